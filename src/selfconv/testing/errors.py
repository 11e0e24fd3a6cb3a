"""The equivariance error of a function or layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from selfconv._arguments import describe_value, is_number, is_whole
from selfconv._resample import round_mask
from selfconv.groups import Group, get_group
from selfconv.testing.checks import (
    check_between,
    check_dependent,
    check_group,
    check_inputs,
    check_mapped,
    check_module,
    check_moved,
    check_output,
    check_values,
    checked_tensors,
    checked_tolerance,
    shapes_of,
    without_gradients,
)
from selfconv.testing.kinds import Kind, check_kinds, default_kind, is_sequence, transform
from selfconv.testing.leaves import aligned, as_tensor, output_kinds, outputs_of, same
from selfconv.testing.waves import Waves

Function = Callable[[Tensor], Tensor]
LEAST_CONSTANT = 1e4  # of masking constants


@without_gradients
def equivariance_error(
    module: Callable[..., Any],
    x: Tensor | Sequence[Tensor],
    group: str | Group,
    *,
    inputs: Kind | Sequence[Kind] | None = None,
    outputs: Kind | Sequence[Kind] | None = None,
) -> list[float]:
    """The error under each element of the group, in the order of its elements (the first is the identity).

    For elements that do not map the grid to itself, x has a round mask and the error is ``deviation_error``.
    The error of integers and booleans, such as labels, is the share of values that differ.

    A ValueError says so where nothing would be compared: if the group has no element but the identity (z2),
    no element changes x, or the output is empty or does not depend on x.

    Args:
        module: a function of x, or of each tensor of x, that returns a tensor or a container of tensors, of
            which the largest error counts: tuples, lists, mappings and dataclasses, nested in any way.
            Numbers in it are expected to be invariant. None and other objects are ignored, but refused if
            they hold tensors. The error is infinite if keys or lengths change with the input.
        inputs, outputs: what each tensor is (see ``transform``); one word stands for all. By default the rank
            decides; outputs for sequences of rank 3 and 4 are sequences too. An input has to transform.
    """
    group = get_group(group)
    check_module(module)
    given = checked_tensors(x)
    of_input = check_kinds("inputs", inputs, len(given))
    check_group(group)
    check_inputs(of_input, given, group)
    masked = tuple(map(through_mask, given, of_input)) if group.band_limited else given
    seen = {True: given, False: masked}  # by whether an element is exact
    y = {exact: outputs_of(module, seen[exact]) for exact in {*group.exact}}
    check_output(y[True])
    sequences = any(map(is_sequence, of_input))
    of_output = [
        kind or default_kind(as_tensor(t), group, sequences=sequences)
        for t, kind in zip(y[True], output_kinds(outputs, y[True]), strict=True)
    ]

    moved = changed = False  # whether an element changes x or what the output should be; and the output

    def error(s: int, exact: bool) -> float:
        nonlocal moved, changed
        turned = [transform(t, s, group, kind) for t, kind in zip(seen[exact], of_input, strict=True)]
        found = outputs_of(module, turned)
        changed |= not same(found, y[exact])
        in_order = aligned(found, y[exact])
        if in_order is None:
            return math.inf
        expected = [
            transform(as_tensor(t), s, group, kind) for t, kind in zip(y[exact], of_output, strict=True)
        ]
        moved |= not same(turned, seen[exact]) or not same(expected, y[exact])
        return largest(
            element_error(as_tensor(a), b, s, group, kind)
            for a, b, kind in zip(in_order, expected, of_output, strict=True)
        )

    errors = [error(s, exact) for s, exact in enumerate(group.exact)]
    check_moved(moved or changed, given, group)
    if not changed:
        check_dependent(module, given, of_input, y[True])
    return errors


def largest(errors: Iterable[float]) -> float:
    """The maximum, in which NaN is the largest of all."""
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e)


@torch.no_grad()
def resampling_error(x: Tensor, group: str | Group, kind: Kind | None = None) -> list[float]:
    """The interpolation error of x for each element: x transformed and transformed back, compared with x.

    0 for exact elements. Where it is not small compared with ``equivariance_error``, x is not smooth enough
    to measure equivariance: it has noise, or edges as sharp as a pixel.

    A ValueError says so where nothing would be compared, as for ``equivariance_error``.
    """
    group = get_group(group)
    if not isinstance(x, Tensor):
        raise ValueError(f"x: expected a tensor; got {describe_value(x)}")
    check_values([x])
    check_kinds("kind", kind, 1)
    if not x.numel():
        raise ValueError(f"x: expected one entry or more; got shape {shapes_of([x])}")
    check_group(group)
    check_inputs([kind], [x], group)
    seen = through_mask(x, kind)
    check_moved(not all(same([transform(seen, s, group, kind)], [seen]) for s in group), [x], group)
    return interpolation_error(x, group, kind)


def interpolation_error(x: Tensor, group: Group, kind: Kind | None) -> list[float]:
    """``resampling_error`` of any x: where no element changes it, interpolation does no harm."""
    seen = through_mask(x, kind)
    there = [transform(seen, s, group, kind) for s in group]
    back = [transform(turned, group.inverse[s], group, kind) for s, turned in enumerate(there)]
    return [deviation_error(t, seen) for t in back]


@torch.no_grad()
def centre_error(
    module: Function, shape: Sequence[int], group: str | Group, *, frequency: float = 0.5, seed: int = 0
) -> list[float]:
    """The error under each element at the centre of the map only, without interpolation.

    The features are sums of plane waves: functions on the whole plane, which can be sampled at the pixels and
    at the rotated pixels. So this is the error of the layers alone, at any angle.

    Args:
        module: layers of stride 1 in float64. The centre of its output must be the centre of its input, and
            must not depend on the border.
        shape: of the features, ``[N, C, h, w]`` or ``[N, C, |H|, h, w]``, with odd sides.
        frequency: of the shortest waves, in units of the Nyquist frequency (a wavelength of two pixels).

    A ValueError says so where nothing would be compared, as for ``equivariance_error``.
    """
    group = get_group(group)
    check_module(module)
    check_group(group)
    sizes = list(shape) if isinstance(shape, list | tuple) else []
    whole = len(sizes) in (4, 5) and all(is_whole(n) and n >= 1 for n in sizes)
    if not whole or sizes[2:-2] not in ([], [len(group)]) or any(n % 2 == 0 for n in sizes[-2:]):
        axis = f"{len(group)}, " if len(sizes) == 5 else ""
        raise ValueError(
            f"shape: expected [N, C, {axis}h, w] on group {group.name!r}, N, C ≥ 1, with odd sides, which "
            f"have a centre; got {shape!r}"
        )
    if not is_number(frequency) or not 0 < frequency < math.inf:
        raise ValueError(f"frequency: expected a finite number above 0; got {frequency!r}")
    if not is_whole(seed):
        raise ValueError(f"seed: expected an integer; got {seed!r}")
    *lead, h, w = sizes
    waves = Waves(lead, frequency, seed)
    given = [waves.turned(h, w, s, group) for s in group]
    check_moved(not all(same([x], given[:1]) for x in given), given[:1], group)

    def centre(x: Tensor) -> Tensor:
        y = check_mapped(module(x), 2)
        if y.dim() not in (4, 5) or y.shape[2:-2] not in ((), (len(group),)):
            raise ValueError(
                f"expected a module that returns [N, C, h, w] or [N, C, {len(group)}, h, w] on group "
                f"{group.name!r}; got shape {shapes_of([y])}"
            )
        return y[..., y.shape[-2] // 2, y.shape[-1] // 2]  # [N, C] or [N, C, P]

    found = [centre(x) for x in given]
    if all(same([y], found[:1]) for y in found):
        check_dependent(centre, given[:1], [None], found[:1])
    in_order = [y[:, :, list(group.product[s])] if y.dim() == 3 else y for s, y in enumerate(found)]
    return [deviation_error(y, found[0]) for y in in_order]  # planes in their order before the turn


def assert_equivariant(
    module: Callable[..., Any],
    x: Tensor | Sequence[Tensor],
    group: str | Group,
    tolerance: float | None = None,
    *,
    between: float | None = None,
    inputs: Kind | Sequence[Kind] | None = None,
    outputs: Kind | Sequence[Kind] | None = None,
) -> None:
    """Raises AssertionError, with the error under each element, unless all errors are within the tolerance.

    Args:
        tolerance: by default 1e-10 for float64, 1e-5 for float32, 1e-2 for float16 and 1e-1 for bfloat16, in
            which smaller faults cannot be distinguished from rounding.
        between: the tolerance for elements that do not map the grid to itself. By default they are not
            tested, since their error depends on the smoothness of x. Needed for groups in which no element
            but the identity maps the grid to itself, such as rotations by 120°.
        inputs, outputs: what each tensor is, as for ``equivariance_error``.
    """
    group = get_group(group)
    check_module(module)
    dtype = checked_tensors(x)[0].dtype
    tolerance = default_tolerance(dtype) if tolerance is None else checked_tolerance("tolerance", tolerance)
    between = None if between is None else checked_tolerance("between", between)
    errors = equivariance_error(module, x, group, inputs=inputs, outputs=outputs)
    check_between(group, between, largest(errors))
    limits = [tolerance if exact else math.inf if between is None else between for exact in group.exact]
    if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):  # NaN fails too
        listed = ", ".join(f"{s}: {error:.1e}" for s, error in enumerate(errors))
        raise AssertionError(
            f"not equivariant to {group.name} within {tolerance:g}"
            + ("" if between is None else f", {between:g} between the pixels")
            + f"; error by element {listed}"
        )


def default_tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-5)


def element_error(a: Tensor, b: Tensor, s: int, group: Group, kind: Kind | None = None) -> float:
    """The error of a, the output for the transformed input, relative to b, the transformed output."""
    if group.exact[s] or a.shape != b.shape:
        return relative_error(a, b)
    return deviation_error(*(t.unsqueeze(1) if kind == "pixels" else t for t in (a, b)))


def relative_error(a: Tensor, b: Tensor) -> float:
    """max |a − b| / max |b|; of integers and booleans, the share of values that differ.

    Masking constants, such as −1e9 or the least number of a dtype, do not count in max |b|: see ``masked``.
    They are compared with themselves.
    """
    if a.shape != b.shape:
        return math.inf
    if not b.numel():
        return 0.0
    if _discrete(b):
        return (a != b).double().mean().item()
    if a.dtype == b.dtype and torch.equal(a, b):  # as most are in an audit
        return 0.0
    difference, size = (a - b).abs().amax().item(), b.abs().amax().item()
    if math.isfinite(difference) and size < LEAST_CONSTANT:  # all entries are finite, and none is masked
        return difference / size if size else difference
    constant = masked(b)
    if bool(constant.any()) and not bool(constant.all()):
        return largest([_ratio(a[constant], b[constant]), _ratio(a[~constant], b[~constant])])
    return _ratio(a, b)


def _ratio(a: Tensor, b: Tensor) -> float:
    difference = torch.where(a == b, 0, (a - b).abs()).amax().item()  # equal infinities are no difference
    size = torch.where(b.isfinite(), b.abs(), 0).amax().item()
    return difference / size if size else difference


def masked(b: Tensor) -> Tensor:
    """Where entries are masking constants: at least two, of ``LEAST_CONSTANT`` or more, equal up to 0.1% in
    size, and 1000 times as large as all that are smaller."""
    sizes = torch.where(b.isfinite(), b.abs(), 0)
    found = torch.zeros_like(b, dtype=torch.bool)
    while True:
        largest = sizes.amax()
        near = sizes >= largest / 1.001
        rest = torch.where(near, 0, sizes).amax()
        if not (largest >= LEAST_CONSTANT and near.sum() >= 2 and 0 < rest <= largest / 1000):
            return found
        found |= near
        sizes = torch.where(near, 0, sizes)


def deviation_error(a: Tensor, b: Tensor) -> float:
    """RMS of a − b divided by the standard deviation of b per channel; for maps, inside the round mask.

    For integers and booleans it is the share of values that differ.
    """
    if a.shape != b.shape:
        return math.inf
    if b.dim() >= 4:
        inside = round_mask(*b.shape[-2:]).to(b.device) > 0
        a, b = a[..., inside], b[..., inside]
    if not b.numel() or _discrete(b):
        return relative_error(a, b)
    others = [axis for axis in range(b.dim()) if axis != 1]
    alone = b.dim() < 2 or b.numel() == b.shape[1]  # one value in each channel has no deviation
    mean = b.mean() if alone else b.mean(others, keepdim=True)
    spread, difference = ((t.abs().square().mean().sqrt().item()) for t in (b - mean, a - b))
    return difference / spread if spread else difference


def _discrete(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def through_mask(x: Tensor, kind: Kind | None = None) -> Tensor:
    """Sets features outside the inscribed disc of their map to zero; features without a map are unchanged."""
    return x * round_mask(*x.shape[-2:]).to(x) if x.dim() >= 4 or kind == "pixels" else x
