"""Convolution on the plane and on groups."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from selfconv._arguments import is_whole, of_python
from selfconv.groups import Z2, Group, own_group
from selfconv.nn._layout import avg_pool, check_features, check_options, check_sizes, draw_normal, group_conv

Downsample = Literal["stride", "pool"]


class _SteeredConv2d(nn.Module):
    """Base class of lifting and group convolution: one filter bank, steered by the group."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int | Literal["same", "valid"] = 0,
        bias: bool = True,
        *,
        group: str | Group = "z2",
        downsample: Downsample = "stride",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(
            type(self).__name__,
            in_channels=in_channels,
            out_channels=out_channels,
            kernel_size=kernel_size,
            stride=stride,
        )
        check_options(type(self).__name__, dtype, bias=bias)
        if downsample not in ("stride", "pool"):
            raise ValueError(
                f"{type(self).__name__}: downsample: expected 'stride' or 'pool'; got {downsample!r}"
            )
        if padding == "same":
            if kernel_size % 2 == 0:
                raise ValueError(f"padding='same' expects an odd kernel_size; got {kernel_size}")
            padding = kernel_size // 2
        if padding == "valid":
            padding = 0
        if not is_whole(padding) or padding < 0:
            name = type(self).__name__
            raise ValueError(f"{name}: padding: expected an integer ≥ 0, 'same' or 'valid'; got {padding!r}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = of_python(padding)
        self.group = own_group(group)
        self.downsample = downsample
        shape = (out_channels, in_channels * self._domain(), *self.group.parameter_shape(kernel_size))
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def _domain(self) -> int:
        """How many planes of the group the input has."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """He initialisation of the filters; for group input the fan-in includes all planes."""
        fan = self.weight.shape[1] * self.kernel_size**2
        draw_normal(self.weight, std=math.sqrt(2.0) / math.sqrt(fan))  # coefficients keep the variance
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def steered_filters(self) -> Tensor:
        raise NotImplementedError

    def _convolve(self, x: Tensor) -> Tensor:
        least = self.kernel_size - 2 * self.padding
        if least > 1 and (x.shape[-2] < least or x.shape[-1] < least):
            raise ValueError(
                f"{type(self).__name__} with kernel_size={self.kernel_size}, padding={self.padding} expects "
                f"maps of {least}×{least} or more; got shape {list(x.shape)}"
            )
        if self.downsample == "stride" or self.stride == 1:
            return group_conv(x, self.steered_filters(), self.bias, self.group, self.stride, self.padding)
        if (
            self.kernel_size == 1 and self.padding == 0
        ):  # pooling and a pointwise map commute: the cheap order
            return group_conv(
                avg_pool(x, self.stride, type(self).__name__), self.steered_filters(), self.bias, self.group
            )
        y = group_conv(x, self.steered_filters(), self.bias, self.group, 1, self.padding)
        return avg_pool(y, self.stride, type(self).__name__)

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        if self.stride > 1:
            parts.append(f"stride={self.stride}, downsample={self.downsample!r}")
        if self.padding:
            parts.append(f"padding={self.padding}")
        return ", ".join([*parts, f"bias={self.bias is not None}", f"group={self.group.name!r}"])


class LiftingConv2d(_SteeredConv2d):
    """Convolution from the plane to a group:

        [f ⋆ ψ](P, x) = Σ_y f(y) ψ(P⁻¹(y − x)) + b

    Shapes: ``[N, in, h, w] -> [N, out, |H|, h', w']``; on z2 an ordinary convolution, ``[N, out, h', w']``.
    Equivariant to shifts (by multiples of ``stride``) and to ``group``. With ``stride`` > 1 equivariance to
    ``group`` holds only on sizes where (size + 2·padding − kernel_size) is a multiple of the stride;
    ``downsample="pool"`` convolves at stride 1 and averages stride×stride cells instead, exact on multiples
    of the stride.

    The weight is ``[out, in, k, k]``; on a band-limited group (``group.band_limited``) coefficients of
    ``group.basis(k)``, ``[out, in, functions]``, and rotations other than by multiples of 90° are
    approximate.
    """

    def _domain(self) -> int:
        return 1

    def steered_filters(self) -> Tensor:
        filters = self.group.window_values(self.weight, self.kernel_size)
        return self.group.steer(filters, planar=True)  # [out, in, P, k, k]

    def forward(self, x: Tensor) -> Tensor:
        check_features("LiftingConv2d", x, self.in_channels, Z2, lifted_to=self.group, weight=self.weight)
        return self._convolve(x)


class GroupConv2d(_SteeredConv2d):
    """Group convolution (Eq. 3; on z2 the ordinary convolution, Eq. 1):

        [f ⋆ ψ](P, x) = Σ_(R,y) f(R, y) ψ(P⁻¹R, P⁻¹(y − x)) + b

    Shapes: ``[N, in, |H|, h, w] -> [N, out, |H|, h', w']``; on z2 without the group axis.
    Equivariant to shifts and to ``group``, under the conditions on stride of ``LiftingConv2d``.

    The weight is ``[out, in·|H|, k, k]``: rank 4, so that ``module.to(memory_format=...)`` works; on a
    band-limited group coefficients, ``[out, in·|H|, functions]``.
    """

    def _domain(self) -> int:
        return len(self.group)

    def steered_filters(self) -> Tensor:
        filters = self.group.window_values(self.weight, self.kernel_size)
        return self.group.steer(filters.unflatten(1, (self.in_channels, -1)))  # [out, in, P, R, k, k]

    def forward(self, x: Tensor) -> Tensor:
        check_features("GroupConv2d", x, self.in_channels, self.group, weight=self.weight)
        return self._convolve(x)
