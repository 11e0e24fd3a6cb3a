"""Affine convolution: affine self convolution without attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from selfconv.groups import Group, own_group
from selfconv.nn._conv import GroupConv2d
from selfconv.nn._layout import (
    avg_pool,
    check_features,
    check_options,
    check_sizes,
    check_window,
    draw_normal,
    in_memory_of,
)
from selfconv.ops import affine_conv


class DepthwiseConv2d(nn.Module):
    """Depthwise convolution, one filter per channel, on the plane or on a group:

        out_c(P, x) = Σ_(R,y) f_c(R, y) ψ_c(P⁻¹R, P⁻¹(y − x)) + b_c

    Shapes: ``[N, C, |H|, h, w] -> [N, C, |H|, h/stride, w/stride]``; on z2 without the group axis.
    Equivariant to shifts and to ``group``; ``stride`` averages stride×stride cells, which keeps both exact on
    maps whose sides are multiples of it.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        stride: int = 1,
        bias: bool = True,
        *,
        group: str | Group = "z2",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(type(self).__name__, channels=channels, stride=stride)
        check_options(type(self).__name__, dtype, bias=bias)
        check_window(type(self).__name__, kernel_size)
        self.channels, self.kernel_size, self.stride = channels, kernel_size, stride
        self.group = own_group(group)
        axis = () if len(self.group) == 1 else (len(self.group),)
        shape = (channels, *axis, *self.group.parameter_shape(kernel_size))
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """He initialisation; the fan-in of a channel is its window times the number of planes."""
        draw_normal(self.weight, std=math.sqrt(2 / (len(self.group) * self.kernel_size**2)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        check_features(type(self).__name__, x, self.channels, self.group, weight=self.weight)
        filters = self.group.window_values(self.weight, self.kernel_size)
        out = avg_pool(
            in_memory_of(x, affine_conv(x, filters, None, group=self.group)), self.stride, "DepthwiseConv2d"
        )
        return out if self.bias is None else out + self.bias.view(-1, *[1] * (x.dim() - 2))

    def extra_repr(self) -> str:
        stride = f", stride={self.stride}" if self.stride > 1 else ""
        return f"{self.channels}, kernel_size={self.kernel_size}{stride}, group={self.group.name!r}"


class AffineConv2d(nn.Module):
    """Affine self convolution with α = 1, a control experiment for the effect of attention:

        V = f ⋆ W^V                                                                       1×1, with bias
        out(P, x) = W^O ⋆ Σ_y Σ_R V(R, y) ψ(P⁻¹R, P⁻¹(y − x)) + β(P⁻¹(y − x))           W^O without bias

    The sum over β is one value per channel. Shapes, equivariance and ``stride`` are those of
    ``AffineSelfConv2d``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 5,
        stride: int = 1,
        *,
        group: str | Group = "z2",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "stride": stride}
        check_sizes(type(self).__name__, **sizes)
        check_options(type(self).__name__, dtype)
        check_window(type(self).__name__, kernel_size)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.group = kernel_size, stride, own_group(group)
        factory = {"group": self.group, "device": device, "dtype": dtype}
        axis = () if len(self.group) == 1 else (len(self.group),)
        window = self.group.parameter_shape(kernel_size)
        self.value = GroupConv2d(in_channels, out_channels, 1, **factory)  # type: ignore[arg-type]
        self.psi_v = nn.Parameter(torch.empty(out_channels, *axis, *window, device=device, dtype=dtype))
        self.beta_v = nn.Parameter(torch.empty(out_channels, *window, device=device, dtype=dtype))
        self.output = GroupConv2d(
            out_channels, out_channels, 1, stride, bias=False, downsample="pool", **factory  # type: ignore[arg-type]
        )  # fmt: skip
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``AffineSelfConv2d``: He initialisation for the 1×1 maps, ψ, β ~ N(0, 1/|H|²)."""
        for layer in (self.value, self.output):
            layer.reset_parameters()
        for parameter in (self.psi_v, self.beta_v):
            draw_normal(parameter, std=1 / len(self.group))

    def forward(self, x: Tensor) -> Tensor:
        check_features(type(self).__name__, x, self.in_channels, self.group, weight=self.psi_v)
        psi, beta = (self.group.window_values(f, self.kernel_size) for f in (self.psi_v, self.beta_v))
        out = affine_conv(self.value(x), psi, beta, group=self.group)
        return self.output(in_memory_of(x, out))

    def extra_repr(self) -> str:
        stride = f", stride={self.stride}" if self.stride > 1 else ""
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return f"{sizes}{stride}, group={self.group.name!r}"
