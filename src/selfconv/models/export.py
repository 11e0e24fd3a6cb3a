"""Exports a trained network: a ``torch.export`` program, the same compiled, ONNX."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfconv._extras import require
from selfconv.models.inference import fold_batch_norm
from selfconv.models.resnet import DOWNSAMPLING, ResNet
from selfconv.nn import AffineSelfConv1d, fix_filters, set_backend

if TYPE_CHECKING:
    from torch.export import ExportedProgram

SMALLEST = 2 * DOWNSAMPLING  # a program for any size: torch.export takes a map of 1 pixel for a constant
OPSET = 20  # ONNX Runtime 1.31 takes 6% longer with opset 22
PathLike = str | os.PathLike[str]
SizesFrom = Callable[[int], dict[int, Any]]  # the sizes that may vary, given the smallest side


def export_program(
    model: nn.Module,
    path: PathLike | None = None,
    *,
    input_shape: Sequence[int] | None = None,
    any_size: bool | None = None,
    metadata: Mapping[str, str] | None = None,
) -> ExportedProgram:
    """The model in evaluation mode as a ``torch.export`` program, for any batch size.

    It consists of torch operators only, so running it does not need selfconv. In layers of this package,
    batch norm is folded, the filters of a group are steered, and attention is a sequence of convolutions and
    elementwise operators that walks its window row by row. Attention that lifts, or whose window is
    rectangular, dilated, or padded other than with zeros, is unfolded instead (``UnfoldedAttention2d``): its
    tensors are k² times the features.

    Args:
        path: of a file to save the program to, usually ``….pt2``.
        input_shape: of an image; by default 32×32 with the model's channels. Or of features on a group,
            (channels, |H|, h, w), or of a sequence, whose last axis is its length.
        any_size: whether the program takes images of other heights and widths too, or sequences of other
            lengths; by default it does for networks of this package that take any. Sides are then 8 or more
            (16, 32, … if the model downsamples further), and multiples of the model's attribute ``cell``, if
            it has one; a program that is exported for smaller images takes those alone.
        metadata: texts to store in the file, by name: ``torch.export.load(path, extra_files=…)`` reads them.
    """
    from torch.export import save

    program = _export_with_sizes(*_prepared(model, input_shape, any_size))
    if path is not None:
        save(program, os.fspath(path), extra_files=dict(metadata or {}))
    return program


def _export_with_sizes(model: nn.Module, images: Tensor, sizes: SizesFrom) -> ExportedProgram:
    """The program for the smallest sides from 8 on that leave every map more than one pixel."""
    from torch._dynamo.exc import UserError
    from torch.export import export

    smallest = SMALLEST
    while True:
        varying = sizes(smallest)
        try:
            return export(model, (images,), dynamic_shapes=(varying,))
        except UserError as error:  # of sizes that the network would have to tell apart
            if len(varying) == 1 or "Constraints violated" not in str(error):
                raise
            smallest *= 2
            if smallest > min(images.shape[-2:]):
                raise ValueError(
                    f"any_size: expected an input_shape whose sides are large enough for every layer to have "
                    f"maps of 2×2 or more; got {tuple(images.shape[1:])}"
                ) from error


def compile_program(
    program: ExportedProgram, path: PathLike, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Compiles a program for this processor (AOTInductor), and writes both to one file, usually ``….pt2``.

    ``torch._inductor.aoti_load_package(path)`` loads the compiled form, ``torch.export.load(path)`` the
    program; either needs torch alone. The compiled form needs the version of torch and the instructions of
    the processor that it was compiled for.

    Args:
        metadata: as in ``export_program``.

    Raises:
        RuntimeError: if there is no C++ compiler, or the compilation fails.
    """
    from torch._inductor import aot_compile
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.export.pt2_archive._package import package_pt2

    get_cpp_compiler()  # raises; without this, only after half the work
    assert program.example_inputs is not None
    args, kwargs = program.example_inputs
    module: Any = program.module(check_guards=False)
    files: Any = aot_compile(module, args, kwargs, options={"aot_inductor.package": True})
    extra = dict(metadata or {})
    package_pt2(os.fspath(path), exported_programs=program, aoti_files=files, extra_files=extra)


def export_onnx(
    model: nn.Module,
    path: PathLike,
    *,
    input_shape: Sequence[int] | None = None,
    any_size: bool | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the model in evaluation mode as ONNX: input ``images``, output ``logits``, any batch size.

    The model is prepared as in ``export_program``.

    Args:
        path: of the file to write, usually ``….onnx``.
        input_shape: of an image; by default 32×32 with the model's channels.
        any_size: as in ``export_program``.
        metadata: texts to store in the file, by name.
    """
    require("ONNX export", "onnx", "onnxscript")
    model, images, sizes = _prepared(model, input_shape, any_size)
    program = torch.onnx.export(
        model,
        (images,),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=(sizes(SMALLEST),),
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(metadata or {})
    program.save(os.fspath(path), external_data=False)


def _prepared(
    model: nn.Module, input_shape: Sequence[int] | None, any_size: bool | None
) -> tuple[nn.Module, Tensor, SizesFrom]:
    """A copy of plain operators, a batch of 2 to trace it with, and which of its sizes may vary, from which
    smallest side on.

    A batch of 1 would be taken for a constant.
    """
    from torch.export import Dim

    if input_shape is None:
        if not isinstance(model, ResNet):
            raise ValueError(f"input_shape: expected (channels, h, w) for a {type(model).__name__}; got None")
        input_shape = (model.in_channels, 32, 32)
    if any_size is None:
        any_size = isinstance(model, ResNet) and model.takes_any_size
    sequences = len(input_shape) == 2 or any(isinstance(m, AffineSelfConv1d) for m in model.modules())
    names = ("length",) if sequences else ("height", "width")
    if any_size and len(input_shape) not in (1 + len(names), 2 + len(names)):
        places = ", ".join(names)
        raise ValueError(
            f"input_shape: expected (channels, {places}), or (channels, |H|, {places}), for any_size=True; "
            f"got {tuple(input_shape)}"
        )
    varies = any_size and min(input_shape[-len(names) :]) >= SMALLEST
    cell = getattr(model, "cell", 1)  # of which the sides are multiples, if the model says so
    cell = cell if isinstance(cell, int) and cell > 0 else 1

    def sizes(smallest: int) -> dict[int, Any]:
        found: dict[int, Any] = {0: Dim("batch")}
        for axis, name in enumerate(names if varies else (), 1 + len(input_shape) - len(names)):
            least = -(-smallest // cell)
            found[axis] = Dim(name, min=least) if cell == 1 else cell * Dim(f"{name}_{cell}", min=least)
        return found

    tensors = (*model.parameters(), *model.buffers())
    like = next((t for t in tensors if t.is_floating_point()), torch.zeros(()))
    images = torch.zeros(2, *input_shape, device=like.device, dtype=like.dtype)
    return set_backend(fix_filters(fold_batch_norm(model)), "eager"), images, sizes
