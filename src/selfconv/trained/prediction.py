"""Predicts the classes and probabilities of image files with a trained model."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from selfconv._text import count
from selfconv.data import (
    Clipping,
    DataError,
    PixelRange,
    Split,
    is_image_name,
    parse_range,
    read_images,
    require_image_readers,
)
from selfconv.trained.model import TrainedModel
from selfconv.trained.outputs import logits

FILES, PIXELS = 128, 2**24  # limits of a batch, after which its predictions are yielded


@dataclass(frozen=True)
class Prediction:
    """The most probable class of an image, and the probability of each."""

    file: str
    label: str
    probability: float
    probabilities: dict[str, float]


def image_files(
    patterns: Sequence[str | os.PathLike[str]], report: Callable[[DataError], None]
) -> list[Path]:
    """The files for a list of files, folders (all images in them, at any depth) and wildcards.

    Args:
        report: called with an error for each of them that names no file; if none does, the first is raised.
    """
    files: list[Path] = []
    errors: list[DataError] = []
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
            expected = "expected an image, a folder of images or a wildcard"
            errors.append(DataError(f"{pattern}: {expected}; got {what}"))
        files += found
    if not files and errors:
        raise errors[0]
    for error in errors:
        report(error)
    return list(dict.fromkeys(files))


def _images(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and is_image_name(path)
    )


def predict(
    trained: TrainedModel, images: Sequence[str | os.PathLike[str]], *, pixel_range: str | None = None
) -> list[Prediction]:
    """The class and probabilities of each image; preprocessing is that of a training folder.

    Args:
        pixel_range: of the values in the files, ``"dtype"`` or ``"LOW,HIGH"``; by default that of the
            training images.

    Raises:
        DataError: a file cannot be read.
    """
    answers = [*predict_each(trained, images, pixel_range=pixel_range)]
    for answer in answers:
        if isinstance(answer, DataError):
            raise answer
    return [answer for answer in answers if isinstance(answer, Prediction)]


def predict_each(
    trained: TrainedModel,
    images: Sequence[str | os.PathLike[str]],
    *,
    pixel_range: str | None = None,
    watch: Callable[[int, int], None] | None = None,
    see: Callable[[Prediction, Tensor], None] | None = None,
) -> Iterator[Prediction | DataError]:
    """Yields a Prediction per image as soon as it is computed, and a DataError per file that cannot be read.

    Args:
        watch: called with the number of files that are done and of all.
        see: called with each prediction and the image that it is about: pixels in 0..1, [C, size, size].
    """
    missing: list[DataError] = []
    files, info = image_files(images, missing.append), trained.data
    clipped: dict[Path, Clipping] = {}  # files with values outside the range
    pixels = info.pixels if pixel_range is None else given_range(pixel_range)
    require_image_readers()

    def read(file: Path) -> Tensor | DataError:
        own: list[Clipping] = []
        try:
            images = read_images(file, info.size, info.in_channels, pixels=pixels, tally=own.append)
        except DataError as error:  # a file that is refused is not clipped
            return error
        if (total := Clipping.total(own)).describe() is not None:
            clipped[file] = total
        return images

    yield from missing
    step = max(1, min(FILES, PIXELS // info.size**2))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(files), step):
            chunk = files[start : start + step]
            found = [*pool.map(read, chunk)]
            read_ones = [one for one in found if isinstance(one, Tensor)]
            answers = iter(_probabilities(trained, torch.cat(read_ones), pixels) if read_ones else ())
            for file, one in zip(chunk, found, strict=True):
                if isinstance(one, DataError):
                    yield one
                    continue
                for index, image in enumerate(one):
                    name = f"{file}[{index}]" if len(one) > 1 else str(file)
                    probabilities = dict(zip(info.class_names, next(answers), strict=True))
                    label = max(probabilities, key=lambda key: probabilities[key])
                    prediction = Prediction(name, label, probabilities[label], probabilities)
                    if see is not None:
                        see(prediction, image.float() / pixels.levels)
                    yield prediction
            if watch is not None:
                watch(start + len(chunk), len(files))
    if clipped:
        worst = max(clipped, key=lambda file: clipped[file].share)
        others = f"; so are some of {count(len(clipped) - 1, 'other file')}" if len(clipped) > 1 else ""
        clipped[worst].warn(f"{trained.name}: {worst}", pixels, others)


def _probabilities(trained: TrainedModel, images: Tensor, pixels: PixelRange) -> list[list[float]]:
    split = Split(images, torch.zeros(len(images), dtype=torch.int64), levels=pixels.levels)
    return logits(trained.optimized, split, trained.data, lambda x: x).softmax(1).tolist()


def given_range(text: str) -> PixelRange:
    """The option ``--range`` of commands that read image files: ``LOW,HIGH`` or ``dtype``."""
    limits = parse_range(text, auto=False)
    return PixelRange(None, 0, 65535, by_type=True) if limits is None else PixelRange(None, *limits)
