"""What can go wrong with a run, each as a line that says it."""

from __future__ import annotations

from importlib.util import find_spec

from selfconv.lab._text import shown

EXTRAS = {  # which of them brings a package that may be missing
    "PIL": "train",
    "accelerate": "train",
    "gradio": "app",
    "matplotlib": "plot",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "ray": "cluster",
    "tensorboard": "train",
    "timm": "timm",
    "triton": "triton",
}


class RunError(ValueError):
    """A run's folder that cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


class RunBusy(RunError):
    """Another process is writing to the run's folder."""


class RunStopped(Exception):
    """A run that ended early; ``code`` is what its process should exit with."""

    code = 1


class Diverged(RunStopped):
    """The loss is no longer a number."""


class PlanFailed(RunStopped):
    """Some runs of a plan failed; the others are done."""


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


def one_line(error: BaseException) -> str:
    """What an error says, in a line."""
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and "pip install" not in str(error):
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            return _needed(package)
    return " ".join(str(error).split()) or type(error).__name__


def require(*packages: str) -> None:
    """Raises ModuleNotFoundError, with the extra that brings it, if one of them is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(_needed(package), name=package)


def _needed(package: str) -> str:
    return f"this needs {package}: pip install 'selfconv[{EXTRAS[package]}]'"
