"""Layers on any group: the same classes for ``"z2"``, ``"p4"``, ``"p4m"``, ``"c8"`` and the others.

Planar features are ``[N, C, h, w]``; group features ``[N, C, |H|, h, w]``. Pointwise activations, such as
``nn.ReLU``, are equivariant, so there is no class for them. ``torch.cat`` along the channels and several of
torch's norms are equivariant too: docs/layers.md lists them.
"""

from selfconv.nn._affine import AffineConv2d, DepthwiseConv2d
from selfconv.nn._attention import (
    AffineSelfConv2d,
    LocalAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
    set_backend,
)
from selfconv.nn._conv import GroupConv2d, LiftingConv2d
from selfconv.nn._dropout import GroupDropout
from selfconv.nn._fixed import ATTENTION, CONVOLUTIONS, fix_filters, is_plain
from selfconv.nn._layer_norm import GroupLayerNorm
from selfconv.nn._norm import GroupBatchNorm
from selfconv.nn._pool import GlobalPool, GroupPool, SpatialPool2d
from selfconv.nn._restrict import RestrictGroup
from selfconv.nn._squeeze_excite import SqueezeExcite
from selfconv.nn._upsample import Upsample2d

__all__ = [
    "ATTENTION",
    "CONVOLUTIONS",
    "AffineConv2d",
    "AffineSelfConv2d",
    "DepthwiseConv2d",
    "GlobalPool",
    "GroupBatchNorm",
    "GroupConv2d",
    "GroupDropout",
    "GroupLayerNorm",
    "GroupPool",
    "LiftingConv2d",
    "LocalAttention2d",
    "RestrictGroup",
    "SimpleAffineSelfConv2d",
    "SpatialPool2d",
    "SqueezeExcite",
    "StandAloneSelfAttention2d",
    "Upsample2d",
    "fix_filters",
    "is_plain",
    "set_backend",
]
