"""Decides whether the border explains features that do not shift exactly, of layers and between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfconv.testing.errors import largest, shift_error
from selfconv.testing.layer_runs import (
    END,
    Key,
    Place,
    Stage,
    look_away,
    replacing,
    run_observed,
)
from selfconv.testing.leaves import as_tensor, judgeable
from selfconv.testing.shifts.motion import GIVEN, Motion
from selfconv.testing.shifts.moves import tiled
from selfconv.testing.windows import largest_dilation, sampling

ROOM = 2  # the assumed radius, in cells, of windows of functions outside any layer
SIDE = 20  # of a map with room for a layer's window

Change = Callable[[Place, Tensor], Tensor]


# ---- of a layer ----


def interior_error(motion: Motion, key: Key) -> float | None:
    """A layer's ``shift_error``: at places that the border does not influence. None if there are none."""
    return _interior_error(motion, key, lambda x: 1)


def error_away_from_the_border(motion: Motion, key: Key) -> float | None:
    """The same on copies of the layer's input, which have room for windows, or at the centre of its map.

    None if neither can be measured.
    """
    try:
        error = _interior_error(motion, key, _copies)
    except Exception:  # it takes this size alone
        error = None
    return _centre_error(motion, key) if error is None else error


def _copies(x: Tensor) -> int:
    return max(3, -(-SIDE // x.shape[-1]))


def _interior_error(motion: Motion, key: Key, copies: Callable[[Tensor], int]) -> float | None:
    call, axes = motion.first.calls[key], motion.first.axes
    given, outputs = call.only_input(), call.tensors("output")
    if given is None or not outputs or not all(t.numel() for t in (given[1], *outputs.values())):
        return None
    (at, x), rule = given, sampling(call.module)
    stride = rule[1] if rule else 1
    if x.dim() < 2 + axes or not _places_last(motion, (key, "input", at), x):
        return None
    if any(y.dim() < 2 + axes or x.shape[-1] < stride * y.shape[-1] for y in outputs.values()):
        return None
    x = tiled(x, motion.last_axes(x), copies(x))
    if min(x.shape[-axes:]) < 2 * stride + 2:
        return None
    frame = largest_dilation(call.module)
    errors = [
        shift_error(lambda t, i=i: call.run({at: t})[i], x, stride, stride, frame=frame, axes=axes)  # type: ignore[misc]
        for i in outputs
    ]
    return None if None in errors else largest(e for e in errors if e is not None)


def _places_last(motion: Motion, place: Place, x: Tensor) -> bool:
    """Whether the last axes are a map or a row; or else channels may be last."""
    move = motion.moves.get(place)
    if move and move.axes:
        return move.axes[-1] == x.dim() - 1
    return x.shape[-1] == motion.side if motion.first.axes == 1 else x.shape[-2] == x.shape[-1]


def _centre_error(motion: Motion, key: Key) -> float | None:
    """The error for inputs that are zero but for the centre; None if a nearby border may explain it."""
    call = motion.first.calls[key]
    inputs = call.tensors("input")
    moves = {i: move for i in inputs if (move := motion.moves.get((key, "input", i))) and move.axes}
    if not moves:
        return None
    copies = _copies(next(inputs[i] for i in moves))
    larger = {i: tiled(inputs[i], move.axes, copies) for i, move in moves.items()}
    fixed_size = not _runs(lambda: call.run(larger))
    given = {i: inputs[i] for i in moves} if fixed_size else larger
    alone = {i: move.centre(given[i]) for i, move in moves.items()}
    before, after = call.run(alone), call.run({i: move(alone[i]) for i, move in moves.items()})
    pairs = enumerate(zip(after, before, strict=True)) if len(after) == len(before) else ()
    errors = [motion.least_error((key, "output", i), a, b) for i, (a, b) in pairs if isinstance(a, Tensor)]
    error = largest(errors) if errors else math.inf
    near = not fixed_size or min(move.room(given[i]) for i, move in moves.items()) < ROOM
    return None if near and not error <= motion.limit(key, "output", None) else error


def _runs(function: Callable[[], Any]) -> bool:
    try:
        function()
    except Exception:  # whatever a model raises for a size that it does not take
        return False
    return True


# ---- between the layers ----


def errors_between(motion: Motion, inexact: dict[Place, Tensor]) -> dict[Place, float | None]:
    """The errors of tensors that did not move exactly, inputs of layers and outputs of the network.

    An error is that at the places which the border does not influence; if there are none, that of features
    which are zero but for one cell, far from the border. None if the border may be too near to tell.
    """
    if not inexact:
        return {}
    first, dilation = motion.first, largest_dilation(motion.first.model)
    disturbed = [
        _replay(motion, lambda place, t: torch.where(motion.border(place, t, dilation), t + 1, t)),
        _replay(motion, lambda place, t: t.masked_fill(motion.border(place, t, dilation), math.nan)),
    ]
    centre = _replay(motion, motion.centred)
    moved = _replay(motion, lambda place, t: motion.moved(place, motion.centred(place, t)))
    larger = tuple(
        tiled(t, motion.last_axes(t), 2) if moves else t
        for t, moves in zip(first.x, first.moving, strict=True)
    )
    any_size = _runs(lambda: run_observed(first.model, larger, look_away))

    def error(place: Place, after: Tensor) -> float | None:
        inside = motion.error_inside(place, after, disturbed)
        if inside is not None:
            return inside
        found = math.inf
        if place in centre and place in moved:
            found = motion.least_error(place, moved[place], centre[place])
        unclear = any_size or motion.room(place) < ROOM
        return None if unclear and not found <= motion.limit(*place) else found

    return {place: error(place, after) for place, after in inexact.items()}


def _replay(motion: Motion, change: Change) -> dict[Place, Tensor]:
    """What functions between the layers make of the first run's features, after a change of each.

    Returns the inputs of layers and the network's output. Layers themselves are given their inputs of the
    first run.
    """
    first = motion.first
    found: dict[Place, Tensor] = {}

    def changed(key: Key, stage: Stage, leaves: list[Any]) -> list[Any]:
        return [
            change((key, stage, i), t) if isinstance(t, Tensor) and t.is_floating_point() else t
            for i, t in enumerate(leaves)
        ]

    def replace(key: Key, stage: Stage, leaves: list[Any]) -> list[Any]:
        original = first.calls[key].leaves[stage]
        if stage == "output":
            return changed(key, stage, original)
        found.update(((key, stage, i), t.clone()) for i, t in enumerate(leaves) if isinstance(t, Tensor))
        return original

    x = tuple(changed(GIVEN, "input", list(first.x)))
    output = judgeable(run_observed(first.model, x, replacing(first.calls, replace)))
    return found | {(*END, i): as_tensor(leaf) for i, leaf in enumerate(output)}
