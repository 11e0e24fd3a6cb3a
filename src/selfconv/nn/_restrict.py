"""From a group to a subgroup: p4m to p4, p4 to z2, and every other pair."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfconv.groups import Group, own_group
from selfconv.nn._layout import channels_innermost, channels_to_end, channels_to_front, check_features


def cosets(group: Group, subgroup: Group) -> list[list[int]]:
    """The right cosets K r of a subgroup K, as elements of the group: row i holds k r_i for k in K.

    The representative r_i is the first element that no earlier coset holds; r_0 is the identity, so row 0 is
    K itself, in its own order.
    """
    members = [group.index(matrix) for matrix in subgroup.matrices]
    missing = [matrix for matrix, k in zip(subgroup.matrices, members, strict=True) if k is None]
    if missing:
        raise ValueError(
            f"group {subgroup.name!r} is not a subgroup of {group.name!r}: {missing[0]} is no element of it"
        )
    rows: list[list[int]] = []
    for r in group:
        if not any(r in row for row in rows):
            rows.append([group.product[k][r] for k in members if k is not None])
    return rows


class RestrictGroup(nn.Module):
    """Reinterprets features on H as features on a subgroup K, with one channel for each coset K r_i,

        y_(c,i)(k, x) = f_c(k r_i, x),   i = 0, …, |H|/|K| − 1

    Shapes: ``[N, C, |H|, h, w] -> [N, C·|H|/|K|, |K|, h, w]``, without the group axis if K is z2. Channel
    c·|H|/|K| + i of the output has coset i of channel c; coset 0 is K. No plane is lost,
    and where their order already fits (p4m to p4, any group to z2) a contiguous map is not copied.

    Equivariant to ``subgroup`` and shifts: for S in K, L_S[y](k) = y(S⁻¹k) reads f at S⁻¹k r_i, in the same
    coset. Elements outside K mix channels, and layers on K that follow are not equivariant to them.

    Args:
        subgroup: a group whose elements are all in ``group``.
        group: the group of the input.
    """

    def __init__(self, subgroup: str | Group = "z2", *, group: str | Group) -> None:
        super().__init__()
        self.group = own_group(group)
        self.subgroup = own_group(subgroup)
        planes = [plane for row in cosets(self.group, self.subgroup) for plane in row]
        self._planes = None if planes == list(self.group) else planes  # None: in order already

    def forward(self, x: Tensor) -> Tensor:
        check_features("RestrictGroup", x, None, self.group)
        if len(self.group) == len(self.subgroup) and self._planes is None:
            return x
        innermost = channels_innermost(x)
        y = channels_to_end(x) if innermost else x
        axis = 3 if innermost else 2
        if self._planes is not None:
            y = y.index_select(axis, torch.tensor(self._planes, device=x.device))
        y = y.unflatten(axis, (-1, len(self.subgroup)))  # [N, C, i, k, h, w] or [N, h, w, i, k, C]
        if innermost:
            y = channels_to_front(y.movedim(3, -1).flatten(4, 5))  # [N, h, w, k, C·i], then as below
        else:
            y = y.flatten(1, 2)  # [N, C·i, k, h, w]
        return y.squeeze(2) if len(self.subgroup) == 1 else y

    def extra_repr(self) -> str:
        return f"subgroup={self.subgroup.name!r}, group={self.group.name!r}"
