"""What can go wrong with a run, each as a line that says it."""

from __future__ import annotations

from selfconv._text import escape_for_terminal


class RunError(ValueError):
    """A run's folder that cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_for_terminal(message))


class RunBusy(RunError):
    """Another process is writing to the run's folder."""


class RunStopped(Exception):
    """A run that ended early; ``code`` is what its process should exit with."""

    code = 1


class Diverged(RunStopped):
    """The loss is no longer a number."""


class OutOfMemory(RunStopped):
    """A step did not fit; the run is saved up to the last checkpoint."""


def is_out_of_memory(error: BaseException) -> bool:
    """Torch has a class of its own for GPUs alone; on a CPU its allocator raises a plain RuntimeError."""
    said = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )


class Interrupted(RunStopped):
    """A signal came, and everything has been saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number
