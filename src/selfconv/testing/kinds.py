"""How features transform: what their rank says, or what the caller says that they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from selfconv.groups import Group, get_group

Kind = Literal["invariant", "planar", "group", "vector"]
RANKS = {"planar": (4,), "group": (3, 5), "vector": (2, 4)}


def transform(x: Tensor, s: int, group: str | Group, kind: Kind | None = None) -> Tensor:
    """L_S[x], for features of a kind; by default that of their rank.

    Args:
        kind: ``"invariant"``: unchanged. ``"planar"``: each channel of ``[N, C, h, w]`` turns as an image
            does. ``"group"``: features on the group, ``[N, C, |H|, h, w]``, or without a map ``[N, C, |H|]``.
            ``"vector"``: channels 2i and 2i + 1 of ``[N, C, h, w]`` are the row and column components of a
            vector field, which turn with it: L_S[v](y) = S v(S⁻¹y); or of a vector, ``[N, C]``.
    """
    group = get_group(group)
    if kind is None:
        kind = "group" if x.dim() == 5 else "planar" if x.dim() == 4 else "invariant"
    if kind == "invariant":
        return x
    if x.dim() not in RANKS[kind] or (kind == "vector" and x.shape[1] % 2):
        shapes = {"planar": "[N, C, h, w]", "group": f"[N, C, {len(group)}, (h, w)]"}
        shape = shapes.get(kind, "[N, C, (h, w)], with two channels for each vector,")
        raise ValueError(f"expected {shape} for {kind!r} features; got shape {list(x.shape)}")
    if kind == "vector":
        (a, b), (c, d) = group.matrices[s]
        moved = group.act_planar(x, s) if x.dim() == 4 else x
        rows, columns = moved[:, ::2], moved[:, 1::2]
        return torch.stack([a * rows + b * columns, c * rows + d * columns], 2).flatten(1, 2)
    if kind == "group" and x.dim() == 3:
        return x.index_select(2, torch.tensor(group.quotient[s], device=x.device))
    return group.act(x, s) if kind == "group" else group.act_planar(x, s)


def check_kinds(name: str, kinds: Kind | Sequence[Kind] | None, number: int) -> list[Kind | None]:
    """A kind for each of so many tensors: as given, one for all, or None."""
    found = list(kinds) if isinstance(kinds, list | tuple) else [kinds] * number
    if any(kind not in (None, *get_args(Kind)) for kind in found):
        expected = ", ".join(map(repr, get_args(Kind)))
        raise ValueError(f"{name}: expected some of {expected}; got {kinds!r}")
    if len(found) != number:
        raise ValueError(f"{name}: expected a kind for each of {number} tensors; got {kinds!r}")
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class Actions:
    """How features inside a network may transform under a group.

    ``larger`` are groups of its layers that contain the group, as before a restriction; ``declared`` the
    kinds that the caller named for the network's inputs and outputs.
    """

    group: Group
    larger: tuple[Group, ...] = ()
    declared: frozenset[Kind] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, group: Group, declared: Iterable[Kind | None]) -> Actions:
        groups = [g for g in (getattr(layer, "group", None) for layer in model.modules()) if g != group]
        larger = {
            g: None
            for g in groups
            if isinstance(g, Group) and all(g.index(matrix) is not None for matrix in group.matrices)
        }
        return cls(group, tuple(larger), frozenset(kind for kind in declared if kind))

    def on_group(self, x: Tensor) -> bool:
        return x.dim() == 5 and any(x.shape[2] == len(g) for g in (self.group, *self.larger))

    def candidates(self, x: Tensor, s: int) -> list[Tensor]:
        """What L_S[x] may be, the usual first."""
        if len(self.group) == 1:
            return [x]
        declared = [
            transform(x, s, self.group, kind)
            for kind in sorted(self.declared & {"vector", "group"})
            if x.dim() in RANKS[kind] and x.dim() != 5
            if (x.shape[2] == len(self.group) if kind == "group" else x.shape[1] % 2 == 0)
        ]
        if x.dim() < 4:
            return [x, *declared]
        return [*self._maps(x, s), *declared]

    def _maps(self, x: Tensor, s: int) -> list[Tensor]:
        group = self.group
        if self.on_group(x):
            return [g.act(x, self._element(g, s)) for g in (group, *self.larger) if x.shape[2] == len(g)]
        candidates = [group.act_planar(x, s)]
        # channels and images may have the group's axis folded into them
        for axis in (0, 1) if x.dim() == 4 else ():
            if x.shape[axis] % len(group) == 0:
                for inner in (True, False):
                    folded = x.unflatten(axis, (-1, len(group)) if inner else (len(group), -1))
                    turned = group.act(folded.movedim(axis + inner, 2), s).movedim(2, axis + inner)
                    candidates.append(turned.flatten(axis, axis + 1))
        return candidates

    def _element(self, larger: Group, s: int) -> int:
        found = larger.index(self.group.matrices[s])
        assert found is not None
        return found


def as_tuple(x: Any) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)
