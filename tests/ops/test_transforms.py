"""torch's transforms of the operation: right, or refused with the backend that has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.cases import Case
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.autograd import functional as autograd_functional

from selfconv.nn import AffineSelfConv2d

CASE = Case("p4", 1, (1, 2), 2, 3, (3, 2))
Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def torch_warns_of_itself() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def operation(backend: str | None, name: str = "q") -> tuple[Function, Tensor]:
    """The operation as a function of one of its tensors, and that tensor."""
    tensors = {n: None if t is None else t.detach() for n, t in CASE.tensors().items()}
    x = tensors[name]
    assert x is not None
    return lambda x: CASE.run(tensors | {name: x}, backend=backend), x


def squares(f: Function) -> Function:
    return lambda x: f(x).square().sum()


def tangent(f: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent
    assert found is not None
    return found


DERIVATIVES: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "jvp": lambda f, x: func.jvp(f, (x,), (x.cos(),))[1],
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "dual numbers": tangent,
    "jacobian, forward mode": lambda f, x: autograd_functional.jacobian(
        f, x, vectorize=True, strategy="forward-mode"
    ),
    "linearize": lambda f, x: func.linearize(f, x)[1](x.cos()),
    "grad": lambda f, x: func.grad(squares(f))(x),
    "vjp": lambda f, x: func.vjp(f, x)[1](x.new_ones(f(x).shape))[0],
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "hessian": lambda f, x: func.hessian(squares(f))(x),
    "grad of grad": lambda f, x: func.grad(squares(func.grad(squares(f))))(x),
    "jvp of grad": lambda f, x: func.jvp(func.grad(squares(f)), (x,), (x.cos(),))[1],
    "vmap of grad": lambda f, x: func.vmap(func.grad(squares(f)))(torch.stack([x, x.cos()])),
    "functionalize of grad": lambda f, x: func.functionalize(func.grad(squares(f)))(x),
}
OTHERS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "vmap": lambda f, x: func.vmap(f)(torch.stack([x, x.cos()])),
    "vmap of vmap": lambda f, x: func.vmap(func.vmap(f), 1)(torch.stack([x, x.cos()])[:, None]),
    "functionalize": lambda f, x: func.functionalize(f)(x),
    "jit.trace": lambda f, x: torch.jit.trace(f, x)(x.cos()),
}


@pytest.mark.parametrize("name", ["q", "psi_k", "beta_v"])
@pytest.mark.parametrize("transform", DERIVATIVES)
def test_derivatives_are_right_or_refused(transform: str, name: str) -> None:
    derive = DERIVATIVES[transform]
    expected = derive(*operation("eager", name))
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(derive(*operation(None, name)), expected)
    with pytest.raises(ValueError, match=r"^backend 'numba' does not serve this call: .*backend='eager'$"):
        derive(*operation("numba", name))


@pytest.mark.parametrize("backend", [None, "numba", "eager"])
@pytest.mark.parametrize("transform", OTHERS)
def test_other_transforms_are_right(transform: str, backend: str | None) -> None:
    f, x = operation("eager")
    arguments = {"vmap": (x, x.cos()), "vmap of vmap": (x, x.cos()), "jit.trace": (x.cos(),)}
    expected = torch.stack([f(y) for y in arguments.get(transform, (x,))])
    found = OTHERS[transform](*operation(backend))
    torch.testing.assert_close(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("group", ["z2", "p4"])
def test_a_traced_layer_takes_other_sizes(group: str, backend: str | None) -> None:
    layer = AffineSelfConv2d(2, 4, 3, num_heads=2, group=group, backend=backend)
    axis = () if group == "z2" else (4,)
    traced = torch.jit.trace(layer, torch.randn(1, 2, *axis, 4, 4))
    x = torch.randn(3, 2, *axis, 5, 7)
    torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_a_derivative_of_the_gradient_is_refused(backend: str) -> None:
    """Tangents, batches and gradients that only the backward pass meets."""
    f, x = operation(backend)
    out = f(x.requires_grad_())
    ones = torch.ones_like(out)
    refusal = "have no second derivative: choose backend='eager'"
    with pytest.raises(RuntimeError, match=refusal), forward_ad.dual_level():
        torch.autograd.grad(out, x, forward_ad.make_dual(ones, ones), retain_graph=True)
    (grad,) = torch.autograd.grad(out, x, ones, create_graph=True)
    with pytest.raises(RuntimeError, match=refusal):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match=r"take no batches of gradients .*: choose backend='eager'"):
        torch.autograd.grad(out, x, torch.stack([ones, ones]), is_grads_batched=True, retain_graph=True)


@pytest.mark.parametrize("name", ["jvp", "grad"])
def test_triton_refuses_derivatives_too(name: str) -> None:
    with pytest.raises(ValueError, match=r"^backend 'triton' does not serve this call: .*backend='eager'$"):
        DERIVATIVES[name](*operation("triton"))


@pytest.mark.parametrize("transform", ["jvp", "dual numbers", "grad"])
def test_derivatives_of_a_compiled_call(transform: str) -> None:
    """Compiled once for a plain call: torch.compile has to notice the transform around it."""
    torch._dynamo.reset()
    derive = DERIVATIVES[transform]
    f, x = operation(None)
    compiled = torch.compile(f, backend="aot_eager")
    torch.testing.assert_close(compiled(x), f(x))
    torch.testing.assert_close(derive(compiled, x), derive(*operation("eager")))


def test_a_traced_call_refuses_tangents() -> None:
    """It calls the operator itself, whatever comes in later."""
    f, x = operation("numba")
    with pytest.raises(RuntimeError, match="have no forward-mode derivative: choose backend='eager'"):
        tangent(torch.jit.trace(f, x), x)
