"""Native workers on the threads that torch itself uses.

Torch's operators run on an OpenMP team whose idle threads spin for a while before they sleep. A second
pool beside it would fight those for the cores. So workers run on that same team, through the OpenMP
runtime that torch has loaded; where there is none, on plain Python threads. Either way there are as many
as ``torch.get_num_threads()`` says, and only one in a forked child, where the team did not survive.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

_Worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_process = os.getpid()


def num_threads() -> int:
    return torch.get_num_threads() if os.getpid() == _process else 1


@cache
def _openmp_parallel() -> object | None:
    """``GOMP_parallel(function, data, threads, flags)`` of torch's OpenMP runtime, or None."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="selfconv")


def run_workers(worker: int, arguments: int, threads: int) -> None:
    """Calls the function at address ``worker`` with the address ``arguments``, once on each thread.

    Args:
        worker: a ``void (*)(void *)`` that needs no interpreter.
        threads: at most ``num_threads()``.
    """
    call = _Worker(worker)
    if threads <= 1:
        call(arguments)
    elif (parallel := _openmp_parallel()) is not None:
        parallel(worker, arguments, threads, 0)  # type: ignore[operator]
    else:
        others = [_pool(threads - 1).submit(call, arguments) for _ in range(threads - 1)]
        call(arguments)
        for other in others:
            other.result()
