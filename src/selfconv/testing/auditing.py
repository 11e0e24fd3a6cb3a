"""``audit``: tests the equivariance of a network layer by layer and prints a table."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from selfconv._arguments import is_whole
from selfconv.groups import Z2, Group, get_group
from selfconv.testing.checks import (
    check_between,
    check_inputs,
    check_model,
    check_output,
    checked_tolerance,
    without_gradients,
)
from selfconv.testing.errors import default_tolerance, largest
from selfconv.testing.kinds import FeaturesOn, Kind, check_kinds, is_sequence
from selfconv.testing.layers.between import between_error, smooth_input
from selfconv.testing.layers.judging import Excess, Judge, judged, output_error, turned
from selfconv.testing.layers.rounding import coarsest
from selfconv.testing.layers.runs import (
    OUTPUT_NAME,
    Images,
    first_line,
    look_away,
    record,
    refused_in_one_line,
    run_observed,
)
from selfconv.testing.layers.windows import sampling
from selfconv.testing.leaves import judgeable, same


@dataclass(frozen=True)
class LayerReport:
    """The errors of one call of a layer whose input was transformed exactly."""

    name: str
    kind: str
    shape: list[int]
    input_error: float  # of the layer's input, caused by code between the layers
    error: float  # of its output; both are the largest over the group's elements
    shift: float | None  # the layer's error under a shift; None where no output is free of the border


@dataclass(frozen=True)
class Audit:
    """Which layers of a network are equivariant, and why the first broken one is not."""

    group: Group
    size: int
    tolerance: float
    layers: list[LayerReport]
    error: float  # of the network's output, rounding of all layers included
    faults: dict[str, str]  # by name of a layer, in the order they are computed: why it breaks
    sizes: list[int] = field(default_factory=list)  # near ``size``, where no layer would break by sampling
    between: float | None = None  # the output's ``deviation_error`` under elements between the pixels
    resampling: float = 0.0  # what interpolation alone does to it, if it is a map
    rounded: dict[str, torch.dtype] = field(default_factory=dict)  # where values have less than float64
    sequences: bool = False  # of length ``size``; or else maps
    untested: list[str] = field(default_factory=list)  # where shifts could not be compared
    shifted: bool = True  # whether anything was compared under a shift
    uncompared: list[str] = field(default_factory=list)  # layers and output that depend on no image
    excess: dict[str, Excess] = field(default_factory=dict)  # by name, as in ``faults``: how large errors are
    limit: float | None = None  # the largest error that passes for ``between``

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
        lines = [
            f"{r.name}  {r.kind}  {r.shape}  {self._shown_error(r)}  {_shown(r.shift)}" for r in self.layers
        ]
        return "\n".join([*lines, self.summary()])

    @property
    def _exact(self) -> bool:
        """Whether an element besides the identity maps the grid to itself."""
        return sum(self.group.exact) > 1

    def summary(self) -> str:
        where = f"at length {self.size}" if self.sequences else f"at {self.size}x{self.size}"
        if self.passed:
            return self._verdict(where) + self._reservations()
        what = " and ".join([*self._tested(), "shifts"])
        measured = self.excess.get(self.culprit or "")
        excess = f" ({measured})" if measured and math.isfinite(measured.error) else ""
        advice = f"; sizes that would work: {_listed(self.sizes)}" if self.sizes else ""
        whole = self._of_the_whole()
        claim = "not every layer is equivariant" if whole else "not equivariant"
        return f"{claim} to {what} {where}: {self.culprit}: {self.reason}{excess}{advice}{whole}"

    def _of_the_whole(self) -> str:
        """A note for networks whose output is equivariant although a layer is not."""
        if not (self._exact and self.error <= self._rounding) or OUTPUT_NAME in (
            self.culprit,
            *self.uncompared,
        ):
            return ""
        return (
            f"; the output is equivariant to {self._without_limit()} on this input (error {self.error:.1e}): "
            "if layers are combined on purpose, as in an average over turned copies, equivariance_error "
            "measures the whole"
        )

    @property
    def _rounding(self) -> float:
        """The largest error of the output that counts as rounding of one layer."""
        return max([self.tolerance, *map(default_tolerance, self.rounded.values())])

    def _tested(self) -> list[str]:
        """What of the group was tested: with a limit, elements between the pixels as well."""
        if self.limit is not None:
            return [f"{self.group} (within {self.limit:.1%})"]
        return [self._without_limit()] if self._exact else []

    def _without_limit(self) -> str:
        """The elements that are tested to rounding."""
        return f"the exact elements of {self.group}" if self.group.band_limited else self.group.name

    def _verdict(self, where: str) -> str:
        shifts = ["shifts"] if self.shifted and not self.untested else []
        what = " and ".join(self._tested() + shifts)
        if not what:
            return f"no fault found {where}"
        shift = max((layer.shift for layer in self.layers if layer.shift is not None), default=None)
        measured = f": shift error {shift:.1e}" if shift is not None else ""
        if self._exact and OUTPUT_NAME not in self.uncompared:
            measured = f": output error {self.error:.1e}"
        return f"equivariant to {what} {where}{measured}"

    def _reservations(self) -> str:
        """What a verdict rests on, and what was not tested."""
        text = ""
        if self.untested:
            text += f"; shifts: not tested in {_some(self.untested)}"
        elif not self.shifted:
            text += "; shifts: not tested, no map is large enough"
        if self.error > self._rounding:
            worst = max((max(layer.input_error, layer.error) for layer in self.layers), default=0.0)
            grows = "" if self.rounded else "accumulated rounding: "
            text += f", {grows}each layer by itself is within {worst:.1e}"
        for dtype in dict.fromkeys(self.rounded.values()):
            places = [place for place, d in self.rounded.items() if d == dtype]
            name, tolerance = str(dtype).removeprefix("torch."), default_tolerance(dtype)
            text += f"; passed with tolerance {tolerance:g}: {name} in {_some(places)}"
        if self.uncompared:
            text += f"; not compared: {_some(self.uncompared)}, the same for every image or no real numbers"
        if self.between is not None:
            text += f"; between the pixels, on smooth images, {self.between:.1%} of its deviation"
            text += f" (interpolation alone {self.resampling:.1%})" if self.resampling else ""
        return text

    def table(self) -> Any:
        """The result as a table for ``rich``."""
        from rich.table import Table

        table = Table("layer", "kind", "output", caption=self.summary(), caption_style="")
        table.add_column("error", justify="right")
        table.add_column("shift", justify="right")
        for r in self.layers:
            style = "bold red" if r.name in self.faults else ""
            shape = "x".join(map(str, r.shape[1:]))
            table.add_row(r.name, r.kind, shape, self._shown_error(r), _shown(r.shift), style=style)
        return table

    def _shown_error(self, layer: LayerReport) -> str:
        return _shown(layer.error if self._exact else None)


def _listed(words: Sequence[object]) -> str:
    return ", ".join(map(str, words))


def _some(words: Sequence[object]) -> str:
    return _listed(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def _shown(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


@without_gradients
@refused_in_one_line()
def audit(
    model: nn.Module,
    input_size: int,
    group: str | Group | None = None,
    *,
    in_channels: int | Sequence[int] | None = None,
    inputs: Kind | Sequence[Kind] = "planar",
    outputs: Kind | Sequence[Kind] | None = None,
    tolerance: float = 1e-8,
    between: float | None = None,
) -> Audit:
    """Tests each layer of a network separately, under every element of the group and shifts, in float64.

    The network runs on a random image, then on the image transformed: by the elements, shifted down, and
    shifted to the right. In these runs every layer receives
    its input of the first run, exactly transformed, and its output is replaced by its output of the first
    run, exactly transformed. So neither rounding nor a fault reaches the next layer, and every broken layer
    is found.

    Elements that do not map the grid to itself (45°, in c8) are never exact, so layers are not tested under
    them. The error of the whole network under them is measured on smooth images: sums of plane waves that
    fade to zero outside a disc, sampled at the rotated pixels. Only outputs that are maps are interpolated.

    Features may be rearranged between layers: the group axis folded into the channels or the batch, flattened
    pixels, channels last. This is a fault only if a later layer, or the model's output, does not transform
    with the image.

    Args:
        model: takes images ``[N, in_channels, input_size, input_size]``, or what ``inputs`` says. A copy is
            tested, in eval mode. Its output is a tensor, or a container of tensors: tuples, lists, mappings
            and dataclasses, nested in any way. Numbers in it are expected to be invariant. None and other
            objects are ignored, but refused if they hold tensors. Integers and booleans are compared exactly:
            their error is the share of values that differ.
        input_size: the side of the images, or the length of sequences.
        group: by default the model's attribute ``group``, or else that of its layers: the smallest, to which
            ``RestrictGroup`` may have restricted the features. z2, if no layer has one, tests shifts only.
        in_channels: by default the attribute ``in_channels`` of the model, or else of the first of its layers
            that has one; of several inputs, one number for each.
        inputs: what the input is, or each of several: ``"planar"``, ``"pixels"``, ``"group"``, ``"vector"``,
            ``"invariant"``, ``"sequence"``, ``"group sequence"``, or ``FeaturesOn(larger)`` (see
            ``transform``).
        outputs: what each output is, in the same words, or ``"attention"``; by default the rank decides.
        tolerance: the largest error of one layer that counts as rounding. Where values that depend on the
            input are computed in a lower precision than float64, the tolerance is that of
            ``assert_equivariant`` for their dtype, and the summary names the dtype and the layers.
        between: the largest error of the output under elements between the pixels that passes, relative to
            its deviation. By default any, except for groups in which no element but the identity maps the
            grid to itself, such as rotations by 120°: they need it.

    Raises:
        ValueError: also where nothing would be compared: no element changes an image of this size, nothing
            can be shifted, or the output is empty or, like all features, does not depend on the image.
    """
    check_model(model)
    tolerance = checked_tolerance("tolerance", tolerance)
    between = None if between is None else checked_tolerance("between", between)
    if not is_whole(input_size) or input_size < 1:
        raise ValueError(f"input_size: expected a positive number of pixels; got {input_size!r}")
    group = default_group(model) if group is None else get_group(group)
    if isinstance(inputs, list | tuple) and not inputs:
        raise ValueError(f"inputs: expected one kind or more; got {inputs!r}")
    of_input = check_kinds("inputs", inputs, len(inputs) if isinstance(inputs, list | tuple) else 1)
    sequences = any(map(is_sequence, of_input))
    if sequences and not all(is_sequence(kind) or kind == "invariant" for kind in of_input):
        raise ValueError(f"inputs: expected maps or sequences, not both; got {inputs!r}")
    given = default_channels(model) if in_channels is None else in_channels
    channels: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * len(of_input)
    if len(channels) != len(of_input):
        raise ValueError(f"in_channels: expected {len(of_input)} numbers for inputs={inputs}; got {given}")
    if not all(is_whole(c) and c >= 1 for c in channels):
        raise ValueError(f"in_channels: expected integers ≥ 1; got {given!r}")
    stored = {name: coarsest(_dtypes(layer)) for name, layer in model.named_modules()}
    model = copy.deepcopy(model).double().eval()
    device = next((p.device for p in model.parameters()), None)

    def images(size: int) -> tuple[Images, Images]:
        generator = torch.Generator().manual_seed(0)
        shapes = [input_shape(kind, c, size, group) for kind, c in zip(of_input, channels, strict=True)]
        pairs = [torch.randn(4, *s, dtype=torch.float64, generator=generator).to(device) for s in shapes]
        return tuple(pair[:2] for pair in pairs), tuple(pair[2:] for pair in pairs)

    x, _ = images(input_size)
    check_inputs(of_input, x, group)
    smooth = [
        smooth_input(kind, c, input_size, group, seed)
        for seed, (kind, c) in enumerate(zip(of_input, channels, strict=True))
        if group.band_limited
    ]
    _check_changing(x, smooth, group, of_input, input_size)
    axes = 1 if sequences else 2
    try:
        recorded = record(model, x)
    except Exception as refusal:  # of the model, or of torch: a quantised or scripted model, for example
        sizes = symmetric_sizes(model, images, input_size, axes)
        given_as = [f"{list(t.shape)} ({kind!r})" for t, kind in zip(x, of_input, strict=True)]
        raise ValueError(
            f"the model cannot be audited, in float64, on inputs of shape {_listed(given_as)}: "
            + first_line(refusal)
            + (f"; sizes that it takes: {_listed(sizes)}" if sizes else "")
            + ("" if sizes or in_channels else f"; in_channels= says how many it takes, by default {given}")
        ) from refusal
    check_output(judgeable(recorded[1]))
    options = group, tolerance, of_input, outputs
    judge, y, kinds = judged(model, images(input_size), *options, recorded=recorded, stored=stored)
    error = largest(
        output_error(
            run_observed(model, turned(x, s, group, of_input), look_away), y, s, judge.actions, kinds
        )
        for s in group
        if group.exact[s]
    )
    judge.conclude_output(model, x, y, error, kinds)
    off_grid, resampling = None, 0.0
    if group.band_limited:
        off_grid, resampling = between_error(model, smooth, judge.actions, device, kinds)
        check_between(group, between, off_grid)
        judge.conclude_between(off_grid, between)
    uncompared = judge.uncompared()
    if not judge.faults:
        _check_compared(judge, uncompared, input_size)
    layers = [
        LayerReport(
            call.name,
            type(call.module).__name__,
            call.shape,
            judge.errors[key, "input"],
            judge.errors[key, "output"],
            judge.shifted.errors.get(key),
        )
        for key, call in judge.calls.items()
    ]
    sizes = []
    if judge.faults and set(judge.faults.values()) <= judge.sampling:
        near = symmetric_sizes(model, images, input_size, axes)
        sizes = [n for n in near if not judged(model, images(n), *options)[0].faults]
    return Audit(
        group=group,
        size=input_size,
        tolerance=tolerance,
        layers=layers,
        error=error,
        faults=judge.faults,
        sizes=sizes,
        between=off_grid,
        resampling=resampling,
        rounded=judge.lowered_precision(),
        sequences=sequences,
        untested=judge.shifted.untested,
        shifted=judge.shifted.compared,
        uncompared=uncompared,
        excess=judge.excess,
        limit=between if group.band_limited else None,
    )


def _dtypes(layer: nn.Module) -> list[torch.dtype]:
    tensors = (*layer.parameters(), *layer.buffers())
    return [t.dtype for t in tensors if t.is_floating_point()]


def _check_changing(
    x: Images, smooth: Sequence[Callable[[int], Tensor]], group: Group, kinds: list[Kind | None], size: int
) -> None:
    """Whether some element changes the inputs: on maps of one pixel, none does."""

    def changes(s: int) -> bool:
        if group.exact[s]:
            return not same(turned(x, s, group, kinds), x)
        return not same([f(s) for f in smooth], [f(0) for f in smooth])

    if not any(changes(s) for s in group) and len(group) > 1:
        raise ValueError(
            f"input_size: expected one at which an element of {group.name!r} changes the input; got {size}"
        )


def _check_compared(judge: Judge, uncompared: list[str], size: int) -> None:
    layers = {call.name for call in judge.calls.values() if call.takes_features}
    if {*layers, OUTPUT_NAME} <= {*uncompared}:
        raise ValueError(
            "expected a model whose output depends on its input; got the same output and features for other "
            "inputs"
        )
    if len(judge.group) == 1 and not judge.shifted.compared:
        raise ValueError(
            f"input_size: expected one at which features can be shifted; got {size}, too small for the model"
        )


def default_group(model: nn.Module) -> Group:
    """The model's own group; or the smallest of its layers' groups, which has to be in all of them."""
    if getattr(model, "group", None) is not None:
        return get_group(model.group)  # type: ignore[arg-type]
    attributes = (getattr(m, name, None) for m in model.modules() for name in ("group", "subgroup"))
    groups = list(dict.fromkeys(g for g in attributes if isinstance(g, Group)))
    smallest = min(groups, key=len, default=Z2)
    if any(g.index(matrix) is None for g in groups for matrix in smallest.matrices):
        names = ", ".join(repr(g.name) for g in groups)
        raise ValueError(
            f"group: expected the one to test, as the layers are on several; got None for {names}"
        )
    return smallest


def default_channels(model: nn.Module) -> int:
    found = (getattr(m, "in_channels", None) for m in model.modules())
    return next((channels for channels in found if isinstance(channels, int)), 3)


def input_shape(kind: Kind | None, channels: int, size: int, group: Group) -> tuple[int, ...]:
    if isinstance(kind, FeaturesOn):
        return input_shape(kind.kind, channels, size, get_group(kind.group))
    axis = () if len(group) == 1 else (len(group),)
    shapes: dict[Kind | None, tuple[int, ...]] = {
        "invariant": (channels,),
        "pixels": (size, size),
        "group": (channels, *axis, size, size),
        "sequence": (channels, size),
        "group sequence": (channels, *axis, size),
    }
    if kind in ("attention", "attention sequence"):
        raise ValueError(
            f"inputs: expected features of a known shape; got {kind!r}, whose window is not known"
        )
    return shapes.get(kind, (channels, size, size))


def symmetric_sizes(
    model: nn.Module, images: Callable[[int], tuple[Images, Images]], size: int, axes: int
) -> list[int]:
    """Input sizes near ``size`` on which every layer samples symmetrically, nearest first."""

    def symmetric(n: int) -> bool:
        try:
            calls, _ = record(model, images(n)[0])
        except Exception:  # too small for the network, for example
            return False
        return all(
            (given[1].shape[axis] + 2 * rule[2] - rule[0]) % rule[1] == 0
            for call in calls.values()
            for axis in range(-axes, 0)
            if (given := call.only_input()) and (rule := sampling(call.module, axis))
        )

    near = sorted(range(max(1, size - 8), size + 9), key=lambda n: abs(n - size))
    return list(islice((n for n in near if n != size and symmetric(n)), 3))
