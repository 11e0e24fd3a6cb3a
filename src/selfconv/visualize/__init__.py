"""What a network with self-convolution layers does, in numbers and in pictures.

``Inspection`` runs a model once and then answers any question about a pixel from what it kept: the numbers
are those that the layers computed with. ``selfconv.visualize.figures`` draws them; it alone needs matplotlib,
which the extra ``plot`` brings.
"""

from typing import TYPE_CHECKING

from selfconv._lazy import lazy
from selfconv.visualize._equivariance import EquivarianceView, equivariance_view
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
    from selfconv.visualize._write import write_figures
else:
    __getattr__, __dir__ = lazy(__name__, _write=["write_figures"])

__all__ = [
    "EquivarianceView",
    "Inspection",
    "LayerFilters",
    "LayerInfo",
    "PixelView",
    "entropy_map",
    "equivariance_view",
    "layer_filters",
    "list_layers",
    "look",
    "write_figures",
]
