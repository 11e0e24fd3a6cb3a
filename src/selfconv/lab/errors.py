"""What can go wrong with a run, each as a line that says it."""

from __future__ import annotations


class RunError(ValueError):
    """A run's folder that cannot be used."""


class RunBusy(RunError):
    """Another process is writing to the run's folder."""


class RunStopped(Exception):
    """A run that ended early; ``code`` is what its process should exit with."""

    code = 1


class Diverged(RunStopped):
    """The loss is no longer a number."""


class PlanFailed(RunStopped):
    """Some runs of a plan failed; the others are done."""


class Interrupted(RunStopped):
    """A signal came, and everything has been saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


def one_line(error: BaseException) -> str:
    """What an error says, in a line."""
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
