"""Pooling over space, over the group and over both; and upsampling, which is exact on every group."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv._arguments import is_whole, of_python
from selfconv.groups import Group, own_group
from selfconv.nn._layout import (
    channels_innermost,
    channels_to_end,
    channels_to_front,
    check_features,
    check_sizes,
    is_sequence,
    on_folded,
)

Mode = Literal["mean", "max"]


class _Pool(nn.Module):
    modes: tuple[str, ...] = ("mean", "max")

    def __init__(self, mode: Mode = "mean", *, group: str | Group = "z2") -> None:
        super().__init__()
        if mode not in self.modes:
            *others, last = map(repr, self.modes)
            raise ValueError(
                f"{type(self).__name__}: mode: expected {', '.join(others)} or {last}; got {mode!r}"
            )
        self.mode = mode
        self.group = own_group(group)

    def _reduce(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.mean(axes) if self.mode == "mean" else x.amax(axes)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, group={self.group.name!r}"


class SpatialPool2d(_Pool):
    """Mean or maximum over windows of space: ``nn.AvgPool2d`` and ``nn.MaxPool2d``, plane by plane,

        y(R, x) = mean or max of f(R, stride·x + u) over u in the kernel_size×kernel_size window

    Shapes: ``[N, C, |H|, h, w] -> [N, C, |H|, h', w']``, on z2 without the group axis. ``stride`` is
    ``kernel_size`` by default (disjoint cells). ``padding``, at most kernel_size / 2, counts as zeros in
    a mean and is ignored in a maximum.

    Equivariant to ``group``, and to shifts by multiples of the stride, on maps where size + 2·padding −
    kernel_size is a multiple of the stride: multiples of ``kernel_size``, by default. On other sizes the last
    rows and columns are omitted, which is not symmetric.
    """

    def __init__(
        self,
        kernel_size: int = 2,
        mode: Mode = "mean",
        *,
        stride: int | None = None,
        padding: int = 0,
        group: str | Group = "z2",
    ) -> None:
        super().__init__(mode, group=group)
        check_sizes(
            "SpatialPool2d", kernel_size=kernel_size, stride=kernel_size if stride is None else stride
        )
        if not is_whole(padding) or not 0 <= padding <= kernel_size // 2:
            raise ValueError(
                f"SpatialPool2d: padding: expected an integer from 0 to half of kernel_size={kernel_size}; "
                f"got {padding}"
            )
        self.kernel_size = kernel_size
        self.stride = kernel_size if stride is None else stride
        self.padding = of_python(padding)

    def forward(self, x: Tensor) -> Tensor:
        check_features("SpatialPool2d", x, None, self.group)
        least = max(1, self.kernel_size - 2 * self.padding)
        if min(x.shape[-2:]) < least:
            raise ValueError(
                f"SpatialPool2d expects maps of {least}×{least} or more; got shape {list(x.shape)}"
            )
        pool = F.avg_pool2d if self.mode == "mean" else F.max_pool2d
        return on_folded(lambda maps: pool(maps, self.kernel_size, self.stride, self.padding), x)

    def extra_repr(self) -> str:
        parts = [f"kernel_size={self.kernel_size}"]
        if self.stride != self.kernel_size:
            parts.append(f"stride={self.stride}")
        if self.padding:
            parts.append(f"padding={self.padding}")
        return ", ".join([*parts, super().extra_repr()])


class GroupPool(_Pool):
    """Mean or maximum over the elements of the group: ``[N, C, |H|, h, w] -> [N, C, h, w]``. Identity on z2.

    Equivariant to ``group`` and to shifts: the planar output rotates with the image.
    """

    def forward(self, x: Tensor) -> Tensor:
        check_features("GroupPool", x, None, self.group)
        return self._reduce(x, (2,)) if x.dim() == 5 else x


class GlobalPool(_Pool):
    """Mean or maximum over space and group: ``[N, C, |H|, h, w] -> [N, C]``. Invariant to ``group``.

    Also of sequences ``[N, C, |H|, L]``, on z2 ``[N, C, L]``, if the group maps rows to rows.

    ``"group_max"`` is the mean over space and then the maximum over the group.
    """

    modes = ("mean", "max", "group_max")

    def __init__(
        self, mode: Literal["mean", "max", "group_max"] = "mean", *, group: str | Group = "z2"
    ) -> None:
        super().__init__(mode, group=group)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        if is_sequence(x, None, self.group):
            return self.forward(x.unsqueeze(-2))
        check_features("GlobalPool", x, None, self.group)
        if self.mode == "group_max":
            means = x.mean((-2, -1))
            return means.amax(2) if means.dim() == 3 else means
        return self._reduce(x, tuple(range(2, x.dim())))


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
            raise ValueError(f"Upsample2d: mode: expected 'nearest' or 'bilinear'; got {mode!r}")
        self.scale_factor = scale_factor
        self.mode = mode
        self.group = own_group(group)

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
        if torch.compiler.is_exporting():  # to flatten a size that was divided before is refused
            place = torch.arange(s * n, device=x.device)
            return torch.cat(cells, axis).index_select(axis, place % s * n + place // s)
        return torch.stack(cells, axis + 1).flatten(axis, axis + 1)

    def extra_repr(self) -> str:
        return f"scale_factor={self.scale_factor}, mode={self.mode!r}, group={self.group.name!r}"
