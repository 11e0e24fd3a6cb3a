"""Affine Self Convolution: convolution whose filters depend on the data, equivariant to shifts and to a group
of rotations and reflections, such as p4, p4m or c8."""

from typing import TYPE_CHECKING

from selfconv._lazy import lazy
from selfconv._version import __version__

if TYPE_CHECKING:
    from selfconv.models import convert, create_model, list_models, model_info, optimize_for_inference
else:  # a user of the layers alone does not wait for the hub's client
    __getattr__, __dir__ = lazy(
        __name__,
        models=["convert", "create_model", "list_models", "model_info", "optimize_for_inference"],
    )

__all__ = [
    "__version__",
    "convert",
    "create_model",
    "list_models",
    "model_info",
    "optimize_for_inference",
]
