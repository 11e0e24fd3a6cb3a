"""A data set, in memory or memory-mapped, built from arrays: checks, split, statistics, digest."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfconv._text import in_utf8, nfc
from selfconv.data.formats import to_numbers
from selfconv.data.pixels import MAX_CHANNELS, Clipping, DataError, PixelRange, choose_range, fit
from selfconv.data.splits import Labels, leaks, split_off
from selfconv.data.stored import Images, Split, Stack

MAX_PIXELS = 89_478_485  # of an image: 256 MB in three channels
MAX_SIZE = math.isqrt(MAX_PIXELS)  # side of a square one


class AbsentDataError(DataError):
    """Data that are not on this machine."""


class MissingDataError(AbsentDataError):
    """Data that must be downloaded first; ``source`` states the address and the size."""

    def __init__(self, message: str, source: str) -> None:
        super().__init__(message)
        self.source = source


FEW_LEVELS = 16  # distinct values of all training images; fewer cause a warning
SMALL_SHARE = 1 / 8  # warn if the values in use span less than this fraction of the range


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
    has_test_part: bool = True  # False: the source has no test part, so some of its images were set aside
    pixels: PixelRange = field(default_factory=PixelRange)
    clipping: Clipping = field(default_factory=Clipping)  # of values that are outside ``pixels``

    @property
    def parts(self) -> tuple[Split, Split, Split]:
        return self.train, self.val, self.test

    def relabelled(self, labels: Tensor, names: Sequence[str]) -> Dataset:
        """A copy with other class names; ``labels[c]`` is the new label of class c, or -1 to leave it out."""

        def part(split: Split) -> Split:
            kept = split.take((labels[split.labels] >= 0).nonzero()[:, 0])
            kept.labels = labels[kept.labels]
            return kept

        train, val, test = map(part, self.parts)
        return replace(self, train=train, val=val, test=test, class_names=tuple(names))

    @property
    def everything(self) -> Split:
        """The images of all three splits."""
        return Split.join([part for part in self.parts if len(part)])

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def in_channels(self) -> int:
        return self.train.shape[1]

    @property
    def size(self) -> int:
        """Height and width of the images."""
        return self.train.shape[2]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How often each channel of the training images has each value ``[C, levels + 1]``."""
        return _count_values(self.train)

    @cached_property
    def _moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        values = np.arange(self.train.levels + 1) / self.train.levels
        share = self.counts / self.counts.sum(1, keepdims=True)
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

    def subset(self, count: int, seed: int) -> Dataset:
        """A copy with ``count`` training images, stratified by class, with at least one image per class."""
        if not self.num_classes <= count <= len(self.train):
            raise DataError(
                f"subset: expected from {self.num_classes} images, one for each class, to all "
                f"{len(self.train)} to train on; got {count}"
            )
        rest, _ = split_off(self.train.labels.numpy(), 1 - count / len(self.train), seed)
        return replace(self, train=self.train.take(torch.from_numpy(rest)))

    def __str__(self) -> str:
        kind = describe_channels(self.in_channels)
        return (
            f"{self.name}: {len(self.train)} images to train, {len(self.val)} to validate, "
            f"{len(self.test)} to test; {self.size}×{self.size}, {kind}, {self.num_classes} classes"
        )


@dataclass(frozen=True)
class DataInfo:
    """The properties of the training images that are needed to use a trained model."""

    name: str
    digest: str
    class_names: list[str]
    in_channels: int
    size: int
    mean: list[float]
    std: list[float]
    images: dict[str, int]
    pixels: PixelRange = field(default_factory=PixelRange)

    def __post_init__(self) -> None:
        """Checks sizes before arrays are allocated: the file may be untrusted."""
        object.__setattr__(self, "class_names", [nfc(name) for name in self.class_names])
        if len({*self.class_names}) < max(2, len(self.class_names)):
            raise ValueError(f"class_names: expected two or more, all different; got {self.class_names!r}")
        if not 1 <= self.in_channels <= MAX_CHANNELS or not 1 <= self.size <= MAX_SIZE:
            raise ValueError(
                f"expected in_channels 1 to {MAX_CHANNELS} and size 1 to {MAX_SIZE}; got "
                f"{self.in_channels}, {self.size}"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.in_channels or (name == "std" and min(values) <= 0):
                raise ValueError(f"{name}: expected {self.in_channels} numbers; got {values!r}")
        if {*self.images} != {"train", "val", "test"} or min(self.images.values()) < 0:
            raise ValueError(
                f"images: expected the number of train, val and test images; got {self.images!r}"
            )

    def agrees_with(self, other: DataInfo) -> bool:
        """Whether both describe the same images; means may round differently on another machine."""
        close = all(
            math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
            for a, b in zip([*self.mean, *self.std], [*other.mean, *other.std], strict=False)
        )
        return (
            close
            and self.in_channels == other.in_channels
            and replace(self, mean=other.mean, std=other.std) == other
        )

    @classmethod
    def of(cls, data: Dataset) -> DataInfo:
        return cls(
            name=data.name,
            digest=data.digest,
            class_names=list(data.class_names),
            in_channels=data.in_channels,
            size=data.size,
            mean=list(data.mean),
            std=list(data.std),
            images={"train": len(data.train), "val": len(data.val), "test": len(data.test)},
            pixels=data.pixels,
        )


def describe_channels(channels: int) -> str:
    """The channels of an image in words: grey, colour, or their number."""
    return {1: "grey", 3: "colour"}.get(channels, f"{channels} channels")


@dataclass(frozen=True, eq=False)
class SourcePart:
    """Images of a source, not yet checked: for training, validation or the test."""

    images: Images | Stack
    labels: NDArray[Any]
    names: Sequence[str] = ()
    groups: Sequence[str] | None = None  # of images that must stay on one side of a split

    def take(self, index: Labels) -> SourcePart:
        stack = self.images if isinstance(self.images, Stack) else Stack(self.images)
        return SourcePart(
            stack.take(index),
            self.labels[index],
            [self.names[i] for i in index] if self.names else (),
            None if self.groups is None else [self.groups[i] for i in index],
        )


Arrays = Mapping[str, SourcePart]  # "train", "test" and maybe "val"


def build(
    name: str,
    arrays: Arrays,
    class_names: Sequence[str] | None = None,
    *,
    image_size: int | None,
    seed: int,
    validation: float,
    pixels: PixelRange | None = None,
    clipping: Clipping | None = None,
    has_test_part: bool = True,
) -> Dataset:
    """Checks the arrays and builds a data set; a ``"val"`` part that is missing is split off ``"train"``.

    Args:
        pixels: the range that the stored integers represent; by default 0 to 255.
    """
    name, pixels = in_utf8(name), PixelRange() if pixels is None else pixels
    images = {part: _check_images(f"{name}: x_{part}", given.images) for part, given in arrays.items()}
    shapes = {part: stack.shape[1:] for part, stack in images.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"x_{part} {_format_shape(shape)}" for part, shape in shapes.items())
        raise DataError(f"{name}: expected images of one size and kind; got {found}")
    labels = {
        part: _check_labels(name, part, given.labels, len(images[part])) for part, given in arrays.items()
    }
    names = _check_classes(name, labels, class_names)
    height, width, _ = shapes["train"]
    if image_size is not None:
        images = {part: Stack(fit(stack.array, image_size)) for part, stack in images.items()}
    elif height != width:
        raise DataError(
            f"{name}: images are {height}×{width}, not square; give an image_size to crop them to"
        )
    digest = hashlib.sha256("\0".join(names).encode())
    if pixels != PixelRange():  # the stored integers alone do not identify the images
        digest.update(repr(pixels).encode())
    for part in sorted(images):
        digest.update(f"{part}{images[part].shape}".encode())
        for chunk in images[part].chunks():
            digest.update(np.ascontiguousarray(chunk).data)
        digest.update(labels[part].astype("<i8").data)

    parts = {p: replace(given, images=images[p], labels=labels[p]) for p, given in arrays.items()}
    if "val" not in parts:
        rest, aside = split_off(labels["train"], validation, seed, parts["train"].groups)
        parts |= {"val": parts["train"].take(aside), "train": parts["train"].take(rest)}
    train, val, test = (_split(parts[part], pixels.levels) for part in ("train", "val", "test"))
    clipping = Clipping() if clipping is None else clipping
    return Dataset(name, train, val, test, names, digest.hexdigest(), has_test_part, pixels, clipping)


def _split(part: SourcePart, levels: int) -> Split:
    labels = torch.from_numpy(part.labels.copy())
    stack = part.images
    assert isinstance(stack, Stack)
    if stack.mapped:
        return Split(stack, labels, levels=levels, names=part.names)
    owned = np.require(stack.array, requirements=["C", "W"])  # torch wants memory it may write to
    return Split(torch.from_numpy(owned).permute(0, 3, 1, 2), labels, levels=levels, names=part.names)


def _count_values(split: Split) -> NDArray[np.int64]:
    values = split.levels + 1
    counts = np.zeros((split.shape[1], values), np.int64)
    for chunk in split.chunks():
        for channel, pixels in enumerate(chunk.unbind(1)):
            counts[channel] += np.bincount(pixels.numpy(force=True).ravel(), minlength=values)
    return counts


def warn_about_data(data: Dataset, *, has_groups: bool) -> None:
    """Warns about identical images in two splits, and about values that do not fit the range.

    Args:
        has_groups: whether the source takes ``group_by``.
    """
    data.clipping.warn(data.name, data.pixels)
    advice = "remove copies" + ", or keep them together with --group-by" * has_groups
    for message in leaks({"train": data.train, "val": data.val, "test": data.test}):
        warnings.warn(f"{data.name}: {message}; {advice}", stacklevel=3)
    counts = [data.counts, *map(_count_values, (data.val, data.test))]  # of all images, as for the range
    used = np.flatnonzero(sum(one.sum(0) for one in counts))
    span = int(used[-1] - used[0])
    levels = data.train.levels
    if len(used) < FEW_LEVELS or span < SMALL_SHARE * levels:
        low, high = (data.pixels.value(int(used[end])) for end in (0, -1))
        hint = ": --range LOW,HIGH may fit them better" if span < levels / 2 else ""
        warnings.warn(
            f"{data.name}: the images use {len(used)} of {levels + 1} levels, from {low:g} to {high:g}, "
            f"of the range {data.pixels}{hint}",
            stacklevel=3,
        )


def warn_about_classes(data: Dataset) -> None:
    """Warns if there are no validation or no test images of a class that is trained."""
    for part, split in (("validation", data.val), ("test", data.test)):
        absent = np.setdiff1d(np.arange(data.num_classes), split.labels.numpy(force=True))
        if len(split) and len(absent):
            warnings.warn(
                f"{data.name}: no {part} images of {len(absent)} of {data.num_classes} classes (first: "
                f"{data.class_names[absent[0]]!r}), so the {part} accuracy says nothing about them",
                stacklevel=3,
            )


def store_arrays(
    name: str, arrays: Mapping[str, SourcePart], text: str
) -> tuple[dict[str, SourcePart], PixelRange, Clipping]:
    """Arrays of any type of number as the integers of one range, chosen as ``--range`` says."""
    images = {part: given.images for part, given in arrays.items()}
    stacks = {part: x for part, x in images.items() if isinstance(x, np.ndarray) and x.size}
    stacks = {part: to_numbers(x) if x.dtype == bool else x for part, x in stacks.items()}
    for part, x in stacks.items():
        if x.dtype.kind not in "uif" or (x.dtype.kind == "f" and not np.isfinite(x).all()):
            found = f"{x.dtype} with infinite values or nan" if x.dtype.kind == "f" else x.dtype
            raise DataError(f"{name}: x_{part}: expected integers or finite numbers; got {found}")

    def extent() -> tuple[float, float]:
        return min(float(x.min()) for x in stacks.values()), max(float(x.max()) for x in stacks.values())

    pixels = choose_range(text, {x.dtype.name for x in stacks.values()} or {"uint8"}, extent, name)
    if pixels == PixelRange():
        stored, clipping = stacks, Clipping()
    else:
        stored = {part: np.rint(pixels.scale(x)).astype(pixels.stored_as) for part, x in stacks.items()}
        clipping = Clipping.total(pixels.clipping(x) for x in stacks.values())
    changed = {part: replace(given, images=stored.get(part, given.images)) for part, given in arrays.items()}
    return changed, pixels, clipping


def _format_shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def channels_may_be_first(image: Sequence[int]) -> bool:
    """Whether the sizes of an image ``[H, W, C]`` may be ``[C, H, W]``.

    That is if the first is a number of channels and less than both others, or these are the sides of a square
    and it is not.
    """
    first, second, third = image
    if not 1 <= first <= MAX_CHANNELS or third == 1:
        return False
    return first < min(second, third) or first != second == third


def _check_images(what: str, x: Images | Stack) -> Stack:
    """Images as [N, H, W, C]."""
    if isinstance(x, Stack):
        return x
    expected = f"expected numbers [N, H, W], or [N, H, W, C] with 1 to {MAX_CHANNELS} channels"
    if x.dtype not in (np.uint8, np.uint16):
        raise DataError(f"{what}: {expected}; got {x.dtype}")
    if x.ndim == 3:
        x = x[..., None]
    channels_first = x.ndim == 4 and channels_may_be_first(x.shape[1:])
    if x.ndim != 4 or not 1 <= x.shape[3] <= MAX_CHANNELS or channels_first:
        hint = " (channels come last)" if channels_first else ""
        raise DataError(f"{what}: {expected}; got shape {list(x.shape)}{hint}")
    if len(x) == 0 and not what.endswith("x_val"):
        raise DataError(f"{what}: expected at least one image; got none")
    if 0 in x.shape[1:]:
        raise DataError(f"{what}: expected images with pixels; got shape {list(x.shape)}")
    return Stack(x)


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
    """Returns the class names; checks that every label has one and every class a training image."""
    count = int(labels["train"].max()) + 1 if class_names is None else len(class_names)
    source = "as in y_train" if class_names is None else f"for {count} class names"
    for part, y in labels.items():
        wrong = y[(y < 0) | (y >= count)]
        if len(wrong) and part == "train" and class_names is None:  # which ``source`` would be
            raise DataError(f"{name}: y_train: expected labels from 0; got {wrong[0]}")
        if len(wrong):
            raise DataError(f"{name}: y_{part}: expected labels 0..{count - 1} {source}; got {wrong[0]}")
    for label in class_names if class_names is not None else ():
        try:
            label.encode()
        except UnicodeEncodeError:
            raise DataError(f"{name}: expected class names that are text in UTF-8; got {label!r}") from None
    class_names = None if class_names is None else [nfc(label) for label in class_names]
    names = Counter(class_names or ())
    if twice := [label for label, n in names.items() if n > 1]:
        raise DataError(f"{name}: expected a name of its own for each class; got {twice[0]!r} more than once")
    if count < 2:
        raise DataError(f"{name}: expected at least two classes; got {count}")
    present = np.unique(labels["train"])
    if len(present) < count:
        missing = np.setdiff1d(np.arange(min(count, len(present) + 1)), present)[0]
        called = missing if class_names is None else repr(class_names[missing])
        raise DataError(
            f"{name}: expected images to train on for each of {count} classes (labels count from 0); "
            f"got none for {count - len(present)} of them, class {called} first"
        )
    return tuple(class_names) if class_names is not None else tuple(map(str, range(count)))
