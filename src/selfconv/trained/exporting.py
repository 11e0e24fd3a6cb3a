"""Exports a trained model to ONNX or to a ``torch.export`` program, optionally compiled by AOTInductor."""

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

# What `selfconv predict` does to an image file, for programs without this package: to grey and colour images
# of 8 bits per channel, and to the files of instruments.
BYTES_PREPROCESSING = """\
import numpy as np
from PIL import Image, ImageOps

def preprocess(path, size, channels):
    image = Image.open(path)
    if image.mode[0] in "IF":
        raise ValueError(f"expected 8 bits per channel; got {image.mode}")
    image.draft(None, (2 * size, 2 * size))  # JPEG decodes at a fraction of its size
    image = ImageOps.exif_transpose(image).convert("RGBA")  # upright; palettes and grey as colours
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)  # shorter side, centre
    image = image.convert("L") if channels == 1 else image
    pixels = np.asarray(image, np.float32).reshape(size, size, channels) / 255  # 0..1, RGB
    return pixels.transpose(2, 0, 1)[None]  # [1, channels, size, size]
"""
VALUES_PREPROCESSING = """\
import numpy as np
import tifffile
from PIL import Image, ImageOps

def preprocess(path, size, channels):
    values = np.load(path) if str(path).endswith(".npy") else tifffile.imread(path)  # [h, w(, channels)]
    LIMITS
    values = np.clip(values, low, high).reshape(*values.shape[:2], channels)
    planes = [Image.fromarray(plane) for plane in values.transpose(2, 0, 1).astype(np.float32)]
    planes = [ImageOps.fit(plane, (size, size), Image.Resampling.BILINEAR) for plane in planes]
    pixels = np.stack([np.asarray(plane) for plane in planes])[None]  # [1, channels, size, size]
    return RESULT
"""
TYPE_LIMITS = """\
whole = values.dtype.kind != "f"
    low, high = (np.iinfo(values.dtype).min, np.iinfo(values.dtype).max) if whole else (0, 1)"""

ONNX, PROGRAM = "ONNX", "a torch.export program"
COMPILED = f"{PROGRAM}, and the same compiled for processors like this one (AOTInductor)"


def _write_onnx(model: nn.Module, path: Path, *, compile: bool, **options: Any) -> str:
    export_onnx(model, path, **options)
    return ONNX


def _write_program(
    model: nn.Module, path: Path, *, compile: bool, metadata: dict[str, str], **options: Any
) -> str:
    """Writes the program, and its compiled form if possible; a failed compilation is told, not raised."""
    program = export_program(model, path, metadata=metadata, **options)
    if not compile:
        return PROGRAM
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        compile_program(program, path, metadata=metadata)
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
    """A model that takes pixels in 0..1, or the values of the files if its training range was not 0..255,
    and normalises them."""

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


def preprocessing(info: DataInfo) -> str:
    """Python code for numpy, Pillow and tifffile that reads a file as the exported model takes it."""
    if info.pixels == PixelRange() and info.in_channels in (1, 3):
        return BYTES_PREPROCESSING
    pixels, limits = info.pixels, f"low, high = {info.pixels.low!r}, {info.pixels.high!r}"
    result = "np.rint(pixels)" if pixels.levels == pixels.whole_width else "pixels"
    if pixels.by_type:
        limits, result = TYPE_LIMITS, "(np.rint(pixels) if whole else pixels)"
    if own_range(info) is None:  # the model takes 0..1
        result = f"({result} - low) / (high - low)"
    return VALUES_PREPROCESSING.replace("LIMITS", limits).replace("RESULT", result)


def export(trained: TrainedModel, path: str | os.PathLike[str], *, compile: bool = True) -> Exported:
    """Writes a trained model to ``….onnx`` or ``….pt2``.

    Input: images ``[N, C, h, w]``, float32, any N: pixels in 0..1, or for a data set with a range of its own
    the values as they are in its files. Output: logits ``[N, classes]``. The range and normalisation are part
    of the file. Its metadata hold ``classes`` (JSON), ``image_shape`` (JSON), ``range`` (JSON: the values
    that stand for black and white in the input) and ``preprocessing``, Python code that reads an image file
    like those of the data set.

    A ``.pt2`` file always holds the program, for ``torch.export.load``. With ``compile``, and where there is
    a C++ compiler, it also holds the compiled form, for ``torch._inductor.aoti_load_package``.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in WRITERS:
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
        metadata = {
            "classes": classes,
            "image_shape": json.dumps(shape),
            "range": json.dumps(own_range(info) or (0.0, 1.0)),
            "preprocessing": preprocessing(info),
        }
        form = WRITERS[suffix](
            model, partial, input_shape=shape, any_size=trained.model.takes_any_size, metadata=metadata,
            compile=compile,
        )  # fmt: skip
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(shape, form)
