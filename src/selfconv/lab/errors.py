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


class Interrupted(RunStopped):
    """A signal came, and everything has been saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number
