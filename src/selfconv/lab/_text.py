"""Text from elsewhere, such as names of files and classes, on its way to a terminal; and small text files."""

from __future__ import annotations

from pathlib import Path

LONGEST = 2000  # characters of a message
JSON_LIMIT = 16_000_000  # bytes; a run's largest JSON file has thousands


def shown(text: object) -> str:
    """One line that no terminal obeys: control characters, line ends and broken bytes as escapes."""
    line = str(text)
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in line
    )


def read_text(path: Path) -> str:
    """The text of a small file; raises ValueError if it is not small, or no text."""
    size = path.stat().st_size
    if size > JSON_LIMIT:
        raise ValueError(f"expected at most {JSON_LIMIT} bytes of JSON; got {size}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError("expected JSON; got bytes that are no text") from None
