"""Runs a function on a few nonzero cells placed at several positions; a function that commutes with shifts
gives the same result at each, moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor

from selfconv.testing.errors import largest, relative_error
from selfconv.testing.layers.runs import Place
from selfconv.testing.shifts.motion import Motion
from selfconv.testing.shifts.moves import Extent, Move, Object, Steps

Run = Callable[[Object | None], dict[Place, Tensor]]  # on an object; on zeros for None


class Objects:
    """Runs of a function on objects at several places: a patch that meets every row and every column, and as
    many cells at once as there are away from the border, one step on.

    Args:
        maps: what moves in its input, and how: objects keep away from the border of each.
    """

    def __init__(self, motion: Motion, maps: Sequence[tuple[Move, Tensor]], run: Run) -> None:
        self.motion, self.maps, self.run = motion, maps, cache(run)

    def _within(self, extent: Extent) -> list[Object]:
        bounds = [
            (max(lo for lo, _ in axis), min(hi for _, hi in axis))
            for axis in zip(*(move.bounds(t, extent) for move, t in self.maps), strict=True)
        ]
        most = max(hi - lo for lo, hi in bounds)
        diagonal = [tuple(min(lo + i, hi) for lo, hi in bounds) for i in range(most + 1)]
        patches: list[Object] = [(steps, "patch") for steps in [*diagonal, *product(*bounds)]]
        return [*patches, *((steps, extent) for steps in self.motion.directions)]

    def error(self, place: Place, *, unclear: bool) -> float | None:
        """The error of a tensor for the move that fits best.

        None if objects have no effect on it, and if the border may explain an error: always if ``unclear``,
        or else if it is one of places farther from the centre alone.
        """
        once: list[Object] = [(steps, "patch") for steps in self.motion.directions]
        near = [*once, *self._within("inner")]
        still = all(not move.axes for move in self.motion.candidates(place))
        objects, farther = (near, self._within("outer")) if still else (once, near)
        if all(self._found(place, which, None) == 0 for which in objects + farther):
            return None
        error, limit = self._error(place, objects), self.motion.limit(*place)
        if not error <= limit:
            return None if unclear else error
        everywhere = self._error(place, objects + farther)
        return everywhere if everywhere <= limit else None

    def _error(self, place: Place, objects: list[Object]) -> float:
        return min(
            largest(self._found(place, which, (self._centre, which[1]), move) for which in objects)
            for move in self.motion.candidates(place)
        )

    @property
    def _centre(self) -> Steps:
        return (0,) * self.motion.first.axes

    def _found(self, place: Place, which: Object, other: Object | None, move: Move | None = None) -> float:
        """The error of the run on an object, for another that the move brings there; what is not a number in
        both is no difference."""
        after, before = self.run(which).get(place), self.run(other).get(place)
        rank = self.motion.first.tensor(place).dim()
        if after is None or before is None or after.shape != before.shape or after.dim() != rank:
            return math.inf
        after, before = torch.nan_to_num(after, nan=0.0), torch.nan_to_num(before, nan=0.0)
        return relative_error(after, move.by(before, which[0]) if move else before)
