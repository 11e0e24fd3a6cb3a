"""Shifts of maps that repeat, and how far a tensor is from another that was shifted or rearranged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import product
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from selfconv.testing.errors import relative_error
from selfconv.testing.interiors import enclosed

Steps = tuple[int, ...]  # how often a shift is repeated along rows and columns, or along a sequence
# Which cells an object away from the border occupies: a patch of a few cells at the centre; all cells but a
# quarter of the map at each side; all cells but those in reach of the window that is assumed of functions.
Extent = Literal["patch", "inner", "outer"]
Object = tuple[Steps, Extent]  # moved by some steps

Found = TypeVar("Found")
P = ParamSpec("P")

ROOM = 2  # the assumed radius, in cells, of windows of functions outside any layer


def _on_maps(
    method: Callable[Concatenate[Move, Tensor, P], Found],
) -> Callable[Concatenate[Move, Tensor, P], Found]:
    """Extends a method for maps to flat tensors, which are unflattened for it, and to maps that move against
    the image, which are flipped for it. A tensor that it returns is changed back."""

    @wraps(method)
    def wrapped(move: Move, x: Tensor, *args: P.args, **options: P.kwargs) -> Found:
        if move.flat:
            (axis,) = move.axes
            maps = x.unflatten(axis, (math.isqrt(x.shape[axis]), -1))
            found = wrapped(Move((axis, axis + 1), move.cells), maps, *args, **options)
            return found.flatten(axis, axis + 1) if isinstance(found, Tensor) else found  # type: ignore[return-value]
        against = [axis for axis, cells in zip(move.axes, move.cells, strict=True) if cells < 0]
        if not against:
            return method(move, x, *args, **options)
        ahead = Move(move.axes, tuple(map(abs, move.cells)))
        found = method(ahead, x.flip(against), *args, **options)
        return found.flip(against) if isinstance(found, Tensor) else found  # type: ignore[return-value]

    return wrapped


@dataclass(frozen=True)
class Move:
    """A circular shift by some cells along each of some axes; without axes, the identity.

    The axes are those of the image's rows and columns, in this order: of a transposed map, the last is first.
    Maps that are mirrored move against the image, by negative numbers of cells. ``flat`` are square maps
    whose rows follow each other along one axis: tokens.
    """

    axes: tuple[int, ...] = ()
    cells: Steps = ()
    flat: bool = False

    @_on_maps
    def moves(self, x: Tensor) -> bool:
        """False if the shift is by whole sides, longer than 1, along every axis: then it changes nothing."""
        pairs = zip(self.axes, self.cells, strict=True)
        return any(x.shape[axis] == 1 or cells % x.shape[axis] for axis, cells in pairs)

    def mirrored(self) -> list[Move]:
        """Those of mirrored maps, which move against this one along some axes."""
        some = list(product((1, -1), repeat=len(self.cells)))[1:]
        return [replace(self, cells=tuple(a * b for a, b in zip(self.cells, s, strict=True))) for s in some]

    def unlike(self, other: Move) -> tuple[bool, int]:
        """How much another move differs."""
        return self.axes != other.axes, sum(a != b for a, b in zip(self.cells, other.cells, strict=False))

    def transposed(self) -> bool:
        return self.axes != tuple(sorted(self.axes))

    def signs(self, other: Move) -> tuple[int, ...]:
        """Along each axis of maps that move in another way: -1 if they move against those of this one."""
        along = sorted(zip(other.axes, self.cells, other.cells, strict=False))
        return tuple(1 if a * b > 0 else -1 for _, a, b in along)

    @_on_maps
    def by(self, x: Tensor, steps: Steps) -> Tensor:
        """Shifted several times, along each axis by itself."""
        if not self.axes:
            return x
        return x.roll([cells * step for cells, step in zip(self.cells, steps, strict=True)], self.axes)

    @_on_maps
    def object(self, x: Tensor, which: Object | None) -> Tensor:
        """Some cells of x in zeros. Zeros alone for None."""
        alone = torch.zeros_like(x)
        if which is None:
            return alone
        steps, extent = which
        chosen: list[Any] = [slice(None)] * x.dim()
        for axis, (first, end) in zip(self.axes, self._span(x, extent), strict=True):
            chosen[axis] = slice(first, end)
        alone[tuple(chosen)] = x[tuple(chosen)]
        return self.by(alone, steps)

    @_on_maps
    def bounds(self, x: Tensor, extent: Extent) -> list[tuple[int, int]]:
        """The least and the largest step along each axis that keeps the patch inside an extent, moved by one
        step."""
        axes = zip(self.cells, self._span(x, "patch"), self._span(x, extent), strict=True)
        return [
            (-(max(0, at - first) // cells), max(1, (last + cells - end) // cells))
            for cells, (at, end), (first, last) in axes
        ]

    def _span(self, x: Tensor, extent: Extent) -> list[tuple[int, int]]:
        """From which cell to which an object is, along each axis."""
        found = []
        for axis, cells in zip(self.axes, self.cells, strict=True):
            n = x.shape[axis]
            width = max(1, min(cells + 2, n - cells - 2 * ROOM))  # a step leaves out no row between patches
            # one cell is not moved to its mirror image, where a symmetric fault does not show
            at = max(0, (n - cells - max(width, 2)) // 2)
            margin = max(0, min(ROOM, (n - width - cells) // 2), n // 4 if extent == "inner" else 0)
            found.append((at, at + width) if extent == "patch" else (margin, max(margin, n - margin - cells)))
        return found

    @_on_maps
    def room(self, x: Tensor) -> int:
        """How many cells are beside the patch on each side, before a step and after it."""
        places = zip(self.axes, self.cells, self._span(x, "patch"), strict=True)
        return min((min(at, x.shape[axis] - end - cells) for axis, cells, (at, end) in places), default=0)

    @_on_maps
    def reach(self, changed: Tensor) -> list[int]:
        """How far from the patch there are cells that changed with it, along each axis."""
        found = []
        for axis, (at, end) in zip(self.axes, self._span(changed, "patch"), strict=True):
            cells = changed.movedim(axis, 0).flatten(1).any(1).nonzero()
            found.append(int(torch.cat([at - cells, cells - end + 1, cells.new_zeros(1, 1)]).max()))
        return found

    @_on_maps
    def inside(self, free: Tensor, reach: Sequence[int]) -> Tensor:
        """The cells of ``free``, which the border does not influence, that are not padding, and that are
        farther than ``reach`` from the border before a step and after it."""
        free = enclosed(free, self.axes)
        for axis, cells, far in zip(self.axes, self.cells, reach, strict=True):
            place = torch.arange(free.shape[axis], device=free.device)
            within = (place >= far) & (place < free.shape[axis] - far - cells)
            free = free & within.view([-1 if i == axis else 1 for i in range(free.dim())])
        return free

    @_on_maps
    def border(self, x: Tensor, dilation: int) -> Tensor:
        """True for cells near the border that a window over the edge can cover, before or after the shift."""
        inner: list[Any] = [slice(None)] * x.dim()
        for axis, cells in zip(self.axes, self.cells, strict=True):
            n = x.shape[axis] - cells
            frame = max(1, min(dilation, n // 2 - 1))
            inner[axis] = slice(frame, max(frame, n - frame))
        border = torch.ones_like(x, dtype=torch.bool)
        border[tuple(inner)] = False
        return border

    @_on_maps
    def sides(self, x: Tensor) -> list[float]:
        """The length of the map along each axis, in steps."""
        return [x.shape[axis] / cells for axis, cells in zip(self.axes, self.cells, strict=True)]

    @_on_maps
    def tiled(self, x: Tensor, copies: int) -> Tensor:
        """Copies of a map or a row, side by side."""
        return tiled(x, self.axes, copies)


STILL = Move()


def permuted(a: Tensor, b: Tensor) -> float:
    """The error of a as a rearrangement of the numbers in b; of complex ones, part by part."""
    if a.is_complex() and b.is_complex():
        return max(permuted(a.real, b.real), permuted(a.imag, b.imag))
    return relative_error(a.flatten().sort().values, b.flatten().sort().values)


def typical_error(a: Tensor, b: Tensor) -> float:
    """The median of the differences, which the border of a large map does not affect."""
    if a.dtype == torch.bool:
        a, b = a.double(), b.double()
    size, error = b.abs().amax().item(), (a - b).abs().double().median().item()
    return error / size if size else error


def tiled(x: Tensor, axes: tuple[int, ...], copies: int) -> Tensor:
    """Copies of a map or a row, side by side."""
    return x.repeat([copies if axis in axes else 1 for axis in range(x.dim())])
