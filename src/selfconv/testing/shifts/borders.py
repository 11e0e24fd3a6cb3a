"""Decides whether the border explains features that do not shift exactly, of layers and between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from selfconv.testing.errors import Function, largest
from selfconv.testing.interiors import interior_error as shifted_error
from selfconv.testing.layers.runs import (
    END,
    GIVEN,
    Key,
    Place,
    Stage,
    replacing,
    run_observed,
)
from selfconv.testing.layers.windows import largest_dilation, sampling
from selfconv.testing.leaves import aligned, as_tensor, judgeable
from selfconv.testing.shifts.motion import Motion
from selfconv.testing.shifts.moves import ROOM, STILL, Move, Object, Steps, tiled
from selfconv.testing.shifts.objects import Objects
from selfconv.testing.shifts.scales import Scale

SIDE = 20  # of a map with room for a layer's window

Change = Callable[[Place, Tensor], Tensor]
Result = TypeVar("Result")


# ---- of a layer ----


def interior_error(motion: Motion, key: Key) -> float | None:
    """A layer's ``shift_error``: at places that the border does not influence. None if there are none."""
    return _result(lambda: _interior_error(motion, key, lambda x: 1))


def error_away_from_the_border(motion: Motion, key: Key) -> float | None:
    """The same on copies of the layer's input, which have room for windows, or at the centre of its map.

    None if neither can be measured.
    """
    error = _result(lambda: _interior_error(motion, key, _copies))
    return _centre_error(motion, key) if error is None else error


def _copies(x: Tensor) -> int:
    return max(3, -(-SIDE // x.shape[-1]))


def _interior_error(motion: Motion, key: Key, copies: Callable[[Tensor], int]) -> float | None:
    call, axes = motion.first.calls[key], motion.first.axes
    given, outputs = call.only_input(), call.tensors("output")
    if given is None or not outputs or not all(t.numel() for t in (given[1], *outputs.values())):
        return None
    at, x = given
    if x.dim() < 2 + axes or not _places_last(motion, (key, "input", at), x):
        return None
    if any(y.dim() < 2 + axes for y in outputs.values()):
        return None
    scales = {i: motion.scales.of_layer(key, at, i) for i in outputs}
    number = copies(x)
    if number > 1 and None in scales.values():
        return None  # on a larger map it may be another function, as adaptive pooling is
    x = tiled(x, motion.last_axes(x), number)
    errors = [
        _least_error(
            lambda t, i=i: call.run({at: t})[i],  # type: ignore[misc]
            x,
            call.module,
            motion,
            (key, "output", i),
            scales[i],
            motion.moves.get((key, "input", at)) or STILL,
        )
        for i in outputs
    ]
    return None if None in errors else largest(e for e in errors if e is not None)


def _least_error(
    function: Function,
    x: Tensor,
    module: nn.Module,
    motion: Motion,
    place: Place,
    scale: Scale | None,
    before: Move,
) -> float | None:
    """For its scale or, if that is not known but one size is a multiple of the other, the ratio of cells that
    fits best; None if nothing can be compared.

    Args:
        before: how the function's input moves with the image.
    """
    axes, frame = motion.first.axes, largest_dilation(module)
    after = motion.moves.get(place) or STILL
    signs = before.signs(after) if before.axes and len(after.axes) == axes else (1,) * axes
    y = function(x)
    n, m = x.shape[-1], y.shape[-1]
    if scale is None and n % m and m % n:
        return None
    rule = sampling(module) if m < n else None
    ratios = [scale] if scale else [(ratio,) * axes for ratio in _ratios(n, m)]
    errors = []
    for ratio in ratios:
        given = tuple(motion.multiple * cells.denominator for cells in ratio)
        moved = tuple(
            motion.multiple * cells.numerator * sign for cells, sign in zip(ratio, signs, strict=True)
        )
        reach = frame if rule else frame * max(cells.denominator for cells in ratio)
        if all(n >= 2 * cells + 2 for n, cells in zip(x.shape[-axes:], given, strict=True)):
            turned = before.transposed() != after.transposed()
            error = shifted_error(function, x, y, given, moved, reach, transposed=turned)
            errors += [] if error is None else [error]
    fitting = [error for error in errors if error <= motion.limit(*place)]
    if fitting:
        return min(fitting)
    return errors[0] if errors and len(errors) == len(ratios) else None


def _ratios(n: int, m: int) -> list[Fraction]:
    """How many cells of a map of m a side there may be for each of one of n, where one is a multiple of the
    other; equally many, if the rest is padding. The likely first."""
    return list(dict.fromkeys([Fraction(m, n), Fraction(1)]))


def _places_last(motion: Motion, place: Place, x: Tensor) -> bool:
    """Whether the last axes are a map or a row; or else channels may be last."""
    move = motion.moves.get(place)
    if move and move.axes:
        return x.dim() - 1 in move.axes and not move.flat
    return x.shape[-1] == motion.side if motion.first.axes == 1 else x.shape[-2] == x.shape[-1]


def _centre_error(motion: Motion, key: Key) -> float | None:
    """The error for inputs that are zero but for the centre; None if a nearby border may explain it."""
    call = motion.first.calls[key]
    inputs = call.tensors("input")
    moves = {i: move for i in inputs if (move := motion.moves.get((key, "input", i))) and move.axes}
    if not moves:
        return None
    copies = _copies(next(inputs[i] for i in moves))
    larger = {i: move.tiled(inputs[i], copies) for i, move in moves.items()}
    results = _result(lambda: call.run(larger))
    fixed_size = results is None
    maps = {i: y for i, y in call.tensors("output").items() if y.dim() >= 2 + motion.first.axes}
    if results and any(y.shape[-1] > 1 and y.shape == results[i].shape for i, y in maps.items()):
        return None  # the same
    given = {i: inputs[i] for i in moves} if fixed_size else larger
    near = not fixed_size or min(move.room(given[i]) for i, move in moves.items()) < ROOM

    def run(which: Object | None) -> dict[Place, Tensor]:
        leaves = call.run({i: move.object(given[i], which) for i, move in moves.items()})
        return {(key, "output", i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    objects = Objects(motion, [(move, given[i]) for i, move in moves.items()], run)
    errors = [objects.error((key, "output", i), unclear=near) for i in call.tensors("output")]
    return None if None in errors else largest([e for e in errors if e is not None] or [math.inf])


def _result(function: Callable[[], Result]) -> Result | None:
    try:
        return function()
    except Exception:  # whatever a model raises for a size that it does not take, or for NaN
        return None


# ---- between the layers ----


def errors_between(
    motion: Motion, inexact: list[tuple[Place, Steps, Tensor]]
) -> list[tuple[Place, float | None]]:
    """The errors of tensors that did not move exactly, inputs of layers and outputs of the network.

    An error is that at the places which the border does not influence; if there are none, that of features
    which are zero but for some cells, far from the border. None if the border may be too near to tell, or if
    no stride follows from the sizes.
    """
    if not inexact:
        return []
    dilation = largest_dilation(motion.first.model)

    def runs(where: Callable[[Place, Tensor], Tensor]) -> list[dict[Place, Tensor]]:
        """Changes some cells in several ways: what saturates passes on NaN, a comparison the others."""
        found = []
        for factor, more in ((1, 1), (-100, 0), (math.nan, 0)):

            def change(place: Place, t: Tensor, factor: float = factor, more: float = more) -> Tensor:
                return torch.where(where(place, t), factor * t + more, t)

            found.append(_result(lambda change=change: _replay(motion, change)))  # type: ignore[misc]
        return [run for run in found if run]

    border = runs(lambda place, t: motion.border(place, t, dilation))
    centre = runs(motion.centre)
    objects = Objects(
        motion,
        motion.maps(),
        lambda which: _replay(motion, lambda place, t: motion.object(place, t, which)),
    )
    any_size = motion.scales.any_size

    def error(place: Place, steps: Steps, after: Tensor) -> float | None:
        if not motion.has_stride(place):
            return None
        inside = motion.error_inside(place, after, steps, border, centre)
        if inside is not None:
            return inside
        return objects.error(place, unclear=any_size or motion.room(place) < ROOM)

    return [(place, error(place, steps, after)) for place, steps, after in inexact]


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
    output = aligned(output, first.output) or []
    return found | {(*END, i): as_tensor(leaf) for i, leaf in enumerate(output)}
