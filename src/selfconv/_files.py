"""Files that are written whole or not at all, and small JSON files that may come from anywhere."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

JSON_LIMIT = 16_000_000  # bytes; a run's largest JSON file has thousands


def write_atomically(path: Path, content: bytes) -> None:
    """The file holds either what it held before or all of the content, even if the machine stops."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes sure that the names in a folder survive, not only the files."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: object) -> None:
    write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The content of a JSON file; raises ValueError if it is larger than ``limit`` bytes, or not JSON."""
    try:
        text = read_text(path, limit)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON; got something else ({error})") from None


def read_text(path: Path, limit: int = JSON_LIMIT) -> str:
    """The text of a small file; raises ValueError if it is larger than ``limit`` bytes, or not text."""
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"expected at most {limit} bytes of JSON; got {size}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError("expected JSON; got bytes that are no text") from None
