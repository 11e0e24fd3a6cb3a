"""Affine Self Convolution: convolution whose filters depend on the image."""

from importlib import import_module
from typing import TYPE_CHECKING

from selfconv._version import __version__

if TYPE_CHECKING:
    from selfconv.models import convert, create_model, list_models, model_info

__all__ = ["__version__", "convert", "create_model", "list_models", "model_info"]

_FROM_MODELS = ("convert", "create_model", "list_models", "model_info")


def __getattr__(name: str) -> object:
    """The models come when first asked for: a user of the layers alone does not wait for the hub's client."""
    if name in _FROM_MODELS:
        return getattr(import_module("selfconv.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
