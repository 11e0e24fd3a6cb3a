"""The window of the operation: which neighbours y a position x has, and what is outside the image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, assert_never, get_args

from selfconv._arguments import is_whole
from selfconv.groups import Group

PaddingMode = Literal["zeros", "circular", "exclude"]
PADDING_MODES: tuple[str, ...] = get_args(PaddingMode)
Pair = tuple[int, int]  # rows, columns


@dataclass(frozen=True)
class Window:
    """Offsets t = dilation · (i, j) around the centre, with odd numbers of rows i and columns j.

    ``padding_mode`` is what a neighbour outside the image is: ``"zeros"``, features of 0, to which β is still
    added; ``"circular"``, the pixel on the opposite side; ``"exclude"``, not part of the softmax.
    """

    size: Pair
    dilation: Pair = (1, 1)
    padding_mode: PaddingMode = "zeros"

    @property
    def taps(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def reach(self) -> Pair:
        """The largest offset in rows and in columns."""
        return self.dilation[0] * (self.size[0] // 2), self.dilation[1] * (self.size[1] // 2)

    def fitted_to(self, size: Pair) -> Window:
        """The window with the same neighbours on maps of ``size``, and the smallest dilation that has them.

        With a dilation of n, all neighbours in an axis of n pixels but the centre are outside; a circular
        image repeats after n pixels. Memory and time depend on how far the window reaches.
        """
        pairs = [(d, max(n, 1)) for d, n in zip(self.dilation, size, strict=True)]
        match self.padding_mode:
            case "zeros" | "exclude":
                rows, columns = (min(d, n) for d, n in pairs)
            case "circular":
                rows, columns = (d % n or n for d, n in pairs)
            case _:
                assert_never(self.padding_mode)
        return self if (rows, columns) == self.dilation else replace(self, dilation=(rows, columns))


def make_window(
    kernel_size: int | Pair, dilation: int | Pair, padding_mode: str, group: Group, module: str = ""
) -> Window:
    """The checked window; each error restates what was given, after the name of the ``module`` if any."""
    where = f"{module}: " if module else ""
    size, steps = pair(kernel_size), pair(dilation)
    if size is None or min(size) < 1 or any(k % 2 == 0 for k in size):
        raise ValueError(
            f"{where}kernel_size: expected an odd integer ≥ 1, or two, (rows, columns); got {kernel_size!r}"
        )
    if steps is None or min(steps) < 1:
        raise ValueError(
            f"{where}dilation: expected an integer ≥ 1, or two, (rows, columns); got {dilation!r}"
        )
    if padding_mode not in PADDING_MODES:
        expected = ", ".join(map(repr, PADDING_MODES))
        raise ValueError(f"{where}padding_mode: expected one of {expected}; got {padding_mode!r}")
    if (size[0] != size[1] or steps[0] != steps[1]) and not group.keeps_axes:
        raise ValueError(
            f"{where}group {group.name!r} turns rows into columns: expected a square window and one "
            f"dilation; got kernel_size={kernel_size!r}, dilation={dilation!r}"
        )
    return Window(size, steps, padding_mode)  # type: ignore[arg-type]


def pair(value: Any) -> Pair | None:
    """(rows, columns) of one integer or two; None for anything else."""
    if type(value) is int:
        return value, value
    rows, columns = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    return (int(rows), int(columns)) if is_whole(rows) and is_whole(columns) else None
