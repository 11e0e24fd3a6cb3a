"""How far a function or layer is from equivariance."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from selfconv.groups import Group, get_group

Function = Callable[[Tensor], Tensor]


def transform(x: Tensor, s: int, group: str | Group) -> Tensor:
    """L_S[x] for features of any rank."""
    group = get_group(group)
    if x.dim() == 5:
        return group.act(x, s)
    return group.act_planar(x, s) if x.dim() == 4 else x


@torch.no_grad()
def equivariance_error(module: Function, x: Tensor, group: str | Group) -> list[float]:
    """The error under each element of the group, in the order of its elements (the first is the identity)."""
    group = get_group(group)
    y = module(x)
    return [relative_error(module(transform(x, s, group)), transform(y, s, group)) for s in group]


@torch.no_grad()
def shift_error(module: Function, x: Tensor, shift: int = 1, stride: int = 1) -> float | None:
    """The error when x is shifted by ``shift`` cells down and right, where the border plays no part.

    Zero padding makes the border different from the interior, so only those outputs are compared that do
    not depend on it: found by changing the border and seeing which outputs change, and by a border of NaN,
    which reaches even outputs that depend on it too little to change (a saturated softmax). None if there is
    no such output, as when the receptive field covers the whole map.

    Args:
        shift: a multiple of ``stride``.
        stride: by how much the module downsamples.
    """
    if shift % stride or shift < 1:
        raise ValueError(f"shift: expected a positive multiple of stride={stride}; got {shift}")
    y = module(x)
    border = torch.ones_like(x[0, 0], dtype=torch.bool)
    border[..., 1 : x.shape[-2] - 1 - shift, 1 : x.shape[-1] - 1 - shift] = False
    interior = torch.ones(y.shape[-2:], dtype=torch.bool, device=y.device)
    for disturbed in (torch.where(border, x + 1, x), x.masked_fill(border, math.nan)):
        interior &= (module(disturbed) == y).flatten(0, -3).all(0)  # [h, w]
        if not interior.any():  # before NaN comes near the statistics of a batch norm in training
            return None
    moved, expected = module(x.roll((shift, shift), (-2, -1))), y.roll((shift // stride,) * 2, (-2, -1))
    interior = interior.roll((shift // stride,) * 2, (0, 1))
    return relative_error(moved[..., interior], expected[..., interior])


def assert_equivariant(
    module: Function, x: Tensor, group: str | Group, tolerance: float | None = None
) -> None:
    """Raises AssertionError, with the error under each element, unless all are within the tolerance.

    Args:
        tolerance: by default 1e-10 for float64, 1e-5 for float32, 1e-2 for float16 and 1e-1 for bfloat16,
            in which smaller faults than that cannot be told from rounding.
    """
    group = get_group(group)
    tolerance = default_tolerance(x.dtype) if tolerance is None else tolerance
    errors = equivariance_error(module, x, group)
    if not max(errors) <= tolerance:  # NaN fails too
        listed = ", ".join(f"{s}: {error:.1e}" for s, error in enumerate(errors))
        raise AssertionError(
            f"not equivariant to {group.name} within {tolerance:g}; error by element {listed}"
        )


def default_tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-5)


def relative_error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    if not b.numel():
        return 0.0
    difference = torch.where(a == b, 0, (a - b).abs()).amax().item()  # equal infinities are no difference
    size = torch.where(b.isfinite(), b.abs(), 0).amax().item()
    return difference / size if size else difference
