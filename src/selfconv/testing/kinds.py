"""How features transform: what their rank says, or what the caller says that they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from selfconv._arguments import is_whole
from selfconv.groups import Group, Matrix, get_group

Name = Literal[
    "invariant",
    "planar",
    "pixels",
    "group",
    "vector",
    "attention",
    "sequence",
    "group sequence",
    "attention sequence",
]
SEQUENCES: frozenset[str] = frozenset({"sequence", "group sequence", "attention sequence"})


@dataclass(frozen=True, repr=False)
class FeaturesOn:
    """Features on a group that contains the one to test, as before ``RestrictGroup``.

    Args:
        group: the group of the features.
        kind: what they are on that group, in the words of ``transform``.
    """

    group: str | Group
    kind: Name = "group"

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", get_group(self.group))
        if self.kind not in get_args(Name):
            raise ValueError(f"FeaturesOn: kind: expected one of {_names()}; got {self.kind!r}")

    def __repr__(self) -> str:
        kind = "" if self.kind == "group" else f", {self.kind!r}"
        return f"FeaturesOn('{self.group}'{kind})"

    def element(self, s: int, group: Group) -> int:
        """The element s of the group to test, as an element of this one."""
        elements = [get_group(self.group).index(matrix) for matrix in group.matrices]
        if None in elements:
            raise ValueError(f"FeaturesOn: expected a group that contains {group.name!r}; got '{self.group}'")
        return elements[s]  # type: ignore[return-value]


Kind = Name | FeaturesOn


def transform(x: Tensor, s: int, group: str | Group, kind: Kind | None = None) -> Tensor:
    """L_S[x], for features of a kind; by default that of their rank.

    Args:
        s: an element of the group, by its index.
        kind: ``"invariant"``: unchanged. ``"planar"``: each channel of ``[N, C, h, w]`` turns as an image
            does. ``"pixels"``: maps without channels, ``[N, h, w]``, such as labels or scores. ``"group"``:
            features on the group, ``[N, C, |H|, h, w]``, or without a map ``[N, C, |H|]``; on a group of one
            element the axis of the group may be missing. ``"vector"``: channels 2i and 2i + 1 of
            ``[N, C, h, w]`` are the row and column components of a vector field, which turn with it:
            L_S[v](y) = S v(S⁻¹y); or of a vector, ``[N, C]``. ``"attention"``: the weights α that a layer
            returns with ``need_weights=True``, ``[N, heads, |H|, k, k, h, w]``, on z2 without the group:
            their window turns too. ``"sequence"``: ``[N, C, L]``, ``"group sequence"``: ``[N, C, |H|, L]``,
            ``"attention sequence"``: ``[N, heads, |H|, k, L]``, on groups that map rows to rows; L is a row.
            ``FeaturesOn(larger)``: features on a larger group, under the elements of ``group``.

    By default tensors of rank 4 are planar, of rank 5 on the group, of rank 7 (on z2 6) attention
    weights, and all others invariant. Elements that do not map the grid to itself interpolate features; of
    integers and booleans, such as labels, they take the nearest.
    """
    group = get_group(group)
    if not is_whole(s) or s not in group:
        raise ValueError(f"s: expected an element of {group.name!r}, 0 to {len(group) - 1}; got {s!r}")
    if isinstance(kind, FeaturesOn):
        return transform(x, kind.element(s, group), kind.group, kind.kind)
    if kind is None:
        kind = default_kind(x, group)
    if kind not in get_args(Name):
        raise ValueError(f"kind: expected one of {_names()}, or FeaturesOn(group); got {kind!r}")
    if not fits(x, group, kind):
        shape, such = _shape(kind, group), "features on" if kind.startswith("group") else "features under"
        raise ValueError(
            f"expected {shape} for {kind!r} {such} group {group.name!r}; got shape {list(x.shape)}"
        )
    if kind in SEQUENCES:
        return _on_one_row(x, s, group, kind)
    return _transformed(x, s, group, kind)


def _transformed(x: Tensor, s: int, group: Group, kind: Name) -> Tensor:
    if kind == "invariant":
        return x
    if kind == "vector":
        return turned_vectors(group.act_planar(x, s) if x.dim() == 4 else x, group.matrices[s])
    if kind == "attention":
        x = group.act_planar(x.movedim((-4, -3), (-2, -1)), s).movedim((-2, -1), (-4, -3))  # the window
    if x.dim() > 3 or kind == "pixels":
        x = group.act_planar(x, s)
    if (kind == "group" and x.dim() in (3, 5)) or (kind == "attention" and x.dim() == 7):
        x = x.index_select(2, torch.tensor(group.quotient[s], device=x.device))
    return x


def turned_vectors(x: Tensor, matrix: Matrix) -> Tensor:
    """Where channels 2i and 2i + 1 are the row and column components of vectors: each vector turned."""
    (a, b), (c, d) = matrix
    rows, columns = x[:, ::2], x[:, 1::2]
    return torch.stack([a * rows + b * columns, c * rows + d * columns], 2).flatten(1, 2)


def _on_one_row(x: Tensor, s: int, group: Group, kind: Name) -> Tensor:
    """Sequences as maps of one row, and their windows as windows of one row."""
    if kind == "attention sequence":  # [N, heads, (|H|,) 1, k, 1, L]
        return _transformed(x.unsqueeze(-2).unsqueeze(-4), s, group, "attention").squeeze(-4).squeeze(-2)
    on_group = kind == "group sequence" and x.dim() == 4
    return _transformed(x.unsqueeze(-2), s, group, "group" if on_group else "planar").squeeze(-2)


def default_kind(x: Tensor, group: Group, *, sequences: bool = False) -> Name:
    """The default kind of a tensor of this rank."""
    by_rank: dict[int, Name] = {4: "planar", 5: "group", 6: "attention", 7: "attention"}
    if sequences and len(group) == 1:
        by_rank = {3: "sequence", 4: "attention sequence"}
    elif sequences:
        by_rank = {3: "sequence", 4: "group sequence", 5: "attention sequence"}
    kind = by_rank.get(x.dim(), "invariant")
    return kind if not kind.startswith("attention") or fits(x, group, kind) else "invariant"


def fits(x: Tensor, group: Group, kind: Name) -> bool:
    """Whether a tensor has a shape of this kind, and the group acts on it."""
    rank, order = x.dim(), len(group)
    if kind == "invariant":
        return True
    if kind in SEQUENCES and not group.keeps_axes:
        return False
    if kind == "vector":
        return rank in (2, 4) and x.shape[1] % 2 == 0
    if kind in ("planar", "pixels", "sequence"):
        return rank == (4 if kind == "planar" else 3)
    ranks = {"group": (3, 5), "group sequence": (4,), "attention": (7,), "attention sequence": (5,)}[kind]
    if kind == "attention" and rank > 5 and x.shape[-4] != x.shape[-3] and not group.keeps_axes:
        return False  # windows that are not square do not turn
    without = order == 1 and rank + 1 in ranks  # on z2 features have no axis of the group
    return without or (rank in ranks and x.shape[2] == order)


def _shape(kind: Name, group: Group) -> str:
    axis = "" if len(group) == 1 else f"{len(group)}, "
    pooled = "[N, C]" if len(group) == 1 else f"[N, C, {len(group)}]"
    shapes = {
        "planar": "[N, C, h, w]",
        "pixels": "[N, h, w]",
        "group": f"[N, C, {axis}h, w] or {pooled}",
        "vector": "[N, C, h, w] or [N, C], with two channels for each vector,",
        "attention": f"[N, heads, {axis}k, k, h, w]",
        "sequence": "[N, C, L]",
        "group sequence": f"[N, C, {axis}L]",
        "attention sequence": f"[N, heads, {axis}k, L]",
    }
    rows = " and a group that maps rows to rows" if kind in SEQUENCES and not group.keeps_axes else ""
    return shapes[kind] + rows


def _names() -> str:
    return ", ".join(map(repr, get_args(Name)))


def is_sequence(kind: Kind | None) -> bool:
    return (kind.kind if isinstance(kind, FeaturesOn) else kind) in SEQUENCES


def check_kinds(name: str, kinds: Kind | Sequence[Kind] | None, number: int) -> list[Kind | None]:
    """One kind per tensor: as given, one for all, or None, which leaves the choice to the rank."""
    found = list(kinds) if isinstance(kinds, list | tuple) else [kinds] * number
    if any(not isinstance(kind, FeaturesOn) and kind not in (None, *get_args(Name)) for kind in found):
        raise ValueError(f"{name}: expected some of {_names()}, or FeaturesOn(group); got {kinds!r}")
    if len(found) != number:
        raise ValueError(f"{name}: expected a kind for each of {number} tensors; got {kinds!r}")
    return found  # type: ignore[return-value]


def as_tuple(x: Any) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)
