"""Exports a trained model to ONNX or to a ``torch.export`` program, compiled where that can be done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfconv._files import check_writable
from selfconv.data import DataInfo, PixelRange
from selfconv.models import compile_program, export_onnx, export_program
from selfconv.trained.model import TrainedModel

# What `selfconv predict` does to an image file, for programs without this package; bytes per pixel, no more.
PREPROCESSING = """\
import numpy as np
from PIL import Image, ImageOps

def preprocess(path, size, channels):
    image = Image.open(path)
    image.draft(None, (2 * size, 2 * size))  # JPEG decodes at a fraction of its size
    image = ImageOps.exif_transpose(image).convert("RGBA")  # upright; palettes and grey as colours
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)  # shorter side, centre
    image = image.convert("L") if channels == 1 else image
    pixels = np.asarray(image, np.float32).reshape(size, size, channels) / 255  # 0..1, RGB
    return pixels.transpose(2, 0, 1)[None]  # [1, channels, size, size]
"""

ONNX, PROGRAM = "ONNX", "a torch.export program"
COMPILED = f"{PROGRAM}, and the same compiled for processors like this one (AOTInductor)"


def _write_onnx(model: nn.Module, path: Path, *, compile: bool, **options: Any) -> str:
    export_onnx(model, path, **options)
    return ONNX


def _write_program(
    model: nn.Module, path: Path, *, compile: bool, metadata: dict[str, str], **options: Any
) -> str:
    """The program, compiled too if asked for and possible: a file without the compiled form is of use."""
    program = export_program(model, path, **options)
    if not compile:
        return PROGRAM
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        compile_program(program, path)
    except InvalidCxxCompiler:
        return f"{PROGRAM}; not compiled: no C++ compiler was found"
    except CppCompileError as error:
        return f"{PROGRAM}; not compiled: {error.cmd[0]} failed"
    return COMPILED


WRITERS: dict[str, Callable[..., str]] = {".onnx": _write_onnx, ".pt2": _write_program}


@dataclass(frozen=True)
class Exported:
    """What ``export`` wrote.

    Attributes:
        image_shape: of the input, without the batch.
        form: what the file holds, in words.
    """

    image_shape: tuple[int, int, int]
    form: str


class FromPixels(nn.Module):
    """A model that takes pixels in 0..1 instead of normalised ones; of images of another range than bytes,
    the values as they are in the files."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, info: DataInfo) -> None:
        super().__init__()
        self.model = model
        self.range = own_range(info)
        self.register_buffer("mean", torch.tensor(info.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(info.std).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.range is not None:
            low, high = self.range
            x = ((x - low) / (high - low)).clamp(0, 1)
        return self.model((x - self.mean) / self.std)


def own_range(info: DataInfo) -> tuple[float, float] | None:
    """The values that an exported model takes; None: pixels in 0..1, from bytes or by the files' type."""
    pixels = info.pixels
    return None if pixels == PixelRange() or pixels.by_type else (pixels.low, pixels.high)


def export(trained: TrainedModel, path: str | os.PathLike[str], *, compile: bool = True) -> Exported:
    """Writes a trained model to ``….onnx`` or ``….pt2``.

    Input: images ``[N, C, h, w]``, float32, any N: pixels in 0..1, or for a data set with a range of its own
    the values as they are in its files. Output: logits ``[N, classes]``. The range and normalisation are part
    of the file. The metadata of an ONNX file hold ``classes`` (JSON), ``image_shape`` (JSON) and
    ``preprocessing``, Python code that reads an image file of 8 bits per channel.

    A ``.pt2`` file always holds the program, for ``torch.export.load``. With ``compile``, and where there is
    a C++ compiler, it also holds the compiled form, for ``torch._inductor.aoti_load_package``.
    """
    path = Path(path)
    if path.suffix not in WRITERS:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(WRITERS)}")
    if not os.path.lexists(path.parent):
        raise FileNotFoundError(f"{path}: expected a folder to write to; got no folder {str(path.parent)!r}")
    partial = path.with_name(f".partial-{path.name}")  # writers go by the suffix
    check_writable(path.parent, path.name, partial.name)
    info = trained.data
    model = FromPixels(trained.model, info)
    shape = (info.in_channels, info.size, info.size)
    with torch.inference_mode():
        if not model(torch.zeros(1, *shape)).isfinite().all():
            raise ValueError(
                f"{trained.name}: expected outputs that are numbers; the model's are infinite or nan"
            )
    try:
        classes = json.dumps(info.class_names, ensure_ascii=False)
        metadata = {"classes": classes, "image_shape": json.dumps(shape), "preprocessing": PREPROCESSING}
        form = WRITERS[path.suffix](
            model, partial, input_shape=shape, any_size=trained.model.takes_any_size, metadata=metadata,
            compile=compile,
        )  # fmt: skip
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(shape, form)
