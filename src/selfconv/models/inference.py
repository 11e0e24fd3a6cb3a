"""A trained network prepared for inference: the same function with fewer operations."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import torch
from torch import Tensor, nn

from selfconv.nn import (
    ATTENTION,
    CONVOLUTIONS,
    AffineConv2d,
    Bottleneck,
    ConvNorm,
    DepthwiseConv2d,
    FixedConv2d,
    FixedLayer,
    GroupBatchNorm,
    LocalAttention2d,
    NativeAttention2d,
    fix_filters,
    is_unmodified,
)


def optimize_for_inference(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode that computes the same, to rounding, in less time; the model stays as it is.

    Batch norm is folded, the filters of a group are steered once, attention holds its filters as the kernels
    take them, features are in channels_last, and the blocks of our networks add and rectify in place. The
    weights are copies, without gradients: ``train()`` raises; train the model, and call this again.

    Layers of this package are replaced where an ``nn.Sequential``, or a block of our networks, calls them,
    and batch norm is folded in ``ConvNorm``. Other layers stay as they are, because a parent of the user's
    own may use more of a layer than its output.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "optimize_for_inference expects an nn.Module, such as the attribute model of what open_trained "
            f"returns; got {type(model).__name__}"
        )
    optimized = fix_filters(fold_batch_norm(model), native=True)
    for parent in list(optimized.modules()):
        for name, child in list(parent._modules.items()):
            if is_unmodified(child, Bottleneck) and _writes_new_maps(child):  # type: ignore[arg-type]
                setattr(parent, name, _InPlaceBottleneck(child))  # type: ignore[arg-type]
    optimized.eval().requires_grad_(False)
    # nn.Module.train changes one layer after another until one refuses; this function asks all of them first
    optimized.train = partial(_refuse_training, optimized)  # type: ignore[method-assign]
    return optimized


def _refuse_training(optimized: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        for layer in optimized.modules():
            if isinstance(layer, FixedLayer):
                FixedLayer.train(layer)  # raises
    return type(optimized).train(optimized, mode)


class _InPlaceBottleneck(nn.Module):
    """``Bottleneck`` whose layers write new maps, which may be overwritten."""

    def __init__(self, block: Bottleneck) -> None:
        super().__init__()
        # the layers alone: around them are modules without effect, whose calls take a tenth of the time
        self.reduce, self.spatial, self.expand = block.reduce.conv, block.spatial.conv, block.expand.conv
        self.se, self.shortcut = (
            None if is_unmodified(layer, nn.Identity) else layer for layer in (block.se, block.shortcut)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.spatial(self.reduce(x).relu_()).relu_()
        y = self.expand(y)
        if self.se is not None:
            y = self.se(y)
        return y.add_(x if self.shortcut is None else self.shortcut(x)).relu_()


def _writes_new_maps(block: Bottleneck) -> bool:
    """Whether no layer of the block returns its input, or keeps its output."""
    return all(
        is_unmodified(layer, ConvNorm)
        and is_unmodified(layer.conv, FixedConv2d, NativeAttention2d)
        and is_unmodified(layer.norm, nn.Identity)
        for layer in (block.reduce, block.spatial, block.expand)
    )


def fold_batch_norm(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, with each batch norm of our networks folded into the layer before it.

    In evaluation mode batch norm is affine, y = a·f + b per channel, and so is the layer before it: its last
    weights are multiplied by a, and b becomes its bias. The function is the same, with fewer operations. The
    batch norm is kept after a layer that is a subclass, has hooks, or is registered in several places.
    """
    folded = copy.deepcopy(model).eval()
    uses = Counter(child for parent in folded.modules() for child in parent._modules.values())
    for pair in folded.modules():
        if (
            isinstance(pair, ConvNorm)
            and is_unmodified(pair, ConvNorm)
            and is_unmodified(pair.norm, nn.BatchNorm2d, GroupBatchNorm)
            and is_unmodified(pair.conv, nn.Conv2d, DepthwiseConv2d, AffineConv2d, *CONVOLUTIONS, *ATTENTION)
            and uses[pair.conv] == 1
        ):
            _fold(pair.conv, pair.norm)  # type: ignore[arg-type]
            pair.norm = nn.Identity()
    return folded


@torch.no_grad()
def _fold(layer: nn.Module, norm: nn.BatchNorm2d) -> None:
    if isinstance(layer, AffineConv2d):
        layer = layer.output
    weight_name, bias_name = ("w_out", "b_out") if isinstance(layer, LocalAttention2d) else ("weight", "bias")
    weight, bias = getattr(layer, weight_name), getattr(layer, bias_name)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    a = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    b = norm.bias - a * norm.running_mean
    setattr(layer, weight_name, nn.Parameter(weight * a.view(-1, *[1] * (weight.dim() - 1))))
    setattr(layer, bias_name, nn.Parameter(b if bias is None else b + a * bias))
