"""Batch normalisation and layer normalisation with statistics per channel or per point, on any group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv._arguments import check_not_negative
from selfconv.groups import Group, own_group
from selfconv.nn._layout import (
    channels_innermost,
    channels_to_end,
    channels_to_front,
    check_features,
    check_options,
    check_sizes,
    is_sequence,
)
from selfconv.ops import check_probability, owned


def _to_match(x: Tensor, weight: Tensor | None) -> Tensor | None:
    """The weight whose dtype the features must have; those in half precision may have weights in float32."""
    half = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return None if half else weight


class GroupBatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose statistics, γ and β are shared by all elements of the group:

        y_c(R, x) = γ_c (f_c(R, x) − mean_c) / √(var_c + ε) + β_c,   mean and variance over N, R and x

    Shapes: ``[N, C, |H|, h, w]``, on z2 ``[N, C, h, w]``, the output has the same shape; also sequences
    ``[N, C, |H|, L]``, on z2 ``[N, C, L]``, if the group maps rows to rows. Equivariant to ``group`` and
    shifts; statistics per plane would break this. A subclass of ``nn.BatchNorm2d``, so that
    weight decay filters and ``nn.SyncBatchNorm.convert_sync_batchnorm`` recognise it.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        *,
        group: str | Group = "z2",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("GroupBatchNorm", num_features=num_features)
        check_options("GroupBatchNorm", dtype)
        eps = check_not_negative("GroupBatchNorm: eps", eps)
        if momentum is not None:
            momentum = check_probability("GroupBatchNorm: momentum", momentum)
        super().__init__(num_features, eps, momentum, device=device, dtype=dtype)
        self.group = own_group(group)

    def forward(self, x: Tensor) -> Tensor:
        if is_sequence(x, self.num_features, self.group):
            return self.forward(x.unsqueeze(-2)).squeeze(-2)
        check_features("GroupBatchNorm", x, self.num_features, self.group, weight=_to_match(x, self.weight))
        if x.dim() == 4:
            return super().forward(x)
        if torch.compiler.is_exporting() and not self.training:  # to fold sizes that vary is refused
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        order = x.shape[2]
        if channels_innermost(x):  # [N, C, h, w·|H|] in channels_last
            y = super().forward(owned(x.permute(0, 1, 3, 4, 2).flatten(3, 4)))
            return y.unflatten(3, (x.shape[4], order)).permute(0, 1, 4, 2, 3)
        return super().forward(owned(x.flatten(2, 3))).unflatten(2, (order, x.shape[3]))  # [N, C, |H|·h, w]

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, group={self.group.name!r}"


class GroupLayerNorm(nn.LayerNorm):
    """Layer normalisation over the channels, separately at each point of the group:

        y_c(R, x) = γ_c (f_c(R, x) − mean(R, x)) / √(var(R, x) + ε) + β_c,   mean and variance over c

    Shapes: ``[N, C, |H|, h, w]``, on z2 ``[N, C, h, w]``, the output has the same shape; also sequences
    ``[N, C, |H|, L]``, on z2 ``[N, C, L]``, if the group maps rows to rows. Equivariant to ``group`` and
    shifts: both permute points, and the layer treats all points in the same way.
    ``nn.LayerNorm`` normalises the last axes, here space, with γ and β for each position, and is not
    equivariant.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        group: str | Group = "z2",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("GroupLayerNorm", num_channels=num_channels)
        check_options("GroupLayerNorm", dtype, elementwise_affine=elementwise_affine, bias=bias)
        eps = check_not_negative("GroupLayerNorm: eps", eps)
        super().__init__(num_channels, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.group = own_group(group)

    def forward(self, x: Tensor) -> Tensor:
        if is_sequence(x, self.normalized_shape[0], self.group):
            return self.forward(x.unsqueeze(-2)).squeeze(-2)
        channels = self.normalized_shape[0]
        check_features("GroupLayerNorm", x, channels, self.group, weight=_to_match(x, self.weight))
        y = channels_to_front(super().forward(channels_to_end(x)))
        return y if channels_innermost(x) else y.contiguous()

    def extra_repr(self) -> str:
        (channels,) = self.normalized_shape
        affine = f"elementwise_affine={self.elementwise_affine}"
        return f"{channels}, eps={self.eps}, {affine}, group={self.group.name!r}"
