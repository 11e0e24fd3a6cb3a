"""Packages that are optional: which extra installs each, and the one message when it is missing."""

from __future__ import annotations

from importlib.util import find_spec

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


def require(*packages: str) -> None:
    """Raises ModuleNotFoundError, with the extra that brings it, if one of them is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(_message(package), name=package)


def _message(package: str) -> str:
    return f"this needs {package}: pip install 'selfconv[{EXTRAS[package]}]'"


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """The message for an import that failed, if an extra brings the package."""
    package = (error.name or "").partition(".")[0]
    return _message(package) if package in EXTRAS and "pip install" not in str(error) else None
