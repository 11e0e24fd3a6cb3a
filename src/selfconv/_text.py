"""Text on its way to a terminal: names from elsewhere, errors, durations."""

from __future__ import annotations

LONGEST = 2000  # characters of a message


def escape_for_terminal(text: object) -> str:
    """One line that no terminal obeys: control characters, line ends and broken bytes as escapes."""
    line = str(text)
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in line
    )


def one_line(error: BaseException) -> str:
    """What an error says, in a line."""
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def format_duration(seconds: float) -> str:
    """In the unit that suits it."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
