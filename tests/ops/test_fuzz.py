"""Random calls, random stacks of layers: every backend gives the reference's numbers, and none goes astray.

``make test`` tries the same few every time; ``make test-long`` thousands of new ones, and says how many. All
run in a process of their own, with memory that is NaN until written and that ends where its tensor ends: what
reads unwritten memory gives NaN, and what goes past an end dies, which is a failure like any other.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.cases import (
    FILTERS,
    LAYOUTS,
    SAME_NUMBERS,
    TESTED_GROUPS,
    TOLERANCE,
    Case,
    Layout,
    assert_close,
    cases,
    contiguous,
    examples,
    expanded_over_maps,
    nan_bits,
    tried,
    with_nan,
)
from helpers.fences import Child, fence_new_tensors, fenced, set_fences
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from selfconv.groups import Group, get_group
from selfconv.nn import (
    AffineSelfConv2d,
    GroupBatchNorm,
    GroupConv2d,
    LiftingConv2d,
    SimpleAffineSelfConv2d,
    SpatialPool2d,
    SqueezeExcite,
    StandAloneSelfAttention2d,
    set_backend,
)
from selfconv.ops import affine_self_conv
from selfconv.testing import assert_equivariant


def prepare() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    assert torch.empty(3).isnan().all()
    fence_new_tensors()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child(prepare)
    yield child
    child.close()


# ---- the operation ----


@dataclass(frozen=True)
class Trial:
    """A case, the backend that is tried, the one that knows, and where and on how many threads it runs."""

    case: Case
    backend: str | None
    against: str
    fence_before: bool
    threads: int = 1


def compare(trial: Trial) -> None:
    case = trial.case
    set_fences(before=trial.fence_before)
    tensors = {n: None if t is None else fenced(t) for n, t in case.tensors().items()}
    torch.set_num_threads(trial.threads)
    try:
        actual = case.gradients(tensors, fenced, backend=trial.backend)
    finally:
        torch.set_num_threads(1)
    assert actual["out"].dtype == case.dtypes[0]
    for name, gradient in actual.items():
        assert gradient.dtype == case.dtypes[name in FILTERS], name
    assert_close(actual, case.expected(trial.against))


@st.composite
def small_trials(draw: st.DrawFn) -> Trial:
    case = draw(cases())
    backends = (None, "eager") if case.dense else ("numba", None, "eager")
    return Trial(case, draw(st.sampled_from(backends)), "reference", draw(st.booleans()))


@examples(30)
@given(trial=small_trials())
def test_small_maps_are_the_reference(child: Child, trial: Trial) -> None:
    tried()
    child(compare, trial)


@examples(60)
@given(
    trial=st.builds(
        Trial, cases(small=False, dense=False), st.just("numba"), st.just("eager"), st.booleans(),
        st.integers(1, 3),
    )
)  # fmt: skip
def test_larger_maps_agree_with_eager(child: Child, trial: Trial) -> None:
    """Several vectors in a row, several bands of rows, windows up to 11: too much for the reference."""
    tried()
    child(compare, trial)


@dataclass(frozen=True)
class Poisoned:
    """A trial in which one number is NaN, with some payload."""

    trial: Trial
    name: str
    place: float
    payload: int

    def tensors(self) -> dict[str, torch.Tensor | None]:
        tensors = self.trial.case.tensors()
        t = tensors[self.name]
        if t is None or not t.numel():
            return tensors
        return tensors | {self.name: with_nan(t, nan_bits(t.dtype, self.payload), self.place)}


def compare_nans(poisoned: Poisoned) -> None:
    """NaN wherever eager has it; and the other numbers of the output are eager's."""
    trial, case = poisoned.trial, poisoned.trial.case
    set_fences(before=trial.fence_before)
    exact = {
        n: t if t is None else t.detach().double().requires_grad_() for n, t in poisoned.tensors().items()
    }
    expected = case.gradients(exact, backend="eager")
    tensors = {n: t if t is None else fenced(t) for n, t in poisoned.tensors().items()}
    actual = case.gradients(tensors, fenced, backend=trial.backend)
    for name, e in expected.items():
        assert actual[name].isnan()[e.isnan()].all(), f"{name}: a number where NaN should be"
    known = ~actual["out"].isnan()
    # where ψ is None, planes of the group may meet as 0 · NaN
    if case.group == "z2" or case.lifting or not {"psi_k", "psi_v"} & set(case.missing):
        assert not expected["out"].isnan()[~known].logical_not().any(), "NaN where a number should be"
    assert_close({"out": actual["out"][known]}, {"out": expected["out"][known]})


@examples(40)
@given(
    poisoned=st.builds(
        Poisoned,
        st.builds(
            Trial, cases(dense=False), st.sampled_from(("numba", "eager")), st.just("eager"), st.booleans()
        ),
        st.sampled_from(("q", "k", "v", *FILTERS)),
        st.floats(0, 1),
        st.integers(0, 2**52) | st.sampled_from((0, 0x7A2, 2**22, 2**51)),
    )
)
def test_nan_with_any_payload_stays_nan(child: Child, poisoned: Poisoned) -> None:
    tried()
    child(compare_nans, poisoned)


@dataclass(frozen=True)
class Sizes:
    """Sizes as a program might make them, which need not be any good."""

    group: str | Group
    batch: int
    channels: tuple[int, int]
    num_heads: int
    kernel_size: int
    size: tuple[int, int]
    scale: float | None
    backend: str | None

    @property
    def good(self) -> bool:
        positive = min(*self.channels, self.num_heads, self.kernel_size) > 0
        return positive and self.kernel_size % 2 == 1 and not any(c % self.num_heads for c in self.channels)


def run_sizes(sizes: Sizes) -> None:
    """The mean of the window, for queries of 0; or an error of one line that says what was expected."""
    axis = () if sizes.group == "z2" else (len(get_group(sizes.group)),)
    c_k, c_v = sizes.channels
    query, value = (torch.ones(sizes.batch, c, *axis, *sizes.size, requires_grad=True) for c in (c_k, c_v))
    k = sizes.kernel_size
    try:
        out = affine_self_conv(
            query, 0 * query, value, None, None, None, None,
            num_heads=sizes.num_heads, kernel_size=k, scale=sizes.scale, group=sizes.group,
            backend=sizes.backend,
        )  # fmt: skip
    except ValueError as error:
        message = str(error)
        assert not sizes.good, message
        assert "\n" not in message
        assert "expected" in message
        return
    assert sizes.good
    grads = torch.autograd.grad(out.sum(), [query, value])
    rows, columns = ([min(k // 2, i) + min(k // 2, n - 1 - i) + 1 for i in range(n)] for n in sizes.size)
    expected = torch.tensor(rows)[:, None] * torch.tensor(columns) / k**2 if min(sizes.size) else out
    torch.testing.assert_close(out, expected.expand(out.shape))
    assert not grads[0].any()
    torch.testing.assert_close(grads[1], expected.expand(out.shape))


@examples(60)
@given(
    sizes=st.builds(
        Sizes, st.sampled_from(TESTED_GROUPS), st.integers(0, 2), st.tuples(*[st.integers(0, 4)] * 2),
        st.integers(-1, 3), st.integers(-3, 5), st.tuples(*[st.integers(0, 3)] * 2),
        st.sampled_from((None, 0.0, 1.0)), st.sampled_from((None, "numba", "eager")),
    )
)  # fmt: skip
def test_any_sizes_are_right_or_refused(child: Child, sizes: Sizes) -> None:
    tried()
    child(run_sizes, sizes)


@st.composite
def few_taps(draw: st.DrawFn) -> Case:
    """The interpreter takes a tenth of a second for each tap of the window."""
    case = draw(cases(dense=False))
    group, kernel_size, num_heads = draw(
        st.sampled_from([("z2", 1, 2), ("z2", 3, 1), ("p4", 1, 2), ("p4m", 1, 1), ("c8", 1, 1)])
    )
    case = replace(case, group=group, kernel_size=kernel_size, num_heads=num_heads)
    return (
        case
        if get_group(group).keeps_axes or not isinstance(case.dilation, tuple)
        else replace(case, dilation=1)
    )


@examples(4)
@given(trial=st.builds(Trial, few_taps(), st.just("triton"), st.just("reference"), st.booleans()))
def test_triton_in_its_interpreter_is_the_reference(child: Child, trial: Trial) -> None:
    tried()
    child(compare, trial)


# ---- layers ----

C = 4
LAYERS = {
    "asc": lambda group, k: AffineSelfConv2d(C, C, k, num_heads=2, group=group),
    "asc, dilated": lambda group, k: AffineSelfConv2d(
        C, C, k, dilation=2, padding_mode="circular", num_heads=2, group=group
    ),
    "asc, no border": lambda group, k: AffineSelfConv2d(
        C, C, k, padding_mode="exclude", num_heads=2, group=group
    ),
    "asc, stride": lambda group, k: AffineSelfConv2d(C, C, k, stride=2, num_heads=1, bias=True, group=group),
    "asc, keys": lambda group, k: AffineSelfConv2d(C, C, k, num_heads=4, key_channels=8, group=group),
    "asc, dense": lambda group, k: AffineSelfConv2d(C, C, k, num_heads=2, psi="dense", group=group),
    "simple asc": lambda group, k: SimpleAffineSelfConv2d(C, C, k, num_heads=2, group=group),
    "sasa": lambda group, k: StandAloneSelfAttention2d(C, C, k, num_heads=2, group=group),
    "conv": lambda group, k: GroupConv2d(C, C, k, padding="same", group=group),
    "conv, pool": lambda group, k: GroupConv2d(
        C, C, k, stride=2, padding="same", downsample="pool", group=group
    ),
    "batch norm": lambda group, k: GroupBatchNorm(C, group=group),
    "squeeze": lambda group, k: SqueezeExcite(C, 2, group=group),
    "pool": lambda group, k: SpatialPool2d(2, "mean", group=group),
    "relu": lambda group, k: nn.ReLU(),
}
HALVING = ("asc, stride", "conv, pool", "pool")


@dataclass(frozen=True)
class Stack:
    """Layers upon each other, the first of which may lift an image to the group."""

    group: str | Group
    lifted: bool
    layers: tuple[str, ...]
    kernels: tuple[int, ...]
    batch: int
    cells: tuple[int, int]  # of the last map
    layout: Layout
    dtype: torch.dtype
    fence_before: bool
    seed: int

    def build(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        layers: list[nn.Module] = [LiftingConv2d(C, C, 3, padding=1, group=self.group)] if self.lifted else []
        layers += [LAYERS[name](self.group, k) for name, k in zip(self.layers, self.kernels, strict=True)]
        return nn.Sequential(*layers).eval()

    def features(self) -> torch.Tensor:
        order = len(get_group(self.group))
        axis = () if order == 1 or self.lifted else (order,)
        scale = 2 ** sum(name in HALVING for name in self.layers)
        generator = torch.Generator().manual_seed(self.seed)
        size = (scale * self.cells[0], scale * self.cells[1])
        x = torch.randn(self.batch, C, *axis, *size, generator=generator, dtype=torch.float64)
        return fenced(self.layout(x.to(self.dtype)))


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    group = draw(st.sampled_from(TESTED_GROUPS))
    names = sorted(LAYERS.keys() - ({"sasa"} if get_group(group).band_limited else set()))
    layers = tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)))
    side = st.integers(1, 6 if group == "z2" else 4)
    return Stack(
        group=group,
        lifted=group != "z2" and draw(st.booleans()),
        layers=layers,
        kernels=tuple(draw(st.sampled_from((1, 3, 5, 7))) for _ in layers),
        batch=draw(st.sampled_from((2, 1, 0))),
        cells=draw(st.tuples(side, side)),
        layout=draw(st.sampled_from(LAYOUTS)),
        # float32 does not survive several softmaxes of large scores in a row, whoever computes them
        dtype=draw(st.sampled_from((torch.float64, torch.float32))) if len(layers) == 1 else torch.float64,
        fence_before=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def stack_gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    out = module(x)
    parameters = dict(module.named_parameters())
    grads = torch.autograd.grad(out.square().sum(), [x, *parameters.values()], allow_unused=True)
    return {"out": out.detach()} | {
        name: torch.zeros(0) if g is None else g for name, g in zip(["x", *parameters], grads, strict=True)
    }


class RoundedSoftmax(torch.autograd.Function):
    """A softmax whose weights are rounded once more for its gradient, this way or that.

    Where one weight is nearly 1, the gradient of its score is a small difference of large numbers: what is
    left of it in float64 depends on how the weight was rounded, and layers upon it magnify that.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim, alpha = dim, scores.softmax(dim)
        ctx.save_for_backward(alpha)
        return alpha

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (alpha,) = ctx.saved_tensors
        alpha = alpha * (1 + torch.finfo(alpha.dtype).eps / 2 * torch.randn_like(alpha).sign())
        return alpha * (grad - (alpha * grad).sum(ctx.dim, keepdim=True)), None


class RoundSoftmax(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.softmax:
            return RoundedSoftmax.apply(*args)
        return func(*args, **(kwargs or {}))


def compare_layers(stack: Stack) -> None:
    set_fences(before=stack.fence_before)
    module, x = stack.build().to(stack.dtype), stack.features()
    exact = copy.deepcopy(module).double()
    set_backend(exact, "eager")
    expected = stack_gradients(exact, x.double())
    with RoundSoftmax():
        again = [stack_gradients(exact, x.double()) for _ in range(3)]
    doubt = {
        name: 4 * max((other[name] - e).abs().max().item() for other in again)
        for name, e in expected.items()
        if e.numel()
    }
    tolerance = 10 * TOLERANCE[stack.dtype]
    assert_close(stack_gradients(module, x), expected, tolerance, doubt)
    turns = len(get_group(stack.group)) > 1 and x[:1, :1].numel() > 1  # an image of one pixel does not
    if stack.batch and turns:
        assert_equivariant(module, x, stack.group, tolerance)


@examples(50)
@given(stack=stacks())
def test_stacks_of_layers_are_equivariant_and_equal_to_eager(child: Child, stack: Stack) -> None:
    tried()
    child(compare_layers, stack)


# ---- the net itself: what it is there to catch, it does ----


def touch(place: int) -> None:
    """One number before the first (-1) or after the last (+1)."""
    import ctypes

    x, y = fenced(torch.ones(7)), torch.ones(1).new_empty(5)
    assert x.sum() == 7
    assert y.isnan().all()
    for t in (x, y):
        address = t.data_ptr() + t.element_size() * (t.numel() if place > 0 else place)
        ctypes.c_float.from_address(address).value  # noqa: B018


def touch_before(place: int) -> None:
    set_fences(before=True)
    touch(place)


def touch_after(place: int) -> None:
    set_fences(before=False)
    touch(place)


def test_out_of_bounds_access_is_detected(child: Child) -> None:
    for touched, place in ((touch_before, -1), (touch_after, 1)):
        child(touched, 0)
        with pytest.raises(AssertionError, match=rf"the process died of SIGSEGV in {touched.__name__}"):
            child(touched, place)


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def fail(_: int) -> None:
    raise ValueError("wrong")


def test_failures_and_crashes_are_reported(child: Child) -> None:
    with pytest.raises(AssertionError, match="the process died of SIGABRT in die"):
        child(die, signal.SIGABRT)
    with pytest.raises(AssertionError, match="ValueError: wrong"):
        child(fail, 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layout_helpers_preserve_values(layout: Layout) -> None:
    for shape in ((2, 3, 4, 5), (2, 3, 4, 4, 5), (0, 3, 4, 5), (1, 1, 1, 1)):
        x = torch.randn(shape)
        y = layout(x)
        assert y.shape == x.shape
        assert not y.isnan().any()
        assert torch.equal(x, y) or layout not in SAME_NUMBERS
        for before in (True, False):
            set_fences(before=before)
            z = fenced(y)
            assert torch.equal(z, y)
            assert not y.numel() or z.stride() == y.stride()
    x = torch.randn(2, 3, 4, 4, 5)
    assert layout is contiguous or not layout(x).is_contiguous()
    assert layout is not expanded_over_maps or layout(x).stride()[-2:] == (0, 0)
