"""How long a plan may take: from a few steps of each of its networks."""

from __future__ import annotations

import heapq
import time
import warnings
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from selfconv._memory import keep_memory
from selfconv._text import count, format_duration
from selfconv._threads import torch_threads
from selfconv.study.plans import Plan, Trial
from selfconv.train import RunConfig, Trainer, make_accelerator
from selfconv.trained import images_evaluated

if TYPE_CHECKING:
    from rich.table import Table

    from selfconv.data import Dataset

STEPS = 3  # after one that compiles and warms up


def run_seconds(config: RunConfig, data: Dataset) -> float:
    """The estimated duration of a run: epochs with validation, the test, the evaluation at every angle."""
    keep_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(config, data, make_accelerator(config.hardware))
        batch = next(iter(trainer.batches.epoch(0, 0)))
        train = _median_seconds(lambda: trainer.step(*batch))
        trainer.network.eval()
        batch_of_test = next(iter(trainer.test))[0]
        with torch.inference_mode():
            test = _median_seconds(lambda: trainer.network(batch_of_test)) / len(batch_of_test)
    sizes = config.recipe.all_sizes(data.size)
    train *= sum(size**2 for size in sizes) / (len(sizes) * data.size**2)
    epoch = train * len(trainer.batches) + test * len(data.val)
    images = len(data.test) + images_evaluated(len(data.test))
    return config.recipe.epochs * epoch + images * test


def _median_seconds(call: object) -> float:
    assert callable(call)
    call()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)


def side_by_side(seconds: Sequence[float], jobs: int) -> float:
    """How long runs take in all if ``jobs`` run at a time, the next beginning when one ends."""
    ends = [0.0] * jobs
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def plan_table(plan: Plan, pending: Sequence[Trial], data: Dataset, jobs: int, threads: int) -> Table:
    """The plan, line by line, with what is left of it and how long that may take here."""
    from rich.table import Table

    table = Table("network", "folder", title=f"Plan {plan.name}", title_justify="left")
    for heading in ("epochs", "runs", "to do", "a run takes", "all to do"):
        table.add_column(heading, justify="right")
    known: dict[tuple[str, str], float] = {}
    several = len({title for title, _ in plan.lines}) > 1
    for (title, label), trials in plan.lines.items():
        config = trials[0].config
        left = sum(trial in pending for trial in trials)
        with torch_threads(threads):
            seconds = known[title, label] = run_seconds(config, data)
        table.add_row(
            f"{title}, {label}" if several else label,
            trials[0].folder.partition("/")[0],
            str(config.recipe.epochs),
            str(len(trials)),
            str(left),
            format_duration(seconds),
            format_duration(left * seconds),
        )
    total = side_by_side([known[trial.line] for trial in pending], jobs)
    table.caption = (
        f"About {format_duration(total)} for {count(len(pending), 'run')}, "
        f"{'one after another' if jobs == 1 else f'{jobs} at a time'} on this machine with "
        f"{count(threads, 'thread')}{' each' * (jobs > 1)}; from {STEPS} steps of each network"
        f"{', which ran alone' * (jobs > 1)}"
    )
    table.caption_justify = "left"
    return table
