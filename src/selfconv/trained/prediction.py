"""Predicts the classes and probabilities of image files with a trained model."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from selfconv.data import IMAGE_SUFFIXES, DataError, Split, read_image
from selfconv.trained.model import TrainedModel
from selfconv.trained.outputs import logits

FILES, PIXELS = 1024, 2**24  # to be read at a time, at most


@dataclass(frozen=True)
class Prediction:
    """The most probable class of an image, and the probability of each."""

    file: str
    label: str
    probability: float
    probabilities: dict[str, float]


def image_files(patterns: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files for a list of files, folders (all images in them, at any depth) and wildcards."""
    files: list[Path] = []
    for pattern in patterns:
        if not os.fspath(pattern):  # Path("") is the working directory
            raise DataError("expected an image, a folder of images or a wildcard; got an empty name")
        path = Path(pattern)
        if path.is_file():
            found = [path]
        elif path.is_dir():
            found = _images(path)
        else:
            matches = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
            found = [f for match in matches for f in (_images(match) if match.is_dir() else [match])]
        if not found:
            what = "no images in this folder" if path.is_dir() else "no such file"
            raise DataError(f"{pattern}: expected an image, a folder of images or a wildcard; got {what}")
        files += found
    return list(dict.fromkeys(files))


def _images(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
    )


def predict(trained: TrainedModel, images: Sequence[str | os.PathLike[str]]) -> list[Prediction]:
    """The class and probabilities of each image; preprocessing is that of a training folder."""
    files, info = image_files(images), trained.data
    predictions = []
    step = max(1, min(FILES, PIXELS // info.size**2))
    for start in range(0, len(files), step):  # so that any number of files fits in memory
        chunk = files[start : start + step]
        pixels = torch.stack([read_image(file, info.size, info.in_channels) for file in chunk])
        split = Split(pixels, torch.zeros(len(chunk), dtype=torch.int64))
        for file, p in zip(chunk, logits(trained.model, split, info, lambda x: x).softmax(1), strict=True):
            probabilities = dict(zip(info.class_names, p.tolist(), strict=True))
            label = info.class_names[int(p.argmax())]
            predictions.append(Prediction(str(file), label, probabilities[label], probabilities))
    return predictions
