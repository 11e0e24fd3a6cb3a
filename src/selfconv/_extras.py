"""Packages that are optional: which extra installs each, and the one message when it is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

EXTRAS = {  # package: the extra that installs it
    "PIL": "train",
    "accelerate": "train",
    "datasets": "parquet",
    "imagecodecs": "train",
    "matplotlib": "plot",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "ray": "cluster",
    "starlette": "app",
    "tensorboard": "train",
    "tifffile": "train",
    "timm": "timm",
    "triton": "triton",
    "uvicorn": "app",
}


def require(user: str, *packages: str) -> None:
    """Raises ModuleNotFoundError if one of the packages is not installed, and says what installs it.

    Args:
        user: what needs them, as the message begins: ``"training"``.
    """
    for package in packages:
        found = sys.modules[package] if package in sys.modules else find_spec(package)
        if found is None:
            message = f"{user} needs {package}: pip install 'selfconv[{EXTRAS[package]}]'"
            raise ModuleNotFoundError(message, name=package)
