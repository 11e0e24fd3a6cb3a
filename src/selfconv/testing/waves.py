"""Features that are functions on the whole plane, which can be rotated by any angle without interpolation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfconv.groups import Group

WAVES = 6  # in each function


class Waves:
    """Sums of plane waves, one function for each entry of ``lead`` ([N, C] or [N, C, |H|]).

    Args:
        frequency: of the shortest waves, in units of the highest that pixels can hold (two pixels a wave).
    """

    def __init__(self, lead: Sequence[int], frequency: float = 0.5, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(3, *lead, WAVES, dtype=torch.float64, generator=generator)
        direction = math.tau * uniform[0]
        number = math.pi * frequency * uniform[1].sqrt()  # evenly over the disc of frequencies
        self.down, self.right = number * direction.cos(), number * direction.sin()  # radians per pixel
        self.phase = math.tau * uniform[2]
        amplitude = torch.randn(*lead, WAVES, dtype=torch.float64, generator=generator)
        self.amplitude = amplitude * math.sqrt(2 / WAVES)

    def turned(self, h: int, w: int, s: int, group: Group, *, masked: bool = False) -> Tensor:
        """L_S of the functions, about the centre of the map: float64, ``[*lead, h, w]``.

        Args:
            masked: whether they fade to zero outside the inscribed disc of the map, so that the whole
                function is inside the map at every angle.
        """
        rows, columns = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in (h, w))
        (a, b), (c, d) = group.matrices[s]
        row, column = a * rows[:, None] + c * columns, b * rows[:, None] + d * columns  # S⁻¹y = Sᵀy
        angle = (
            self.down[..., None, None] * row
            + self.right[..., None, None] * column
            + self.phase[..., None, None]
        )
        x = (self.amplitude[..., None, None] * angle.cos()).sum(-3)
        if masked:
            distance = (row.square() + column.square()).sqrt() / (min(h, w) / 2)
            x = x * torch.cos(distance.clamp(max=1) * math.pi / 2).square()
        return x[:, :, list(group.quotient[s])] if self.phase.dim() == 4 else x
