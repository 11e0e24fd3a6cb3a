"""The fused operators under torch's transforms: torch.func, forward-mode derivatives, batches of gradients.

Their backward pass is an operator too, and has no derivative of its own. torch does not say so by itself: it
takes a tangent that meets an operator without a rule for zero. So calls under forward-mode differentiation
or a derivative of torch.func are refused, which leaves them to the eager backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

F = TypeVar("F", bound=Callable[..., Any])


def constant_when_compiled(function: F) -> F:
    """torch.compile calls the function while it traces, and takes the result for a constant.

    ``torch.compiler.assume_constant_result`` does just this, but imports half of torch, Triton included.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def derivative_refusal() -> str | None:
    """Why fused kernels do not serve a call here, whatever its arguments."""
    if (
        forward_ad._current_level >= 0
    ):  # inside dual_level: an operator cannot see which tensors have tangents
        return "has no forward-mode derivative; choose backend='eager'"
    if _inside_func_derivative():
        return "takes no part in torch.func's grad, jvp and their like; choose backend='eager'"
    return None


@constant_when_compiled  # torch.compile guards on the transforms that it traces under
def _inside_func_derivative() -> bool:
    """Whether a derivative of torch.func is being taken: grad, vjp, jvp, jacobians, hessian, linearize."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    derivatives = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return any(interpreter.key() in derivatives for interpreter in stack)


def refuse_tangents() -> None:
    """For the operators themselves: a traced or exported program calls them without a choice of backend."""
    if forward_ad._current_level >= 0:
        raise RuntimeError("the fused kernels have no forward-mode derivative: choose backend='eager' for it")


def refuse_second_derivative(*_: Any) -> NoReturn:
    raise RuntimeError("the fused kernels have no second derivative: choose backend='eager' for it")


def check_gradient(grad: Tensor) -> None:
    """Refuses gradients that the backward pass would get wrong: with a tangent, or many in one."""
    if derivative_refusal():
        refuse_second_derivative()
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "the fused kernels take no batches of gradients (is_grads_batched, vectorize): "
            "choose backend='eager' for them"
        )


def register_vmap(operator: Any) -> None:
    """vmap as a loop: each call of a kernel uses all threads anyway."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        dims = pytree.tree_flatten(in_dims, is_leaf=lambda dim: dim is None)[0]

        def example(i: int) -> Any:
            pairs = zip(leaves, dims, strict=True)
            own = [leaf if dim is None else leaf.select(dim, i) for leaf, dim in pairs]
            return operator(*pytree.tree_unflatten(own, structure))

        results = [example(i) for i in range(info.batch_size)]
        stacked = pytree.tree_map(lambda *each: torch.stack(each), *results)
        return stacked, pytree.tree_map(lambda _: 0, stacked)

    operator.register_vmap(rule)
