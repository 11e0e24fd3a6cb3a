"""Progress of a run: a bar on a terminal, plain lines elsewhere, ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from selfconv._files import write_atomically
from selfconv._text import HalfMinute, escape_for_terminal, format_duration
from selfconv.train.files.record import EpochMetrics

Watch = Callable[[float, str], None]  # the completed fraction of a run, and a status line


class Progress:
    """Shows steps and epochs, if ``visible``, and passes them to ``watch``."""

    def __init__(self, total_steps: int, *, visible: bool, watch: Watch | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._print: Callable[[str], None] = lambda text: print(text, flush=True)
        self._bar, self._visible, self._total, self._watch = None, visible, total_steps, watch
        self._line = HalfMinute()
        if visible and sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(highlight=False), transient=True)
            self._print = partial(self._bar.console.print, markup=False)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        if self._visible:
            self._print(escape_for_terminal(text))

    def step(self, done: int, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif self._visible:
            self._line(f"{done / self._total:.1%}: {text}")
        if self._watch is not None:
            self._watch(done / self._total, text)

    def epoch(self, metrics: EpochMetrics, epochs: int) -> None:
        validation = ""
        if metrics.val_accuracy is not None:
            validation = f", validation {metrics.val_loss:.3f} {metrics.val_accuracy:6.2%}"
        left = (
            f", {format_duration(metrics.seconds * (epochs - metrics.epoch))} left"
            if self._bar is None
            else ""
        )
        self.say(
            f"epoch {metrics.epoch:3d}/{epochs}: loss {metrics.train_loss:.3f}, "
            f"accuracy {metrics.train_accuracy:6.2%}{validation}, "
            f"{metrics.images_per_second:.0f} images/s{left}"
        )


class Journal:
    """``metrics.jsonl`` and TensorBoard's events. A resumed run deletes the epochs after its checkpoint."""

    def __init__(self, folder: Path, history: Sequence[EpochMetrics]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / "metrics.jsonl"
        write_atomically(self._path, b"".join(_line(metrics) for metrics in history))
        self._board = SummaryWriter(str(folder), purge_step=len(history) + 1)

    def epoch(self, metrics: EpochMetrics) -> None:
        with open(self._path, "ab") as file:
            file.write(_line(metrics))
        for name, value in asdict(metrics).items():
            if name != "epoch" and value is not None:
                self._board.add_scalar(name, value, metrics.epoch)
        self._board.flush()

    def close(self) -> None:
        self._board.close()


def _line(metrics: EpochMetrics) -> bytes:
    return (json.dumps(asdict(metrics)) + "\n").encode()
