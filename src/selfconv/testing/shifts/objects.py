"""What functions make of one cell in zeros, at several places: the same everywhere, if places are alike."""

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
from selfconv.testing.shifts.moves import Move, Steps

Run = Callable[[Steps | None], dict[Place, Tensor]]  # on an object moved by some steps; on zeros for None


class Objects:
    """Runs of a function on an object at several places.

    Args:
        maps: what moves in its input, and how: the object keeps away from the border of each.
    """

    def __init__(self, motion: Motion, maps: Sequence[tuple[Move, Tensor]], run: Run) -> None:
        self.motion, self.run = motion, cache(run)
        self.near, self.far = (self._bounds(maps, far) for far in (False, True))

    @staticmethod
    def _bounds(maps: Sequence[tuple[Move, Tensor]], far: bool) -> list[tuple[int, int]]:
        bounds = [move.bounds(t, far=far) for move, t in maps]
        return [(max(lo for lo, _ in axis), min(hi for _, hi in axis)) for axis in zip(*bounds, strict=True)]

    def error(self, place: Place, *, unclear: bool) -> float | None:
        """The error of a tensor for the move that fits best.

        None if the object has no effect on it, and if the border may explain an error: always if ``unclear``,
        or else if it is one of places farther from the centre alone.
        """
        once = self.motion.directions
        near = [*once, *product(*((lo, 0, hi) for lo, hi in self.near))]
        still = all(not move.axes for move in self.motion.candidates(place))
        places, farther = (near, list(product(*self.far))) if still else (once, near)
        if all(self._found(place, steps, None) == 0 for steps in places + farther):
            return None
        error, limit = self._error(place, places), self.motion.limit(*place)
        if not error <= limit:
            return None if unclear else error
        everywhere = self._error(place, places + farther)
        return everywhere if everywhere <= limit else None

    def _error(self, place: Place, places: list[Steps]) -> float:
        centre = (0,) * len(self.near)
        return min(
            largest(self._found(place, steps, centre, move) for steps in places)
            for move in self.motion.candidates(place)
        )

    def _found(self, place: Place, steps: Steps, other: Steps | None, move: Move | None = None) -> float:
        """The error of the run on an object that moved by some steps, for another that the move brings there;
        what is not a number in both is no difference."""
        after, before = self.run(steps).get(place), self.run(other).get(place)
        rank = self.motion.first.tensor(place).dim()
        if after is None or before is None or after.shape != before.shape or after.dim() != rank:
            return math.inf
        after, before = torch.nan_to_num(after, nan=0.0), torch.nan_to_num(before, nan=0.0)
        return relative_error(after, move.by(before, steps) if move else before)
