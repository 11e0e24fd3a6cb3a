"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from selfconv._text import escape_for_terminal


@contextmanager
def progress(title: str, total: int, unit: Literal["bytes", "images"]) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how much is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    console = Console(stderr=True)
    if not console.is_terminal:  # before 14.3 of rich even a disabled bar ends with an empty line
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape_for_terminal(title), total=total)
        yield lambda done: bar.update(task, completed=done)
