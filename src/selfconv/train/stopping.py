"""Why a run stops: its errors, each with a message of one line, and SIGINT and SIGTERM."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from selfconv._text import escape_for_terminal


class RunError(ValueError):
    """The folder of a run cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_for_terminal(message))


class RunBusy(RunError):
    """Another process is writing to the run's folder."""


class RunStopped(Exception):
    """A run ended early; ``code`` is the exit code of the process."""

    code = 1


class Diverged(RunStopped):
    """The loss or a weight is infinite or NaN."""


class OutOfMemory(RunStopped):
    """A training step ran out of memory; the last checkpoint is kept."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. For a GPU torch has an exception class; on a CPU it raises a RuntimeError."""
    messages = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in messages)
    )


class Interrupted(RunStopped):
    """The run was stopped by a signal; a checkpoint has been saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


def check_finite(loss: float, epoch: int, step: int, checkpoints: Path) -> None:
    if not math.isfinite(loss):
        raise diverged(f"the loss is {loss}", epoch, step, checkpoints)


def diverged(what: str, epoch: int, step: int, checkpoints: Path) -> Diverged:
    return Diverged(
        f"{what} in epoch {epoch + 1}, step {step}; the last finite weights are in {checkpoints}; "
        "a lower --lr or --clip 1 may help"
    )


def interruption(epoch: int, step: int, folder: Path, number: int) -> Interrupted:
    """The error of a run that a signal stopped.

    Args:
        epoch: number of completed epochs.
        step: number of completed steps in the current epoch.
        number: of the signal.
    """
    return Interrupted(
        f"stopped and saved in epoch {epoch + 1}, after step {step}; "
        f"continue with: selfconv train --out {folder} --resume",
        number,
    )


def out_of_memory(
    epoch: int, step: int, images_per_process: int, micro_batch_size: int, checkpoints: Path
) -> OutOfMemory:
    """The error of a training step that ran out of memory.

    Args:
        epoch: number of completed epochs.
        step: number of completed steps in the current epoch.
        images_per_process: images that a process takes in a step.
        micro_batch_size: of these, images at a time.
    """
    return OutOfMemory(
        f"out of memory in epoch {epoch + 1}, step {step + 1}, with {micro_batch_size} images at a time; "
        f"--accumulate {2 * images_per_process // micro_batch_size} takes half as many and computes the "
        "same gradient, except for batch norm statistics; a lower --batch-size or --image-size needs less "
        f"too; the checkpoints in {checkpoints} are kept"
    )


class StopSignals:
    """Within the context, the first SIGINT or SIGTERM is stored in ``number``; a second one raises.

    Args:
        insistent: whether a second signal raises KeyboardInterrupt. False in a worker of ``ProcessEngine``,
            which receives two for one Ctrl-C: SIGINT from the terminal, and SIGTERM, which it sends to itself
            when its parent closes its input.
    """

    def __init__(self, *, insistent: bool = True) -> None:
        self.number = 0
        self._insistent, self._at_once = insistent, False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        second, self.number = self.number != 0, self.number or number
        if self._at_once:
            self._at_once = False
            raise Interrupted("stopped", self.number)
        if second and self._insistent:
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this context a signal, even an earlier one, raises Interrupted: nothing has to be saved."""
        self._at_once = True
        try:
            if self.number:
                raise Interrupted("stopped", self.number)
            yield
        finally:
            self._at_once = False

    def __enter__(self) -> StopSignals:
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # others cannot receive signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
