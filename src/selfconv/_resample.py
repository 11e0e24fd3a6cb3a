"""Images turned by any angle: interpolation by Lanczos' windowed sinc, zero outside.

    out(y) = Σ_p L(p − S⁻¹y) x(p) / Σ_p L(p − S⁻¹y)

with L(u) = sinc(u) sinc(u/3) along rows and columns, over the 6×6 pixels p around S⁻¹y. For measuring and for
showing: no layer interpolates. ``round_mask`` keeps the disc that every rotation maps to itself: the
corners of a rotated image leave the frame, so they cannot be compared, and show its angle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

REACH = 3  # lobes of the window on each side
TAPS = torch.arange(1 - REACH, REACH + 1)


def resample(x: Tensor, matrix: Sequence[Sequence[float]]) -> Tensor:
    """x(S⁻¹y) for the pixels y of maps ``[..., h, w]``, about their centre.

    Integers and booleans, such as labels, have no values in between: the nearest pixel's is taken.
    """
    h, w = x.shape[-2:]
    rows, columns = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in (h, w))
    (a, b), (c, d) = matrix  # orthogonal: the inverse is the transpose
    down = a * rows[:, None] + c * columns + (h - 1) / 2  # [h, w]
    right = b * rows[:, None] + d * columns + (w - 1) / 2
    maps = x.flatten(-2)
    if not (x.is_floating_point() or x.is_complex()):
        row, column = down.round().long(), right.round().long()
        inside = ((row >= 0) & (row < h) & (column >= 0) & (column < w)).to(x.device)
        index = (row.clamp(0, h - 1) * w + column.clamp(0, w - 1)).flatten().to(x.device)
        nearest = maps.index_select(-1, index).unflatten(-1, (h, w))
        return torch.where(inside, nearest, torch.zeros_like(nearest))
    row, row_weight = _taps(down, h)  # [h, w, 6]
    column, column_weight = _taps(right, w)
    out = torch.zeros_like(x)
    for i in range(len(TAPS)):
        for j in range(len(TAPS)):
            index = (row[..., i] * w + column[..., j]).flatten().to(x.device)
            weight = (row_weight[..., i] * column_weight[..., j]).to(x)
            out = out + maps.index_select(-1, index).unflatten(-1, (h, w)) * weight
    return out


def round_mask(height: int, width: int) -> Tensor:
    """1 inside the disc that fits into the image, 0 outside: ``[h, w]``."""
    rows, columns = (torch.arange(n) - (n - 1) / 2 for n in (height, width))
    radius = min(height, width) / 2
    return (rows[:, None] ** 2 + columns**2 <= radius**2).float()


def _taps(place: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The six pixels around each place along one axis, and their weights; those outside weigh nothing."""
    pixel = place.floor()[..., None] + TAPS
    distance = place[..., None] - pixel
    weight = torch.sinc(distance) * torch.sinc(distance / REACH)
    weight = weight / weight.sum(-1, keepdim=True)
    inside = (pixel >= 0) & (pixel < side)
    return pixel.clamp(0, side - 1).long(), weight * inside
