"""Text for a terminal: names from outside, errors, durations, counts, and a progress bar."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

LONGEST = 2000  # characters of a message
QUIET_SECONDS = 30.0  # between lines on progress where there is no terminal to draw a bar on


def escape_for_terminal(text: object) -> str:
    """Text as one line without effect on a terminal: control characters and invalid bytes are escaped."""
    line = str(text)
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in line
    )


def in_utf8(name: str) -> str:
    """The name of a file as text: a byte that is not UTF-8 is written as ``\\udcff``.

    Backslashes in such a name, or in one that looks like it, are doubled, so that no two names are alike.
    """
    if "\\udc" not in (text := name.encode("utf-8", "backslashreplace").decode()):
        return text
    return name.replace("\\", r"\\").encode("utf-8", "backslashreplace").decode()


def nfc(name: str) -> str:
    """A name in the usual spelling of Unicode: é may be one character or two, and is one name."""
    return unicodedata.normalize("NFC", name)


def one_line(error: BaseException) -> str:
    """The message of an error in one line."""
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def format_duration(seconds: float) -> str:
    """Seconds as text, in a fitting unit: ``3.5 min``."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def format_bytes(number: float) -> str:
    scale, unit = (1e9, "GB") if number >= 1e8 else (1e6, "MB") if number >= 1e5 else (1e3, "kB")
    return f"{number / scale:.1f} {unit}"


def count(number: int, word: str) -> str:
    """A number of things: ``1 run``, ``2 runs``."""
    return f"{number:,} {word}" + "s" * (number != 1)


class HalfMinute:
    """Prints a line on stderr, unless one was printed in the last half minute; the first after that time."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last >= QUIET_SECONDS:
            self._last = time.monotonic()
            print(escape_for_terminal(text), file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: int, unit: Literal["bytes", "images"]) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if that is a terminal, and otherwise a line every half minute.

    Yields a function that takes how much is done.
    """
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
        line = HalfMinute()
        yield lambda done: line(f"{title}: {done} of {total} {unit} ({done / max(1, total):.0%})")
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape_for_terminal(title), total=total)
        yield lambda done: bar.update(task, completed=done)
