"""A data set in memory, built from arrays: checks, split, statistics, digest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from selfconv._text import escape_for_terminal

Images = NDArray[np.uint8]  # [N, H, W, C]
Labels = NDArray[np.int64]  # [N]
Arrays = Mapping[str, tuple[NDArray, NDArray]]  # "train", "test" and maybe "val": images and labels


class DataError(ValueError):
    """Invalid data; the message is one line that names the data and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_for_terminal(message))


class MissingDataError(DataError):
    """Data that must be downloaded first; ``source`` states the address and the size."""

    def __init__(self, message: str, source: str) -> None:
        super().__init__(message)
        self.source = source


@dataclass(frozen=True, eq=False)
class Split:
    """Images uint8 ``[N, C, H, W]``, stored channels_last, and their labels int64 ``[N]``."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Split:
        """Copies the split to a device; batches are then computed there."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled square images in three disjoint splits: train, validation and test.

    ``digest`` is the SHA-256 of all images, labels and class names, computed before the validation split.
    Together with ``seed`` and ``validation`` it identifies the exact training set of a run.
    """

    name: str
    train: Split
    val: Split
    test: Split
    class_names: tuple[str, ...]
    digest: str
    own_test: bool = True  # False: the source has no test part, so some of its images were set aside

    @property
    def everything(self) -> Split:
        """The images of all three splits."""
        parts = (self.train, self.val, self.test)
        return Split(torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts]))

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def in_channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width of the images."""
        return self.train.images.shape[2]

    @cached_property
    def _moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        counts = np.zeros((self.in_channels, 256), np.int64)
        for chunk in self.train.images.split(4096):
            for channel, pixels in enumerate(chunk.unbind(1)):
                counts[channel] += np.bincount(pixels.numpy(force=True).ravel(), minlength=256)
        values = np.arange(256) / 255
        share = counts / counts.sum(1, keepdims=True)
        mean = share @ values
        std = np.sqrt((share * (values - mean[:, None]) ** 2).sum(1))
        std[std == 0] = 1.0  # a constant channel carries nothing and must not divide by zero
        return tuple(mean.tolist()), tuple(std.tolist())

    @property
    def mean(self) -> tuple[float, ...]:
        """The mean of each channel over the training images, with pixels in 0..1."""
        return self._moments[0]

    @property
    def std(self) -> tuple[float, ...]:
        """The standard deviation of each channel over the training images, pixels in 0..1; 1 if constant."""
        return self._moments[1]

    def with_fewer(self, count: int, seed: int) -> Dataset:
        """A copy with ``count`` training images, stratified by class, with at least one image per class."""
        if not self.num_classes <= count <= len(self.train):
            raise DataError(
                f"subset: expected from {self.num_classes} images, one for each class, to all "
                f"{len(self.train)} to train on; got {count}"
            )
        rest, _ = stratified(self.train.labels.numpy(), 1 - count / len(self.train), seed)
        return replace(self, train=Split(self.train.images[rest], self.train.labels[rest]))

    def __str__(self) -> str:
        kind = "grey" if self.in_channels == 1 else "colour"
        return (
            f"{self.name}: {len(self.train)} images to train, {len(self.val)} to validate, "
            f"{len(self.test)} to test; {self.size}×{self.size}, {kind}, {self.num_classes} classes"
        )


def stratified(labels: Labels, fraction: float, seed: int) -> tuple[Labels, Labels]:
    """Indices of the images that stay and of those set aside, both ascending.

    ``round(fraction · N)`` images are set aside, from each class its share up to rounding (largest
    remainder), but never the last image of a class.
    """
    classes, counts = np.unique(labels, return_counts=True)
    share = counts * fraction
    take = np.floor(share).astype(np.int64)
    order = np.argsort(take - share, kind="stable")  # largest remainder first
    missing = round(fraction * len(labels)) - int(take.sum())
    take[order[:missing]] += 1
    take = np.minimum(take, counts - 1)
    random = np.random.RandomState(seed)  # its stream is frozen, as the split must be
    aside = [random.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, take, strict=True)]
    mask = np.zeros(len(labels), bool)
    mask[np.concatenate(aside)] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def build(
    name: str,
    arrays: Arrays,
    class_names: Sequence[str] | None = None,
    *,
    image_size: int | None,
    seed: int,
    validation: float,
) -> Dataset:
    """A data set from checked arrays; without a ``"val"`` part, that is split off ``"train"`` by seed."""
    images = {part: _check_images(f"{name}: x_{part}", x) for part, (x, _) in arrays.items()}
    shapes = {part: x.shape[1:] for part, x in images.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"x_{part} {_by(shape)}" for part, shape in shapes.items())
        raise DataError(f"{name}: expected images of one size and kind; got {found}")
    labels = {part: _check_labels(name, part, y, len(images[part])) for part, (_, y) in arrays.items()}
    names = _check_classes(name, labels, class_names)
    height, width, _ = shapes["train"]
    if image_size is not None:
        images = {part: fit(x, image_size) for part, x in images.items()}
    elif height != width:
        raise DataError(
            f"{name}: images are {height}×{width}, not square; give an image_size to crop them to"
        )

    digest = hashlib.sha256("\0".join(names).encode())
    for part in sorted(images):
        digest.update(f"{part}{images[part].shape}".encode())
        digest.update(np.ascontiguousarray(images[part]).data)
        digest.update(labels[part].astype("<i8").data)

    if "val" not in arrays:
        rest, aside = stratified(labels["train"], validation, seed)
        images["val"], labels["val"] = images["train"][aside], labels["train"][aside]
        images["train"], labels["train"] = images["train"][rest], labels["train"][rest]
    train, val, test = (_split(images[part], labels[part]) for part in ("train", "val", "test"))
    return Dataset(name, train, val, test, names, digest.hexdigest())


def _split(images: Images, labels: Labels) -> Split:
    owned = np.require(images, requirements=["C", "W"])  # torch wants memory it may write to
    return Split(torch.from_numpy(owned).permute(0, 3, 1, 2), torch.from_numpy(labels.copy()))


def fit(images: Images, size: int) -> Images:
    """Images [N, H, W, C] resized so that the shorter side is ``size``, then cropped to the centre."""
    height, width = images.shape[1:3]
    if height == width == size:
        return images
    scale = size / min(height, width)
    target = (max(size, round(height * scale)), max(size, round(width * scale)))
    top, left = (target[0] - size) // 2, (target[1] - size) // 2
    out = np.empty((len(images), size, size, images.shape[3]), np.uint8)
    for start in range(0, len(images), 1024):
        chunk = torch.tensor(images[start : start + 1024]).permute(0, 3, 1, 2).float()
        resized = F.interpolate(chunk, target, mode="bilinear", antialias=True).round_().clamp_(0, 255)
        cropped = resized[:, :, top : top + size, left : left + size]
        out[start : start + 1024] = cropped.permute(0, 2, 3, 1).to(torch.uint8).numpy()
    return out


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _check_images(what: str, x: NDArray) -> Images:
    """Images as [N, H, W, C]."""
    expected = "expected uint8 [N, H, W], or [N, H, W, C] with 1 or 3 channels"
    if x.dtype != np.uint8:
        raise DataError(f"{what}: {expected}; got {x.dtype}")
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or x.shape[3] not in (1, 3):
        channels_first = x.ndim == 4 and x.shape[1] in (1, 3)
        hint = " (channels come last)" if channels_first else ""
        raise DataError(f"{what}: {expected}; got shape {list(x.shape)}{hint}")
    if len(x) == 0 and not what.endswith("x_val"):
        raise DataError(f"{what}: expected at least one image; got none")
    if 0 in x.shape[1:]:
        raise DataError(f"{what}: expected images with pixels; got shape {list(x.shape)}")
    return x


def _check_labels(name: str, part: str, y: NDArray, count: int) -> Labels:
    what = f"{name}: y_{part}"
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{what}: expected integers [N]; got {y.dtype} {list(y.shape)}")
    if len(y) != count:
        raise DataError(
            f"{name}: expected a label for each image; got {count} in x_{part}, {len(y)} in y_{part}"
        )
    if count and int(y.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{what}: expected labels from 0; got {int(y.max())}")
    return y.astype(np.int64)


def _check_classes(
    name: str, labels: Mapping[str, Labels], class_names: Sequence[str] | None
) -> tuple[str, ...]:
    """Class names, once every label is one of theirs and every class has an image to train on."""
    count = int(labels["train"].max()) + 1 if class_names is None else len(class_names)
    source = "as in y_train" if class_names is None else f"for {count} class names"
    for part, y in labels.items():
        wrong = y[(y < 0) | (y >= count)]
        if len(wrong):
            raise DataError(f"{name}: y_{part}: expected labels 0..{count - 1} {source}; got {wrong[0]}")
    for label in class_names if class_names is not None else ():
        try:
            label.encode()
        except UnicodeEncodeError:
            raise DataError(f"{name}: expected class names that are text in UTF-8; got {label!r}") from None
    if class_names is not None and (twice := [label for label, n in Counter(class_names).items() if n > 1]):
        raise DataError(f"{name}: expected a name of its own for each class; got {twice[0]!r} more than once")
    if count < 2:
        raise DataError(f"{name}: expected at least two classes; got {count}")
    present = np.unique(labels["train"])
    if len(present) < count:
        missing = np.setdiff1d(np.arange(min(count, len(present) + 1)), present)[0]
        raise DataError(
            f"{name}: expected images to train on for each of {count} classes (labels count from 0); "
            f"got none for {count - len(present)} of them, class {missing} first"
        )
    return tuple(class_names) if class_names is not None else tuple(map(str, range(count)))
