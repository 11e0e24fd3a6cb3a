"""The tensors in what a model or a layer takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from selfconv.testing.kinds import Kind, check_kinds


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
    leaves, spec = tree_flatten(tree)
    fields = {i: leaf for i, leaf in enumerate(leaves) if _is_field(leaf)}
    return [leaf.tensor if i in fields else leaf for i, leaf in enumerate(leaves)], Nesting(spec, fields)


def _is_field(leaf: Any) -> bool:
    """By its attributes: escnn need not be installed."""
    has_type = hasattr(getattr(leaf, "type", None), "representations")
    return has_type and isinstance(getattr(leaf, "tensor", None), Tensor)


def own(inputs: Sequence[Any]) -> list[Any]:
    """Copies of a module's inputs, for one run: it may work in place."""
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def outputs_of(module: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """What a module returns, as ``judgeable`` says; its inputs stay as they are."""
    return judgeable(flatten(module(*own(inputs)))[0])


def judgeable(leaves: Sequence[Any]) -> list[Any]:
    """The tensors and numbers that a model returns, without None and other objects."""
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor | bool | int | float | complex)]
    if not any(isinstance(leaf, Tensor) for leaf in found):
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves)
        raise ValueError(f"expected a model that returns a tensor to compare; got {kinds or 'nothing'}")
    return found


def as_tensor(leaf: Any) -> Tensor:
    """What ``judgeable`` returns, as a tensor."""
    return torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else torch.as_tensor(leaf)


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether tensors and numbers that a model returned are equal, bit for bit."""
    return len(a) == len(b) and all(map(torch.equal, map(as_tensor, a), map(as_tensor, b)))


def output_kinds(outputs: Kind | Sequence[Kind] | None, leaves: Sequence[Any]) -> list[Kind | None]:
    """The kinds that the caller named for tensors; numbers are invariant."""
    named = iter(check_kinds("outputs", outputs, sum(isinstance(leaf, Tensor) for leaf in leaves)))
    return [next(named) if isinstance(leaf, Tensor) else "invariant" for leaf in leaves]
