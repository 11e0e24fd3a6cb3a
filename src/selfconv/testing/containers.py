"""Containers of tensors, as flat lists and back: those of torch, dataclasses, and any mapping or sequence."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_map

DEPTH = 8  # of objects within objects, in which tensors are looked for


class Opened:
    """A container that torch does not know, with its values by name."""

    def __init__(self, original: Any, names: list[Any], values: list[Any]) -> None:
        self.original, self.names, self.values = original, names, values


def _close(values: Any, context: tuple[Any, list[Any]]) -> Any:
    """The container with other values; as it was, if it cannot be made from values."""
    original, names = context
    values = list(values)
    try:
        if isinstance(original, Mapping):
            return _with_items(original, dict(zip(names, values, strict=True)))
        if dataclasses.is_dataclass(original):
            closed = copy.copy(original)
            for name, value in zip(names, values, strict=True):
                object.__setattr__(closed, name, value)
            return closed
        return type(original)(values)
    except Exception:  # whatever a constructor raises
        return original


def _with_items(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        closed = type(original)(items)  # type: ignore[call-arg]
        if [*closed] == [*items]:
            return closed
    except Exception:  # it takes other arguments
        pass
    closed = copy.deepcopy(original)
    for name, value in items.items():
        closed[name] = value  # type: ignore[index]
    return closed


register_pytree_node(Opened, lambda o: (o.values, (o.original, o.names)), _close)


def opened(tree: Any) -> Any:
    """With every container of tensors in a form that torch's functions for trees know."""
    return tree_map(_open, tree)


def _open(leaf: Any) -> Any:
    items = _items(leaf)
    if not items or not holds_tensors(leaf):
        return leaf
    return Opened(leaf, list(items), [opened(value) for value in items.values()])


def _items(leaf: Any) -> dict[Any, Any]:
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | nn.Module):
        return {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
    if isinstance(leaf, Sequence) and not isinstance(leaf, str | bytes):
        return dict(enumerate(leaf))
    return {}


def names_of(spec: TreeSpec, name: str = "") -> list[str]:
    """A name for each leaf, of the keys and indices that lead to it."""
    if spec.is_leaf():
        return [name]
    labels: Sequence[Any] = range(spec.num_children)
    if spec.type in (dict, OrderedDict):
        labels = spec.context
    elif spec.type is defaultdict or spec.type is Opened:
        labels = spec.context[1]
    pairs = zip(labels, spec.children(), strict=True)
    return [found for label, child in pairs for found in names_of(child, f"{name}[{label!r}]")]


def holds_tensors(given: Any, depth: int = DEPTH) -> bool:
    """Whether there are tensors or arrays in an object, or may be: an iterator shows its values once."""
    if isinstance(given, Tensor | np.ndarray | Iterator):
        return True
    if depth == 0 or isinstance(given, str | bytes | type | nn.Module) or callable(given):
        return False
    if isinstance(given, Mapping):
        return any(holds_tensors(value, depth - 1) for value in given.values())
    if isinstance(given, Sequence | Set):
        return any(holds_tensors(value, depth - 1) for value in given)
    slots = [name for base in type(given).__mro__ for name in _slots(base)]
    values = [*getattr(given, "__dict__", {}).values(), *(getattr(given, name, None) for name in slots)]
    return any(holds_tensors(value, depth - 1) for value in values)


def _slots(base: type) -> list[str]:
    slots = base.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)
