"""Layer normalisation over channels, which torch's norms do not provide for group features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfconv.groups import Group, get_group
from selfconv.nn._layout import (
    channels_innermost,
    channels_to_end,
    channels_to_front,
    check_features,
    check_sizes,
)


class GroupLayerNorm(nn.LayerNorm):
    """Layer normalisation over the channels, separately at each point of the group:

        y_c(R, x) = γ_c (f_c(R, x) − mean(R, x)) / √(var(R, x) + ε) + β_c,   mean and variance over c

    Shapes: ``[N, C, |H|, h, w]``, on z2 ``[N, C, h, w]``, the output has the same shape. Equivariant to
    ``group`` and shifts: both permute points, and the layer treats all points in the same way.
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
        super().__init__(num_channels, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.group = get_group(group)

    def forward(self, x: Tensor) -> Tensor:
        check_features("GroupLayerNorm", x, self.normalized_shape[0], self.group)
        y = channels_to_front(super().forward(channels_to_end(x)))
        return y if channels_innermost(x) else y.contiguous()

    def extra_repr(self) -> str:
        (channels,) = self.normalized_shape
        affine = f"elementwise_affine={self.elementwise_affine}"
        return f"{channels}, eps={self.eps}, {affine}, group={self.group.name!r}"
