"""An autoencoder of affine self convolution on any group."""

from __future__ import annotations

from torch import Tensor, nn

from selfconv.groups import Group, get_group
from selfconv.nn import (
    AffineSelfConv2d,
    GroupBatchNorm,
    GroupPool,
    LiftingSelfConv2d,
    Upsample2d,
)


class Autoencoder(nn.Module):
    """``[N, in_channels, h, w] -> [N, in_channels, h, w]``, through a code ``[N, code, |H|, h/4, w/4]``.

    The code turns with the image: its planes are permuted and its map is turned. So does the reconstruction.
    ``width`` and the sides of images are multiples of 4.
    """

    def __init__(
        self, in_channels: int, code: int = 4, width: int = 16, *, group: str | Group = "p4"
    ) -> None:
        super().__init__()
        self.in_channels, self.group = in_channels, get_group(group)
        self.cell = 4

        def block(layer: type[AffineSelfConv2d], channels: int, out: int, stride: int = 1) -> nn.Module:
            attention = layer(channels, out, 5, stride, num_heads=4, group=group)
            return nn.Sequential(attention, GroupBatchNorm(out, group=group), nn.ReLU())

        self.encoder = nn.Sequential(
            block(LiftingSelfConv2d, in_channels, width, 2),
            block(AffineSelfConv2d, width, width, 2),
            AffineSelfConv2d(width, code, 1, num_heads=1, bias=True, group=group),
        )
        self.decoder = nn.Sequential(
            block(AffineSelfConv2d, code, width),
            Upsample2d(2, "bilinear", group=group),
            block(AffineSelfConv2d, width, width),
            Upsample2d(2, "bilinear", group=group),
            block(AffineSelfConv2d, width, width),
            GroupPool("mean", group=group),
            nn.Conv2d(width, in_channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and any(side % self.cell for side in x.shape[-2:]):
            raise ValueError(f"Autoencoder expects sides that are multiples of 4; got {list(x.shape)}")
        return self.decoder(self.encoder(x))
