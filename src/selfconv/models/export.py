"""Exports a trained network: folded batch norm, ``torch.export``, ONNX."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selfconv._extras import require
from selfconv.models.resnet import ConvNorm, ResNet
from selfconv.nn import (
    ATTENTION,
    CONVOLUTIONS,
    AffineConv2d,
    DepthwiseConv2d,
    GroupBatchNorm,
    LocalAttention2d,
    fix_filters,
    is_plain,
    set_backend,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

PathLike = str | os.PathLike[str]


def fold_batch_norm(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, with each batch norm of our networks folded into the layer before it.

    In evaluation mode batch norm is affine, y = a·f + b per channel, and so is the layer before it: its last
    weights are multiplied by a, and b becomes its bias. The function is the same, with fewer operations. The
    batch norm is kept after a layer that is not of a plain class, or whose output is used elsewhere too.
    """
    folded = copy.deepcopy(model).eval()
    uses = Counter(child for parent in folded.modules() for child in parent._modules.values())
    for pair in folded.modules():
        if (
            isinstance(pair, ConvNorm)
            and is_plain(pair.norm, nn.BatchNorm2d, GroupBatchNorm)
            and is_plain(pair.conv, nn.Conv2d, DepthwiseConv2d, AffineConv2d, *CONVOLUTIONS, *ATTENTION)
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


def export_program(
    model: nn.Module, path: PathLike | None = None, *, input_shape: Sequence[int] | None = None
) -> ExportedProgram:
    """The model in evaluation mode as a ``torch.export`` program, for any batch size.

    It consists of torch operators only, so running it does not need selfconv. In layers of this package,
    batch norm is folded and the filters of a group are steered before the export.

    Args:
        path: of a file to save the program to, usually ``….pt2``.
        input_shape: of an image; by default 32×32 with the model's channels.
    """
    from torch.export import Dim, export, save

    model, images = _prepared(model, input_shape)
    program = export(model, (images,), dynamic_shapes=({0: Dim("batch")},))
    if path is not None:
        save(program, os.fspath(path))
    return program


def export_onnx(model: nn.Module, path: PathLike, *, input_shape: Sequence[int] | None = None) -> None:
    """Writes the model in evaluation mode as ONNX: input ``images``, output ``logits``, any batch size.

    The model is prepared as in ``export_program``.

    Args:
        path: of the file to write, usually ``….onnx``.
        input_shape: of an image; by default 32×32 with the model's channels.
    """
    require("ONNX export", "onnx", "onnxscript")
    model, images = _prepared(model, input_shape)
    torch.onnx.export(
        model,
        (images,),
        os.fspath(path),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _prepared(model: nn.Module, input_shape: Sequence[int] | None) -> tuple[nn.Module, Tensor]:
    """A copy of plain operators, and a batch of 2 to trace it with (1 would be taken for a constant)."""
    if input_shape is None:
        if not isinstance(model, ResNet):
            raise ValueError(f"input_shape: expected (channels, h, w) for a {type(model).__name__}; got None")
        input_shape = (model.in_channels, 32, 32)
    like = next(model.parameters())
    images = torch.zeros(2, *input_shape, device=like.device, dtype=like.dtype)
    return set_backend(fix_filters(fold_batch_norm(model)), "eager"), images
