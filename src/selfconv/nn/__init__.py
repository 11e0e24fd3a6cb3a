"""Layers on any group: the same classes for ``"z2"``, ``"p4"``, ``"p4m"``, ``"c8"`` and the others.

Planar features are ``[N, C, h, w]``; group features ``[N, C, |H|, h, w]``. Pointwise activations, such as
``nn.ReLU``, are equivariant, so there is no class for them. ``torch.cat`` along the channels and several of
torch's norms are equivariant too: docs/layers.md lists them.
"""

from selfconv.nn._affine import AffineConv2d, DepthwiseConv2d
from selfconv.nn._bottleneck import Bottleneck, ConvNorm
from selfconv.nn._concatenate import concatenate
from selfconv.nn._conv import GroupConv2d, LiftingConv2d
from selfconv.nn._gates import GroupDropout, SqueezeExcite
from selfconv.nn._norm import GroupBatchNorm, GroupLayerNorm
from selfconv.nn._pool import GlobalPool, GroupPool, SpatialPool2d, Upsample2d
from selfconv.nn._restrict import RestrictGroup
from selfconv.nn.attention.layers import (
    AffineSelfConv2d,
    LiftingSelfConv2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from selfconv.nn.attention.layers_1d import AffineSelfConv1d
from selfconv.nn.attention.local_attention import LocalAttention2d, relative_entropy, set_backend
from selfconv.nn.fixed.layers import (
    ATTENTION,
    CONVOLUTIONS,
    FixedConv2d,
    FixedLayer,
    NativeAttention2d,
    fix_filters,
    is_unmodified,
)

__all__ = [
    "ATTENTION",
    "CONVOLUTIONS",
    "AffineConv2d",
    "AffineSelfConv1d",
    "AffineSelfConv2d",
    "Bottleneck",
    "ConvNorm",
    "DepthwiseConv2d",
    "FixedConv2d",
    "FixedLayer",
    "GlobalPool",
    "GroupBatchNorm",
    "GroupConv2d",
    "GroupDropout",
    "GroupLayerNorm",
    "GroupPool",
    "LiftingConv2d",
    "LiftingSelfConv2d",
    "LocalAttention2d",
    "NativeAttention2d",
    "RestrictGroup",
    "SimpleAffineSelfConv2d",
    "SpatialPool2d",
    "SqueezeExcite",
    "StandAloneSelfAttention2d",
    "Upsample2d",
    "concatenate",
    "fix_filters",
    "is_unmodified",
    "relative_entropy",
    "set_backend",
]
