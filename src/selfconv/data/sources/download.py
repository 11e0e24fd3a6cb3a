"""Downloads a file of known size and checksum: resumed if cut off, moved into place when complete."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from filelock import FileLock

from selfconv._text import progress
from selfconv._version import __version__
from selfconv.data.dataset import DataError

ATTEMPTS = 5
PAUSE = 1.0  # seconds before the second attempt; doubled before each further one
TIMEOUT = 30.0  # seconds without a byte


class _CutOffError(Exception):
    """The transfer ended early; another attempt may continue it."""


def download(url: str, path: Path, *, size: int, md5: str) -> None:
    """Fetch ``url`` into ``path``. Processes that want the same file wait for one of them to fetch it.

    What has arrived is kept in ``path`` + ``.part``, from where the next attempt or call continues.

    Raises:
        DataError: the server does not have it, sends something else, or stops sending.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                _download(url, path, size, md5)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def check(path: Path, md5: str) -> str | None:
    """What is wrong with a file's checksum, or None."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return None if found == md5 else f"expected MD5 {md5}; got {found}"


def _download(url: str, path: Path, size: int, md5: str) -> None:
    part = path.with_name(f"{path.name}.part")
    if not sys.stderr.isatty():
        print(f"downloading {url} ({size / 1e6:.1f} MB) to {path}", file=sys.stderr)
    reason = ""
    with progress(path.name, size, unit="bytes") as show:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            before = _length(part)
            try:
                _transfer(url, part, size, show)
            except _CutOffError as error:
                reason = str(error)
                continue
            wrong = check(part, md5)
            if wrong is None:
                os.replace(part, path)
                return
            part.unlink()
            reason = f"wrong checksum: {wrong}"
            if before == 0:  # else the earlier part may be of another file: once more from the start
                raise DataError(f"{url}: {reason}; nothing was kept")
    kept = _length(part)
    rest = f"; {kept / 1e6:.1f} of {size / 1e6:.1f} MB are kept; the next call continues from there"
    raise DataError(f"{url}: download failed after {ATTEMPTS} attempts ({reason}){rest if kept else ''}")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(url: str, part: Path, size: int, show: Callable[[int], None]) -> None:
    """One request: append the missing bytes to the part, or start it again."""
    have = _length(part)
    if have >= size:
        return  # an earlier call ended between the last byte and the checksum
    with _open(url, have, part) as response:
        if response.status != 206:
            have = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink()
            raise _CutOffError("the server resumed at the wrong place")
        if response.length is not None and have + response.length != size:
            raise DataError(f"{url}: expected a file of {size} bytes; got one of {have + response.length}")
        with part.open("ab" if have else "wb") as file:
            show(have)
            while have <= size and (chunk := _read(response)):
                file.write(chunk)
                have += len(chunk)
                show(have)
            file.flush()
            os.fsync(file.fileno())
    if have < size:
        raise _CutOffError("the connection was closed")


def _open(url: str, have: int, part: Path) -> HTTPResponse:
    headers = {"User-Agent": f"selfconv/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        return urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == 416:
            part.unlink(missing_ok=True)
        elif error.code < 500 and error.code not in (408, 429):
            raise DataError(f"{url}: HTTP {error.code} {error.reason}") from error
        raise _CutOffError(f"HTTP {error.code} {error.reason}") from error
    except (HTTPException, OSError) as error:
        raise _CutOffError(str(error.reason if isinstance(error, URLError) else error)) from error


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read1(1 << 18)
    except (HTTPException, OSError) as error:  # retried, unlike errors of writing the file
        raise _CutOffError(str(error)) from error
