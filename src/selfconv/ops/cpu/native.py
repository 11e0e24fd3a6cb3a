"""Native functions whose machine code is kept on disk where that is possible.

Numba keeps compiled code beside the source, in ``NUMBA_CACHE_DIR``, or in the user's cache folder. That saves
seconds in every process, and is worth no failure: a damaged cache is emptied, and where nothing can be
written the code is compiled anew, after one warning. Concurrent processes share one compilation: the first
compiles, the others wait on its lock.

Numba takes cached code as current if the source file of its function has the same date and size. That would
miss a change in another file, and installers give every file the same date. So kernels close over
``KERNEL_HASH``, a checksum of their sources, and closure values are part of Numba's cache key.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from numba import cfunc
from numba.core.caching import FunctionCache

_SOURCES = ("workers.py", "kernels.py", "tiles.py", "simd.py")
KERNEL_HASH = zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in _SOURCES))
"""A checksum of the sources of all kernels."""


def native(signature: Any, name: str) -> Callable[[Callable[..., None]], Any]:
    """As ``numba.cfunc(signature, cache=True)``; ``name`` tells kernels apart that share their source."""

    def compiled(function: Callable[..., None]) -> Any:
        try:
            with _turn(function, name):
                return cfunc(signature, cache=True)(function)
        except (OSError, RuntimeError):  # there is no folder for the cache, or no space in it
            pass
        except Exception:
            # Cached code that cannot be unpickled may raise anything. If the function itself is at fault, the
            # second attempt raises its error.
            try:
                FunctionCache(function).flush()
                return cfunc(signature, cache=True)(function)
            except OSError:
                pass
        _warn_once()
        return cfunc(signature)(function)

    return compiled


@contextmanager
def _turn(function: Callable[..., None], name: str) -> Iterator[None]:
    """Waits while another process compiles the function, for up to a minute, since that one may hang."""
    with ExitStack() as held:
        folder = Path(FunctionCache(function).cache_path)
        with suppress(OSError, NotImplementedError):  # the folder cannot be written, or not locked
            held.enter_context(FileLock(folder / f"selfconv-{name}.lock", timeout=60))
        yield


@cache
def _warn_once() -> None:
    warnings.warn(
        "selfconv: compiled kernels cannot be kept on disk, so every process compiles them anew; "
        "NUMBA_CACHE_DIR may name a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
