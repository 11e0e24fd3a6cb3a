"""Layers that multiply features by gates: squeeze and excite computes them, dropout draws them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv.groups import Group, own_group
from selfconv.nn._layout import check_features, check_options, check_sizes, is_sequence
from selfconv.ops import check_probability


class SqueezeExcite(nn.Module):
    """Group Squeeze and Excite (Eq. 15, 16): multiplies every channel by a gate computed from the whole map,

        squeeze(f) = σ(W_1 ReLU(W_2 (1/|G|) Σ_h f(h))),   f'_c(g) = f_c(g) squeeze_c(f)

    W_2 (``reduce``) maps the channels to channels / reduction, W_1 (``expand``) maps them back; both have a
    bias. Shapes: ``[N, C, |H|, h, w]``, on z2 ``[N, C, h, w]``, the output has the same shape; also sequences
    ``[N, C, |H|, L]``, on z2 ``[N, C, L]``, if the group maps rows to rows. The gate is invariant to
    ``group``, so the layer is equivariant to it. It is equivariant to shifts to the extent that the mean over
    the map is invariant.
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
        check_options("SqueezeExcite", dtype)
        self.channels = channels
        self.reduction = reduction
        self.group = own_group(group)
        hidden = max(1, channels // reduction)
        self.reduce = nn.Linear(channels, hidden, device=device, dtype=dtype)
        self.expand = nn.Linear(hidden, channels, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if is_sequence(x, self.channels, self.group):
            return self.forward(x.unsqueeze(-2)).squeeze(-2)
        check_features("SqueezeExcite", x, self.channels, self.group, weight=self.reduce.weight)
        gate = torch.sigmoid(self.expand(torch.relu(self.reduce(x.mean(tuple(range(2, x.dim())))))))  # [N, C]
        return x * gate.reshape(*gate.shape, *(1,) * (x.dim() - 2))

    def extra_repr(self) -> str:
        return f"{self.channels}, reduction={self.reduction}, group={self.group.name!r}"


DropoutMode = Literal["channel", "point"]


class GroupDropout(nn.Module):
    """Dropout with one mask for all planes of the group; in evaluation the identity:

        channel   y_c(R, x) = f_c(R, x) m_c          one draw for each image and channel
        point     y_c(R, x) = f_c(R, x) m_c(x)       one draw for each image, channel and place

    m is 0 with probability ``p`` and 1 / (1 − p) otherwise. Shapes: ``[N, C, |H|, h, w]``, on z2 ``[N, C, h,
    w]``; the output has the same shape; also sequences ``[N, C, |H|, L]``, on z2 ``[N, C, L]``, if the group
    maps rows to rows.

    Equivariance of a random layer can mean two things. *For the same mask*: layer(L_S[f]; m) = L_S[layer(f;
    m)], the layer is an equivariant function for every mask; "channel" has this property, for ``group`` and
    shifts. *In distribution*: layer(L_S[f]; m) and L_S[layer(f; m)] are equally probable, since layer(L_S[f];
    L_S[m]) = L_S[layer(f; m)] and L_S[m] is as probable as m; "point" has this property, and so has
    ``nn.Dropout``, which also samples for each plane and so drops only parts of a group feature.
    """

    def __init__(self, p: float = 0.5, mode: DropoutMode = "channel", *, group: str | Group = "z2") -> None:
        super().__init__()
        if mode not in ("channel", "point"):
            raise ValueError(f"GroupDropout: mode: expected 'channel' or 'point'; got {mode!r}")
        self.p = check_probability("GroupDropout: p", p)
        self.mode = mode
        self.group = own_group(group)

    def forward(self, x: Tensor) -> Tensor:
        if is_sequence(x, None, self.group):
            return self.forward(x.unsqueeze(-2)).squeeze(-2)
        check_features("GroupDropout", x, None, self.group)
        if not self.training or self.p == 0:
            return x
        shape = list(x.shape)
        shape[2:] = [1] * (x.dim() - 2) if self.mode == "channel" else [1] * (x.dim() - 4) + shape[-2:]
        return x * F.dropout(x.new_ones(shape), self.p)  # [N, C, (1,) 1, 1] or [N, C, (1,) h, w]

    def extra_repr(self) -> str:
        return f"p={self.p}, mode={self.mode!r}, group={self.group.name!r}"
