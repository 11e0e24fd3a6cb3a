"""Measuring equivariance: of a layer, of a model, and layer by layer of a whole network.

A module is equivariant to S when turning its input turns its output: module(L_S[x]) = L_S[module(x)]. The
functions here return how far the two sides are apart, as max |difference| / max |output|: 0 for a perfect
module, some 1e-15 (float64) or 1e-6 (float32) for one that is equivariant up to rounding, and of the order
of 1 for one that is not.

Features are told by their rank: ``[N, C, |H|, h, w]`` live on the group, ``[N, C, h, w]`` on the plane (each
channel turns as an image does), anything smaller is expected not to change.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    not depend on it: found by changing the border and seeing which outputs change. None if there is no such
    output, as when the receptive field covers the whole map.

    Args:
        shift: a multiple of ``stride``.
        stride: by how much the module downsamples.
    """
    if shift % stride or shift < 1:
        raise ValueError(f"shift: expected a positive multiple of stride={stride}; got {shift}")
    y = module(x)
    disturbed = x.clone()
    for edge in (slice(0, 1), slice(x.shape[-2] - 1 - shift, None)):
        disturbed[..., edge, :] += 1
    for edge in (slice(0, 1), slice(x.shape[-1] - 1 - shift, None)):
        disturbed[..., edge] += 1
    interior = (module(disturbed) == y).flatten(0, -3).all(0)  # [h, w]
    if not interior.any():
        return None
    moved, expected = module(x.roll((shift, shift), (-2, -1))), y.roll((shift // stride,) * 2, (-2, -1))
    interior = interior.roll((shift // stride,) * 2, (0, 1))
    return relative_error(moved[..., interior], expected[..., interior])


def assert_equivariant(
    module: Function, x: Tensor, group: str | Group, tolerance: float | None = None
) -> None:
    """Raises AssertionError, with the error under each element, unless all are within the tolerance.

    Args:
        tolerance: by default 1e-10 for float64 and 1e-5 for float32.
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
    return 1e-10 if dtype == torch.float64 else 1e-5


def relative_error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    size = b.abs().amax().item() if b.numel() else 0.0
    difference = (a - b).abs().amax().item() if b.numel() else 0.0
    return difference / size if size else difference


# ---- a whole network ----


@dataclass(frozen=True)
class LayerReport:
    """What one layer's output did when the network's input was transformed."""

    name: str
    kind: str
    shape: list[int]
    input_error: float  # the largest over the group's elements
    error: float
    shift: float | None  # the layer's own error under a shift; None where no output is free of the border


@dataclass(frozen=True)
class Audit:
    """Which layers of a network are equivariant, and why the first that is not breaks it."""

    group: Group
    size: int
    tolerance: float
    layers: list[LayerReport]
    error: float  # of the network's output
    culprit: str | None = None
    reason: str | None = None
    sizes: list[int] = field(
        default_factory=list
    )  # near ``size``, on which every layer samples symmetrically

    @property
    def passed(self) -> bool:
        return self.culprit is None

    def __str__(self) -> str:
        lines = [f"{r.name}  {r.kind}  {r.shape}  {r.error:.1e}  {_shown(r.shift)}" for r in self.layers]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        what = "shifts" if len(self.group) == 1 else f"{self.group.name} and shifts"
        if self.passed:
            return f"equivariant to {what} at {self.size}x{self.size}: output error {self.error:.1e}"
        advice = f"; sizes that would work: {', '.join(map(str, self.sizes))}" if self.sizes else ""
        return f"not equivariant to {what} at {self.size}x{self.size}: {self.culprit}: {self.reason}{advice}"

    def table(self) -> Any:
        """As a table for ``rich`` to print."""
        from rich.table import Table

        table = Table("layer", "kind", "output", caption=self.summary(), caption_style="")
        table.add_column("error", justify="right")
        table.add_column("shift", justify="right")
        for r in self.layers:
            style = "bold red" if r.name == self.culprit else "dim" if r.error > self.tolerance else ""
            shape = "x".join(map(str, r.shape[1:]))
            table.add_row(r.name, r.kind, shape, f"{r.error:.1e}", _shown(r.shift), style=style)
        return table


def _shown(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


@dataclass(frozen=True)
class _Step:
    """A layer with what went in and came out in one run of the network."""

    module: nn.Module
    input: Tensor
    output: Tensor


@torch.no_grad()
def audit(
    model: nn.Module,
    input_size: int,
    group: str | Group | None = None,
    *,
    in_channels: int | None = None,
    tolerance: float = 1e-8,
) -> Audit:
    """Walks a whole network with every element of the group and with shifts, in float64.

    Args:
        model: takes images ``[N, in_channels, input_size, input_size]``. A copy is tested, in eval mode.
        group: by default the model's own (its attribute ``group``), or else z2, which leaves shifts alone.
        in_channels: by default the model's own attribute, or else 3.
        tolerance: how much is still rounding.
    """
    group = get_group(getattr(model, "group", "z2") if group is None else group)
    channels = getattr(model, "in_channels", 3) if in_channels is None else in_channels
    model = copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, input_size, input_size, dtype=torch.float64, generator=generator)
    x = x.to(next(model.parameters(), x).device)

    y, steps = _trace(model, x)
    input_errors, errors = dict.fromkeys(steps, 0.0), dict.fromkeys(steps, 0.0)
    error = 0.0
    for s in group:
        turned, turned_steps = _trace(model, transform(x, s, group))
        error = max(error, relative_error(turned, transform(y, s, group)))
        for name, step in turned_steps.items():
            given, output = transform(steps[name].input, s, group), transform(steps[name].output, s, group)
            input_errors[name] = max(input_errors[name], relative_error(step.input, given))
            errors[name] = max(errors[name], relative_error(step.output, output))

    layers = []
    for name, step in steps.items():
        kind, shape, shift = type(step.module).__name__, list(step.output.shape), _layer_shift_error(step)
        layers.append(LayerReport(name, kind, shape, input_errors[name], errors[name], shift))
    culprit, reason = _first_break(layers, steps, tolerance)
    if culprit is None and not error <= tolerance:
        culprit, reason = "the model's output", "something after the last layer does not turn with its input"
    sizes = _symmetric_sizes(model, channels, input_size, x) if culprit else []
    return Audit(group, input_size, tolerance, layers, error, culprit, reason, sizes)


def _trace(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, _Step]]:
    """Runs the model: its output, and every layer's first use, in the order they are computed."""
    steps: dict[str, _Step] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                # copies: a later layer may work in place
                steps.setdefault(name, _Step(module, args[0].clone(), output.clone()))

        return hook

    handles = [m.register_forward_hook(hook_for(name)) for name, m in model.named_modules() if _is_layer(m)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes: what an audit finds out by itself
            return model(x), steps
    finally:
        for handle in handles:
            handle.remove()


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, SqueezeExcite) or not any(True for _ in module.children())


def _layer_shift_error(r: _Step) -> float | None:
    if r.input.dim() < 4 or r.output.dim() < 4:
        return None
    rule = sampling(r.module)
    stride = rule[1] if rule else 1
    if min(r.input.shape[-2:]) < 2 * stride + 2 or r.input.shape[-1] < stride * r.output.shape[-1]:
        return None
    return shift_error(r.module, r.input, stride, stride)


def _first_break(
    layers: list[LayerReport], steps: dict[str, _Step], tolerance: float
) -> tuple[str | None, str | None]:
    for r in layers:
        if not r.input_error <= tolerance:
            return (
                r.name,
                "its input does not turn with the image: a function before it, outside any layer, breaks it",
            )
        if not r.error <= tolerance:
            return r.name, _reason(steps[r.name])
        if r.shift is not None and not r.shift <= tolerance:
            return r.name, "it treats places differently: its output does not move with its input"
    return None, None


def _reason(r: _Step) -> str:
    rule = sampling(r.module)
    if rule:
        k, stride, padding = rule
        off = [n for n in r.input.shape[-2:] if (n + 2 * padding - k) % stride]
        if off:
            parity = "even" if off[0] % 2 == 0 else "odd"
            h, w = r.input.shape[-2:]
            left = (off[0] + 2 * padding - k) % stride
            return (
                f"stride {stride} on an {parity}-sized map ({h}x{w}): with window {k} and padding {padding}, "
                f"{left} row and column too many on one side, so that it samples off centre"
            )
    if isinstance(r.module, nn.Conv2d):
        return "an ordinary convolution: its filters do not turn with the image"
    return "its output does not turn with its input"


def sampling(module: nn.Module) -> tuple[int, int, int] | None:
    """(window, stride, padding) by which a layer downsamples, or None if it does not.

    It does so symmetrically on a map of n cells a side if n + 2·padding − window is a multiple of the stride.
    """
    stride = _first(getattr(module, "stride", 1))
    if stride is None or stride == 1:
        return None
    pools = isinstance(module, LocalAttention2d) or (
        isinstance(module, GroupConv2d | LiftingConv2d) and module.downsample == "pool"
    )
    if pools:
        return stride, stride, 0
    window, padding = _first(getattr(module, "kernel_size", None)), _first(getattr(module, "padding", 0))
    return None if window is None or padding is None else (window, stride, padding)


def _first(value: Any) -> int | None:
    value = value[0] if isinstance(value, tuple) else value
    return value if isinstance(value, int) else None


def _symmetric_sizes(model: nn.Module, channels: int, size: int, like: Tensor) -> list[int]:
    """Input sizes near ``size`` on which every layer samples symmetrically, nearest first."""

    def symmetric(n: int) -> bool:
        try:
            _, steps = _trace(model, like.new_zeros(1, channels, n, n))
        except (RuntimeError, ValueError):  # too small for the network
            return False
        rules = [(sampling(step.module), step.input.shape[-2:]) for step in steps.values()]
        return all(
            (side + 2 * rule[2] - rule[0]) % rule[1] == 0 for rule, sides in rules if rule for side in sides
        )

    if not any(sampling(module) for module in model.modules()):
        return []  # nothing depends on the size
    near = sorted(range(max(1, size - 8), size + 9), key=lambda n: abs(n - size))
    return [n for n in near if n != size and symmetric(n)][:3]
