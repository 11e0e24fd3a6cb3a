"""The error under shifts, at the outputs that do not depend on the border."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from selfconv._arguments import is_whole
from selfconv.testing.checks import (
    check_dependent,
    check_map,
    check_mapped,
    check_module,
    check_whole,
    shapes_of,
    without_gradients,
)
from selfconv.testing.errors import Function, default_tolerance, largest, relative_error
from selfconv.testing.layers.runs import first_line
from selfconv.testing.layers.windows import largest_dilation

MORE = 32  # changes of the border, before an error counts


@without_gradients
def shift_error(
    module: Function,
    x: Tensor,
    shift: int = 1,
    stride: int = 1,
    frame: int | None = None,
    *,
    axes: int = 2,
) -> float | None:
    """The error when x is shifted by ``shift`` cells, for outputs independent of the border.

    x is shifted down, and to the right: a function that commutes with both shifts does so with shifts in all
    directions. The larger error counts.

    Padding makes the border different from the interior, so only outputs that do not depend on it are
    compared. They are found by changing the border and observing which outputs change, and with a border of
    NaN, which also reaches outputs that depend on the border too weakly to change (a saturated softmax). An
    error counts if it remains after many random changes, which reach labels and booleans.
    Outputs outside of those that change, such as padding, are part of the border. None if no output is left,
    for example if the receptive field covers the whole map.

    Args:
        shift: a multiple of ``stride``.
        stride: the downsampling factor of the module.
        frame: how many rows and columns at the border are changed. A window that reaches over the border must
            meet them, so it has to be as large as the largest dilation, on maps that were downsampled times
            the stride. By default that of the module's layers.
        axes: the number of trailing spatial axes: 2 of maps, 1 of sequences, which shift to the right alone.

    Raises:
        ValueError: also where nothing would be compared: the shift does not change x, or the output does not
            depend on it.
    """
    check_module(module)
    if not is_whole(axes) or axes not in (1, 2):
        raise ValueError(f"axes: expected 1 or 2; got {axes!r}")
    x = check_map(x, axes)
    check_whole("stride", stride)
    if not is_whole(shift) or shift % stride or shift < 1:
        raise ValueError(f"shift: expected a positive multiple of stride={stride}; got {shift!r}")
    if shift >= min(x.shape[-axes:]):
        raise ValueError(
            f"shift: expected less than the least side of x, {min(x.shape[-axes:])}; got {shift}"
        )
    frame = stride * largest_dilation(module) if frame is None else frame
    check_whole("frame", frame)
    y = check_mapped(module(x.clone()), axes)
    if bool(y.isnan().any()):
        return math.nan
    if all(torch.equal(x, x.roll(shift, axis)) for axis in range(-axes, 0)):
        raise ValueError(f"x: expected values that the shift changes; got shape {shapes_of([x])}")
    error = interior_error(module, x, y, (shift,) * axes, (shift // stride,) * axes, frame)
    if not error:
        check_dependent(module, [x], [None], [y])
    return error


def interior_error(
    module: Function,
    x: Tensor,
    y: Tensor,
    given: tuple[int, ...],
    moved: tuple[int, ...],
    frame: int,
    *,
    transposed: bool = False,
) -> float | None:
    """The largest error of a shift along one axis, at the outputs that do not depend on the border; None if
    there are none.

    Args:
        y: the output for x.
        given, moved: by how many cells along each axis x is shifted, and its output should be; less than 0 if
            that is mirrored.
        transposed: whether rows of x are columns of the output.
    """
    axes = len(given)
    border = torch.ones_like(x[0, 0], dtype=torch.bool)
    sides = zip(x.shape[-axes:], given, strict=True)
    inner: list[Any] = [slice(frame, max(frame, n - frame - cells)) for n, cells in sides]
    border[(..., *inner)] = False
    free = torch.ones(y.shape[-axes:], dtype=torch.bool, device=y.device)  # [h, w] or [L]

    def error() -> float | None:
        interior, errors = enclosed(free, range(axes)), []
        for axis in range(axes):
            of_output = axes - 1 - axis if transposed else axis
            cells, n = moved[of_output], interior.shape[of_output]
            inside = interior.roll(cells, of_output)
            wrapped = min(abs(cells), n)  # from the other side
            inside.narrow(of_output, 0 if cells > 0 else n - wrapped, wrapped).fill_(False)
            if not inside.any():
                return None
            after, expected = module(x.roll(given[axis], axis - axes)), y.roll(cells, of_output - axes)
            after, expected = after[..., inside], expected[..., inside]
            errors += [relative_error(after, expected)] if bool(after.any() or expected.any()) else []
        return largest(errors) if len(errors) == axes else None

    refusals = []
    changes = _changes(x, border)
    for number in (2, MORE):
        for disturbed in islice(changes, number):
            try:
                free &= (module(disturbed) == y).flatten(0, -axes - 1).all(0)
            except Exception as refusal:  # of values that are not numbers, or out of range
                refusals.append(refusal)
            if not free.any():  # before NaN comes near the statistics of a batch norm in training
                return None
        found = error()
        # Comparisons and labels do not pass every change on, so cells that depend on the border may look
        # free: an error is believed only after more changes.
        if found is None or found <= (default_tolerance(y.dtype) if y.is_floating_point() else 0):
            return found
    if len(refusals) == 2 + MORE:
        raise ValueError(
            f"expected a module that takes other values at the border; got {first_line(refusals[0])}"
        )
    return found


def _changes(x: Tensor, border: Tensor) -> Iterator[Tensor]:
    """x with other values at the border: larger ones, NaN, then those of other places, also multiplied."""
    yield torch.where(border, x + 1, x)
    yield x.masked_fill(border, math.nan)
    generator = torch.Generator().manual_seed(0)
    for i in range(MORE):
        order = torch.randperm(x.numel(), generator=generator).to(x.device)
        yield torch.where(border, x.flatten()[order].view_as(x) * 10.0 ** (i % 4), x)


def enclosed(interior: Tensor, axes: Sequence[int]) -> Tensor:
    """Without the cells that are farther from the centre than one that the border changes: padding."""
    for axis in axes:
        n = interior.shape[axis]
        near, far = (~interior).split((n // 2, n - n // 2), axis)
        interior = ~torch.cat([near.flip(axis).cumsum(axis).flip(axis), far.cumsum(axis)], axis).bool()
    return interior
