"""Whether a network moves its features with a shifted image: in its layers, between them, in its output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from selfconv.testing.errors import Function, as_tensor, judgeable, largest, relative_error, shift_error
from selfconv.testing.kinds import Kind
from selfconv.testing.layer_runs import (
    END,
    Images,
    Key,
    LayerCall,
    Stage,
    look_away,
    returned,
    run_observed,
)
from selfconv.testing.moves import STILL, Move, permuted, tiled, typical_error
from selfconv.testing.windows import largest_dilation, sampling

PLACES = "it treats places differently: its output does not move with its input"
BETWEEN = (
    "its input does not move with the image: a function before it, outside any layer, "
    "treats places differently"
)
AFTER = "something after the last layer treats places differently"
GIVEN: Key = ("the model's input", 0)
ROOM = 2  # cells on each side of the centre that the windows of functions outside any layer are taken to need
SIDE = 20  # of a map with room for a layer's window

Place = tuple[Key, Stage, int]  # of a tensor in a run
Change = Callable[[Place, Tensor], Tensor]


@dataclass
class ShiftReport:
    """What a shift of the image did to a network."""

    errors: dict[Key, float | None] = field(default_factory=dict)  # of layers; None where none was measured
    faults: dict[str, str] = field(default_factory=dict)  # by name of a layer: why it breaks
    untested: list[str] = field(default_factory=list)  # where nothing could be compared


class ShiftTest:
    """Runs a network on a shifted image, and gives each layer its input of the first run, shifted.

    A layer's output is replaced by its output of the first run, shifted as in a map that repeats; so what is
    between the layers is given features that moved exactly. Where its result did not, the border may be the
    reason. To tell, the places are compared that do not depend on the border, since they are the same when it
    changes; if there is none, features are set to zero but for one cell, which is far from the border.

    Args:
        moving: which of the inputs move.
        limit: the largest error of a tensor that counts as rounding.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Images,
        moving: list[bool],
        calls: dict[Key, LayerCall],
        output: list[Any],
        kinds: list[Kind | None],
        *,
        axes: int,
        limit: Callable[[Key, Stage, int | None], float],
    ) -> None:
        self.model, self.x, self.moving, self.calls = model, x, moving, calls
        self.output, self.kinds, self.axes, self.limit = list(map(as_tensor, output)), kinds, axes, limit
        self.side = next(t.shape[-1] for t, moves in zip(x, moving, strict=True) if moves)
        self.shift = self._total_stride()
        self.report = ShiftReport()
        self.moves: dict[Place, Move | None] = {}  # how each tensor of the first run moves; None: rearranged
        self.rearranged: str | None = None  # the layer that did it, until features are in order again
        self.waiting: dict[Key, tuple[float, bool]] = {}  # errors of layers, and whether nothing moved there
        self.doubts: dict[Place, Tensor] = {}  # what functions between the layers gave, if not exactly moved

    def run(self) -> ShiftReport:
        if self.shift >= self.side:
            self.report.untested.append("functions between the layers, which would need a larger image")
            for key in self.calls:
                self._conclude_layer(key, math.inf)
            return self.report
        self._run_on_shifted()
        for key, (circular, still) in self.waiting.items():
            self._conclude_layer(key, circular, still)
        self._resolve()
        self.report.untested = list(dict.fromkeys(self.report.untested))
        return self.report

    # ---- how tensors may move ----

    def _total_stride(self) -> int:
        """A shift that is a whole number of cells on every map of the network."""
        steps = {1}
        for rule in filter(None, (sampling(call.module) for call in self.calls.values())):
            steps |= {step * rule[1] for step in steps if step * rule[1] <= self.side}
        total = 1
        for call in self.calls.values():
            for t in (*call.leaves["input"], *call.leaves["output"]):
                if not isinstance(t, Tensor) or t.dim() < 2 + self.axes or len({*t.shape[-self.axes :]}) > 1:
                    continue
                n = t.shape[-1]
                if 1 < n < self.side:
                    near = min(steps, key=lambda step, n=n: abs(step - self.side / n))  # type: ignore[misc]
                    total = math.lcm(total, self.side // n if self.side % n == 0 else near)
        return total

    def _candidates(self, t: Tensor) -> list[Move]:
        """How a tensor may move, the usual first."""
        arrangements = [tuple(range(t.dim() - self.axes, t.dim()))] if t.dim() > self.axes else []
        if t.dim() == 2 + self.axes:
            arrangements.append(tuple(range(1, 1 + self.axes)))  # channels last
        cells = [self.shift // step for step in range(1, self.shift + 1) if self.shift % step == 0]
        found = []
        for axes in arrangements:
            n = t.shape[axes[-1]]
            likely = self.shift * n / self.side
            more = [round(likely)] if n > self.side else []
            found += [Move(axes, c) for c in sorted({*cells, *more}, key=lambda c, at=likely: abs(c - at))]  # type: ignore[misc]
        return [*found, STILL]

    def _found(self, place: Place, leaf: Tensor, t: Tensor, moves: list[Move]) -> tuple[Move | None, float]:
        """How a tensor moved, or most likely did if the error is large; None if it is rearranged."""
        limit = self.limit(*place)
        errors = [relative_error(leaf, move(t)) for move in moves]
        for move, error in zip(moves, errors, strict=True):
            if error <= limit:
                return move, error
        rearranged = permuted(leaf, t) if leaf.shape == t.shape else math.inf
        if rearranged <= limit:
            return None, rearranged
        if leaf.shape != t.shape:
            return moves[0], math.inf
        # the border may reach everywhere: then the usual
        typical = [move for move in moves if move.axes and typical_error(leaf, move(t)) <= limit]
        best = moves.index(typical[0] if typical else moves[0])
        return moves[best], errors[best]

    # ---- the run on a shifted image ----

    def _run_on_shifted(self) -> None:
        given: dict[Key, list[tuple[Any, Any, Any]]] = {}

        def observe(
            key: Key, module: nn.Module, stage: Stage, leaves: list[Any], spec: TreeSpec
        ) -> list[Any] | None:
            call = self.calls.get(key)
            if call is None or len(call.leaves[stage]) != len(leaves):
                return None  # the network goes another way with this image
            exact = [self._exact(key, stage, i, leaf, call) for i, leaf in enumerate(leaves)]
            if stage == "input":
                passed = [e.clone() if e is not leaf else leaf for leaf, e in zip(leaves, exact, strict=True)]
                given[key] = list(zip(leaves, exact, passed, strict=True))
                self._before = self.rearranged
                return passed
            self._judge_layer(key, leaves)
            return returned(leaves, exact, given.pop(key, []))

        for i, (t, moves) in enumerate(zip(self.x, self.moving, strict=True)):
            places = tuple(range(t.dim() - self.axes, t.dim()))
            self.moves[GIVEN, "input", i] = Move(places, self.shift) if moves else STILL
        shifted = tuple(self._as_moved((GIVEN, "input", i), t) for i, t in enumerate(self.x))
        output = list(map(as_tensor, judgeable(run_observed(self.model, shifted, observe))))
        if len(output) != len(self.output):
            self.report.untested.append(END[0][0])
            return
        for i, (leaf, t, kind) in enumerate(zip(output, self.output, self.kinds, strict=True)):
            place: Place = (*END, i)
            self.moves[place], error = self._found(place, leaf, t, self._output_moves(t, kind))
            if not error <= self.limit(*place):
                self.doubts[place] = leaf
            elif self.moves[place] is None:
                self.report.untested.append(END[0][0])

    def _output_moves(self, t: Tensor, kind: Kind | None) -> list[Move]:
        """How an output should move: by its kind, or as it likes if its rank says nothing."""
        moves = self._candidates(t)
        if kind == "invariant" or t.dim() <= self.axes:
            return [STILL]
        inner = [move for move in moves if move.axes and move.axes[-1] == t.dim() - 1]
        return inner if t.dim() >= 2 + self.axes or kind == "pixels" else moves

    def _exact(self, key: Key, stage: Stage, i: int, leaf: Any, call: LayerCall) -> Any:
        """Notes how a tensor moved; returns what should be in its place."""
        t, place = call.leaves[stage][i], (key, stage, i)
        if not (isinstance(leaf, Tensor) and isinstance(t, Tensor) and leaf.is_floating_point()):
            return leaf
        if call.constant.get(stage, [])[i : i + 1] == [True]:
            self.moves[place] = STILL
            return leaf
        move, error = self._found(place, leaf, t, self._candidates(t))
        self.moves[place] = move
        if move is None:
            self.rearranged = self.rearranged or call.name
            return leaf
        if error <= self.limit(*place):
            if bool(leaf.any()):
                self.rearranged = None
        elif stage == "input":
            self.doubts[place] = leaf
        return move(t)

    def _as_moved(self, place: Place, t: Tensor) -> Tensor:
        move = self.moves.get(place)
        return t if move is None else move(t)

    # ---- layers ----

    def _judge_layer(self, key: Key, leaves: list[Any]) -> None:
        call = self.calls[key]
        inputs = [self.moves.get((key, "input", i), STILL) for i in range(len(call.leaves["input"]))]
        errors = []
        for i, (leaf, t) in enumerate(zip(leaves, call.leaves["output"], strict=True)):
            place: Place = (key, "output", i)
            if place in self.moves:
                move = self.moves[place]
                errors.append(permuted(leaf, t) if move is None else relative_error(leaf, move(t)))
        error = max(errors, default=0.0)
        if None in inputs and not error <= self.limit(key, "output", None):
            if any(base.__module__.startswith("torch.nn") for base in type(call.module).__mro__[:-2]):
                self.report.faults.setdefault(self._before or call.name, PLACES)
                self.report.errors[key] = error
            else:
                self.report.untested.append(call.name)
                self.report.errors[key] = None
            return
        still = not any(move is None or move.axes for move in inputs)
        self.waiting[key] = error, still  # until no hook watches the layers

    def _conclude_layer(self, key: Key, circular: float, still: bool = False) -> None:
        """A layer's own error, given its shifted input; and, if it is too large, whether it is a fault."""
        call, limit = self.calls[key], self.limit(key, "output", None)
        error = self._interior_error(key, 1)
        if error is None and circular <= limit:
            error = None if still else circular
        elif error is None:
            error = self._error_on_copies(key)
            if error is None:
                error = self._centre_error(key)
            if error is None:
                self.report.untested.append(call.name)
        self.report.errors[key] = error
        if error is not None and not error <= limit:
            self.report.faults.setdefault(call.name, PLACES)

    def _interior_error(self, key: Key, copies: int | None) -> float | None:
        """By ``shift_error``, on copies of the layer's input side by side; by default enough for windows."""
        call, axes = self.calls[key], self.axes
        given = [(i, t) for i, t in enumerate(call.leaves["input"]) if isinstance(t, Tensor)]
        outputs = [(i, t) for i, t in enumerate(call.leaves["output"]) if isinstance(t, Tensor)]
        if len(given) != 1 or not given[0][1].is_floating_point() or not outputs:
            return None
        (at, x), rule = given[0], sampling(call.module)
        stride = rule[1] if rule else 1
        if x.dim() < 2 + axes or not self._places_last((key, "input", at), x):
            return None
        if any(y.dim() < 2 + axes or x.shape[-1] < stride * y.shape[-1] for _, y in outputs):
            return None
        x = tiled(x, tuple(range(x.dim() - axes, x.dim())), copies or self._copies(x))
        if min(x.shape[-axes:]) < 2 * stride + 2:
            return None
        frame = largest_dilation(call.module)
        errors = [
            shift_error(self._function(call, at, i), x, stride, stride, frame=frame, axes=axes)
            for i, _ in outputs
        ]
        return None if None in errors else largest(e for e in errors if e is not None)

    def _error_on_copies(self, key: Key) -> float | None:
        try:
            return self._interior_error(key, None)
        except Exception:  # it takes this size alone
            return None

    def _places_last(self, place: Place, x: Tensor) -> bool:
        """Whether the last axes are a map or a row; or else channels may be last."""
        move = self.moves.get(place)
        if move and move.axes:
            return move.axes[-1] == x.dim() - 1
        return x.shape[-1] == self.side if self.axes == 1 else x.shape[-2] == x.shape[-1]

    def _function(self, call: LayerCall, at: int, i: int) -> Function:
        """Output i of a layer as a function of the tensor at a place among its arguments."""
        return lambda x: self._outputs(call, {at: x})[i]

    def _outputs(self, call: LayerCall, changed: dict[int, Tensor]) -> list[Any]:
        leaves = [changed.get(i, leaf) for i, leaf in enumerate(call.leaves["input"])]
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        return tree_flatten(call.module(*args, **kwargs))[0]

    def _centre_error(self, key: Key) -> float | None:
        """For inputs that are zero but at the centre. None if a border that is near may be the reason."""
        call = self.calls[key]
        inputs = {i: t for i, t in enumerate(call.leaves["input"]) if isinstance(t, Tensor)}
        moves = {i: move for i in inputs if (move := self.moves.get((key, "input", i))) and move.axes}
        if not moves:
            return None
        copies = self._copies(next(inputs[i] for i in moves))
        larger = {i: tiled(inputs[i], move.axes, copies) for i, move in moves.items()}
        fixed_size = not _runs(lambda: self._outputs(call, larger))
        given = {i: inputs[i] for i in moves} if fixed_size else larger
        alone = {i: move.centre(given[i]) for i, move in moves.items()}
        before = self._outputs(call, alone)
        after = self._outputs(call, {i: move(alone[i]) for i, move in moves.items()})
        pairs = enumerate(zip(after, before, strict=True)) if len(after) == len(before) else ()
        errors = [self._moved_error((key, "output", i), *ab) for i, ab in pairs if isinstance(ab[0], Tensor)]
        error = largest(errors) if errors else math.inf
        near = not fixed_size or min(move.room(given[i]) for i, move in moves.items()) < ROOM
        return None if near and not error <= self.limit(key, "output", None) else error

    def _copies(self, x: Tensor) -> int:
        return max(3, -(-SIDE // x.shape[-1]))

    # ---- between the layers ----

    def _resolve(self) -> None:
        """Whether the border is the reason of what moved inexactly, between layers or in the output."""
        if not self.doubts:
            return
        dilation = largest_dilation(self.model)
        disturbed = [
            self._replay(lambda place, t: torch.where(self._border(place, t, dilation), t + 1, t)),
            self._replay(lambda place, t: t.masked_fill(self._border(place, t, dilation), math.nan)),
        ]
        centre = self._replay(self._centred)
        moved = self._replay(lambda place, t: self._as_moved(place, self._centred(place, t)))
        larger = tuple(
            tiled(t, tuple(range(t.dim() - self.axes, t.dim())), 2) if moves else t
            for t, moves in zip(self.x, self.moving, strict=True)
        )
        any_size = _runs(lambda: run_observed(self.model, larger, look_away))
        for place, leaf in self.doubts.items():
            error = self._error_inside(place, leaf, disturbed)
            unclear = error is None and (any_size or self._room(place, leaf) < ROOM)
            if error is None and place in centre and place in moved:
                error = self._moved_error(place, moved[place], centre[place])
            if error is not None and error <= self.limit(*place):
                continue
            name = self.calls[place[0]].name if place[0] in self.calls else place[0][0]
            if unclear:
                self.report.untested.append(name)
            else:
                self.report.faults.setdefault(name, BETWEEN if place[1] == "input" else AFTER)

    def _replay(self, change: Change) -> dict[Place, Tensor]:
        """What functions between the layers make of the first run's features, after a change of each.

        Returns the inputs of layers and the network's output. Layers themselves are given their inputs of the
        first run.
        """
        found: dict[Place, Tensor] = {}
        given: dict[Key, list[tuple[Any, Any, Any]]] = {}

        def changed(key: Key, stage: Stage, leaves: list[Any]) -> list[Any]:
            return [
                change((key, stage, i), t) if isinstance(t, Tensor) and t.is_floating_point() else t
                for i, t in enumerate(leaves)
            ]

        def observe(
            key: Key, module: nn.Module, stage: Stage, leaves: list[Any], spec: TreeSpec
        ) -> list[Any] | None:
            call = self.calls.get(key)
            if call is None or len(call.leaves[stage]) != len(leaves):
                return None
            if stage == "output":
                return returned(leaves, changed(key, stage, call.leaves[stage]), given.pop(key, []))
            found.update(((key, stage, i), t.clone()) for i, t in enumerate(leaves) if isinstance(t, Tensor))
            first = call.leaves["input"]
            passed = [t.clone() if isinstance(t, Tensor) else t for t in first]
            given[key] = list(zip(leaves, first, passed, strict=True))
            return passed

        x = tuple(changed(GIVEN, "input", list(self.x)))
        output = judgeable(run_observed(self.model, x, observe))
        return found | {(*END, i): as_tensor(leaf) for i, leaf in enumerate(output)}

    def _centred(self, place: Place, t: Tensor) -> Tensor:
        move = self.moves.get(place)
        return move.centre(t) if move and move.axes else t

    def _border(self, place: Place, t: Tensor, dilation: int) -> Tensor:
        move = self.moves.get(place)
        return move.border(t, dilation) if move and move.axes else torch.zeros_like(t, dtype=torch.bool)

    def _original(self, place: Place) -> Tensor:
        key, stage, i = place
        leaf: Tensor = self.calls[key].leaves[stage][i] if key in self.calls else self.output[i]
        return leaf

    def _moved_error(self, place: Place, after: Tensor, before: Tensor) -> float:
        """For the way of moving that fits best; what is not a number in both is no difference."""
        t = self._original(place)
        moves = self._candidates(t) if place[0] in self.calls else self._output_moves(t, self.kinds[place[2]])
        if after.shape != before.shape or after.dim() != t.dim():
            return math.inf
        after, before = after.nan_to_num(nan=0.0), before.nan_to_num(nan=0.0)
        return min(relative_error(after, move(before)) for move in moves)

    def _error_inside(self, place: Place, leaf: Tensor, disturbed: list[dict[Place, Tensor]]) -> float | None:
        """At the places that do not depend on the border, if there are any."""
        t, move = self._original(place), self.moves[place]
        if move is None or not move.axes or leaf.shape != t.shape:
            return None
        others = [axis for axis in range(t.dim()) if axis not in move.axes]
        inside = ~move.border(t, 1)
        for run in disturbed:
            if place not in run or run[place].shape != t.shape:
                return None
            inside &= (run[place] == t).all(dim=others, keepdim=True)
        inside = move(inside)
        return relative_error(leaf[inside], move(t)[inside]) if bool(inside.any()) else None

    def _room(self, place: Place, t: Tensor) -> int:
        rooms = [
            move.room(x)
            for p, x in [*(((GIVEN, "input", i), x) for i, x in enumerate(self.x)), (place, t)]
            if (move := self.moves.get(p)) and move.axes
        ]
        return min(rooms, default=0)


def _runs(function: Callable[[], Any]) -> bool:
    try:
        function()
    except Exception:  # whatever a model raises for a size that it does not take
        return False
    return True
