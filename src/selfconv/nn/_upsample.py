"""Upsampling over space by integer factors, exact on every group."""

from __future__ import annotations

from typing import Literal

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

UpsampleMode = Literal["nearest", "bilinear"]


class Upsample2d(nn.Module):
    """Every cell becomes s×s cells, s = ``scale_factor``; along each of the two axes of space, for
    r = 0, …, s − 1:

        nearest    y(s·i + r) = x(i)
        bilinear   y(s·i + r) = (1 − |t|) x(i) + |t| x(i + sign t),   t = (2r + 1 − s) / 2s

    and x(−1) = x(0), x(n) = x(n − 1). This is ``F.interpolate`` in the modes "nearest" and "bilinear"
    (``align_corners=False``), plane by plane; ``F.interpolate`` with a single factor would enlarge the group
    axis too.

    Shapes: ``[N, C, |H|, h, w] -> [N, C, |H|, s·h, s·w]``, on z2 without the group axis. Equivariant to
    ``group`` on every size, because a mirrored row swaps r with s − 1 − r, and so t with −t; and to shifts:
    by one cell of the input, s of the output, away from the border. t is a quotient of integers, not a
    difference of positions, so the weights are exactly symmetric on large maps too.
    """

    def __init__(
        self, scale_factor: int = 2, mode: UpsampleMode = "nearest", *, group: str | Group = "z2"
    ) -> None:
        super().__init__()
        check_sizes("Upsample2d", scale_factor=scale_factor)
        if mode not in ("nearest", "bilinear"):
            raise ValueError(f"mode: expected 'nearest' or 'bilinear'; got {mode!r}")
        self.scale_factor = scale_factor
        self.mode = mode
        self.group = get_group(group)

    def forward(self, x: Tensor) -> Tensor:
        check_features("Upsample2d", x, None, self.group)
        if min(x.shape[-2:]) < 1:
            raise ValueError(f"Upsample2d expects maps of 1×1 or more; got shape {list(x.shape)}")
        if self.scale_factor == 1:
            return x
        if channels_innermost(x):
            return channels_to_front(self._along(self._along(channels_to_end(x), 1), 2))
        return self._along(self._along(x, x.dim() - 2), x.dim() - 1)

    def _along(self, x: Tensor, axis: int) -> Tensor:
        s, n = self.scale_factor, x.shape[axis]
        cells = [x] * s
        if self.mode == "bilinear":
            before = torch.cat([x.narrow(axis, 0, 1), x.narrow(axis, 0, n - 1)], axis)  # x(i − 1)
            after = torch.cat([x.narrow(axis, 1, n - 1), x.narrow(axis, n - 1, 1)], axis)  # x(i + 1)
            for r in range(s):
                t = (2 * r + 1 - s) / (2 * s)
                if t:  # else the cell's own centre
                    cells[r] = torch.lerp(x, before if t < 0 else after, abs(t))
        return torch.stack(cells, axis + 1).flatten(axis, axis + 1)

    def extra_repr(self) -> str:
        return f"scale_factor={self.scale_factor}, mode={self.mode!r}, group={self.group.name!r}"
