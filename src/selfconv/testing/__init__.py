"""Measures equivariance. Start with ``audit``: it tests a network layer by layer, and says what is at fault.

``equivariance_error`` and ``shift_error`` measure one module; ``assert_equivariant`` is for tests.

A module is equivariant to S if transforming its input transforms its output: module(L_S[x]) = L_S[module(x)].
The functions here return the difference of the two sides as max |difference| / max |output|: 0 for a perfect
module, about 1e-15 (float64) or 1e-6 (float32) for a layer that is equivariant up to rounding, and about 5e-3
or more for one that is not. Rounding accumulates over layers, so the error of a deep network may be larger
than that of any of its layers: ``audit`` tests each layer separately.

For an element that does not map the grid to itself (45°, in c8) there is no exact reference: rotating an
image by it interpolates. For such elements x is multiplied by a round mask, so that the corners have no
influence, and the error is the root mean square of the difference inside the mask divided by the standard
deviation of the output. ``resampling_error`` measures the error of interpolation alone; ``centre_error`` and
``audit`` do not interpolate.

Where nothing would be compared, as for an empty batch or an output that does not depend on x, the functions
raise a ValueError that says so, so an error of 0 always means that something was compared.

The rank of a tensor determines its kind: ``[N, C, |H|, h, w]`` are features on the group, ``[N, C, h, w]``
are planar features (each channel transforms like an image), tensors of rank 7 (on z2 6) are attention
weights, and other tensors are expected to be invariant. ``equivariance_error``, ``assert_equivariant`` and
``audit`` take other kinds by name, such as ``outputs="vector"`` for a vector field, ``"pixels"`` for a map of
labels and ``inputs="sequence"``: ``transform`` lists them. ``FeaturesOn`` names a group larger than the one
to test.
"""

from selfconv.testing.auditing import Audit, LayerReport, audit
from selfconv.testing.errors import (
    assert_equivariant,
    centre_error,
    default_tolerance,
    deviation_error,
    element_error,
    equivariance_error,
    relative_error,
    resampling_error,
    through_mask,
)
from selfconv.testing.interiors import shift_error
from selfconv.testing.kinds import FeaturesOn, Kind, transform
from selfconv.testing.layers.runs import run_observed

__all__ = [
    "Audit",
    "FeaturesOn",
    "Kind",
    "LayerReport",
    "assert_equivariant",
    "audit",
    "centre_error",
    "default_tolerance",
    "deviation_error",
    "element_error",
    "equivariance_error",
    "relative_error",
    "resampling_error",
    "run_observed",
    "shift_error",
    "through_mask",
    "transform",
]
