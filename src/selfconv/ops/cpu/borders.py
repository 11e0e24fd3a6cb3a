"""Circular images for the CPU kernels: maps repeated beyond their border, and the gradients of the copies.

The kernels read keys and values of a circular image as far as the window reaches. Both functions copy the
middle once and the border from there, in the memory order of the features; torch's operators that do the
same copy everything twice, and again for each gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from selfconv.ops._window import Pair

ROWS, COLUMNS = -2, -1


def repeat_border(f: Tensor, reach: Pair) -> Tensor:
    """f [N, C, R, h, w] with ``reach`` more rows and columns on every side, of the image repeated."""
    h, w = f.shape[-2:]
    padded = features_like(f, f.shape[1], (h + 2 * reach[0], w + 2 * reach[1]))
    middle = padded.narrow(ROWS, reach[0], h)
    middle.narrow(COLUMNS, reach[1], w).copy_(f)
    for axis, part, r, n in ((COLUMNS, middle, reach[1], w), (ROWS, padded, reach[0], h)):
        for target, source, length in _copies(n, r):
            part.narrow(axis, target, length).copy_(part.narrow(axis, source, length))
    return padded


def sum_border(gradient: Tensor, reach: Pair, out: Tensor) -> None:
    """The gradient of f, for that of ``repeat_border(f)``, which it overwrites, to ``out``."""
    h, w = out.shape[-2:]
    middle = gradient.narrow(ROWS, reach[0], h)
    for axis, part, r, n in ((ROWS, gradient, reach[0], h), (COLUMNS, middle, reach[1], w)):
        for target, source, length in reversed(list(_copies(n, r))):
            part.narrow(axis, source, length).add_(part.narrow(axis, target, length))
    out.copy_(middle.narrow(COLUMNS, reach[1], w))


def _copies(n: int, reach: int) -> Iterator[tuple[int, int, int]]:
    """The copies that fill both borders of an axis, each as (where to, where from, length).

    The axis holds the image of n numbers between two borders of ``reach``. A border that is longer than the
    image takes several copies, the innermost first: each reads from n further inwards, where the image is or
    what the copy before wrote.
    """
    end = reach + n + reach
    for stop in range(reach, 0, -n):  # the border before the image, in pieces that end at ``stop``
        start = max(stop - n, 0)
        yield start, start + n, stop - start
    for start in range(reach + n, end, n):  # the border behind it, in pieces that begin at ``start``
        yield start, start - n, min(n, end - start)


def features_like(x: Tensor, channels: int, size: Pair, planes: int | None = None) -> Tensor:
    """Unwritten features in the memory order of x: channels innermost, or contiguous."""
    n, planes = x.shape[0], x.shape[2] if planes is None else planes
    if x.stride(1) == 1:
        return x.new_empty(n, *size, planes, channels).permute(0, 4, 3, 1, 2)
    return x.new_empty(n, channels, planes, *size)
