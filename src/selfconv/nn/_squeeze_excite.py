"""Squeeze and Excitation on the plane and on groups."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfconv.groups import Group, get_group
from selfconv.nn._layout import check_features, check_sizes


class SqueezeExcite(nn.Module):
    """Group Squeeze and Excite (Eq. 15, 16): multiplies every channel by a gate computed from the whole map,

        squeeze(f) = σ(W_1 ReLU(W_2 (1/|G|) Σ_h f(h))),   f'_c(g) = f_c(g) squeeze_c(f)

    W_2 (``reduce``) maps the channels to channels / reduction, W_1 (``expand``) maps them back; both have a
    bias. Shapes: ``[N, C, |H|, h, w]``, on z2 ``[N, C, h, w]``, the output has the same shape. The gate is
    invariant to ``group``, so the layer is equivariant to it. It is equivariant to shifts to the extent that
    the mean over the map is invariant.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        group: str | Group = "z2",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("SqueezeExcite", channels=channels, reduction=reduction)
        self.channels = channels
        self.reduction = reduction
        self.group = get_group(group)
        hidden = max(1, channels // reduction)
        self.reduce = nn.Linear(channels, hidden, device=device, dtype=dtype)
        self.expand = nn.Linear(hidden, channels, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        check_features("SqueezeExcite", x, self.channels, self.group)
        gate = torch.sigmoid(self.expand(torch.relu(self.reduce(x.mean(tuple(range(2, x.dim())))))))  # [N, C]
        return x * gate.reshape(*gate.shape, *(1,) * (x.dim() - 2))

    def extra_repr(self) -> str:
        return f"{self.channels}, reduction={self.reduction}, group={self.group.name!r}"
