"""Layers that sample a map: window, step, padding and dilation."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from selfconv.nn import GroupConv2d, LiftingConv2d, LocalAttention2d


def sampling(module: nn.Module, axis: int = -1) -> tuple[int, int, int] | None:
    """(window, stride, padding) by which a layer downsamples along an axis, or None if it does not.

    It does so symmetrically on a map of n cells a side if n + 2·padding − window is a multiple of the stride.
    """
    stride = _entry(getattr(module, "stride", 1), axis)
    if stride is None or stride == 1 or isinstance(module, _ConvTransposeNd):
        return None
    pools = isinstance(module, LocalAttention2d) or (
        isinstance(module, GroupConv2d | LiftingConv2d) and module.downsample == "pool"
    )
    if pools:
        return stride, stride, 0
    window = _entry(getattr(module, "kernel_size", None), axis)
    dilation = _entry(getattr(module, "dilation", 1), axis)
    padding = getattr(module, "padding", 0)
    padding = 0 if padding == "valid" else _entry(padding, axis)
    if window is None or dilation is None or padding is None:
        return None
    return dilation * (window - 1) + 1, stride, padding


def stated_scale(module: nn.Module, n: int, m: int, axis: int) -> Fraction | None:
    """How many cells a layer's output has for each cell of its input along an axis, as the layer says, for
    sides of m and n cells. Attention weights are at every place, before a layer pools."""
    rule = sampling(module, axis)
    if rule and m < n:
        return Fraction(1, rule[1])
    stride = _entry(getattr(module, "stride", 1), axis) if isinstance(module, _ConvTransposeNd) else None
    return Fraction(stride) if stride else None


def largest_dilation(function: object) -> int:
    """The largest distance between neighbours in a window of a module's layers; 1 for other functions."""
    layers = function.modules() if isinstance(function, nn.Module) else ()
    found = [1]
    for dilation in (getattr(layer, "dilation", 1) for layer in layers):
        found += [d for d in (dilation if isinstance(dilation, tuple) else (dilation,)) if isinstance(d, int)]
    return max(found)


def _entry(value: Any, axis: int) -> int | None:
    value = value[axis] if isinstance(value, tuple) and -axis <= len(value) else value
    return value if isinstance(value, int) else None
