"""What commands show: tables on stdout, progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selfconv._text import HalfMinute


@contextmanager
def progress(title: str, *, hidden: bool = False) -> Iterator[Callable[[float, str], None] | None]:
    """Yields a function (fraction, text) that shows progress: a bar on a terminal, elsewhere a line each half
    minute.

    Args:
        hidden: no bar, because results are printed to the terminal.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        say = HalfMinute()
        yield lambda fraction, text: say(f"{fraction:.0%}: {text}")
        return
    if hidden:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda fraction, text: bar.update(task, completed=fraction, description=text)


def print_table(table: Any) -> None:
    """Prints a table as wide as the terminal, or 120 columns wide if the output is not one."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(table)
