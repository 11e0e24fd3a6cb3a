"""The residual block of the paper's networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv._arguments import describe_value
from selfconv.groups import Group, own_group
from selfconv.nn._conv import Downsample, GroupConv2d
from selfconv.nn._gates import SqueezeExcite
from selfconv.nn._layout import check_options, check_sizes
from selfconv.nn._norm import GroupBatchNorm
from selfconv.nn.attention.layers import AffineSelfConv2d


class ConvNorm(nn.Sequential):
    """A convolution or attention layer, and the batch norm of its output."""

    conv: nn.Module
    norm: nn.Module

    def __init__(
        self,
        conv: nn.Module,
        channels: int,
        group: str | Group = "z2",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_layer("ConvNorm: conv: expected an nn.Module", conv)
        self.conv = conv
        self.norm = GroupBatchNorm(channels, group=group, device=device, dtype=dtype)


class Bottleneck(nn.Module):
    """relu(shortcut(f) + SE(1×1(relu(spatial(relu(1×1(f))))))), batch norm after every convolution.

    Shapes: ``[N, in_channels, |H|, h, w] -> [N, 4·width, |H|, h/stride, w/stride]``; on z2 without |H|.
    Equivariant to ``group`` and shifts if the spatial layer is.

    Args:
        width: channels of the spatial layer.
        spatial: makes the spatial layer, a function of width and stride; by default affine self convolution
            with a 5×5 window, and with the largest number of heads up to 8 that divides the width.
        squeeze_excite: whether the block ends with squeeze and excite, of reduction 16/|H|.
        zero_gamma: whether γ of the last batch norm is zero at first, so that the block begins as its
            shortcut.
        downsample: how the shortcut gets smaller; ``"stride"`` is not equivariant on maps of even size.
    """

    expansion = 4  # the output is this many times as wide as the spatial layer

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int = 1,
        *,
        spatial: Callable[[int, int], nn.Module] | None = None,
        squeeze_excite: bool = False,
        zero_gamma: bool = True,
        downsample: Downsample = "pool",
        group: str | Group = "z2",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(type(self).__name__, in_channels=in_channels, width=width, stride=stride)
        check_options(type(self).__name__, dtype, squeeze_excite=squeeze_excite, zero_gamma=zero_gamma)
        if spatial is not None and (not callable(spatial) or isinstance(spatial, nn.Module)):
            raise ValueError(
                "Bottleneck: spatial: expected a function of width and stride that returns an nn.Module; "
                f"got {describe_value(spatial)}"
            )
        self.group = own_group(group)
        self.in_channels, self.out_channels, self.stride = in_channels, self.expansion * width, stride
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def norm(conv: nn.Module, channels: int) -> ConvNorm:
            return ConvNorm(conv, channels, self.group, **factory)

        def pointwise(channels: int, out: int, stride: int = 1) -> ConvNorm:
            options: dict[str, Any] = {"group": self.group, "downsample": downsample} | factory
            return norm(GroupConv2d(channels, out, 1, stride, bias=False, **options), out)

        spatial = partial(_self_conv, self.group) if spatial is None else spatial
        self.reduce = pointwise(in_channels, width)
        layer = spatial(width, stride)
        _check_layer("Bottleneck: spatial: expected a function that returns an nn.Module", layer)
        self.spatial = norm(layer.to(**factory), width)
        self.expand = pointwise(width, self.out_channels)
        self.se: nn.Module = nn.Identity()
        if squeeze_excite:
            reduction = max(1, 16 // len(self.group))
            self.se = SqueezeExcite(self.out_channels, reduction, group=self.group, **factory)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != self.out_channels:
            self.shortcut = pointwise(in_channels, self.out_channels, stride)
        if zero_gamma:  # attention is unstable in the first epochs: every block starts as its shortcut
            nn.init.zeros_(self.expand.norm.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.reduce(x))
        y = F.relu(self.spatial(y))
        y, shortcut = self.se(self.expand(y)), self.shortcut(x)
        if not torch.compiler.is_exporting() and y.shape != shortcut.shape:  # whose sizes may be symbols
            raise ValueError(
                f"Bottleneck expects a spatial layer with an output of {list(shortcut.shape[-2:])} cells, as "
                f"stride={self.stride} of the shortcut gives; got {list(y.shape[-2:])}"
            )
        return F.relu(y + shortcut)


def _check_layer(expected: str, layer: object) -> None:
    if not isinstance(layer, nn.Module):
        raise ValueError(f"{expected}; got {layer!r}")


def _self_conv(group: Group, width: int, stride: int) -> nn.Module:
    heads = max(n for n in range(1, 9) if width % n == 0)
    return AffineSelfConv2d(width, width, 5, stride, num_heads=heads, group=group)
