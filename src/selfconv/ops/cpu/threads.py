"""Native workers on the threads that torch itself uses.

Torch's operators run on an OpenMP team whose idle threads spin for a while before they sleep. A second
pool beside it would fight those for the cores. So workers run on that same team, through the OpenMP
runtime that torch has loaded; where there is none, on plain Python threads. Either way there are as many
as ``torch.get_num_threads()`` says, and only one in a forked child, where the team did not survive and a
parallel region would wait for it for ever.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

_Worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _has_threads(process: int | str = "self") -> bool:
    """Whether the process has threads besides its first; where there is no /proc to tell, it may have."""
    try:
        return len(os.listdir(f"/proc/{process}/task")) > 1
    except OSError:
        return True


def _forked_before_import() -> bool:
    """Whether this process was forked, without exec, from one that may have had a team.

    The kernel keeps that as a flag. Children of multiprocessing's fork server have it too, and that has no
    threads.
    """
    fork_no_exec = 0x40
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        parent = os.getppid()
        if not int(fields[6]) & fork_no_exec:
            return False
        return b"multiprocessing.forkserver" not in Path(
            f"/proc/{parent}/cmdline"
        ).read_bytes() or _has_threads(parent)
    except FileNotFoundError:  # not Linux
        return False


_team_lost = _forked_before_import()
_had_threads = False


def _before_fork() -> None:
    global _had_threads
    _had_threads = _has_threads()


def _after_fork() -> None:
    global _team_lost
    _team_lost = _team_lost or _had_threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def num_threads() -> int:
    return 1 if _team_lost else torch.get_num_threads()


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
