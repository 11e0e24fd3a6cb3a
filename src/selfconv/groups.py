"""Point groups of the square grid: their elements, products, and actions on images and filters.

A group here is the rotational (and mirror) part H of a group G of the plane's symmetries, G = Z² ⋊ H:

    z2   H = {1}          translations alone
    p4   H = C4           and quarter turns
    p4m  H = D4           and mirrors

An element is the integer matrix by which it moves (row, column) offsets. Everything else, tables and
actions alike, follows from the matrices, so a new group is one more line in ``GROUPS``.

Conventions: planar features are ``[..., h, w]``, group features ``[..., |H|, h, w]``. An element S acts
on both as the paper's L_S: L_S[f](y) = f(S⁻¹y) and L_S[f](R, y) = f(S⁻¹R, S⁻¹y), about the centre of
the map. The quarter turn is ``torch.rot90(x, 1, (-2, -1))`` with a roll by +1 along the group axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

Matrix = tuple[tuple[int, int], tuple[int, int]]

IDENTITY: Matrix = ((1, 0), (0, 1))
QUARTER_TURN: Matrix = ((0, -1), (1, 0))
MIRROR: Matrix = ((1, 0), (0, -1))  # left to right


def _multiply(a: Matrix, b: Matrix) -> Matrix:
    (a00, a01), (a10, a11) = a
    (b00, b01), (b10, b11) = b
    return (
        (a00 * b00 + a01 * b10, a00 * b01 + a01 * b11),
        (a10 * b00 + a11 * b10, a10 * b01 + a11 * b11),
    )


def _power(a: Matrix, n: int) -> Matrix:
    return _multiply(a, _power(a, n - 1)) if n else IDENTITY


@dataclass(frozen=True)
class Group:
    """A finite group of symmetries of the grid, given by its matrices, the identity first.

    Elements are named by their index; ``product[s][r]`` and ``inverse[s]`` are the group's tables.
    """

    name: str
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        known = set(self.matrices)
        if len(known) != len(self.matrices) or self.matrices[:1] != (IDENTITY,):
            raise ValueError(f"group {self.name!r}: expected distinct elements, the identity first")
        for (a, b), (c, d) in self.matrices:
            if sorted((abs(a), abs(b))) != [0, 1] or (abs(c), abs(d)) != (abs(b), abs(a)):
                raise ValueError(f"group {self.name!r}: {((a, b), (c, d))} does not map the grid to itself")
        if any(_multiply(a, b) not in known for a in self.matrices for b in self.matrices):
            raise ValueError(f"group {self.name!r}: the product of two of its elements is not among them")
        _ = self.quotient  # and with it all tables, while no compiler is tracing

    def __len__(self) -> int:
        return len(self.matrices)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __str__(self) -> str:
        return self.name

    @cached_property
    def product(self) -> tuple[tuple[int, ...], ...]:
        """The Cayley table: ``product[s][r]`` is the element that acts like r, then s."""
        index = {m: i for i, m in enumerate(self.matrices)}
        return tuple(tuple(index[_multiply(s, r)] for r in self.matrices) for s in self.matrices)

    @cached_property
    def inverse(self) -> tuple[int, ...]:
        return tuple(row.index(0) for row in self.product)

    @cached_property
    def quotient(self) -> tuple[tuple[int, ...], ...]:
        """``quotient[p][r]`` is p⁻¹r, by which every filter on the group is indexed."""
        return tuple(self.product[p_inv] for p_inv in self.inverse)

    @cached_property
    def element_names(self) -> tuple[str, ...]:
        """What each element does to a picture: turns it counter-clockwise, perhaps after a mirror."""
        names = []
        for (a, b), (c, d) in self.matrices:
            angle = round(math.degrees(math.atan2(c, a))) % 360
            names.append(f"{angle}°" + (" mirrored" if a * d - b * c < 0 else ""))
        return tuple(names)

    def turn(self, quarters: int) -> int | None:
        """The element that turns by so many quarters, counter-clockwise; None if there is none."""
        wanted = _power(QUARTER_TURN, quarters % 4)
        return self.matrices.index(wanted) if wanted in self.matrices else None

    def apply(self, s: int, offset: tuple[int, int]) -> tuple[int, int]:
        """Where element s moves a (row, column) offset from the centre."""
        (a, b), (c, d) = self.matrices[s]
        i, j = offset
        return a * i + b * j, c * i + d * j

    def act_planar(self, x: Tensor, s: int) -> Tensor:
        """L_S[f](y) = f(S⁻¹y) on the last two axes of x."""
        (a, b), (c, d) = self.matrices[s]
        if a == 0:
            x = x.transpose(-2, -1)
        flipped = [axis for axis, sign in ((-2, a + b), (-1, c + d)) if sign < 0]
        return x.flip(flipped) if flipped else x

    def act(self, x: Tensor, s: int) -> Tensor:
        """L_S[f](R, y) = f(S⁻¹R, S⁻¹y) on the last three axes of x."""
        if x.shape[-3] != len(self):
            raise ValueError(
                f"group {self.name!r} acts on maps [..., {len(self)}, h, w]; got shape {list(x.shape)}"
            )
        return self.act_planar(x, s).index_select(-3, torch.tensor(self.quotient[s], device=x.device))

    def steer(self, filters: Tensor, *, planar: bool = False) -> Tensor:
        """Every element's view of a filter, L_P[ψ](R, y) = ψ(P⁻¹R, P⁻¹y): one gather, differentiable.

        Args:
            filters: ``[..., |H|, k, k]``, or ``[..., k, k]`` if ``planar``.

        Returns:
            ``[..., P, R, k, k]``, or ``[..., P, k, k]`` if ``planar``.
        """
        k = filters.shape[-1]
        domain = 1 if planar else len(self)
        if filters.shape[-2] != k or (not planar and filters.shape[-3] != domain):
            lead = "" if planar else f"{domain}, "
            raise ValueError(
                f"group {self.name!r} steers filters [..., {lead}k, k]; got shape {list(filters.shape)}"
            )
        if len(self) == 1:
            return filters.unsqueeze(-3 if planar else -4)
        if (
            torch.compiler.is_dynamo_compiling()
        ):  # which would trace the making of the index, number by number
            views = [self.act_planar(filters, p) if planar else self.act(filters, p) for p in self]
            return torch.stack(views, -3 if planar else -4)
        index = torch.tensor(_steering_index(self, domain, k), device=filters.device)
        steered = filters.flatten(-2 if planar else -3).index_select(-1, index)
        return steered.unflatten(-1, (len(self), *(() if planar else (domain,)), k, k))


@cache
def _steering_index(group: Group, domain: int, k: int) -> list[int]:
    """Where in a flat filter [domain·k·k] the value of L_P[ψ](R, y) stands, for P, R, y in order.

    Kept as numbers: a tensor made while a graph is traced would belong to the tracer.
    """
    middle = (k - 1) / 2
    index = []
    for p in group:
        for r in range(domain):
            plane = group.quotient[p][r] if domain > 1 else 0
            for i in range(k):
                for j in range(k):
                    # doubled, so that the centre of an even window is on the lattice too
                    u, v = group.apply(group.inverse[p], (2 * i - k + 1, 2 * j - k + 1))
                    index.append((plane * k + int(u / 2 + middle)) * k + int(v / 2 + middle))
    return index


Z2 = Group("z2", (IDENTITY,))
P4 = Group("p4", tuple(_power(QUARTER_TURN, n) for n in range(4)))
P4M = Group("p4m", P4.matrices + tuple(_multiply(m, MIRROR) for m in P4.matrices))

GROUPS = {group.name: group for group in (Z2, P4, P4M)}


def get_group(group: str | Group) -> Group:
    """The group of that name; a Group passes through."""
    if isinstance(group, Group):
        return group
    if not isinstance(group, str) or group not in GROUPS:
        raise ValueError(f"unknown group {group!r}; expected one of {', '.join(map(repr, GROUPS))}")
    return GROUPS[group]
