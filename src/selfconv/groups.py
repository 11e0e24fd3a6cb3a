"""Point groups of the plane: their elements, products, and actions on images and filters.

A group here is the rotational (and mirror) part H of a group G of the plane's symmetries, G = Z² ⋊ H:

    z2            H = {1}          translations alone
    p4            H = C4           and quarter turns
    p4m           H = D4           and mirrors
    c8, c12, c16  H = C_N          turns by 360°/N
    d8, d12, d16  H = D_N          and mirrors

An element is the matrix by which it moves (row, column) offsets. Everything else, tables and actions alike,
follows from the matrices, so a new group is one more entry in ``GROUPS.update`` at the end of this file.

Elements of z2, p4 and p4m map the grid to itself: they permute pixels, and act exactly. Other elements need
values between the pixels. Their tables are exact too; they act on filters through a band-limited basis
(``_harmonics``), and on images through interpolation (``_resample``). In these groups the rotations by
multiples of 90° and the reflections of the grid remain exact.

Conventions: planar features are ``[..., h, w]``, group features ``[..., |H|, h, w]``. An element S acts
on both as the paper's L_S: L_S[f](y) = f(S⁻¹y) and L_S[f](R, y) = f(S⁻¹R, S⁻¹y), about the centre of
the map. The quarter turn is ``torch.rot90(x, 1, (-2, -1))`` with a roll by +1 along the group axis.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfconv import _harmonics
from selfconv._arguments import describe_value, is_whole
from selfconv._matrices import Array, Index, Matrix, as_matrix, multiply, near, nearest, power
from selfconv._resample import resample

PRECISION = 1e-12  # of the matrices, so that their products are exact to rounding
ROUNDED = 1e-3  # what deviates by less was meant as a group, and rounded
IDENTITY: Matrix = ((1, 0), (0, 1))
QUARTER_TURN: Matrix = ((0, -1), (1, 0))
MIRROR: Matrix = ((1, 0), (0, -1))  # left to right


GROUPS: dict[str, Group] = {}  # by name; filled below


@dataclass(frozen=True)
class Group:
    """A finite group of rotations and reflections of the plane, given by its matrices, the identity first.

    Elements are named by their index; ``product[s][r]`` and ``inverse[s]`` are the group's tables.
    """

    name: str
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name of a group: expected a string; got {self.name!r}")
        try:
            matrices = tuple(map(as_matrix, self.matrices))
        except (TypeError, ValueError, OverflowError, RuntimeError):  # entries that are no finite numbers
            matrices = ()
        if not matrices:
            given: Any = self.matrices
            shown = repr(given) if isinstance(given, tuple | list) else describe_value(given)
            raise ValueError(f"group {self.name!r}: expected 2×2 matrices of finite numbers; got {shown}")
        object.__setattr__(self, "matrices", matrices)
        if matrices[0] != IDENTITY or [*map(self.index, matrices)] != [*self]:
            raise ValueError(f"group {self.name!r}: expected distinct elements, the identity first")
        elements = self._elements
        for matrix, element in zip(matrices, elements, strict=True):
            self._check_precision(
                f"{matrix} is neither a rotation nor a reflection", element @ element.T - np.eye(2)
            )
        for s in elements:
            self._check_precision(
                "the product of two of its elements is not among them", nearest(s @ elements, elements)[1]
            )
        table = GROUPS.get(self.name)
        if table is not None:
            if len(table) != len(self) or not all(map(near, table.matrices, matrices)):
                raise ValueError(
                    f"group {self.name!r}: expected the {len(table)} elements that this name has in GROUPS, "
                    f"in their order, or another name; got {len(self)} others"
                )
            object.__setattr__(self, "matrices", table.matrices)  # which may differ by rounding
        _ = self.quotient, self.factors, self.band_limited, self.keeps_axes  # while no compiler is tracing

    def _check_precision(self, fault: str, deviations: Array) -> None:
        deviation = float(np.abs(deviations).max())
        if deviation < ROUNDED:
            fault += f": expected a precision of {PRECISION:g}, which matrices computed in float64 have; got "
            fault += f"a deviation of {deviation:.1e}"
        if not deviation <= PRECISION:
            raise ValueError(f"group {self.name!r}: {fault}")

    def __len__(self) -> int:
        return len(self.matrices)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __str__(self) -> str:
        return self.name

    @cached_property
    def product(self) -> tuple[tuple[int, ...], ...]:
        """The Cayley table: ``product[s][r]`` is the element that acts as r followed by s."""
        elements = self._elements
        return tuple(tuple(nearest(s @ elements, elements)[0].tolist()) for s in elements)

    @property
    def _elements(self) -> Array:
        return np.array(self.matrices, dtype=np.float64)  # [|H|, 2, 2]

    @cached_property
    def inverse(self) -> tuple[int, ...]:
        return tuple(row.index(0) for row in self.product)

    @cached_property
    def quotient(self) -> tuple[tuple[int, ...], ...]:
        """``quotient[p][r]`` is p⁻¹r, the index into every filter on the group."""
        return tuple(self.product[p_inv] for p_inv in self.inverse)

    @cached_property
    def exact(self) -> tuple[bool, ...]:
        """For each element, whether it maps the grid to itself."""
        return tuple(all(isinstance(e, int) for row in matrix for e in row) for matrix in self.matrices)

    @cached_property
    def band_limited(self) -> bool:
        """Whether some element does not map the grid to itself: filters then need values between pixels."""
        return not all(self.exact)

    @cached_property
    def keeps_axes(self) -> bool:
        """Whether every element maps rows to rows and columns to columns, and so rectangles to themselves."""
        return all(b == c == 0 and abs(a) == abs(d) == 1 for (a, b), (c, d) in self.matrices)

    @cached_property
    def factors(self) -> tuple[tuple[int, int], ...]:
        """For each s a pair (q, r) with s = q·r and q exact; r is the smallest possible index.

        So elements that differ by an exact q share r. Only r is interpolated, so exact elements remain exact.
        """
        exact = [q for q in self if self.exact[q]]
        least = [min((self.product[self.inverse[q]][s], q) for q in exact) for s in self]
        return tuple((q, r) for r, q in least)

    @cached_property
    def element_names(self) -> tuple[str, ...]:
        """The name of each element: a counter-clockwise rotation, possibly after a reflection."""
        names = []
        for (a, b), (c, d) in self.matrices:
            angle = round(math.degrees(math.atan2(c, a)), 1) % 360
            names.append(f"{angle:g}°" + (" mirrored" if a * d - b * c < 0 else ""))
        return tuple(names)

    def index(self, matrix: Matrix) -> int | None:
        """The element with this matrix, up to rounding; None if the group does not contain it."""
        return next((i for i, m in enumerate(self.matrices) if near(m, matrix)), None)

    def turn(self, quarters: int) -> int | None:
        """The counter-clockwise rotation by this many quarter turns; None if it is not in the group."""
        return self.index(power(QUARTER_TURN, quarters % 4))

    def apply(self, s: int, offset: tuple[float, float]) -> tuple[float, float]:
        """Where element s moves a (row, column) offset from the centre."""
        (a, b), (c, d) = self.matrices[s]
        i, j = offset
        return a * i + b * j, c * i + d * j

    def act_planar(self, x: Tensor, s: int) -> Tensor:
        """L_S[f](y) = f(S⁻¹y) on the last two axes of x."""
        if not self.exact[s]:
            q, r = self.factors[s]
            return self.act_planar(resample(x, self.matrices[r]), q)
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

    # ---- filters ----

    def parameter_shape(self, k: int | tuple[int, int]) -> tuple[int, ...]:
        """The shape of a k×k filter's parameters: values ``(k, k)``, or coefficients ``(functions,)``.

        Args:
            k: also (rows, columns), where the group ``keeps_axes``.
        """
        rows, columns = self._window(k)
        return (len(_harmonics.basis(rows)),) if self.band_limited else (rows, columns)

    def window_values(self, parameters: Tensor, k: int | tuple[int, int]) -> Tensor:
        """The filters ``[..., k, k]`` for parameters ``[..., *parameter_shape(k)]``."""
        if not self.band_limited:
            return parameters
        if not torch.compiler.is_compiling():  # which does not trace the check
            self._window(k)
        rows, columns = k if isinstance(k, tuple) else (k, k)
        basis = _constant("basis", self.matrices, rows, columns)
        functions = basis.shape[0]
        if parameters.dim() < 1 or int(parameters.shape[-1]) != functions:  # torch.jit.trace: a tensor
            raise ValueError(
                f"group {self.name!r} has {functions} functions for {rows}×{columns} filters: expected "
                f"coefficients [..., {functions}]; got shape {list(parameters.shape)}"
            )
        self._check_floating("coefficients", parameters)
        return _combine(parameters, basis).unflatten(-1, (rows, columns))

    def basis(self, k: int) -> Tensor | None:
        """The basis of k×k filters, ``[functions, k, k]``; None if every filter value is a parameter."""
        window = self._window(k)
        if not self.band_limited:
            return None
        return torch.from_numpy(_harmonics.basis(window[0])).clone().unflatten(-1, window)

    def _window(self, k: int | tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of a window that the group maps to itself."""
        rows, columns = k if isinstance(k, tuple) and len(k) == 2 else (k, k)
        if not (is_whole(rows) and is_whole(columns)) or min(rows, columns) < 1:
            raise ValueError(f"k: expected an integer ≥ 1, or two, (rows, columns); got {k!r}")
        if rows != columns and not self.keeps_axes:
            raise ValueError(
                f"group {self.name!r} does not map rows to rows: expected a square window; "
                f"got {rows}×{columns}"
            )
        self._check_odd(rows)
        return int(rows), int(columns)

    def _check_floating(self, what: str, values: Tensor) -> None:
        if self.band_limited and not (values.is_floating_point() or values.is_complex()):
            raise TypeError(
                f"group {self.name!r} computes values between the pixels: expected {what} of a floating "
                f"dtype; got {values.dtype}"
            )

    def _check_odd(self, k: int) -> None:
        if self.band_limited and k % 2 == 0:
            raise ValueError(
                f"group {self.name!r} turns filters about a pixel: expected a window of odd size; got {k}×{k}"
            )

    def steer(self, filters: Tensor, *, planar: bool = False) -> Tensor:
        """The filter transformed by every element P, L_P[ψ](R, y) = ψ(P⁻¹R, P⁻¹y); differentiable.

        On a band-limited group, the values of ψ between the pixels are those of the least-squares fit by
        basis functions.

        Args:
            filters: ``[..., |H|, k, k]``, or ``[..., k, k]`` if ``planar``; where the group ``keeps_axes``,
                the window may be a rectangle.

        Returns:
            ``[..., P, R, k, k]``, or ``[..., P, k, k]`` if ``planar``.
        """
        domain, least = (1, 2) if planar else (len(self), 3)
        window = tuple(map(int, filters.shape[-2:]))  # torch.jit.trace makes tensors of sizes
        square = filters.dim() >= least and (window[0] == window[1] or self.keeps_axes)
        if not square or (not planar and filters.shape[-3] != domain):
            lead = "" if planar else f"{domain}, "
            raise ValueError(
                f"group {self.name!r} steers filters [..., {lead}k, k]; got shape {list(filters.shape)}"
            )
        self._check_floating("filters", filters)
        if len(self) == 1:
            return filters.unsqueeze(-3 if planar else -4)
        if self.band_limited and window[0] > 1:
            return self._steer_between_pixels(filters, planar)
        index = _constant("planar index" if planar else "group index", self.matrices, *window)
        steered = filters.flatten(-2 if planar else -3).index_select(-1, index.to(filters.device))
        return steered.unflatten(-1, (len(self), *(() if planar else (domain,)), *window))

    def _steer_between_pixels(self, filters: Tensor, planar: bool) -> Tensor:
        k = int(filters.shape[-1])  # torch.jit.trace makes tensors of sizes
        self._check_odd(k)
        steering = _constant("steering", self.matrices, k, k)  # [k·k, P·k·k]
        turned = _combine(filters.flatten(-2), steering)  # [..., (R,) P·k·k]
        turned = turned.unflatten(-1, (len(self), k, k))  # [..., (R,) P, k, k]
        if planar:
            return turned
        index = _constant("planes", self.matrices, k, k).to(filters.device)
        return turned.flatten(-4, -3).index_select(-3, index).unflatten(-3, (len(self), len(self)))


# ---- constants of a group and a window ----


def _constant(kind: str, matrices: tuple[Matrix, ...], rows: int, columns: int) -> Tensor:
    """A constant as a tensor, new each time: one made in a trace or in inference mode stays bound to it.

    A compiler calls an operator for it. An exported program holds the numbers: it needs no operator of ours.
    """
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        entries = [entry for matrix in matrices for row in matrix for entry in row]
        return _constant_op(kind, entries, rows, columns)
    return _literal(kind, matrices, rows, columns)


def _literal(kind: str, matrices: tuple[Matrix, ...], rows: int, columns: int) -> Tensor:
    return torch.from_numpy(_CONSTANTS[kind](matrices, rows, columns))


# torch.compiler.assume_constant_result does just this, but imports half of torch
_literal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _array(kind: str, entries: list[float], rows: int, columns: int) -> np.ndarray:
    pairs = list(zip(entries[::2], entries[1::2], strict=True))
    return _CONSTANTS[kind](tuple(zip(pairs[::2], pairs[1::2], strict=True)), rows, columns)


@torch.library.custom_op("selfconv::group_constant", mutates_args=())
def _constant_op(kind: str, entries: list[float], rows: int, columns: int) -> Tensor:
    return torch.from_numpy(_array(kind, entries, rows, columns)).clone()  # a compiler may reuse its memory


@_constant_op.register_fake
def _(kind: str, entries: list[float], rows: int, columns: int) -> Tensor:
    array = _array(kind, entries, rows, columns)
    return torch.empty(array.shape, dtype=torch.float64 if array.dtype.kind == "f" else torch.int64)


# "basis", "steering" and "planes" are for square windows alone, as band-limited groups have. None of these
# functions uses torch, whose tensors have no numbers while a compiler traces.


def _basis(matrices: tuple[Matrix, ...], k: int, _: int) -> Array:
    return _harmonics.basis(k)


@cache
def _steering(matrices: tuple[Matrix, ...], k: int, _: int) -> Array:
    """Takes the values of a filter to those of the filter turned by each element: ``[k·k, P·k·k]``."""
    group = _unnamed(matrices)
    turned = [_harmonics.basis(k, matrices[r])[:, _places(group, q, k, k)] for q, r in group.factors]
    return _harmonics.expansion(k) @ np.concatenate(turned, 1)  # B(S⁻¹y) = B(R⁻¹Q⁻¹y)


@cache
def _planes(matrices: tuple[Matrix, ...], *_: int) -> Index:
    """Where plane P⁻¹R of the filter turned by P stands in a flat [plane, P], for P, R in order."""
    group = _unnamed(matrices)
    return np.array([group.quotient[p][r] * len(group) + p for p in group for r in group])


@cache
def _planar_index(matrices: tuple[Matrix, ...], rows: int, columns: int) -> Index:
    """Where in a flat filter [rows·columns] the value of ψ(P⁻¹y) stands, for P, y in order."""
    group = _unnamed(matrices)
    return np.array([place for p in group for place in _places(group, p, rows, columns)])


def _places(group: Group, p: int, rows: int, columns: int) -> list[int]:
    """Where ψ(P⁻¹y) stands in a flat filter, for one exact element P."""
    places = []
    for i in range(rows):
        for j in range(columns):
            # doubled, so that the centre of an even window is on the lattice too
            u, v = group.apply(group.inverse[p], (2 * i - rows + 1, 2 * j - columns + 1))
            places.append(int((u + rows - 1) / 2) * columns + int((v + columns - 1) / 2))
    return places


@cache
def _group_index(matrices: tuple[Matrix, ...], rows: int, columns: int) -> Index:
    """Where in a flat filter [|H|·rows·columns] the value of ψ(P⁻¹R, P⁻¹y) stands, for P, R, y in order."""
    taps = rows * columns
    places = _planar_index(matrices, rows, columns).reshape(len(matrices), 1, taps)  # [P, 1, y]
    return (np.array(_unnamed(matrices).quotient)[:, :, None] * taps + places).reshape(-1)


@cache
def _unnamed(matrices: tuple[Matrix, ...]) -> Group:
    return Group("", matrices)


_CONSTANTS: dict[str, Callable[[tuple[Matrix, ...], int, int], np.ndarray]] = {
    "basis": _basis,
    "steering": _steering,
    "planes": _planes,
    "planar index": _planar_index,
    "group index": _group_index,
}


def _combine(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix in the dtype of x, computed in float32 or better, in autocast too."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    device = x.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        return (x.to(dtype) @ matrix.to(x.device, dtype)).to(x.dtype)


def _rotations(name: str, order: int) -> tuple[Matrix, ...]:
    if not is_whole(order) or order < 1:
        raise ValueError(f"group {name!r}: order: expected an integer ≥ 1; got {order!r}")
    angles = [math.tau * n / order for n in range(order)]
    return tuple(((math.cos(a), -math.sin(a)), (math.sin(a), math.cos(a))) for a in angles)


def cyclic(name: str, order: int) -> Group:
    """C_N: rotations by multiples of 360°/N."""
    return Group(name, _rotations(name, order))


def dihedral(name: str, order: int) -> Group:
    """D_N: the rotations, followed by each rotation after a reflection."""
    turns = _rotations(name, order)
    return Group(name, turns + tuple(multiply(m, MIRROR) for m in turns))


Z2, P4, P4M = cyclic("z2", 1), cyclic("p4", 4), dihedral("p4m", 4)
BAND_LIMITED = [cyclic(f"c{n}", n) for n in (8, 12, 16)] + [dihedral(f"d{n}", n) for n in (8, 12, 16)]

GROUPS.update({group.name: group for group in (Z2, P4, P4M, *BAND_LIMITED)})


def get_group(group: str | Group) -> Group:
    """The group with this name; a ``Group`` is returned unchanged."""
    if isinstance(group, Group):
        return group
    if not isinstance(group, str) or group not in GROUPS:
        raise ValueError(f"unknown group {group!r}; expected one of {', '.join(map(repr, GROUPS))}")
    return GROUPS[group]


def own_group(group: str | Group) -> Group:
    """``get_group`` as an object of a module's own.

    torch.compile guards an object at one of the places where it finds it. A program for a network whose
    modules share the objects of ``GROUPS`` would serve networks that differ in the group of some modules.
    """
    return copy.copy(get_group(group))
