"""How features inside a network may transform when the caller did not name their kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfconv.groups import Group, get_group
from selfconv.testing.kinds import FeaturesOn, Kind, Name, default_kind, fits, is_sequence, transform


@dataclass(frozen=True)
class Actions:
    """How features inside a network may transform under a group.

    ``larger`` are groups that contain the group, of layers and of features that the caller named, as before a
    restriction.
    """

    group: Group
    larger: tuple[Group, ...] = ()
    sequences: bool = False  # or else maps

    @classmethod
    def of(cls, model: nn.Module, group: Group, declared: Iterable[Kind | None]) -> Actions:
        declared = list(declared)
        named = [get_group(kind.group) for kind in declared if isinstance(kind, FeaturesOn)]
        groups = [*named, *(getattr(layer, "group", None) for layer in model.modules())]
        larger = {
            g: None
            for g in groups
            if isinstance(g, Group) and g != group
            if all(g.index(matrix) is not None for matrix in group.matrices)
        }
        return cls(group, tuple(larger), any(map(is_sequence, declared)))

    @property
    def axes(self) -> int:
        """The number of trailing spatial axes: 2 of maps, 1 of sequences."""
        return 1 if self.sequences else 2

    @property
    def _on_group(self) -> Name:
        return "group sequence" if self.sequences else "group"

    @property
    def _attention(self) -> Name:
        return "attention sequence" if self.sequences else "attention"

    def on_group(self, x: Tensor) -> bool:
        return x.dim() == 3 + self.axes and any(x.shape[2] == len(g) for g in (self.group, *self.larger))

    def output(self, y: Tensor, s: int, kind: Kind | None) -> Tensor:
        """L_S[y] for an output, of the kind that the caller named, or else by its rank and the groups."""
        if kind is not None:
            return transform(y, s, self.group, kind)
        if len(self.group) == 1:
            return y
        default = default_kind(y, self.group, sequences=self.sequences)
        known = default != "invariant" and fits(y, self.group, default)
        if not known and y.dim() >= 3 + self.axes:
            larger = self._on_larger(y, s, self._on_group) or self._on_larger(y, s, self._attention)
            if larger:
                return larger[0]
        if not fits(y, self.group, default):
            return self._plain(y, s)  # the group has no axis: the last axes are a map or a row
        return transform(y, s, self.group, default)

    def candidates(self, x: Tensor, s: int, field_type: Any = None) -> list[Tensor]:
        """What L_S[x] may be, the usual first.

        Args:
            field_type: of x as a geometric tensor of escnn, which says what it is.
        """
        if len(self.group) == 1:
            return [x]
        if field_type is not None and (field := self._field(x, s, field_type)) is not None:
            return [field]
        weights = fits(x, self.group, self._attention)
        found = [transform(x, s, self.group, self._attention)] if weights else []
        found += self._on_larger(x, s, self._attention)
        found += [x] if x.dim() < 2 + self.axes else self._maps(x, s)
        kinds: tuple[Name, ...] = () if self.sequences else ("pixels", "vector", "group")
        fitting = (kind for kind in kinds if x.dim() < 5 and fits(x, self.group, kind))
        return found + [transform(x, s, self.group, kind) for kind in fitting]

    def _maps(self, x: Tensor, s: int) -> list[Tensor]:
        group = self.group
        if self.on_group(x):
            own = [transform(x, s, group, self._on_group)] if fits(x, group, self._on_group) else []
            return own + self._on_larger(x, s, self._on_group)
        if self.sequences:
            return [self._plain(x, s), x]
        candidates = [self._plain(x, s)]
        # channels and images may have the group's axis folded into them
        for axis in (0, 1) if x.dim() == 4 else ():
            if x.shape[axis] % len(group) == 0:
                for inner in (True, False):
                    folded = x.unflatten(axis, (-1, len(group)) if inner else (len(group), -1))
                    turned = group.act(folded.movedim(axis + inner, 2), s).movedim(2, axis + inner)
                    candidates.append(turned.flatten(axis, axis + 1))
        return candidates

    def _plain(self, x: Tensor, s: int) -> Tensor:
        """The last axes as a map or a row, whatever is before them."""
        if not self.sequences:
            return self.group.act_planar(x, s)
        return self.group.act_planar(x.unsqueeze(-2), s).squeeze(-2)

    def _field(self, x: Tensor, s: int, field_type: Any) -> Tensor | None:
        """By the representations of escnn's fields; None if their group does not contain the element."""
        space = field_type.gspace
        for element in space.fibergroup.elements or ():
            (a, b), (c, d) = space.basespace_action(element).tolist()  # moves (x, y), y upwards
            if self.group.index(((d, -c), (-b, a))) == s and x.dim() == 4:
                blocks = [torch.as_tensor(r(element)).to(x) for r in field_type.representations]
                fibers = torch.block_diag(*blocks)
                return torch.einsum("oc,nchw->nohw", fibers, self.group.act_planar(x, s))
        return None

    def _on_larger(self, x: Tensor, s: int, kind: Name) -> list[Tensor]:
        fitting = (g for g in self.larger if fits(x, g, kind))
        return [transform(x, s, self.group, FeaturesOn(g, kind)) for g in fitting]
