"""The equivariance error of a function or layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from selfconv._resample import round_mask
from selfconv.groups import Group, get_group
from selfconv.testing.kinds import Kind, as_tuple, check_kinds, transform
from selfconv.testing.waves import Waves
from selfconv.testing.windows import largest_dilation

Function = Callable[[Tensor], Tensor]


@torch.no_grad()
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

    Args:
        module: a function of x, or of each tensor of x, that returns a tensor or a container of tensors, of
            which the largest error counts.
        inputs, outputs: what each tensor is (see ``transform``); one word stands for all. By default the rank
            decides.
    """
    group = get_group(group)
    given = as_tuple(x)
    of_input = check_kinds("inputs", inputs, len(given))
    masked = tuple(map(through_mask, given)) if group.band_limited else given
    seen = {True: given, False: masked}  # by whether an element is exact
    y = {exact: tree_flatten(module(*seen[exact]))[0] for exact in {*group.exact}}
    of_output = check_kinds("outputs", outputs, len(y[True]))

    def error(s: int, exact: bool) -> float:
        turned = [transform(t, s, group, kind) for t, kind in zip(seen[exact], of_input, strict=True)]
        found = tree_flatten(module(*turned))[0]
        expected = [transform(t, s, group, kind) for t, kind in zip(y[exact], of_output, strict=True)]
        return largest(element_error(a, b, s, group) for a, b in zip(found, expected, strict=True))

    return [error(s, exact) for s, exact in enumerate(group.exact)]


def largest(errors: Iterable[float]) -> float:
    """The maximum, in which NaN is the largest of all."""
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e)


@torch.no_grad()
def resampling_error(x: Tensor, group: str | Group) -> list[float]:
    """The interpolation error of x for each element: x transformed and transformed back, compared with x.

    0 for exact elements. Where it is not small compared with ``equivariance_error``, x is not smooth enough
    to measure equivariance: it has noise, or edges as sharp as a pixel.
    """
    group = get_group(group)
    seen = through_mask(x)
    there_and_back = [transform(transform(seen, s, group), group.inverse[s], group) for s in group]
    return [deviation_error(back, seen) for back in there_and_back]


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
    """
    group = get_group(group)
    *lead, h, w = shape
    axis = "" if len(lead) < 3 else f"{len(group)}, "
    if len(lead) not in (2, 3) or lead[2:] not in ([], [len(group)]) or h % 2 == 0 or w % 2 == 0:
        raise ValueError(
            f"shape: expected [N, C, {axis}h, w] on group {group.name!r}, with odd sides, which have a "
            f"centre; got {list(shape)}"
        )
    waves = Waves(lead, frequency, seed)

    def centre(s: int) -> Tensor:
        """The output at the centre for the features turned by s, plane P where it was before the turn."""
        y = module(waves.turned(h, w, s, group))
        y = y[..., y.shape[-2] // 2, y.shape[-1] // 2]  # [N, C] or [N, C, P]
        return y[:, :, list(group.product[s])] if y.dim() == 3 else y

    upright = centre(0)
    return [deviation_error(centre(s), upright) for s in group]


@torch.no_grad()
def shift_error(
    module: Function, x: Tensor, shift: int = 1, stride: int = 1, frame: int | None = None
) -> float | None:
    """The error when x is shifted by ``shift`` cells down and right, for outputs independent of the border.

    Zero padding makes the border different from the interior, so only outputs that do not depend on it are
    compared. They are found by changing the border and observing which outputs change, and with a border of
    NaN, which also reaches outputs that depend on the border too weakly to change (a saturated softmax). None
    if there is no such output, for example if the receptive field covers the whole map.

    Args:
        shift: a multiple of ``stride``.
        stride: the downsampling factor of the module.
        frame: how many rows and columns at the border are changed. A window that reaches over the border must
            meet them, so it has to be as large as the largest dilation, on maps that were downsampled times
            the stride. By default that of the module's layers.
    """
    if shift % stride or shift < 1:
        raise ValueError(f"shift: expected a positive multiple of stride={stride}; got {shift}")
    if frame is None:
        frame = stride * largest_dilation(module)
    y = module(x)
    border = torch.ones_like(x[0, 0], dtype=torch.bool)
    border[..., frame : x.shape[-2] - frame - shift, frame : x.shape[-1] - frame - shift] = False
    interior = torch.ones(y.shape[-2:], dtype=torch.bool, device=y.device)
    for disturbed in (torch.where(border, x + 1, x), x.masked_fill(border, math.nan)):
        interior &= (module(disturbed) == y).flatten(0, -3).all(0)  # [h, w]
        if not interior.any():  # before NaN comes near the statistics of a batch norm in training
            return None
    moved, expected = module(x.roll((shift, shift), (-2, -1))), y.roll((shift // stride,) * 2, (-2, -1))
    interior = interior.roll((shift // stride,) * 2, (0, 1))
    return relative_error(moved[..., interior], expected[..., interior])


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
            tested, since their error depends on the smoothness of x.
        inputs, outputs: what each tensor is, as for ``equivariance_error``.
    """
    group = get_group(group)
    tolerance = default_tolerance(as_tuple(x)[0].dtype) if tolerance is None else tolerance
    errors = equivariance_error(module, x, group, inputs=inputs, outputs=outputs)
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


def element_error(a: Tensor, b: Tensor, s: int, group: Group) -> float:
    """The error of a, the output for the transformed input, relative to b, the transformed output."""
    return (relative_error if group.exact[s] else deviation_error)(a, b)


def relative_error(a: Tensor, b: Tensor) -> float:
    """max |a − b| / max |b|."""
    if a.shape != b.shape:
        return math.inf
    if not b.numel():
        return 0.0
    difference = torch.where(a == b, 0, (a - b).abs()).amax().item()  # equal infinities are no difference
    size = torch.where(b.isfinite(), b.abs(), 0).amax().item()
    return difference / size if size else difference


def deviation_error(a: Tensor, b: Tensor) -> float:
    """RMS of a − b divided by the standard deviation of b per channel; for maps, inside the round mask."""
    if a.shape != b.shape:
        return math.inf
    if b.dim() >= 4:
        inside = round_mask(*b.shape[-2:]).to(b.device) > 0
        a, b = a[..., inside], b[..., inside]
    if not b.numel():
        return 0.0
    others = [axis for axis in range(b.dim()) if axis != 1]
    alone = b.dim() < 2 or b.numel() == b.shape[1]  # one value in each channel has no deviation
    mean = b.mean() if alone else b.mean(others, keepdim=True)
    spread, difference = ((t.square().mean().sqrt().item()) for t in (b - mean, a - b))
    return difference / spread if spread else difference


def through_mask(x: Tensor) -> Tensor:
    """Sets features outside the inscribed disc of their map to zero; features without a map are unchanged."""
    return x * round_mask(*x.shape[-2:]).to(x) if x.dim() >= 4 else x
