"""The machine's memory: its size, and a caching allocator, which speeds up training on a CPU most."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters, from malloc.h
_LARGEST = 1 << 30


def keep_memory() -> bool:
    """Makes glibc's malloc a caching allocator: freed memory is not returned to the system.

    Each training step allocates the same large tensors again. Memory that was returned must be mapped and
    zeroed page by page at every step, about a third of its time. Returns True on Linux with glibc.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    never = -1
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, never))


def machine_memory() -> float:
    """Bytes of memory, as far as the system tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return float("inf")
