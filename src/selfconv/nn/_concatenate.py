"""Features side by side in the channels, for skip connections."""

from __future__ import annotations

import torch
from torch import Tensor

from selfconv.groups import Group, get_group
from selfconv.nn._layout import in_memory_of


def concatenate(*features: Tensor, group: str | Group = "z2") -> Tensor:
    """Concatenates features along their channels: ``torch.cat`` with a check, and for planar maps too.

    Planar maps ``[N, C, h, w]``, such as the image itself, are repeated on every plane of the group, which is
    equivariant: what does not depend on R is the same for every R.

    Args:
        features: ``[N, C_i, |H|, h, w]`` or ``[N, C_i, h, w]``, of one batch and one size.

    Returns:
        ``[N, Σ C_i, |H|, h, w]``; on z2 without the group axis.
    """
    group = get_group(group)
    order = len(group)
    expected = "[N, C, h, w]" if order == 1 else f"[N, C, {order}, h, w] or [N, C, h, w]"
    for x in features:
        if not isinstance(x, Tensor):
            kinds = ", ".join(type(x).__name__ for x in features)
            raise TypeError(f"concatenate expects tensors as arguments, concatenate(a, b); got {kinds}")
        on_group = order > 1 and x.dim() == 5 and x.shape[2] == order
        if not (x.dim() == 4 or on_group):
            raise ValueError(
                f"concatenate on group {group.name!r} expects {expected}; got {_shapes(features)}"
            )
    sizes = [(x.shape[0], x.shape[-2], x.shape[-1]) for x in features]
    if not sizes or any(size != sizes[0] for size in sizes):  # no set: exports trace sizes that have no hash
        raise ValueError(f"concatenate expects maps of one batch and size; got {_shapes(features)}")
    if order > 1:
        features = tuple(
            x if x.dim() == 5 else x.unsqueeze(2).expand(-1, -1, order, -1, -1) for x in features
        )
    return in_memory_of(features[0], torch.cat(features, 1))


def _shapes(features: tuple[Tensor, ...]) -> str:
    return f"shapes {', '.join(str(list(x.shape)) for x in features)}" if features else "nothing"
