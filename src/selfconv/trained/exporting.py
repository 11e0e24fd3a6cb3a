"""Exports a trained model to ONNX or to a ``torch.export`` program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from selfconv.models import export_onnx, export_program
from selfconv.trained.model import TrainedModel

WRITERS: dict[str, Callable[..., object]] = {".onnx": export_onnx, ".pt2": export_program}


class FromPixels(nn.Module):
    """A model that takes pixels in 0..1 instead of normalised ones."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x - self.mean) / self.std)


def export(trained: TrainedModel, path: str | os.PathLike[str]) -> tuple[int, int, int]:
    """Writes a trained model to ``….onnx`` or ``….pt2``; returns the shape of its input images.

    Input: images ``[N, C, h, w]``, float32 pixels in 0..1, any N. Output: logits ``[N, classes]``.
    Normalisation is part of the file.
    """
    path = Path(path)
    if path.suffix not in WRITERS:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(WRITERS)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: no folder {str(path.parent)!r} to write to")
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write; got a folder")
    info = trained.data
    model = FromPixels(trained.model, info.mean, info.std)
    shape = (info.in_channels, info.size, info.size)
    with torch.inference_mode():
        if not model(torch.zeros(1, *shape)).isfinite().all():
            raise ValueError(
                f"{trained.name}: expected outputs that are numbers; the model's are infinite or nan"
            )
    partial = path.with_name(f".partial-{path.name}")  # writers go by the suffix
    try:
        partial.touch()  # the writers' own errors do not say what is wrong with a place
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from None
    try:
        WRITERS[path.suffix](model, partial, input_shape=shape)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return shape
