"""Uses selfconv layers in escnn networks, and escnn layers in selfconv networks. Needs escnn.

escnn's features are fields, each with a representation of the group. C *regular* fields, that is
``[N, C·|H|, h, w]``, are our features on the group, ``[N, C, |H|, h, w]``; C *trivial* fields are our planar
ones, ``[N, C, h, w]``:

- channel c·|H| + r of regular fields is plane r of channel c, where r counts ``fibergroup.elements``;
- the representation moves plane r to plane sr, ρ(s)[f](r) = f(s⁻¹r), as L_S does here;
- an element moves (x, y), y upwards, where our matrices move (row, column), rows downwards. C4's element 1 is
  ``torch.rot90(x, 1, (-2, -1))``, a quarter turn counter-clockwise, in both.

The elements of C4 and D4 (``rot2dOnR2(4)``, ``flipRot2dOnR2(4)``) have the order of p4 and p4m; with another
``axis`` D4 has another order. Planes are matched by the matrices of their elements, not by their number.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

try:
    from escnn.nn import EquivariantModule, FieldType, GeometricTensor
except ModuleNotFoundError as error:
    missing = (error.name or "escnn").partition(".")[0]
    raise ModuleNotFoundError(
        f"selfconv.escnn needs escnn, which does not import here: no module named {missing!r}; "
        "docs/layers.md says how to install escnn beside NumPy 2",
        name=missing,
    ) from None

from selfconv.groups import GROUPS, Group, Matrix, get_group, own_group

__all__ = ["AsEscnn", "FromEscnn", "from_escnn", "group_of", "to_escnn"]


def group_of(gspace: Any) -> Group:
    """The group with the elements of an escnn space: p4 for ``rot2dOnR2(4)``, c8 for ``rot2dOnR2(8)``.

    For a space that matches none of ``selfconv.groups.GROUPS`` a new group is created, with its elements in
    escnn's order, and named as escnn names the space.
    """
    matrices = _matrices(gspace)
    for group in GROUPS.values():
        if _same_elements(group, matrices):
            return group
    return Group(gspace.name, matrices)


def to_escnn(x: Tensor, field_type: FieldType, group: str | Group | None = None) -> GeometricTensor:
    """Converts to escnn: ``[N, C, |H|, h, w]`` to C regular fields, ``[N, C, h, w]`` to C trivial fields.

    Args:
        field_type: C times ``gspace.regular_repr``, or C times ``gspace.trivial_repr``.
        group: the group of x; by default ``group_of(field_type.gspace)``.
    """
    planes = _planes(field_type, group)
    axis = [] if planes is None else [len(planes)]
    fields = len(field_type.representations)
    if list(x.shape[1:-2]) != [fields, *axis] or x.dim() < 4:
        expected = ", ".join(map(str, ["N", fields, *axis, "h", "w"]))
        raise ValueError(f"to_escnn expects [{expected}] for {field_type}; got shape {list(x.shape)}")
    if planes is not None:
        x = _reorder(x, planes).flatten(1, 2)
    return GeometricTensor(x, field_type)


def from_escnn(x: GeometricTensor, group: str | Group | None = None) -> Tensor:
    """Converts from escnn: regular fields to ``[N, C, |H|, h, w]``, trivial fields to ``[N, C, h, w]``.

    The inverse of ``to_escnn``; a view if the planes have the same order.
    """
    planes = _planes(x.type, group)
    if x.tensor.dim() != 4:
        raise ValueError(f"from_escnn expects fields on a grid, [N, C, h, w]; got shape {list(x.shape)}")
    if planes is None:
        return x.tensor
    inverse = [planes.index(r) for r in range(len(planes))]
    return _reorder(x.tensor.unflatten(1, (-1, len(planes))), inverse)


class AsEscnn(EquivariantModule):
    """Wraps a selfconv layer or network as an escnn module, for example for ``SequentialModule``.

    Shapes: those of ``in_type`` and ``out_type``, regular or trivial fields each. Equivariant to the group of
    their space, if the layer is.

    Args:
        layer: maps features as returned by ``from_escnn`` for ``in_type`` to such features for ``out_type``.
        group: the group of the layer; by default ``group_of(in_type.gspace)``.
    """

    def __init__(
        self,
        layer: nn.Module,
        in_type: FieldType,
        out_type: FieldType,
        group: str | Group | None = None,
    ) -> None:
        super().__init__()
        for field_type in (in_type, out_type):
            _planes(field_type, group)
        self.layer = layer
        self.in_type = in_type
        self.out_type = out_type
        self.group = own_group(group_of(in_type.gspace) if group is None else group)

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        if input.type != self.in_type:
            raise ValueError(f"AsEscnn expects features of type {self.in_type}; got {input.type}")
        return to_escnn(self.layer(from_escnn(input, self.group)), self.out_type, self.group)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        layer = copy.deepcopy(self.layer).to("meta").eval()  # shapes alone, and no statistics that move
        given = GeometricTensor(torch.empty(input_shape, device="meta"), self.in_type)
        dtype = next((p.dtype for p in layer.parameters()), torch.float32)
        out = layer(from_escnn(given, self.group).to(dtype))
        return tuple(to_escnn(out, self.out_type, self.group).shape)


class FromEscnn(nn.Module):
    """Wraps an escnn module as a layer on selfconv features.

    Shapes: ``[N, C, |H|, h, w]`` for regular fields of the module's ``in_type`` and ``out_type``, and
    ``[N, C, h, w]`` for trivial ones. Equivariant to the group of their space, as the module is.

    Args:
        module: an ``escnn.nn.EquivariantModule`` from regular or trivial fields to such fields.
        group: the group of the features; by default ``group_of(module.in_type.gspace)``.
    """

    def __init__(self, module: EquivariantModule, group: str | Group | None = None) -> None:
        super().__init__()
        for field_type in (module.in_type, module.out_type):
            _planes(field_type, group)
        self.module = module
        self.group = own_group(group_of(module.in_type.gspace) if group is None else group)

    def forward(self, x: Tensor) -> Tensor:
        return from_escnn(self.module(to_escnn(x, self.module.in_type, self.group)), self.group)

    def extra_repr(self) -> str:
        return f"group={self.group.name!r}"


def _matrices(gspace: Any) -> tuple[Matrix, ...]:
    """How the space's elements move (row, column) offsets, in escnn's order."""
    elements = gspace.fibergroup.elements
    if not elements or gspace.dimensionality != 2:
        raise ValueError(f"expected a space of the plane with a finite group; got escnn's {gspace.name}")
    found = []
    for element in elements:
        (a, b), (c, d) = gspace.basespace_action(element).tolist()
        found.append(((d, -c), (-b, a)))  # row = −y, column = x
    return tuple(found)


def _same_elements(group: Group, matrices: tuple[Matrix, ...]) -> bool:
    return {group.index(matrix) for matrix in matrices} == {*group}


def _planes(field_type: FieldType, group: str | Group | None) -> list[int] | None:
    """Which of our planes is plane r of escnn's regular fields; None for planar features."""
    gspace = field_type.gspace
    matrices = _matrices(gspace)
    group = group_of(gspace) if group is None else get_group(group)
    if not _same_elements(group, matrices):
        raise ValueError(f"group {group.name!r} has other elements than escnn's space {gspace.name}")
    kinds = field_type.representations
    if all(kind == gspace.trivial_repr for kind in kinds):
        return None
    if all(kind == gspace.regular_repr for kind in kinds):
        return (
            None
            if len(group) == 1
            else [plane for matrix in matrices if (plane := group.index(matrix)) is not None]
        )
    raise ValueError(f"expected regular fields alone, or trivial fields alone; got {field_type}")


def _reorder(x: Tensor, planes: list[int]) -> Tensor:
    if planes == list(range(len(planes))):
        return x
    return x.index_select(2, torch.tensor(planes, device=x.device))
