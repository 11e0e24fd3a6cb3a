"""A stand-in for the parts of escnn that ``selfconv.escnn`` and its tests touch, with escnn's conventions.

escnn's requirements do not install beside NumPy 2, so the suite cannot count on it. The stand-in shares
nothing with ``selfconv.groups``: it moves pixels by their (x, y) coordinates, y upwards, and fibers by
matrices. That it agrees with escnn 1.0.11 was found by running ``tests/nn/test_escnn.py`` against both: the
file takes the real one where it can be imported, and its first tests state as plain numbers what each must
do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Group:
    """C_N or D_N: element r + N·f is r turns by 2π/N after f mirrors."""

    def __init__(self, name: str, turns: int, mirrors: int) -> None:
        self.name, self.turns = name, turns
        self.elements = list(range(turns * (1 + mirrors))) if turns > 0 else None

    def multiply(self, a: int, b: int) -> int:
        n = self.turns
        sign = -1 if a >= n else 1
        return (a + sign * b) % n + n * ((a >= n) != (b >= n))


class Representation:
    def __init__(self, group: Group, name: str) -> None:
        assert group.elements is not None
        self.group, self.name = group, name
        self.size = len(group.elements) if name == "regular" else 1

    def __call__(self, element: int) -> np.ndarray:
        if self.size == 1:
            return np.eye(1)
        matrix = np.zeros((self.size, self.size))
        for r in range(self.size):
            matrix[self.group.multiply(element, r), r] = 1  # e_r becomes e_sr
        return matrix


class Space:
    dimensionality = 2

    def __init__(self, name: str, turns: int, axis: float | None = None) -> None:
        self.fibergroup = Group(name, turns, axis is not None)
        self.axis = axis
        self.name = f"{name}_on_R2[({None if axis is None else 2 * axis}, {turns})]"
        if self.fibergroup.elements is not None:
            self.regular_repr = Representation(self.fibergroup, "regular")
            self.trivial_repr = Representation(self.fibergroup, "irrep_0")

    def basespace_action(self, element: int) -> np.ndarray:
        """The matrix that moves (x, y), y upwards."""
        n = self.fibergroup.turns
        angle = 2 * math.pi * (element % n) / n
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        if element < n:
            return turn
        assert self.axis is not None
        c, s = math.cos(2 * self.axis), math.sin(2 * self.axis)
        return turn @ np.array([[c, s], [s, -c]])


def move(x: Tensor, matrix: np.ndarray) -> Tensor:
    """f(A⁻¹p) on the last two axes, square maps."""
    n = x.shape[-1]
    rows, columns = np.meshgrid(np.arange(n), np.arange(n), indexing="ij")
    middle = (n - 1) / 2
    p = np.stack([columns - middle, middle - rows])  # x, y
    source = np.einsum("ij,jrc->irc", np.linalg.inv(matrix), p)
    i, j = np.rint(middle - source[1]).astype(int), np.rint(source[0] + middle).astype(int)
    return x[..., torch.from_numpy(i), torch.from_numpy(j)]


class FieldType:
    def __init__(self, gspace: Space, representations: Sequence[Representation]) -> None:
        self.gspace, self.representations = gspace, tuple(representations)
        self.size = sum(r.size for r in representations)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, FieldType)
        return (self.gspace, self.representations) == (other.gspace, other.representations)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"[{self.gspace.name}: {{{', '.join(r.name for r in self.representations)}}}({self.size})]"

    def fibers(self, element: int) -> Tensor:
        blocks = [torch.from_numpy(r(element)) for r in self.representations]
        return torch.block_diag(*blocks)


class GeometricTensor:
    def __init__(self, tensor: Tensor, type: FieldType) -> None:
        assert tensor.shape[1] == type.size
        self.tensor, self.type, self.shape = tensor, type, tensor.shape

    def transform(self, element: int) -> GeometricTensor:
        moved = move(self.tensor, self.type.gspace.basespace_action(element))
        fibers = self.type.fibers(element).to(moved.dtype)
        return GeometricTensor(torch.einsum("oc,nchw->nohw", fibers, moved), self.type)


class EquivariantModule(torch.nn.Module):
    in_type: Any
    out_type: Any


class SequentialModule(EquivariantModule):
    def __init__(self, *modules: EquivariantModule) -> None:
        super().__init__()
        self.steps = torch.nn.ModuleList(modules)
        self.in_type, self.out_type = modules[0].in_type, modules[-1].out_type

    def forward(self, x: GeometricTensor) -> GeometricTensor:
        for step in self.steps:
            assert x.type == step.in_type
            x = step(x)
        return x

    def evaluate_output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        for step in self.steps:
            shape = step.evaluate_output_shape(shape)  # type: ignore[operator]
        return shape


class ReLU(EquivariantModule):
    def __init__(self, in_type: FieldType) -> None:
        super().__init__()
        self.in_type = self.out_type = in_type

    def forward(self, x: GeometricTensor) -> GeometricTensor:
        return GeometricTensor(x.tensor.relu(), x.type)

    def evaluate_output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


class R2Conv(EquivariantModule):
    """A convolution whose filters are summed over the group: Σ_g ρ_out(g) W(g⁻¹·) ρ_in(g)⁻¹."""

    def __init__(self, in_type: FieldType, out_type: FieldType, kernel_size: int, padding: int) -> None:
        super().__init__()
        self.in_type, self.out_type, self.padding = in_type, out_type, padding
        weight = torch.randn(out_type.size, in_type.size, kernel_size, kernel_size)
        summed = weight[0].numel() * len(in_type.gspace.fibergroup.elements or [])
        self.weight = torch.nn.Parameter(weight * (2 / summed) ** 0.5)  # He

    def forward(self, x: GeometricTensor) -> GeometricTensor:
        space = self.in_type.gspace
        filters = torch.zeros_like(self.weight)
        for g in space.fibergroup.elements:
            out, into = (t.fibers(g).to(self.weight.dtype) for t in (self.out_type, self.in_type))
            moved = move(self.weight, space.basespace_action(g))
            filters = filters + torch.einsum("ab,bchw,dc->adhw", out, moved, into)
        return GeometricTensor(F.conv2d(x.tensor, filters, padding=self.padding), self.out_type)

    def evaluate_output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        grown = 2 * self.padding + 1 - self.weight.shape[-1]
        return (shape[0], self.out_type.size, shape[2] + grown, shape[3] + grown)


def install() -> None:
    """As ``escnn``, ``escnn.nn`` and ``escnn.gspaces``."""
    escnn, nn, gspaces = ModuleType("escnn"), ModuleType("escnn.nn"), ModuleType("escnn.gspaces")
    for item in (FieldType, GeometricTensor, EquivariantModule, SequentialModule, ReLU, R2Conv):
        setattr(nn, item.__name__, item)
    named: dict[str, Any] = {
        "trivialOnR2": lambda: Space("C1", 1),
        "rot2dOnR2": lambda N: Space("SO(2)" if N == -1 else f"C{N}", N),
        "flipRot2dOnR2": lambda N, axis=math.pi / 2: Space(f"D{N}", N, axis),
    }
    for name, make in named.items():
        setattr(gspaces, name, make)
    escnn.nn, escnn.gspaces = nn, gspaces  # type: ignore[attr-defined]
    sys.modules |= {"escnn": escnn, "escnn.nn": nn, "escnn.gspaces": gspaces}
