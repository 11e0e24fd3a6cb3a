"""Measuring equivariance: of a layer, of a model, and layer by layer of a whole network.

A module is equivariant to S when turning its input turns its output: module(L_S[x]) = L_S[module(x)]. The
functions here return how far the two sides are apart, as max |difference| / max |output|: 0 for a perfect
module, some 1e-15 (float64) or 1e-6 (float32) for a layer that is equivariant up to rounding, and some
5e-3 or more for one that is not. Rounding grows from layer to layer, so that the output of a deep network
may be further off than any of its layers: ``audit`` judges each layer by itself.

Features are told by their rank: ``[N, C, |H|, h, w]`` live on the group, ``[N, C, h, w]`` on the plane (each
channel turns as an image does), anything smaller is expected not to change.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from selfconv.groups import Group, get_group
from selfconv.nn import GroupConv2d, LiftingConv2d, LocalAttention2d, SqueezeExcite

Function = Callable[[Tensor], Tensor]


def transform(x: Tensor, s: int, group: str | Group) -> Tensor:
    """L_S[x] for features of any rank."""
    group = get_group(group)
    if x.dim() == 5:
        return group.act(x, s)
    return group.act_planar(x, s) if x.dim() == 4 else x


@torch.no_grad()
def equivariance_error(module: Function, x: Tensor, group: str | Group) -> list[float]:
    """The error under each element of the group, in the order of its elements (the first is the identity)."""
    group = get_group(group)
    y = module(x)
    return [relative_error(module(transform(x, s, group)), transform(y, s, group)) for s in group]


@torch.no_grad()
def shift_error(module: Function, x: Tensor, shift: int = 1, stride: int = 1) -> float | None:
    """The error when x is shifted by ``shift`` cells down and right, where the border plays no part.

    Zero padding makes the border different from the interior, so only those outputs are compared that do
    not depend on it: found by changing the border and seeing which outputs change, and by a border of NaN,
    which reaches even outputs that depend on it too little to change (a saturated softmax). None if there is
    no such output, as when the receptive field covers the whole map.

    Args:
        shift: a multiple of ``stride``.
        stride: by how much the module downsamples.
    """
    if shift % stride or shift < 1:
        raise ValueError(f"shift: expected a positive multiple of stride={stride}; got {shift}")
    y = module(x)
    border = torch.ones_like(x[0, 0], dtype=torch.bool)
    border[..., 1 : x.shape[-2] - 1 - shift, 1 : x.shape[-1] - 1 - shift] = False
    interior = torch.ones(y.shape[-2:], dtype=torch.bool, device=y.device)
    for disturbed in (torch.where(border, x + 1, x), x.masked_fill(border, math.nan)):
        interior &= (module(disturbed) == y).flatten(0, -3).all(0)  # [h, w]
        if not interior.any():  # before NaN comes near the statistics of a batch norm in training
            return None
    moved, expected = module(x.roll((shift, shift), (-2, -1))), y.roll((shift // stride,) * 2, (-2, -1))
    interior = interior.roll((shift // stride,) * 2, (0, 1))
    return relative_error(moved[..., interior], expected[..., interior])


def assert_equivariant(
    module: Function, x: Tensor, group: str | Group, tolerance: float | None = None
) -> None:
    """Raises AssertionError, with the error under each element, unless all are within the tolerance.

    Args:
        tolerance: by default 1e-10 for float64, 1e-5 for float32, 1e-2 for float16 and 1e-1 for bfloat16,
            in which smaller faults than that cannot be told from rounding.
    """
    group = get_group(group)
    tolerance = default_tolerance(x.dtype) if tolerance is None else tolerance
    errors = equivariance_error(module, x, group)
    if not max(errors) <= tolerance:  # NaN fails too
        listed = ", ".join(f"{s}: {error:.1e}" for s, error in enumerate(errors))
        raise AssertionError(
            f"not equivariant to {group.name} within {tolerance:g}; error by element {listed}"
        )


def default_tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-5)


def relative_error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    if not b.numel():
        return 0.0
    difference = torch.where(a == b, 0, (a - b).abs()).amax().item()  # equal infinities are no difference
    size = torch.where(b.isfinite(), b.abs(), 0).amax().item()
    return difference / size if size else difference


# ---- a whole network ----


@dataclass(frozen=True)
class LayerReport:
    """What a layer did with its exactly transformed input, in one of its calls."""

    name: str
    kind: str
    shape: list[int]
    input_error: float  # of what the functions between the layers made of exactly transformed features
    error: float  # of its output; both are the largest over the group's elements
    shift: float | None  # the layer's error under a shift; None where no output is free of the border


@dataclass(frozen=True)
class Audit:
    """Which layers of a network are equivariant, and why the first that is not breaks it."""

    group: Group
    size: int
    tolerance: float
    layers: list[LayerReport]
    error: float  # of the network's output, rounding of all layers included
    faults: dict[str, str]  # by name of a layer, in the order they are computed: why it breaks
    sizes: list[int] = field(default_factory=list)  # near ``size``, where no layer would break by sampling

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def culprit(self) -> str | None:
        return next(iter(self.faults), None)

    @property
    def reason(self) -> str | None:
        return next(iter(self.faults.values()), None)

    def __str__(self) -> str:
        lines = [f"{r.name}  {r.kind}  {r.shape}  {r.error:.1e}  {_shown(r.shift)}" for r in self.layers]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        what = "shifts" if len(self.group) == 1 else f"{self.group.name} and shifts"
        if not self.passed:
            advice = f"; sizes that would work: {', '.join(map(str, self.sizes))}" if self.sizes else ""
            where = f"{self.size}x{self.size}: {self.culprit}"
            return f"not equivariant to {what} at {where}: {self.reason}{advice}"
        verdict = f"equivariant to {what} at {self.size}x{self.size}: output error {self.error:.1e}"
        if self.error <= self.tolerance:
            return verdict
        worst = max((layer.error for layer in self.layers), default=0.0)
        return f"{verdict}, rounding that grows from layer to layer: each by itself is within {worst:.1e}"

    def table(self) -> Any:
        """As a table for ``rich`` to print."""
        from rich.table import Table

        table = Table("layer", "kind", "output", caption=self.summary(), caption_style="")
        table.add_column("error", justify="right")
        table.add_column("shift", justify="right")
        for r in self.layers:
            style = "bold red" if r.name in self.faults else ""
            shape = "x".join(map(str, r.shape[1:]))
            table.add_row(r.name, r.kind, shape, f"{r.error:.1e}", _shown(r.shift), style=style)
        return table


def _shown(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


@torch.no_grad()
def audit(
    model: nn.Module,
    input_size: int,
    group: str | Group | None = None,
    *,
    in_channels: int | None = None,
    tolerance: float = 1e-8,
) -> Audit:
    """Judges each layer of a network by itself, under every element of the group and a shift, in float64.

    The network runs on a random image, then on the image transformed. In the second run every layer is given
    the input it had in the first, exactly transformed, and passes on the output it had, exactly transformed:
    so neither rounding nor a fault reaches the next layer, and every layer that breaks is found.

    Between layers features may be rearranged: a group axis among the channels or the images, pixels in a
    row, channels last. That is a fault only if a later layer, or the model's output, does not turn with the
    image.

    Args:
        model: takes images ``[N, in_channels, input_size, input_size]``. A copy is tested, in eval mode. Its
            output is a tensor, or a container of tensors.
        group: by default the model's own (its attribute ``group``), or else z2, which leaves shifts alone.
        in_channels: by default the model's own attribute, or else 3.
        tolerance: how much of one layer's error is still rounding. Where a network computes in less than
            float64 all the same, ``assert_equivariant``'s for that dtype.
    """
    if input_size < 1:
        raise ValueError(f"input_size: expected a positive number of pixels; got {input_size}")
    group = get_group(getattr(model, "group", "z2") if group is None else group)
    channels = getattr(model, "in_channels", 3) if in_channels is None else in_channels
    model = copy.deepcopy(model).double().eval()
    device = next((p.device for p in model.parameters()), None)

    def images(size: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        both = torch.randn(4, channels, size, size, dtype=torch.float64, generator=generator)
        return both.to(device).split(2)

    x, _ = images(input_size)
    try:
        judge, y = _judged(model, images(input_size), group, tolerance)
    except RuntimeError as refusal:  # of torch: a quantised or scripted model, for example
        raise ValueError(
            f"the model cannot be audited, in float64, on images of shape {list(x.shape)}: "
            f"{str(refusal).partition(chr(10))[0]}"
        ) from refusal
    error = max(_output_error(_run(model, transform(x, s, group), _look_away), y, s, group) for s in group)
    layers = [
        LayerReport(
            call.name,
            type(call.module).__name__,
            call.shape,
            judge.errors[key, "input"],
            judge.errors[key, "output"],
            judge.shifts[key],
        )
        for key, call in judge.calls.items()
    ]
    sizes = []
    if judge.faults and set(judge.faults.values()) <= judge.sampling:
        near = _symmetric_sizes(model, channels, input_size, x)
        sizes = [n for n in near if not _judged(model, images(n), group, tolerance)[0].faults]
    return Audit(group, input_size, tolerance, layers, error, judge.faults, sizes)


# ---- a run of the network, layer by layer ----


Key = tuple[str, int]  # a layer, and how often it was called before
Stage = Literal["input", "output"]
END: tuple[Key, Stage] = (("the model's output", 0), "output")


@dataclass
class _Call:
    """A call of a layer in the first run: what went in and came out, as flat lists of tensors and others."""

    name: str
    module: nn.Module
    spec: TreeSpec  # of its arguments
    leaves: dict[Stage, list[Any]]
    constant: dict[Stage, list[bool]] = field(default_factory=dict)  # whether it ignores the image

    @property
    def shape(self) -> list[int]:
        return next((list(t.shape) for t in self.leaves["output"] if isinstance(t, Tensor)), [])


Observer = Callable[[Key, nn.Module, Stage, list[Any], TreeSpec], list[Any] | None]


def _look_away(*_: Any) -> None: ...


def _run(model: nn.Module, x: Tensor, observe: Observer) -> list[Any]:
    """Runs the model; its outputs. Each layer's arguments and outputs become what ``observe`` returns."""
    counts: Counter[str] = Counter()

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        changed = observe((name, counts[name]), module, "input", leaves, spec)
        return None if changed is None else tree_unflatten(changed, spec)

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        changed = observe((name, counts[name]), module, "output", leaves, spec)
        counts[name] += 1
        return None if changed is None else tree_unflatten(changed, spec)

    handles = []
    for name, module in model.named_modules():
        if _is_layer(name, module):
            handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(after, name), with_kwargs=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes: what an audit finds out by itself
            return tree_flatten(model(x))[0]
    finally:
        for handle in handles:
            handle.remove()


def _is_layer(name: str, module: nn.Module) -> bool:
    if "parametrizations" in name.split("."):
        return False  # it makes weights, not features
    children = [child for child, _ in module.named_children() if child != "parametrizations"]
    return isinstance(module, SqueezeExcite) or not children


def _record(model: nn.Module, x: Tensor) -> tuple[dict[Key, _Call], list[Any]]:
    calls: dict[Key, _Call] = {}

    def observe(key: Key, module: nn.Module, stage: Stage, leaves: list[Any], spec: TreeSpec) -> None:
        # copies: a later layer may work in place
        kept = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if stage == "output":
            calls[key].leaves["output"] = kept
            return
        name = (key[0] or "the model") + (f" (call {key[1] + 1})" if key[1] else "")
        calls[key] = _Call(name, module, spec, {"input": kept, "output": []})

    return calls, _run(model, x, observe)


class _Precision(TorchDispatchMode):
    """Watches for operations in less than float64: a network may insist on them, in a norm for example."""

    tolerance = 0.0  # of the least precise operation since it was last set to 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.tolerance = max(self.tolerance, default_tolerance(leaf.dtype))
        return result


def _explore(model: nn.Module, other: Tensor, calls: dict[Key, _Call]) -> dict[tuple[Key, Stage], float]:
    """With another image: marks what does not depend on the image, such as weights; and returns how much is
    rounding in what the network computes until each stage, if less precise than float64."""
    tolerances: dict[tuple[Key, Stage], float] = {}
    precision = _Precision()

    def observe(key: Key, module: nn.Module, stage: Stage, leaves: list[Any], spec: TreeSpec) -> None:
        tolerances[key, stage], precision.tolerance = precision.tolerance, 0.0
        if key in calls:
            pairs = zip(leaves, calls[key].leaves[stage], strict=False)
            calls[key].constant[stage] = [isinstance(a, Tensor) and _same(a, b) for a, b in pairs]

    with precision:
        _run(model, other, observe)
    return {**tolerances, END: precision.tolerance}


def _same(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)


# ---- judging ----

BETWEEN = "its input does not turn with the image: a function before it, outside any layer, breaks it"
PLACES = "it treats places differently: its output does not move with its input"
CONSTANT = "its output does not depend on the image, and does not turn with it"
RANDOM = "it is given, or gives, something else each time the network runs"


class _Judge:
    """Compares runs on transformed images with the first run, and puts exact features in their place."""

    def __init__(
        self, group: Group, calls: dict[Key, _Call], tolerances: dict[tuple[Key, Stage], float]
    ) -> None:
        self.group, self.calls, self.tolerances = group, calls, tolerances
        self.errors: dict[tuple[Key, Stage], float] = dict.fromkeys(product(calls, ("input", "output")), 0.0)
        self.shifts: dict[Key, float | None] = {}
        self.faults: dict[str, str] = {}
        self.sampling: set[str] = set()  # reasons that would not hold on another size of map
        self._found: dict[str, Callable[[], str]] = {}  # who broke, and how to find out why, after all runs

    def start(self, s: int) -> Observer:
        """To observe a run on the image that s transformed."""
        self.s = s
        self.suspect: tuple[str, Callable[[], str]] | None = (
            None  # who rearranged features, and what to say if it matters
        )
        self.inexact: set[Key] = set()  # calls whose input is rearranged
        self.inputs: dict[Key, list[tuple[Any, Any, Any]]] = {}  # as given, exact, and as passed to the layer
        return self.observe

    def observe(
        self, key: Key, module: nn.Module, stage: Stage, leaves: list[Any], spec: TreeSpec
    ) -> list[Any] | None:
        call = self.calls.get(key)
        if call is None or len(call.leaves[stage]) != len(leaves):
            return None  # the network goes another way with this image
        constant = call.constant.get(stage) or [False] * len(leaves)
        exact = [self._exact(key, stage, *x) for x in zip(leaves, call.leaves[stage], constant, strict=True)]
        if stage == "input":
            passed = [e.clone() if e is not leaf else leaf for leaf, e in zip(leaves, exact, strict=True)]
            self.inputs[key] = list(zip(leaves, exact, passed, strict=True))
            return passed
        return _returned(leaves, exact, self.inputs.pop(key, []))

    def _exact(self, key: Key, stage: Stage, leaf: Any, original: Any, constant: bool) -> Any:
        """Judges one tensor; returns what should be in its place, or itself where nobody can say."""
        if not (isinstance(leaf, Tensor) and isinstance(original, Tensor) and leaf.is_floating_point()):
            return leaf
        candidates = _transformed(original, self.s, self.group)
        found = [relative_error(leaf, candidate) for candidate in candidates]
        error = min(found, key=lambda e: math.inf if math.isnan(e) else e)
        exact: Tensor = candidates[found.index(error)]
        breach = (self.calls[key].name, partial(self._reason, key, stage, self.s))
        tolerance = self.tolerances[key, stage]
        if error <= tolerance:
            if not constant and bool(leaf.any()):
                self.suspect = None
        elif constant:
            self.suspect = self.suspect or (self.calls[key].name, lambda: CONSTANT)
            exact, error = leaf, 0.0
        elif not _on_group(leaf, self.group) and (moved := _permuted(leaf, original)) <= tolerance:
            if stage == "input":
                self.inexact.add(key)
            self.suspect = self.suspect or breach
            exact, error = leaf, moved
        else:
            exact = candidates[0]
            inherited = stage == "input" or key in self.inexact
            self._found.setdefault(*(self.suspect if self.suspect and inherited else breach))
        self.errors[key, stage] = max(self.errors[key, stage], error)
        return exact

    def judge_output(self, output: list[Any], original: list[Any]) -> None:
        if not _output_error(output, original, self.s, self.group) <= self.tolerances[END]:
            reason = RANDOM if self.s == 0 else "something after the last layer does not turn with its input"
            self._found.setdefault(*(self.suspect or (END[0][0], lambda: reason)))

    def conclude(self) -> None:
        """After all runs: shifts, and every fault with its reason, in the order of the layers."""
        for key, call in self.calls.items():
            shift = self.shifts[key] = _layer_shift_error(call)
            if shift is not None and not shift <= self.tolerances[key, "output"]:
                self._found.setdefault(call.name, lambda: PLACES)
        names = [call.name for call in self.calls.values()]
        for name in sorted(self._found, key=lambda name: names.index(name) if name in names else len(names)):
            self.faults[name] = self._found[name]()

    def _reason(self, key: Key, stage: Stage, s: int) -> str:
        call = self.calls[key]
        if any(isinstance(leaf, Tensor) and bool(leaf.isnan().any()) for leaf in call.leaves[stage]):
            return f"its {stage} is not a number"
        if s == 0:
            return RANDOM
        if stage == "input":
            return BETWEEN
        off_centre = _off_centre(call, self.group, self.tolerances[key, stage])
        if off_centre:
            self.sampling.add(off_centre)
            return off_centre
        if isinstance(call.module, nn.Conv2d):
            return "an ordinary convolution: its filters do not turn with the image"
        return "its output does not turn with its input"


def _judged(
    model: nn.Module, images: tuple[Tensor, ...], group: Group, tolerance: float
) -> tuple[_Judge, list[Any]]:
    """All runs of the model on the first images (the second serve to compare), judged; and its output."""
    x, other = images
    calls, y = _record(model, x)
    if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in y):
        kinds = ", ".join(type(leaf).__name__ for leaf in y)
        raise ValueError(f"the model returns no floating-point tensor to compare; got {kinds or 'nothing'}")
    tolerances: dict[tuple[Key, Stage], float] = defaultdict(lambda: tolerance)
    tolerances |= {at: max(tolerance, found) for at, found in _explore(model, other, calls).items()}
    judge = _Judge(group, calls, tolerances)
    for s in group:
        judge.judge_output(_run(model, transform(x, s, group), judge.start(s)), y)
    judge.conclude()
    return judge, y


def _on_group(x: Tensor, group: Group) -> bool:
    return x.dim() == 5 and x.shape[2] == len(group)


def _transformed(x: Tensor, s: int, group: Group) -> list[Tensor]:
    """What L_S[x] may be, the usual first: channels and images may have the group's axis folded into them."""
    if len(group) == 1 or x.dim() < 4:
        return [x]
    if _on_group(x, group):
        return [group.act(x, s)]
    candidates = [group.act_planar(x, s)]
    for axis in (0, 1) if x.dim() == 4 else ():
        if x.shape[axis] % len(group) == 0:
            for inner in (True, False):
                folded = x.unflatten(axis, (-1, len(group)) if inner else (len(group), -1))
                turned = group.act(folded.movedim(axis + inner, 2), s).movedim(2, axis + inner)
                candidates.append(turned.flatten(axis, axis + 1))
    return candidates


def _permuted(a: Tensor, b: Tensor) -> float:
    """The error of a as a rearrangement of the numbers in b."""
    return relative_error(a.flatten().sort().values, b.flatten().sort().values)


def _returned(leaves: list[Any], exact: list[Any], inputs: list[tuple[Any, Any, Any]]) -> list[Any]:
    """A layer's exact outputs. What it did to its input in place is done to the one that it was given."""
    exact = list(exact)
    for given, before, passed in inputs:
        if passed is given:
            continue
        same = [i for i, leaf in enumerate(leaves) if leaf is passed]
        value = exact[same[0]] if same else passed
        if (same or not torch.equal(passed, before)) and given.shape == value.shape:
            for i in same:
                exact[i] = given
            given.copy_(value)
    return exact


def _output_error(output: list[Any], original: list[Any], s: int, group: Group) -> float:
    """The largest error of the tensors that a model returns."""
    if len(output) != len(original):
        return math.inf
    errors = [
        relative_error(a, _transformed(b, s, group)[0])
        for a, b in zip(output, original, strict=True)
        if isinstance(b, Tensor) and b.is_floating_point()
    ]
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e)


def _layer_shift_error(call: _Call) -> float | None:
    x, function = _as_function(call)
    outputs = call.leaves["output"]
    if x is None or len(outputs) != 1 or not isinstance(outputs[0], Tensor):
        return None
    y, rule = outputs[0], sampling(call.module)
    stride = rule[1] if rule else 1
    maps = min(x.dim(), y.dim()) >= 4 and x.shape[-2] == x.shape[-1]  # or else channels may be last
    if not maps or min(x.shape[-2:]) < 2 * stride + 2 or x.shape[-1] < stride * y.shape[-1]:
        return None
    return shift_error(function, x, stride, stride)


def _as_function(call: _Call) -> tuple[Tensor | None, Function]:
    """A layer's only tensor, and the layer as a function of it; no tensor if there are several."""
    leaves = call.leaves["input"]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(x: Tensor) -> Tensor:
        changed = [x.clone() if i in places else leaf for i, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(changed, call.spec)
        output: Tensor = call.module(*args, **kwargs)
        return output

    single = len(places) == 1 and leaves[places[0]].is_floating_point()
    return (leaves[places[0]] if single else None), function


def _off_centre(call: _Call, group: Group, tolerance: float) -> str | None:
    """How a layer samples off centre, if that is all that keeps it from being equivariant."""
    rule, (x, function) = sampling(call.module), _as_function(call)
    if rule is None or x is None or x.dim() < 4:
        return None
    k, stride, padding = rule
    left = [(n + 2 * padding - k) % stride for n in x.shape[-2:]]
    if not any(left) or min(x.shape[-2:]) <= max(left):
        return None
    h, w = x.shape[-2:]
    if not max(equivariance_error(function, x[..., : h - left[0], : w - left[1]], group)) <= tolerance:
        return None
    parity = "even" if h % 2 == 0 else "odd"
    return (
        f"stride {stride} on an {parity}-sized map ({h}x{w}): with window {k} and padding {padding}, "
        f"{left[0]} row and column too many on one side, so that it samples off centre"
    )


def sampling(module: nn.Module) -> tuple[int, int, int] | None:
    """(window, stride, padding) by which a layer downsamples, or None if it does not.

    It does so symmetrically on a map of n cells a side if n + 2·padding − window is a multiple of the stride.
    """
    stride = _first(getattr(module, "stride", 1))
    if stride is None or stride == 1 or isinstance(module, _ConvTransposeNd):
        return None
    pools = isinstance(module, LocalAttention2d) or (
        isinstance(module, GroupConv2d | LiftingConv2d) and module.downsample == "pool"
    )
    if pools:
        return stride, stride, 0
    window, dilation = _first(getattr(module, "kernel_size", None)), _first(getattr(module, "dilation", 1))
    padding = getattr(module, "padding", 0)
    padding = 0 if padding == "valid" else _first(padding)
    if window is None or dilation is None or padding is None:
        return None
    return dilation * (window - 1) + 1, stride, padding


def _first(value: Any) -> int | None:
    value = value[0] if isinstance(value, tuple) else value
    return value if isinstance(value, int) else None


def _symmetric_sizes(model: nn.Module, channels: int, size: int, like: Tensor) -> list[int]:
    """Input sizes near ``size`` on which every layer samples symmetrically, nearest first."""

    def symmetric(n: int) -> bool:
        try:
            calls, _ = _record(model, like.new_zeros(1, channels, n, n))
        except (RuntimeError, ValueError):  # too small for the network
            return False
        rules = [(sampling(call.module), _as_function(call)[0]) for call in calls.values()]
        return all(
            (side + 2 * rule[2] - rule[0]) % rule[1] == 0
            for rule, x in rules
            if rule and x is not None
            for side in x.shape[-2:]
        )

    near = sorted(range(max(1, size - 8), size + 9), key=lambda n: abs(n - size))
    return list(islice((n for n in near if n != size and symmetric(n)), 3))
