"""How the tensors of a network move with its input: how they may, and how they did."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor, nn

from selfconv.testing.errors import relative_error
from selfconv.testing.layers.runs import END, GIVEN, FirstRun, Key, Place, Stage
from selfconv.testing.shifts.moves import STILL, Move, Object, Steps, permuted, typical_error
from selfconv.testing.shifts.scales import Scale, Scales

Limit = Callable[[Key, Stage, int | None], float]
Runs = list[dict[Place, Tensor]]


class Motion:
    """The moves of a network's tensors when its input is shifted by ``shift`` cells, along rows or columns.

    Args:
        limit: the largest error of a tensor that counts as rounding.
        multiple: of the least shift that is a whole number of cells on every map, by which it is shifted.
    """

    def __init__(self, first: FirstRun, scales: Scales, limit: Limit, multiple: int = 1) -> None:
        self.first, self.limit, self.multiple = first, limit, multiple
        self.scales = scales
        self.side = scales.side
        self.shift = multiple * scales.total_stride()
        self.directions: list[Steps] = [(1, 0), (0, 1)] if first.axes == 2 else [(1,)]
        self.moves: dict[Place, Move | None] = {}  # how each tensor of the first run moves; None: rearranged
        for i, (t, moves) in enumerate(zip(first.x, first.moving, strict=True)):
            self.moves[GIVEN, "input", i] = self._move(t) if moves else STILL

    def _move(self, t: Tensor) -> Move:
        """How the input moves: by the shift along its last axes."""
        return Move(self.last_axes(t), (self.shift,) * self.first.axes)

    def last_axes(self, t: Tensor) -> tuple[int, ...]:
        """The axes of a map or a row that come last."""
        return tuple(range(t.dim() - self.first.axes, t.dim()))

    def candidates(self, place: Place) -> list[Move]:
        """How a tensor may move, the usual first; an output as its kind says."""
        t, axes = self.first.tensor(place), self.first.axes
        if place[:2] != END:
            return self._candidates(place)
        kind = self.first.kinds[place[2]]
        if kind == "invariant" or t.dim() <= axes:
            return [STILL]
        moves = self._candidates(place)
        inner = [move for move in moves if move.axes and move.axes[-1] == t.dim() - 1]
        if t.dim() < 2 + axes and kind != "pixels":
            return moves
        return inner or [move for move in moves if move.axes]  # channels last

    def _candidates(self, place: Place) -> list[Move]:
        t = self.first.tensor(place)
        arrangements = self._arrangements(place, t)
        scales = {move: scale for move in arrangements if (scale := self._scale(place, move))}
        if scales:
            found = [
                replace(move, cells=tuple(int(self.shift * cells) for cells in scale))
                for move, scale in scales.items()
            ]
        else:
            found = [guess for move in arrangements for guess in self._guesses(place, move)]
        if place[:2] != END:
            found += [mirrored for move in found for mirrored in move.mirrored()]
        return [*(move for move in found if move.moves(t)), STILL]

    def _arrangements(self, place: Place, t: Tensor) -> list[Move]:
        """The axes along which a tensor may have places, the usual first."""
        axes, last = self.first.axes, self.last_axes(t)
        square = t.dim() > axes and len({t.shape[axis] for axis in last}) == 1
        found = [Move(last)] if t.dim() >= 2 + axes or square else []
        if t.dim() == 2 + axes:
            found.append(Move(tuple(range(1, 1 + axes))))  # channels last
        if axes == 2 and t.dim() in (3, 4) and not (square and t.dim() == 4):
            found += [Move((i,), flat=True) for i in range(1, t.dim()) if self._is_flat(t.shape[i])]
        if axes == 2 and t.dim() >= 4 and place[:2] != END:
            found.append(Move(last[::-1]))  # transposed
        channels = self._channels(place)
        return sorted(found, key=lambda move: t.dim() - 1 in move.axes) if channels == "last" else found

    def _is_flat(self, n: int) -> bool:
        side = math.isqrt(n)
        return side > 1 and side * side == n and side in self.scales.sides

    def _channels(self, place: Place) -> str:
        """Where a layer has the channels of its input and output: last, or first as usual."""
        call = self.first.calls.get(place[0])
        module = call.module if call else None
        last = isinstance(module, nn.Linear | nn.Bilinear) or (
            isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) == 1
        )
        return "last" if last else "first"

    def _scale(self, place: Place, move: Move) -> Scale | None:
        """None also if the shift is not a whole number of cells there."""
        scale = self.scales.known(place, move.axes, flat=move.flat)
        return scale if scale and all((self.shift * s).denominator == 1 for s in scale) else None

    def _guesses(self, place: Place, move: Move) -> list[Move]:
        """Where the sizes do not tell by how many cells a map moves, the likely first."""
        n = self.first.tensor(place).shape[move.axes[-1]]
        likely = self.shift * self.scales.guess(place, math.isqrt(n) if move.flat else n)
        cells = {self.shift // step for step in range(1, self.shift + 1) if self.shift % step == 0}
        chosen = sorted({*cells, max(1, round(likely))}, key=lambda c: abs(c - likely))
        return [replace(move, cells=(c,) * self.first.axes) for c in chosen]

    def has_stride(self, place: Place) -> bool:
        """Whether it is known by how many cells a tensor moves: from how sizes grow, or since its size is a
        multiple or a divisor of one for which they tell. Not so for 17 cells that are pooled to 7."""
        move = self.moves[place]
        if not self.scales.any_size or move is None or not move.axes or self._scale(place, move):
            return True
        n = self.first.tensor(place).shape[move.axes[-1]]
        n = math.isqrt(n) if move.flat else n
        return any(n % side == 0 or side % n == 0 for side in self.scales.known_sides)

    def note(self, place: Place, after: Tensor, steps: Steps) -> float:
        """Notes how a tensor moved, or most likely did if the error, which it returns, is too large."""
        self.moves[place], error = self._found(place, after, steps)
        return error

    def _found(self, place: Place, after: Tensor, steps: Steps) -> tuple[Move | None, float]:
        before, limit, noted = self.first.tensor(place), self.limit(*place), self.moves.get(place)
        moves = self.candidates(place)
        if noted:
            moves.sort(key=noted.unlike)
        if not moves:
            return None, 0.0  # the shift leads once round the map
        for move in moves:
            error = relative_error(after, move.by(before, steps))
            if error <= limit:
                return move, error
        if after.shape != before.shape:
            return moves[0], math.inf
        given = self.moves.get((place[0], "input", 0)) if place[1] == "output" else None
        if given:
            moves.sort(key=lambda m: (m.transposed() != given.transposed(), -1 in given.signs(m)))
        typical = [
            move for move in moves if move.axes and typical_error(after, move.by(before, steps)) <= limit
        ]
        rearranged = permuted(after, before)
        if not typical and rearranged <= limit:
            return None, rearranged
        # if no move fits, the border may affect every cell: assume the most common move
        best = typical[0] if typical else moves[0]
        return best, relative_error(after, best.by(before, steps))

    # ---- tensors as they move ----

    def moved(self, place: Place, t: Tensor, steps: Steps) -> Tensor:
        move = self.moves.get(place)
        return t if move is None else move.by(t, steps)

    def object(self, place: Place, t: Tensor, which: Object | None) -> Tensor:
        """The tensor with zeros around an object, or zeros alone for None; unchanged if it does not move."""
        move = self.moves.get(place)
        return move.object(t, which) if move and move.axes else t

    def maps(self) -> list[tuple[Move, Tensor]]:
        """All tensors that move, the input's among them."""
        return [(move, self.first.tensor(p)) for p, move in self.moves.items() if move and move.axes]

    def border(self, place: Place, t: Tensor, dilation: int) -> Tensor:
        move = self.moves.get(place)
        if not (move and move.axes):
            return torch.zeros_like(t, dtype=torch.bool)
        steps = max(map(abs, move.cells)) // self.multiple  # a stride may leave out the others
        return move.border(t, max(dilation, steps))

    def centre(self, place: Place, t: Tensor) -> Tensor:
        """True for the cells of the patch, if the tensor moves."""
        move = self.moves.get(place)
        still = torch.zeros_like(t, dtype=torch.bool)
        return move.object(~still, ((0,) * self.first.axes, "patch")) if move and move.axes else still

    def room(self, place: Place) -> int:
        """How many cells are beside the centre, there and in the input."""
        rooms = [
            move.room(self.first.tensor(p))
            for p, move in self.moves.items()
            if (p[0] == GIVEN or p == place) and move and move.axes
        ]
        return min(rooms, default=0)

    # ---- errors ----

    def error(self, place: Place, after: Tensor, steps: Steps) -> float:
        """The error of a tensor in a run on the shifted input, for the move that was noted."""
        before, move = self.first.tensor(place), self.moves[place]
        return permuted(after, before) if move is None else relative_error(after, move.by(before, steps))

    def error_inside(
        self, place: Place, after: Tensor, steps: Steps, border: Runs, centre: Runs
    ) -> float | None:
        """The error at the places that do not depend on the border: those that are the same in runs that
        change it, and as far from it as what changes with the centre is from the centre."""
        t, move = self.first.tensor(place), self.moves[place]
        if move is None or not move.axes or after.shape != t.shape:
            return None
        by_border, by_centre = (self._changed(place, runs) for runs in (border, centre))
        if by_border is None or by_centre is None or not bool(by_centre.any()):
            return None
        reach = [
            far + more for far, more in zip(move.reach(by_centre), self._padding(place, move), strict=True)
        ]
        inside = move.by(move.inside(~by_border, reach), steps).expand_as(t)
        return relative_error(after[inside], move.by(t, steps)[inside]) if bool(inside.any()) else None

    def _padding(self, place: Place, move: Move) -> list[int]:
        """By how many cells a map may have been padded, along each axis: it is larger than one before it. Not
        more than a quarter of it, as a skip connection leads past smaller ones."""
        maps = takewhile(lambda p: p != place, self.moves)
        others = [other.sides(self.first.tensor(p)) for p in maps if (other := self.moves[p]) and other.axes]
        sides = move.sides(self.first.tensor(place))
        return [
            math.ceil(min(n / 4, n - least) * abs(cells))
            for n, least, cells in zip(
                sides, map(min, zip(sides, *others, strict=True)), move.cells, strict=True
            )
        ]

    def _changed(self, place: Place, runs: Runs) -> Tensor | None:
        """Where a tensor differs from that of the first run in any of the runs; None without a run."""
        t, move = self.first.tensor(place), self.moves[place]
        others = [axis for axis in range(t.dim()) if move and axis not in move.axes]
        found = [run[place] for run in runs if place in run]
        if not found or any(other.shape != t.shape for other in found):
            return None
        return torch.stack([(other != t).any(dim=others, keepdim=True) for other in found]).any(0)
