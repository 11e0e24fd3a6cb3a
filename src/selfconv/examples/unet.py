"""A U-Net of affine self convolution on any group, for segmentation."""

from __future__ import annotations

from torch import Tensor, nn

from selfconv.groups import Group, get_group
from selfconv.nn import (
    AffineSelfConv2d,
    GroupBatchNorm,
    GroupPool,
    LiftingSelfConv2d,
    SpatialPool2d,
    Upsample2d,
    concatenate,
)


class UNet(nn.Module):
    """``[N, in_channels, h, w] -> [N, num_classes, h, w]``: scores that turn with the image. ``widths``:
    the channels of each level, multiples of 4 (the heads). Each level has half the sides of the last."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        widths: tuple[int, ...] = (8, 16, 32),
        *,
        kernel_size: int = 5,
        group: str | Group = "p4",
    ) -> None:
        super().__init__()
        self.in_channels, self.group = in_channels, get_group(group)

        def block(channels: int, width: int, layer: type[AffineSelfConv2d] = AffineSelfConv2d) -> nn.Module:
            attention = layer(channels, width, kernel_size, num_heads=4, padding_mode="exclude", group=group)
            return nn.Sequential(attention, GroupBatchNorm(width, group=group), nn.ReLU())

        if not widths or num_classes < 1:
            raise ValueError(f"UNet expects one width and one class or more; got {widths=}, {num_classes=}")
        first, *rest = widths
        self.cell = 2 ** len(rest)
        self.lift = block(in_channels, first, LiftingSelfConv2d)
        self.down = nn.ModuleList(block(a, b) for a, b in zip(widths, rest, strict=False))
        self.up = nn.ModuleList(block(a + b, a) for a, b in zip(widths, rest, strict=False))
        self.pool = SpatialPool2d(2, "mean", group=group)
        self.upsample = Upsample2d(2, "bilinear", group=group)
        self.head = nn.Sequential(GroupPool("mean", group=group), nn.Conv2d(first, num_classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and any(side % self.cell for side in x.shape[-2:]):
            raise ValueError(f"UNet expects sides that are multiples of {self.cell}; got {list(x.shape)}")
        maps = [self.lift(x)]  # [N, width, |H|, h, w], then half the sides at each level
        for down in self.down:
            maps.append(down(self.pool(maps[-1])))
        y = maps.pop()
        for up in reversed(self.up):
            y = up(concatenate(maps.pop(), self.upsample(y), group=self.group))
        return self.head(y)
