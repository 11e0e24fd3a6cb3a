"""Memory with a page beside it that nobody may touch, and a process in which to touch it.

A kernel that reads or writes one number too many does not fail by itself: the memory beside a tensor belongs
to the process, and holds what it happens to hold. A fence ends the process, and who asked for it notices.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_before = False  # which side the fence is on: it cannot be on both


def set_fences(*, before: bool) -> None:
    global _before
    _before = before


def unwritten(count: int, dtype: torch.dtype) -> Tensor:
    """``count`` times NaN, and right before or after them memory that no one may touch."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    size = count * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE)
    region = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    fence = start if _before else start + pages * mmap.PAGESIZE
    if _libc.mprotect(fence, mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    place = mmap.PAGESIZE if _before else pages * mmap.PAGESIZE - size
    return torch.frombuffer(region, dtype=dtype, count=count, offset=place).fill_(torch.nan)


def fenced(x: Tensor) -> Tensor:
    """The same numbers in the same strides, and nothing before or after them."""
    if not x.numel():
        return x
    length = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    copy = unwritten(length, x.dtype)
    copy.copy_(x.detach().as_strided((length,), (1,), x.storage_offset()))
    return copy.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad)


def fence_new_tensors() -> None:
    """From now on ``x.new_empty`` and ``x.new_zeros``, by which kernels get memory, give fenced memory."""
    original = torch.Tensor.new_empty

    def new_empty(x: Tensor, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        kind = x.dtype if dtype is None else dtype
        if type(x) is not Tensor or x.device.type != "cpu" or options or not kind.is_floating_point:
            return original(x, shape, dtype=dtype, **options)
        return unwritten(shape.numel(), kind).view(shape)

    def new_zeros(x: Tensor, *size: Any, **options: Any) -> Tensor:
        return new_empty(x, *size, **options).zero_()

    torch.Tensor.new_empty = new_empty  # type: ignore[assignment]
    torch.Tensor.new_zeros = new_zeros  # type: ignore[assignment]


class Child:
    """Another process that calls functions; one that dies of it fails with what it was called for."""

    def __init__(self, setup: Callable[[], None], timeout: float = 300) -> None:
        self.setup, self._timeout = setup, timeout
        self._process: Any = None

    def __call__(self, function: Callable[[Any], None], case: Any) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self.setup), daemon=True)
            self._process.start()
            theirs.close()
        self._connection.send((function, case))
        try:
            if not self._connection.poll(self._timeout):
                raise EOFError
            error = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"{self._end()} in {function.__name__}({case!r})") from None
        if error is not None:
            raise AssertionError(error)

    def _end(self) -> str:
        self._process.join(1)
        code = self._process.exitcode
        self.close()
        if code is None:
            return f"no answer within {self._timeout} s"
        return f"the process died of {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(connection: Connection, setup: Callable[[], None]) -> None:
    setup()
    while True:
        try:
            function, case = connection.recv()
        except EOFError:
            return
        try:
            function(case)
        except Exception:
            connection.send(traceback.format_exc())
        else:
            connection.send(None)
