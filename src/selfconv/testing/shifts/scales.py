"""The scale of each map of a network (its cells per input cell), found from how its size changes with the
input's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from selfconv.testing.layers.runs import END, FirstRun, Key, LayerCall, Place, Stage, run_observed
from selfconv.testing.layers.windows import stated_scale
from selfconv.testing.leaves import Nesting, aligned, as_tensor, judgeable

COMMON = 12  # a multiple of the usual strides
LARGER = (1, 2, 3)  # how many times inputs become larger by the same number of cells

Scale = tuple[Fraction, ...]  # how many cells for each, along rows and columns, or along a sequence


def enlarged(t: Tensor, axes: tuple[int, ...], size: Callable[[int], int]) -> Tensor:
    """A map or a row that repeats, of another size."""
    for axis in axes:
        n = t.shape[axis]
        t = t.index_select(axis, torch.arange(size(n), device=t.device) % n)
    return t


class Scales:
    """The scales of a network's maps: by how many cells each moves, if its input moves by one.

    A total size does not tell them: it includes what windows and padding add or take. Its differences do, on
    inputs of several sizes. Where a network takes one size alone, the scales are guessed layer by layer.
    """

    def __init__(self, first: FirstRun) -> None:
        self.first = first
        self.side = next(t.shape[-1] for t, moves in zip(first.x, first.moving, strict=True) if moves)
        self.sides = {self.side: Fraction(1)}  # of all maps, and the scale of the last of each
        self._ratios: dict[tuple[Key, int], Scale | None] = {}
        self._sizes: list[dict[Place, torch.Size]] = []
        self._more = COMMON  # by how many cells inputs become larger
        self._guesses = self._guessed()
        self._more = math.lcm(COMMON, *(scale.denominator for scale in self._guesses.values()))
        if self._more > 2 * max(self.side, 4 * COMMON):
            self._more = 4 * COMMON
        self.any_size = True  # whether the network takes larger inputs
        for times in LARGER:
            found, complete = self._run_on_larger(times * self._more)
            self._sizes.append(found)
            self.any_size &= complete
        self.known_sides = {self.side} | {
            t.shape[-1] for place, t in self._maps() if self.known(place, _last(t, first.axes))
        }

    def known(self, place: Place, axes: tuple[int, ...], *, flat: bool = False) -> Scale | None:
        """The scale of a tensor with places along these axes; None if its sizes do not follow the input's.

        Args:
            flat: whether there are square maps along one axis, row after row.
        """
        shapes = [self.first.tensor(place).shape, *(found.get(place, ()) for found in self._sizes)]
        if not axes or len({len(shape) for shape in shapes}) > 1 or max(axes) >= len(shapes[0]):
            return None
        sizes = [[shape[axis] for shape in shapes] for axis in axes]
        if flat:
            squares, sizes = sizes, [[math.isqrt(n) for n in sizes[0]]]
            if [side * side for side in sizes[0]] != squares[0]:
                return None
            sizes *= self.first.axes
        return _slopes(sizes, self._more)

    def guess(self, place: Place, n: int) -> Fraction:
        """A guess of the scale of a map of n cells a side, for maps whose sizes do not tell it."""
        return self._guesses.get(place) or self.sides.get(n) or Fraction(n, self.side)

    def of_layer(self, key: Key, at: int, i: int) -> Scale | None:
        """How many cells output i of a layer has for each cell of its input ``at``; None if not known."""
        call, axes = self.first.calls[key], self.first.axes
        given = self.known((key, "input", at), _last(call.leaves["input"][at], axes))
        result = self.known((key, "output", i), _last(call.leaves["output"][i], axes))
        if given and result:
            return tuple(b / a for a, b in zip(given, result, strict=True))
        if (key, i) not in self._ratios:
            n, m = call.leaves["input"][at].shape, call.leaves["output"][i].shape
            stated = [stated_scale(call.module, n[axis], m[axis], axis) for axis in range(-axes, 0)]
            known = tuple(scale for scale in stated if scale)
            self._ratios[key, i] = known if len(known) == axes else self._measured(call, at, i)
        return self._ratios[key, i]

    def total_stride(self) -> int:
        """The least shift of the input that is a whole number of cells on every map."""
        found = [1]
        for place, t in self._tensors():
            n = min(t.shape[-self.first.axes :], default=0)
            scale = self.known(place, _last(t, self.first.axes)) if n > 1 else None
            if scale is None and 1 < n < self.side and place in self._guesses:
                scale = (self._guesses[place],)
            found += [cells.denominator for cells in scale or ()]
        return math.lcm(*found)

    # ---- how it is found ----

    def _run_on_larger(self, more: int) -> tuple[dict[Place, torch.Size], bool]:
        """The shapes of all tensors, up to where the network refuses an input of this size."""
        found: dict[Place, torch.Size] = {}

        def observe(key: Key, module: nn.Module, stage: Stage, leaves: list[Any], nesting: Nesting) -> None:
            found.update(((key, stage, i), t.shape) for i, t in enumerate(leaves) if isinstance(t, Tensor))

        first = self.first
        larger = tuple(
            enlarged(t[:1], _last(t, first.axes), lambda n: n + more) if moves else t[:1]
            for t, moves in zip(first.x, first.moving, strict=True)
        )
        try:
            output = aligned(judgeable(run_observed(first.model, larger, observe)), first.output)
        except Exception:  # whatever a model raises for a size that it does not take
            return found, False
        found.update(((*END, i), as_tensor(leaf).shape) for i, leaf in enumerate(output or ()))
        return found, True

    def _measured(self, call: LayerCall, at: int, i: int) -> Scale | None:
        """By running a layer on larger inputs."""
        x, y = call.leaves["input"][at], call.leaves["output"][i]
        n, m = x.shape[-1], y.shape[-1]
        more = COMMON * max(1, round(n / m))
        axes = _last(x, self.first.axes)
        try:
            larger = [enlarged(x, axes, lambda n, by=times * more: n + by) for times in LARGER]  # type: ignore[misc]
            shapes = [y.shape, *(call.run({at: t})[i].shape for t in larger)]
        except Exception:  # it takes this size alone, or several inputs that have to fit
            return None
        return _slopes([[shape[axis] for shape in shapes] for axis in _last(y, self.first.axes)], more)

    def _guessed(self) -> dict[Place, Fraction]:
        """Layer by layer: what a layer says or, run by itself, shows; between layers, a map has the scale of
        the last map of its size, or one that is a whole number of times as large or as small."""
        seen, last = self.sides, self.side
        found: dict[Place, Fraction] = {}
        for place, t in self._maps():
            n = t.shape[-1]
            key, stage, i = place
            scale = None
            given = self.first.calls[key].only_input() if key in self.first.calls else None
            if stage == "output" and given and (key, "input", given[0]) in found:
                before = given[1].shape[-1]
                ratio = (Fraction(1),) if n == before else self.of_layer(key, given[0], i)
                scale = found[key, "input", given[0]] * (ratio[-1] if ratio else _whole_ratio(before, n))
            elif n in seen:
                scale = seen[n]
            found[place] = seen[n] = scale or seen[last] * _whole_ratio(last, n)
            last = n
        return found

    def _maps(self) -> Iterator[tuple[Place, Tensor]]:
        """All square maps, or sequences, in the order in which they are computed."""
        axes = self.first.axes
        for place, t in self._tensors():
            if t.dim() >= 2 + axes and len({*t.shape[-axes:]}) == 1 and t.numel():
                yield place, t

    def _tensors(self) -> Iterator[tuple[Place, Tensor]]:
        stages: tuple[Stage, Stage] = ("input", "output")
        for key, call in self.first.calls.items():
            for stage in stages:
                yield from (((key, stage, i), t) for i, t in call.tensors(stage).items())
        yield from (((*END, i), as_tensor(leaf)) for i, leaf in enumerate(self.first.output))


def _last(t: Tensor, axes: int) -> tuple[int, ...]:
    return tuple(range(t.dim() - axes, t.dim()))


def _slopes(sizes: list[list[int]], more: int) -> Scale | None:
    """By how much sizes grow along each axis, for each cell by which inputs do; None if they do not, or not
    evenly."""
    steps = [{b - a for a, b in pairwise(some)} for some in sizes]
    even = all(len(some) == 1 and min(some) > 0 for some in steps)
    return tuple(Fraction(min(some), more) for some in steps) if even else None


def _whole_ratio(n: int, m: int) -> Fraction:
    """The scale from a map of n cells a side to one of m: windows and padding may account for a remainder."""
    return Fraction(max(1, round(m / n))) if m >= n else Fraction(1, max(1, round(n / m)))
