"""The floating-point operations of the operation, from shapes alone: one formula for all backends."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = Sequence[int]


def affine_self_conv_flops(
    query: Shape,
    key: Shape,
    value: Shape,
    psi_k: Shape | None,
    beta_k: Shape | None,
    psi_v: Shape | None,
    beta_v: Shape | None,
    *,
    kernel_size: int | tuple[int, int] | None = None,
) -> int:
    """Floating-point operations of ``affine_self_conv`` for arguments of these shapes, a multiply-add as two.

    At each of the N·|H|·h·w centres, the keys and values of the window take their affine maps (ψ: a
    multiply-add for each of its entries, the addition of β among them; β alone: an addition), the score is a
    multiply-add per key channel and neighbour, the aggregation one per value channel and neighbour. Softmax
    is not counted, as torch's own formulas for attention do not. Neighbours outside the image count too.

    The shapes are those of the arguments, with or without the group axis. ``kernel_size`` is only needed
    when every ψ and β is None.
    """
    given = [shape for shape in (psi_k, beta_k, psi_v, beta_v) if shape is not None]
    if given:
        taps = math.prod(given[0][-2:])
    elif kernel_size is None:
        raise ValueError("expected kernel_size, as psi and beta are all None")
    else:
        taps = math.prod(kernel_size) if isinstance(kernel_size, tuple) else kernel_size**2
    centres = math.prod(query) // query[1]
    per_centre = 0
    for channels, psi, beta in ((query[1], psi_k, beta_k), (value[1], psi_v, beta_v)):
        if psi is not None:
            per_centre += 2 * math.prod(psi)
        elif beta is not None:
            per_centre += math.prod(beta)
        per_centre += 2 * channels * taps
    return centres * per_centre
