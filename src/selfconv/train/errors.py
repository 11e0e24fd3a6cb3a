"""The errors of a run; each message is one line."""

from __future__ import annotations

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
    """The loss is infinite or NaN."""


class OutOfMemory(RunStopped):
    """A training step ran out of memory; the last checkpoint is kept."""


def is_out_of_memory(error: BaseException) -> bool:
    """Torch has a class of its own for GPUs alone; on a CPU its allocator raises a plain RuntimeError."""
    said = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )


class Interrupted(RunStopped):
    """The run was stopped by a signal; a checkpoint has been saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number
