"""Counts the parameters and FLOPs of a network."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfconv.nn import (
    AffineConv2d,
    DepthwiseConv2d,
    GroupConv2d,
    LiftingConv2d,
    LocalAttention2d,
    set_backend,
)
from selfconv.ops import affine_self_conv_flops


def count_parameters(model: nn.Module) -> int:
    """The number of learned parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(model: nn.Module, input_shape: Sequence[int]) -> int:
    """Floating-point operations of a forward pass for one image, a multiply-add counted as two.

    Convolutions and matrix products are counted by torch. Affine self convolution has its own formula, since
    torch does not count all of it; the result is the same for every backend. Work that is done once for all
    images, the computation of filters from coefficients, is not counted. A copy of the model runs on the
    model's device; on the ``"meta"`` device nothing is computed.

    Args:
        input_shape: of an image, such as ``(3, 32, 32)``.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton where there is one

    model = set_backend(copy.deepcopy(model), None).eval()
    counter = FlopCounterMode(display=False)
    correction = 0

    def beside_convolutions() -> int:
        counts = counter.get_flop_counts().get("Global", {})
        return sum(flops for op, flops in counts.items() if op is not torch.ops.aten.convolution)

    def before(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        nonlocal correction
        correction += beside_convolutions()

    def after(layer: nn.Module, inputs: tuple[Tensor], output: Any) -> None:
        nonlocal correction
        correction -= beside_convolutions()
        if isinstance(layer, LocalAttention2d):
            correction += operation_flops(layer, inputs[0].shape)

    makes_filters = (LocalAttention2d, LiftingConv2d, GroupConv2d, DepthwiseConv2d, AffineConv2d)
    for layer in model.modules():
        if isinstance(layer, makes_filters):
            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after)
    with counter:
        run_on_zeros(model, input_shape)
    return counter.get_total_flops() + correction


@torch.no_grad()
def run_on_zeros(model: nn.Module, input_shape: Sequence[int]) -> None:
    """Calls the model on an image of zeros, for what can be seen on the way."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about results, which nobody looks at
        model(torch.zeros(1, *input_shape, device=like.device, dtype=like.dtype))


def operation_flops(layer: LocalAttention2d, input_shape: Sequence[int]) -> int:
    """Those of the operation inside an attention layer, without its 1×1 maps."""
    n, _, *rest = input_shape
    if len(layer.domain) < len(layer.group):  # lifted: a centre for each element
        rest = [len(layer.group), *rest]
    query, value = (n, layer.key_channels, *rest), (n, layer.out_channels, *rest)
    affine = [None if t is None else t.shape for t in layer.affine_parameters()]
    return affine_self_conv_flops(query, query, value, *affine, kernel_size=layer.window.size)
