"""The error of a network under elements between the pixels, on smooth images, which need no interpolation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfconv.groups import Group, get_group
from selfconv.testing.actions import Actions
from selfconv.testing.errors import interpolation_error, largest
from selfconv.testing.kinds import FeaturesOn, Kind, default_kind, fits, turned_vectors
from selfconv.testing.layers.judging import output_error
from selfconv.testing.layers.runs import Images, look_away, run_observed
from selfconv.testing.leaves import as_tensor, judgeable
from selfconv.testing.waves import Waves

SMOOTH = 8  # images


def smooth_input(
    kind: Kind | None, channels: int, size: int, group: Group, seed: int
) -> Callable[[int], Tensor]:
    """Features that fade to zero outside a disc, turned by the element s: a function of s."""
    if isinstance(kind, FeaturesOn):
        on_larger = smooth_input(kind.kind, channels, size, get_group(kind.group), seed)
        return lambda s: on_larger(kind.element(s, group))
    if kind == "invariant":
        numbers = torch.randn(
            SMOOTH, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        return lambda s: numbers
    lead = (
        (SMOOTH, channels, len(group)) if kind == "group" else (SMOOTH, 1 if kind == "pixels" else channels)
    )
    waves = Waves(lead, seed=seed)

    def turned(s: int) -> Tensor:
        x = waves.turned(size, size, s, group, masked=True)
        if kind == "vector":
            return turned_vectors(x, group.matrices[s])
        return x[:, 0] if kind == "pixels" else x

    return turned


def between_error(
    model: nn.Module,
    inputs: Sequence[Callable[[int], Tensor]],
    actions: Actions,
    device: torch.device | None,
    kinds: list[Kind | None],
) -> tuple[float | None, float]:
    """The largest error of the output under elements between the pixels, and that of interpolating it.

    None if all outputs are attention weights, whose windows cannot be interpolated.
    """
    group = actions.group

    def run(s: int) -> list[Any]:
        x: Images = tuple(turned(s).to(device) for turned in inputs)
        return judgeable(run_observed(model, x, look_away))

    outputs = {s: run(s) for s in group if s == 0 or not group.exact[s]}
    judged_as = [kind or default_kind(as_tensor(y), group) for y, kind in zip(outputs[0], kinds, strict=True)]
    places = [i for i, kind in enumerate(judged_as) if getattr(kind, "kind", kind) != "attention"]
    if not places:
        return None, 0.0

    def chosen(items: list[Any]) -> list[Any]:
        return [items[i] for i in places]

    error = largest(
        output_error(chosen(output), chosen(outputs[0]), s, actions, chosen(kinds))
        for s, output in outputs.items()
        if s
    )
    maps = [
        (y, kind)
        for y, kind in zip(chosen(outputs[0]), chosen(judged_as), strict=True)
        if isinstance(y, Tensor) and kind in ("planar", "pixels", "group", "vector") and y.is_floating_point()
        if y.dim() > 2 and y.numel() and fits(y, group, kind)
    ]
    return error, max((max(interpolation_error(y, group, kind)) for y, kind in maps), default=0.0)
