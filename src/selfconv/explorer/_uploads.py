"""Image files that somebody uploads: never trusted, checked by their header before anything is decoded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from selfconv._files import parse_json
from selfconv.data import DataError, read_image

MAX_BYTES = 16 * 2**20
MAX_PIXELS = 40_000_000  # fewer than of one's own files
PATIENCE = 60.0  # seconds in which an upload must be used
MOST = 8  # uploads that may wait to be used


def read_upload(path: Path, size: int, channels: int) -> np.ndarray:
    """An uploaded file as uint8 ``[channels, size, size]``: the shorter side resized, the centre cut out.

    Raises:
        DataError: too large, not an image, or damaged; the line names the file, without its folder.
    """
    length = path.stat().st_size
    if length > MAX_BYTES:
        raise DataError(f"{path.name}: expected up to {MAX_BYTES >> 20} MB; got {length / 2**20:.1f} MB")
    try:
        return read_image(path, size, channels, max_pixels=MAX_PIXELS).numpy()
    except DataError as error:
        raise DataError(str(error).replace(str(path), path.name)) from None


class Uploads:
    """The folder that uploads are kept in, by gradio, which removes none of them.

    An upload that was refused is removed at once, one that a call has named when the call is answered, and
    one that nobody uses after ``PATIENCE`` seconds, or when more than ``MOST`` wait.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: dict[Path, float] = {}  # since when
        self._busy = 0  # requests that may be writing files

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request is answered that may write files."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self.sweep()

    def arrived(self, answer: bytes) -> None:
        """Notes the files that gradio's answer to an upload names."""
        try:
            named = [Path(path) for path in parse_json(answer)]
        except (ValueError, TypeError):  # refused: it names none
            return
        now = time.monotonic()
        self._waiting |= dict.fromkeys((path for path in named if path.is_file()), now)
        asyncio.get_running_loop().call_later(PATIENCE, self.sweep)

    def answered(self, call: bytes) -> None:
        """Forgets the files that a call has named, whatever came of it."""
        self._waiting = {
            path: since
            for path, since in self._waiting.items()
            if path.parent.name.encode() not in call  # the digest of its content
        }

    def sweep(self) -> None:
        """Removes what waits for nobody; files that may still be written only when no request is busy."""
        now, before = time.monotonic(), self._waiting
        recent = [(path, since) for path, since in before.items() if now - since < PATIENCE]
        self._waiting = dict(recent[-MOST:])
        files = self.folder.rglob("*") if not self._busy else iter(before)
        for path in [path for path in files if path not in self._waiting and not path.is_dir()]:
            path.unlink(missing_ok=True)
            if path.parent != self.folder:
                with suppress(OSError):  # others are in it
                    path.parent.rmdir()
