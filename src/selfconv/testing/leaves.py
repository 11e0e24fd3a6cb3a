"""The tensors in what a model or a layer takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from selfconv.testing.containers import holds_tensors, names_of, opened
from selfconv.testing.kinds import Kind, check_kinds


class Leaves(list[Any]):
    """What a model returns, as a flat list, with the name of each value in its container."""

    def __init__(self, values: Iterable[Any], names: Iterable[str]) -> None:
        super().__init__(values)
        self.names = list(names)


@dataclass(frozen=True)
class Nesting:
    """How a flat list of tensors and other objects was nested.

    ``fields`` are the geometric tensors of escnn by their place in the list, where each has its tensor.
    """

    spec: TreeSpec
    fields: dict[int, Any]

    def nested(self, leaves: Sequence[Any]) -> Any:
        """The inverse of ``flatten``, for other leaves too."""
        leaves = list(leaves)
        for i, field in self.fields.items():
            leaves[i] = type(field)(leaves[i], field.type)
        return tree_unflatten(leaves, self.spec)


def flatten(tree: Any) -> tuple[list[Any], Nesting]:
    leaves, spec = tree_flatten(opened(tree))
    fields = {i: leaf for i, leaf in enumerate(leaves) if _is_field(leaf)}
    return [leaf.tensor if i in fields else leaf for i, leaf in enumerate(leaves)], Nesting(spec, fields)


def flat(tree: Any) -> Leaves:
    leaves, nesting = flatten(tree)
    return Leaves(leaves, names_of(nesting.spec))


def _is_field(leaf: Any) -> bool:
    """By its attributes: escnn need not be installed."""
    has_type = hasattr(getattr(leaf, "type", None), "representations")
    return has_type and isinstance(getattr(leaf, "tensor", None), Tensor)


def own(inputs: Sequence[Any]) -> list[Any]:
    """Copies of a module's inputs, for one run: it may work in place."""
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def outputs_of(module: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """What a module returns, as ``judgeable`` says; its inputs stay as they are."""
    return judgeable(flat(module(*own(inputs))))


def judgeable(leaves: Sequence[Any]) -> list[Any]:
    """The tensors and numbers that a model returns, without None and other objects, but not without those
    that hold tensors."""
    numbers = Tensor | bool | int | float | complex
    found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, numbers)]
    hidden = [leaf for leaf in leaves if not isinstance(leaf, numbers) and holds_tensors(leaf)]
    if hidden:
        raise ValueError(
            "expected tensors in tuples, lists, mappings and dataclasses; got "
            f"{type(hidden[0]).__name__}, whose values would not be compared"
        )
    check_dense(leaves)
    if any(isinstance(leaf, Tensor) and leaf.is_quantized for leaf in leaves):
        raise ValueError("expected tensors of numbers; got a quantized one")
    if not any(isinstance(leaves[i], Tensor) for i in found):
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves)
        raise ValueError(f"expected a model that returns a tensor to compare; got {kinds or 'nothing'}")
    names = leaves.names if isinstance(leaves, Leaves) else list(map(str, range(len(leaves))))
    return Leaves((leaves[i] for i in found), (names[i] for i in found))


def check_dense(leaves: Sequence[Any]) -> None:
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        raise ValueError("expected dense tensors; got a nested one")
    layouts = [leaf.layout for leaf in leaves if isinstance(leaf, Tensor)]
    other = [layout for layout in layouts if layout not in (torch.strided, torch._mkldnn)]  # type: ignore[attr-defined]
    if other:
        raise ValueError(f"expected dense tensors; got one of layout {other[0]}")


def aligned(leaves: Sequence[Any], like: Sequence[Any]) -> list[Any] | None:
    """What a model returned, in the order of another run; None if its containers have other keys or sizes."""
    if not isinstance(leaves, Leaves) or not isinstance(like, Leaves):
        return list(leaves) if len(leaves) == len(like) else None
    if leaves.names == like.names:
        return leaves
    if sorted(leaves.names) != sorted(like.names):
        return None
    order = [leaves.names.index(name) for name in like.names]
    return Leaves((leaves[i] for i in order), like.names)


def as_tensor(leaf: Any) -> Tensor:
    """What ``judgeable`` returns, as a tensor."""
    return torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else torch.as_tensor(leaf)


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether tensors and numbers that a model returned are equal, bit for bit."""
    in_order = aligned(a, b)
    return in_order is not None and all(map(torch.equal, map(as_tensor, in_order), map(as_tensor, b)))


def output_kinds(outputs: Kind | Sequence[Kind] | None, leaves: Sequence[Any]) -> list[Kind | None]:
    """The kinds that the caller named for tensors; numbers are invariant."""
    named = iter(check_kinds("outputs", outputs, sum(isinstance(leaf, Tensor) for leaf in leaves)))
    return [next(named) if isinstance(leaf, Tensor) else "invariant" for leaf in leaves]
