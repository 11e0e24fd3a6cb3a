"""Inspects and plots what self-convolution layers compute.

``Inspection`` runs a model once, stores the inputs of its layers, and then returns the numbers with which a
layer computed its output at any pixel. ``class_activation_maps`` and ``occlusion_maps`` say which places
of an image speak for a class. ``selfconv.visualize.figures`` plots them; only this module needs
matplotlib (extra ``plot``).
"""

from typing import TYPE_CHECKING

from selfconv._lazy import lazy
from selfconv.visualize._choice import choose_pixel, selectivity
from selfconv.visualize._equivariance import EquivarianceView, equivariance_view
from selfconv.visualize._explanation import border_colour, class_activation_maps, occlusion_maps
from selfconv.visualize._inspection import (
    Inspection,
    LayerFilters,
    LayerInfo,
    PixelView,
    entropy_map,
    layer_filters,
    list_layers,
    look,
)

if TYPE_CHECKING:
    from selfconv.visualize._write import ExplanationWriter, write_figures
else:
    __getattr__, __dir__ = lazy(__name__, _write=["ExplanationWriter", "write_figures"])

__all__ = [
    "EquivarianceView",
    "ExplanationWriter",
    "Inspection",
    "LayerFilters",
    "LayerInfo",
    "PixelView",
    "border_colour",
    "choose_pixel",
    "class_activation_maps",
    "entropy_map",
    "equivariance_view",
    "layer_filters",
    "list_layers",
    "look",
    "occlusion_maps",
    "selectivity",
    "write_figures",
]
