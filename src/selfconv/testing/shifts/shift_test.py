"""Whether a network moves its features with a shifted image: in its layers, between them, in its output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from selfconv.testing.errors import largest
from selfconv.testing.layers.runs import (
    END,
    GIVEN,
    OUTPUT_NAME,
    FirstRun,
    Key,
    Place,
    Stage,
    replacing,
    run_observed,
)
from selfconv.testing.leaves import aligned, as_tensor, judgeable
from selfconv.testing.shifts.borders import error_away_from_the_border, errors_between, interior_error
from selfconv.testing.shifts.motion import Limit, Motion
from selfconv.testing.shifts.moves import STILL, Steps
from selfconv.testing.shifts.scales import Scales

PLACES = "it depends on absolute position: its output does not shift with its input"
BETWEEN = "its input does not shift with the image: code between the layers depends on absolute position"
AFTER = "code after the last layer depends on absolute position"

MULTIPLES = (2, 4)


@dataclass
class ShiftReport:
    """What a shift of the image did to a network."""

    errors: dict[Key, float | None] = field(default_factory=dict)  # of layers; None where none was measured
    faults: dict[str, str] = field(default_factory=dict)  # by name of a layer: why it breaks
    excess: dict[str, tuple[float, Key, Stage]] = field(default_factory=dict)  # by the same name: the error
    untested: list[str] = field(default_factory=list)  # where nothing could be compared
    compared: bool = False  # whether a layer or an output was

    def fault(self, name: str, reason: str, error: float, key: Key, stage: Stage) -> None:
        self.faults.setdefault(name, reason)
        self.excess.setdefault(name, (error, key, stage))


def tested_shifts(first: FirstRun, limit: Limit) -> ShiftReport:
    """What shifts do to a network.

    What moves with a multiple of the shift alone may have a stride that no size shows, or depend on places
    with that period: it counts as not tested.
    """
    scales = Scales(first)
    report = ShiftTest(first, scales, limit).run()
    for multiple in MULTIPLES if report.faults else ():
        test = ShiftTest(first, scales, limit, multiple)
        if 4 * test.motion.shift > test.motion.side:
            break  # too few places are left to tell
        coarser = test.run()
        if not coarser.faults and not {*report.faults} & {*coarser.untested}:
            coarser.untested += list(report.faults)
            return coarser
    return report


class ShiftTest:
    """Runs a network on an image shifted down, and on the image shifted to the right, of which all shifts
    consist, and gives each layer its input of the first run, shifted.

    A layer's output is replaced by its output of the first run, shifted as in a map that repeats; so what is
    between the layers is given features that moved exactly. Where its result did not, the border may be the
    reason: ``borders`` tells.

    Args:
        limit: the largest error of a tensor that counts as rounding.
        multiple: of the least shift that is a whole number of cells on every map, by which it is shifted.
    """

    def __init__(self, first: FirstRun, scales: Scales, limit: Limit, multiple: int = 1) -> None:
        self.first, self.calls, self.limit = first, first.calls, limit
        self.motion = Motion(first, scales, limit, multiple)
        self.report = ShiftReport()
        self.steps: Steps = ()  # the direction of the current run
        self.rearranged: str | None = None  # the layer that did it, until features are in order again
        self.rearranged_before: str | None = None  # the same at the input of the current layer
        self.waiting: dict[Key, tuple[float, bool]] = {}  # errors of layers, and whether nothing moved there
        self.inexact: list[
            tuple[Place, Steps, Tensor]
        ] = []  # what functions between the layers gave, if not exactly moved

    def run(self) -> ShiftReport:
        if self.motion.shift >= self.motion.side:
            self.report.untested.append("functions between the layers, which would need a larger image")
            for key in self.calls:
                self._conclude_layer(key, math.inf)
            return self.report
        for steps in self.motion.directions:
            self.steps, self.rearranged = steps, None
            self._run_on_shifted()
        for key, (circular, still) in self.waiting.items():
            self._conclude_layer(key, circular, still)
        self._conclude_between()
        self.report.untested = list(dict.fromkeys(self.report.untested))
        return self.report

    # ---- the run on a shifted image ----

    def _run_on_shifted(self) -> None:
        shifted = tuple(
            self.motion.moved((GIVEN, "input", i), t, self.steps) for i, t in enumerate(self.first.x)
        )
        observer = replacing(self.calls, self._all_moved)
        output = aligned(judgeable(run_observed(self.first.model, shifted, observer)), self.first.output)
        if output is None:
            self.report.untested.append(OUTPUT_NAME)
            return
        for i, after in enumerate(map(as_tensor, output)):
            place: Place = (*END, i)
            if not self.motion.note(place, after, self.steps) <= self.limit(*place):
                self.inexact.append((place, self.steps, after))
            elif self.motion.moves[place] is None:
                self.report.untested.append(OUTPUT_NAME)
            else:
                self.report.compared |= after.numel() > 0

    def _all_moved(self, key: Key, stage: Stage, leaves: list[Any]) -> list[Any]:
        moved = [self._moved(key, stage, i, leaf) for i, leaf in enumerate(leaves)]
        if stage == "input":
            self.rearranged_before = self.rearranged
        else:
            self._judge_layer(key, leaves)
        return moved

    def _moved(self, key: Key, stage: Stage, i: int, leaf: Any) -> Any:
        """Notes how a tensor moved; returns the exactly shifted one."""
        call, place = self.calls[key], (key, stage, i)
        t = call.leaves[stage][i]
        if not (isinstance(leaf, Tensor) and isinstance(t, Tensor) and leaf.is_floating_point()):
            return leaf
        if call.constant.get(stage, [])[i : i + 1] == [True]:
            self.motion.moves[place] = STILL
            return leaf
        error = self.motion.note(place, leaf, self.steps)
        if self.motion.moves[place] is None:
            self.rearranged = self.rearranged or call.name
            return leaf
        if error <= self.limit(*place):
            if bool(leaf.any()):
                self.rearranged = None
        elif stage == "input":
            # a copy: a layer that returns its input replaces it
            self.inexact.append((place, self.steps, leaf.clone()))
        return self.motion.moved(place, t, self.steps)

    # ---- verdicts ----

    def _judge_layer(self, key: Key, leaves: list[Any]) -> None:
        call, moves = self.calls[key], self.motion.moves
        inputs = [moves.get((key, "input", i), STILL) for i in range(len(call.leaves["input"]))]
        places: list[Place] = [(key, "output", i) for i in range(len(leaves))]
        errors = [self.motion.error(p, leaves[p[2]], self.steps) for p in places if p in moves]
        error = largest([*errors, 0.0])
        if None in inputs and not error <= self.limit(key, "output", None):
            if any(base.__module__.startswith("torch.nn") for base in type(call.module).__mro__[:-2]):
                self.report.fault(self.rearranged_before or call.name, PLACES, error, key, "output")
                self.report.errors[key] = error
            else:
                self.report.untested.append(call.name)
                self.report.errors[key] = None
            return
        still = not any(move is None or move.axes for move in inputs)
        other, so_far = self.waiting.get(key, (0.0, True))
        self.waiting[key] = largest([error, other]), still and so_far  # until no hook watches the layers

    def _conclude_layer(self, key: Key, circular: float, still: bool = False) -> None:
        """A layer's own error, given its shifted input; and, if it is too large, whether it is a fault.

        Args:
            circular: the error of its whole output, border included.
            still: whether nothing moved in its input.
        """
        name, limit = self.calls[key].name, self.limit(key, "output", None)
        error = interior_error(self.motion, key)
        if error is None and circular <= limit:
            error = None if still else circular
        elif error is None:
            error = error_away_from_the_border(self.motion, key)
            if error is None:
                self.report.untested.append(name)
        self.report.errors[key] = error
        self.report.compared |= error is not None
        if error is not None and not error <= limit:
            self.report.fault(name, PLACES, error, key, "output")

    def _conclude_between(self) -> None:
        for place, error in errors_between(self.motion, self.inexact):
            name = self.first.name(place[0])
            self.report.compared |= error is not None
            if error is None:
                self.report.untested.append(name)
            elif not error <= self.limit(*place):
                self.report.fault(name, BETWEEN if place[1] == "input" else AFTER, error, *place[:2])
