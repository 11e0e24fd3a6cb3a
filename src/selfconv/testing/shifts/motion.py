"""How the tensors of a network move with its input: how they may, and how they did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from selfconv.testing.errors import relative_error
from selfconv.testing.layer_runs import END, FirstRun, Key, Place, Stage
from selfconv.testing.leaves import as_tensor
from selfconv.testing.shifts.moves import STILL, Move, Steps, permuted, typical_error
from selfconv.testing.windows import sampling

GIVEN: Key = ("the model's input", 0)

Limit = Callable[[Key, Stage, int | None], float]


class Motion:
    """The moves of a network's tensors when its input is shifted by ``shift`` cells.

    Args:
        limit: the largest error of a tensor that counts as rounding.
        multiple: of the least shift that is a whole number of cells on every map, by which it is shifted.
    """

    def __init__(self, first: FirstRun, limit: Limit, multiple: int = 1) -> None:
        self.first, self.limit, self.multiple = first, limit, multiple
        self.side = next(t.shape[-1] for t, moves in zip(first.x, first.moving, strict=True) if moves)
        self.shift = multiple * self._total_stride()
        self.moves: dict[Place, Move | None] = {}  # how each tensor of the first run moves; None: rearranged
        for i, (t, moves) in enumerate(zip(first.x, first.moving, strict=True)):
            self.moves[GIVEN, "input", i] = Move(self.last_axes(t), self.shift) if moves else STILL

    def last_axes(self, t: Tensor) -> tuple[int, ...]:
        """Those of a map or a row, if they come last."""
        return tuple(range(t.dim() - self.first.axes, t.dim()))

    def _total_stride(self) -> int:
        """A shift that is a whole number of cells on every map of the network."""
        steps = {1}
        for factor in self._factors():
            steps |= {step * factor for step in steps if step * factor <= self.side}
        total = 1
        for n in self._sides():
            if 1 < n < self.side:
                near = min(steps, key=lambda step, n=n: abs(step - self.side / n))  # type: ignore[misc]
                total = math.lcm(total, self.side // n if self.side % n == 0 else near)
        return total

    def _factors(self) -> Iterator[int]:
        """By which maps become smaller, one after the other: as layers say, or else by their sizes."""
        last = self.side
        for call in self.first.calls.values():
            rule = sampling(call.module)
            for stage in ("input", "output"):
                for n in self._sides_of(call.tensors(stage).values()):
                    known = rule[1] if rule and stage == "output" else None
                    yield known or max(1, round(last / n))
                    last = n
        for n in self._sides_of(map(as_tensor, self.first.output)):
            yield max(1, round(last / n))

    def _sides(self) -> Iterator[int]:
        """Of all square maps, or sequences, in the network."""
        for call in self.first.calls.values():
            yield from self._sides_of((*call.tensors("input").values(), *call.tensors("output").values()))
        yield from self._sides_of(map(as_tensor, self.first.output))

    def _sides_of(self, tensors: Iterable[Tensor]) -> list[int]:
        axes = self.first.axes
        maps = (t for t in tensors if t.dim() >= 2 + axes and len({*t.shape[-axes:]}) == 1)
        return [t.shape[-1] for t in maps if t.numel()]

    def candidates(self, place: Place) -> list[Move]:
        """How a tensor may move, the usual first; an output as its kind says."""
        t, axes = self.first.tensor(place), self.first.axes
        if place[:2] != END:
            return self._candidates(t)
        kind = self.first.kinds[place[2]]
        if kind == "invariant" or t.dim() <= axes:
            return [STILL]
        moves = self._candidates(t)
        inner = [move for move in moves if move.axes and move.axes[-1] == t.dim() - 1]
        return inner if t.dim() >= 2 + axes or kind == "pixels" else moves

    def _candidates(self, t: Tensor) -> list[Move]:
        arrangements = [self.last_axes(t)] if t.dim() > self.first.axes else []
        if t.dim() == 2 + self.first.axes:
            arrangements.append(tuple(range(1, 1 + self.first.axes)))  # channels last
        cells = [self.shift // step for step in range(1, self.shift + 1) if self.shift % step == 0]
        found = []
        for axes in arrangements:
            n = t.shape[axes[-1]]
            likely = self.shift * n / self.side
            more = [round(likely)] if n > self.side else []
            chosen = {c for c in (*cells, *more) if n <= 1 or c % n}  # by n cells, nothing would move
            found += [Move(axes, c) for c in sorted(chosen, key=lambda c, at=likely: abs(c - at))]  # type: ignore[misc]
        return [*found, STILL]

    def note(self, place: Place, after: Tensor) -> float:
        """Notes how a tensor moved, or most likely did if the error, which it returns, is too large."""
        self.moves[place], error = self._found(place, after)
        return error

    def _found(self, place: Place, after: Tensor) -> tuple[Move | None, float]:
        before, moves, limit = self.first.tensor(place), self.candidates(place), self.limit(*place)
        errors = [relative_error(after, move(before)) for move in moves]
        for move, error in zip(moves, errors, strict=True):
            if error <= limit:
                return move, error
        if after.shape != before.shape:
            return moves[0], math.inf
        typical = [move for move in moves if move.axes and typical_error(after, move(before)) <= limit]
        rearranged = permuted(after, before)
        if not typical and rearranged <= limit:
            return None, rearranged
        # the border may reach everywhere: then the usual
        best = moves.index(typical[0] if typical else moves[0])
        return moves[best], errors[best]

    # ---- tensors as they move ----

    def moved(self, place: Place, t: Tensor) -> Tensor:
        move = self.moves.get(place)
        return t if move is None else move(t)

    def object(self, place: Place, t: Tensor, steps: Steps | None) -> Tensor:
        """One cell in zeros, or none, if the tensor moves."""
        move = self.moves.get(place)
        return move.object(t, steps) if move and move.axes else t

    def maps(self) -> list[tuple[Move, Tensor]]:
        """All tensors that move, the input's among them."""
        given: list[tuple[Place, Tensor]] = [((GIVEN, "input", i), t) for i, t in enumerate(self.first.x)]
        found = [*given, *((p, self.first.tensor(p)) for p in self.moves if p[0] != GIVEN)]
        return [(move, t) for p, t in found if (move := self.moves.get(p)) and move.axes]

    def border(self, place: Place, t: Tensor, dilation: int) -> Tensor:
        move = self.moves.get(place)
        return move.border(t, dilation) if move and move.axes else torch.zeros_like(t, dtype=torch.bool)

    def room(self, place: Place) -> int:
        """How many cells are beside the centre, there and in the input."""
        given: list[tuple[Place, Tensor]] = [((GIVEN, "input", i), t) for i, t in enumerate(self.first.x)]
        rooms = [
            move.room(t)
            for p, t in [*given, (place, self.first.tensor(place))]
            if (move := self.moves.get(p)) and move.axes
        ]
        return min(rooms, default=0)

    # ---- errors ----

    def error(self, place: Place, after: Tensor) -> float:
        """Of a tensor in a run on the shifted input, for the move that was noted."""
        before, move = self.first.tensor(place), self.moves[place]
        return permuted(after, before) if move is None else relative_error(after, move(before))

    def error_inside(self, place: Place, after: Tensor, disturbed: list[dict[Place, Tensor]]) -> float | None:
        """At the places that do not depend on the border: those that are the same in runs that change it."""
        t, move = self.first.tensor(place), self.moves[place]
        if move is None or not move.axes or after.shape != t.shape:
            return None
        others = [axis for axis in range(t.dim()) if axis not in move.axes]
        inside = ~move.border(t, 1)
        for run in disturbed:
            if place not in run or run[place].shape != t.shape:
                return None
            inside &= (run[place] == t).all(dim=others, keepdim=True)
        inside = move(inside)
        return relative_error(after[inside], move(t)[inside]) if bool(inside.any()) else None
