"""How things are measured: interleaved, the least of many, and memory as the allocator saw it."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from selfconv._files import parse_json

Work = Callable[[], object]
Key = TypeVar("Key")


def interleaved(
    contenders: dict[Key, Work], seconds: float, device: torch.device, *, one_thread: bool = False
) -> dict[Key, float]:
    """Seconds that each contender takes: the minimum over interleaved repetitions.

    A machine's other tenants slow a whole round down, so ratios hold, and the least of many is what the work
    itself costs. Every contender runs at least five times, more as ``seconds`` for all of them allow.

    Args:
        one_thread: whether all work runs on one thread. Then CPU time is measured, which leaves out the time
            that other processes had the core.
    """
    clock = time.process_time if one_thread and device.type == "cpu" else time.perf_counter
    for work in contenders.values():  # compile, fill caches
        work()
        _finish(device)
    best = dict.fromkeys(contenders, float("inf"))
    rounds, start = 0, time.perf_counter()
    while rounds < 5 or time.perf_counter() - start < seconds:
        for name, work in contenders.items():
            begin = clock()
            work()
            _finish(device)
            best[name] = min(best[name], clock() - begin)
        rounds += 1
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(work: Work, device: torch.device) -> int:
    """Peak bytes allocated by ``work``."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        _finish(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces its starts and stops
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = parse_json(trace.read_bytes())["traceEvents"]
    changes = [e["args"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e.get("name") == "[memory]"]
    if not changes:
        return 0
    start = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return max(change["Total Allocated"] for change in changes) - start


def matmul_rate(device: torch.device) -> float:
    """GFLOP/s of a large float32 matrix product: what this machine can do at best."""
    a = torch.randn(1024, 1024, device=device)
    seconds = interleaved({"mm": lambda: a @ a}, 1.0, device)["mm"]
    return 2 * 1024**3 / seconds / 1e9


def training_pass(module: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> Work:
    """Forward and backward, gradients of input and parameters included, as in the middle of a network."""
    x = x.detach().requires_grad_()
    with torch.no_grad():
        grad = torch.randn_like(module(x))

    def work() -> object:
        return torch.autograd.grad(module(x), [x, *parameters], grad)

    return work


def forward_pass(module: Callable[[Tensor], Tensor], x: Tensor) -> Work:
    def work() -> object:
        with torch.no_grad():
            return module(x)

    return work
