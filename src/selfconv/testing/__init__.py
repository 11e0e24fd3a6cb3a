"""Measuring equivariance: of a layer, of a model, and layer by layer of a whole network.

A module is equivariant to S when turning its input turns its output: module(L_S[x]) = L_S[module(x)]. The
functions here return how far the two sides are apart, as max |difference| / max |output|: 0 for a perfect
module, some 1e-15 (float64) or 1e-6 (float32) for a layer that is equivariant up to rounding, and some
5e-3 or more for one that is not. Rounding grows from layer to layer, so that the output of a deep network
may be further off than any of its layers: ``audit`` judges each layer by itself.

An element that looks between the pixels (45°, in c8) has no exact side to compare with: turning an image by
it interpolates. For such elements x is seen through a round mask, so that nothing comes in at the corners,
and the error is the root mean square of the difference inside the mask over the deviation of the output.
What interpolation alone does is ``resampling_error``; ``centre_error`` and ``audit`` do without it.

Features are told by their rank: ``[N, C, |H|, h, w]`` live on the group, ``[N, C, h, w]`` on the plane (each
channel turns as an image does), anything smaller is expected not to change.
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
    shift_error,
    through_mask,
    transform,
)
from selfconv.testing.layer_runs import run_observed

__all__ = [
    "Audit",
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
