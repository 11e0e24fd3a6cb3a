"""The feature maps and predictions of a model for transformed images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfconv.groups import P4, Z2, Group, get_group
from selfconv.testing import element_error, through_mask, transform
from selfconv.visualize._trace import as_batch, trace


@dataclass(frozen=True)
class EquivarianceView:
    """For every element S of a group: the transformed image, and whether a layer's map transforms with it.

    ``errors[s]`` is max |maps[s] − steered[s]| / max |steered[s]|: rounding, if the layer and all before it
    are equivariant. For elements that do not map the grid to itself it is
    ``selfconv.testing.deviation_error``; on groups with such elements, the image has a round mask.
    """

    layer: str
    group: Group
    images: list[Tensor]  # L_S[image], [C, h, w]
    maps: list[Tensor]  # the layer's map of that image, [C, h, w] or [C, |H|, h, w]
    steered: list[Tensor]  # L_S of the layer's map of the first image
    errors: list[float]
    outputs: list[Tensor]  # of the model, [num_classes]
    output_errors: list[float]  # against the output for the first image

    def error_map(self) -> Tensor:
        """Where the largest error comes from, ``[h, w]``: the values over which ``errors`` are computed.

        If all elements are exact, the largest error of each place over elements and channels, upright; its
        maximum is ``max(errors)``. Otherwise of the element with the largest error, the root mean square over
        channels inside the round mask, NaN outside; its root mean square is ``max(errors)``.
        """
        apart = [(m - t).double().flatten(0, -3) for m, t in zip(self.maps, self.steered, strict=True)]
        if not self.group.band_limited:
            places = torch.stack(
                [
                    self.group.act_planar(d.abs().amax(0, keepdim=True), self.group.inverse[s])[0]
                    for s, d in enumerate(apart)
                ]
            ).amax(0)
            total = places.max()
        else:
            places = apart[self.errors.index(max(self.errors))].square().mean(0).sqrt()
            inside = through_mask(torch.ones(1, 1, *places.shape))[0, 0] > 0
            places = torch.where(inside, places, torch.nan)
            total = places[inside].square().mean().sqrt()
        return places * (max(self.errors) / total) if total > 0 else places  # both are relative to one size


def equivariance_view(
    model: nn.Module, image: Tensor, layer: str, group: str | Group | None = None
) -> EquivarianceView:
    """Runs a model on an image under every element of a group.

    Args:
        layer: any spatial layer: self convolution, or a convolution wider than 1×1.
        group: by default the model's group, or p4 if that has no rotations.
    """
    group = get_group(getattr(model, "group", Z2) if group is None else group)
    if len(group) == 1:
        group = P4
    own = getattr(model, "group", None)
    if isinstance(own, Group) and len(own) > 1 and own != group:
        raise ValueError(f"group: expected {own.name!r}, on which this model's maps live; got {group.name!r}")
    batch = through_mask(as_batch(image)) if group.band_limited else as_batch(image)
    runs = [trace(model, transform(batch, s, group)) for s in group]
    first = runs[0]
    if layer not in first.maps:
        raise ValueError(f"layer: expected one of {', '.join(first.maps)}; got {layer!r}")
    maps = [run.maps[layer] for run in runs]
    steered = [transform(maps[0], s, group) for s in group]
    return EquivarianceView(
        layer=layer,
        group=group,
        images=[run.image[0] for run in runs],
        maps=[m[0] for m in maps],
        steered=[m[0] for m in steered],
        errors=[element_error(*pair, s, group) for s, pair in enumerate(zip(maps, steered, strict=True))],
        outputs=[run.output[0] for run in runs],
        output_errors=[element_error(run.output, first.output, s, group) for s, run in enumerate(runs)],
    )
