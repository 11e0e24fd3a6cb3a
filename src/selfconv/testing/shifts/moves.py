"""Shifts of maps that repeat, and how far a tensor is from another that was shifted or rearranged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from selfconv.testing.errors import relative_error

Steps = tuple[int, ...]  # how often a shift is repeated along rows and columns, or along a sequence

Found = TypeVar("Found")
P = ParamSpec("P")

ROOM = 2  # the assumed radius, in cells, of windows of functions outside any layer


def _on_maps(
    method: Callable[Concatenate[Move, Tensor, P], Found],
) -> Callable[Concatenate[Move, Tensor, P], Found]:
    """Makes a method for maps one for flat tensors too, which become maps for it, and flat again."""

    @wraps(method)
    def wrapped(move: Move, x: Tensor, *args: P.args, **options: P.kwargs) -> Found:
        if not move.flat:
            return method(move, x, *args, **options)
        (axis,) = move.axes
        maps = x.unflatten(axis, (math.isqrt(x.shape[axis]), -1))
        found = method(Move((axis, axis + 1), move.cells), maps, *args, **options)
        return found.flatten(axis, axis + 1) if isinstance(found, Tensor) else found  # type: ignore[return-value]

    return wrapped


@dataclass(frozen=True)
class Move:
    """A circular shift by some cells along each of some axes; without axes, the identity.

    The axes are those of the image's rows and columns, in this order: of a transposed map, the last is first.
    ``flat`` are square maps whose rows follow each other along one axis: tokens.
    """

    axes: tuple[int, ...] = ()
    cells: Steps = ()
    flat: bool = False

    @_on_maps
    def moves(self, x: Tensor) -> bool:
        """Not if it goes once round a map, or several times."""
        pairs = zip(self.axes, self.cells, strict=True)
        return any(x.shape[axis] == 1 or cells % x.shape[axis] for axis, cells in pairs)

    @_on_maps
    def by(self, x: Tensor, steps: Steps) -> Tensor:
        """Shifted several times, along each axis by itself."""
        if not self.axes:
            return x
        return x.roll([cells * step for cells, step in zip(self.cells, steps, strict=True)], self.axes)

    @_on_maps
    def object(self, x: Tensor, steps: Steps | None) -> Tensor:
        """One cell of x in zeros: that near the centre, moved by some steps. Zeros alone for None."""
        alone = torch.zeros_like(x)
        if steps is not None:
            chosen: list[Any] = [slice(None)] * x.dim()
            for axis, cell in zip(self.axes, self._centre(x), strict=True):
                chosen[axis] = cell
            alone[tuple(chosen)] = x[tuple(chosen)]
        return alone if steps is None else self.by(alone, steps)

    @_on_maps
    def bounds(self, x: Tensor, *, far: bool) -> list[tuple[int, int]]:
        """The least and the largest step along each axis that keeps the object from the border: by a quarter
        of the map, or ``far`` from the centre by the window that is assumed of functions."""
        found = []
        for axis, cells, at in zip(self.axes, self.cells, self._centre(x), strict=True):
            n = x.shape[axis]
            margin = max(0, min(ROOM, (n - 1 - cells) // 2))
            margin = margin if far else max(margin, n // 4)
            last = (n - 1 - margin - at) // cells
            found.append((-(max(0, at - margin) // cells), max(1, last)))
        return found

    def _centre(self, x: Tensor) -> list[int]:
        """Avoids cells that the shift maps to their mirror image, where a symmetric fault does not show."""
        pairs = zip(self.axes, self.cells, strict=True)
        return [max(0, (x.shape[axis] - cells) // 2 - 1) for axis, cells in pairs]

    @_on_maps
    def room(self, x: Tensor) -> int:
        """How many cells are beside that cell on each side, before the move and after it."""
        places = zip(self.axes, self.cells, self._centre(x), strict=True)
        return min((min(at, x.shape[axis] - 1 - at - cells) for axis, cells, at in places), default=0)

    @_on_maps
    def border(self, x: Tensor, dilation: int) -> Tensor:
        """True for cells near the border that a window over the edge can cover, before or after the shift."""
        inner: list[Any] = [slice(None)] * x.dim()
        for axis, cells in zip(self.axes, self.cells, strict=True):
            n = x.shape[axis] - cells
            frame = max(1, n // 4, min(dilation, n // 2 - 1))
            inner[axis] = slice(frame, max(frame, n - frame))
        border = torch.ones_like(x, dtype=torch.bool)
        border[tuple(inner)] = False
        return border

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
