"""From the values in image files to the integers that are kept in memory: one range for a whole data set."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import DTypeLike, NDArray

from selfconv._text import escape_for_terminal

MAX_CHANNELS = 16
CLIPPED_SHARE = 0.001  # warn if more than this fraction of the values is outside the range
LARGEST = 2**64  # of the limits of a range
DEEPEST = 65535  # the largest stored value; images are kept in 16 bits at most
LIMITS = "dtype, or LOW,HIGH with LOW < HIGH"
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in grey, as Pillow weights them


class DataError(ValueError):
    """Invalid data; the message is one line that names the data and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_for_terminal(message))


class GroupError(DataError):
    """``group_by`` does not fit the data."""


class UnreadableError(Exception):
    """Why an image file cannot be used."""


@dataclass(frozen=True)
class Clipping:
    """How many values of some files there are, and how many are below and above the range."""

    values: int = 0
    below: int = 0
    above: int = 0

    @staticmethod
    def total(parts: Iterable[Clipping]) -> Clipping:
        found = [(part.values, part.below, part.above) for part in parts]
        return Clipping(*map(sum, zip(*found, strict=True))) if found else Clipping()

    @property
    def share(self) -> float:
        """The fraction of values outside the range."""
        return (self.below + self.above) / max(1, self.values)

    def describe(self) -> str | None:
        """The shares of values outside, such as ``76% of the values are above``; None if they are tiny."""
        outside = {"below": self.below, "above": self.above}
        shares = {where: count / max(1, self.values) for where, count in outside.items()}
        told = [(where, share) for where, share in shares.items() if share > CLIPPED_SHARE]
        if not told:
            return None
        first, *rest = [f"{share:.0%}" if share >= 0.01 else f"{share:.1%}" for _, share in told]
        more = "".join(f", {share} {where}" for share, (where, _) in zip(rest, told[1:], strict=True))
        return f"{first} of the values are {told[0][0]}{more}"

    def warn(self, what: str, pixels: PixelRange, others: str = "") -> None:
        """Warns if more than a few values are outside the range.

        Args:
            others: about other files, after the sentence.
        """
        if (outside := self.describe()) is not None:
            warnings.warn(
                f"{what}: {outside} the range {pixels}, and are clipped{others}; --range LOW,HIGH sets "
                "another range",
                stacklevel=4,
            )


@dataclass(frozen=True)
class PixelRange:
    """Which values in the files become the pixels 0 and 1. Values outside are clipped.

    In memory a pixel is an integer from 0 to ``levels``: every value of the files, if they hold integers and
    the range has up to 65536 of them, and otherwise (floating point, mixed types) the nearest of 65536.

    Attributes:
        dtype: of the values in the files; None if files of several types are mixed.
        by_type: each file has the full range of its dtype (floating point: 0 to 1); ``low`` and ``high`` then
            describe the integers in memory only.
    """

    dtype: str | None = "uint8"
    low: float = 0.0
    high: float = 255.0
    by_type: bool = False

    def __post_init__(self) -> None:
        for name in ("low", "high"):  # 255 and 255.0 are one range, with one digest
            object.__setattr__(self, name, float(getattr(self, name)))
        if not self.low < self.high or max(abs(self.low), abs(self.high)) > LARGEST:
            raise DataError(
                f"range: expected LOW < HIGH, both of at most {LARGEST:.2g}; got {self.low:g}, {self.high:g}"
            )

    @property
    def levels(self) -> int:
        """The integer in memory that stands for the pixel 1."""
        counted = self.by_type or (self.dtype is not None and self.dtype.startswith(("int", "uint")))
        return self.whole_width if counted and self.whole_width <= DEEPEST else DEEPEST

    @property
    def whole_width(self) -> int:
        """``high - low`` if both are integers; otherwise 65536, which does not fit."""
        whole = self.low.is_integer() and self.high.is_integer()
        return int(self.high - self.low) if whole else DEEPEST + 1

    @property
    def stored_as(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.levels <= 255 else np.uint16

    def scale(self, values: NDArray) -> NDArray:
        """Values of a file as numbers from 0 to ``levels``, not yet rounded."""
        found = values.dtype
        if not self.by_type and self.dtype not in (None, found.name):
            raise UnreadableError(
                f"expected {self.dtype} values, as the training images have; got {found.name}, "
                f"{values.min()} to {values.max()}: give their range, such as --range "
                f"{_suggested(values)}"
            )
        low, high = type_range(found) if self.by_type else (self.low, self.high)
        shifted = values.astype(np.float64) - low
        return np.clip(shifted * (self.levels / (high - low)), 0, self.levels)

    def value(self, level: int) -> float:
        """What a stored integer stands for in the files, to a hundred-thousandth of the range.

        In files of several types that is not one value, and the integer itself is returned.
        """
        own = self.dtype if self.by_type else None
        low, high = (self.low, self.high) if own is None else type_range(own)
        digits = 5 - math.ceil(math.log10(high - low))
        return round(low + (high - low) * level / self.levels, digits) + 0.0  # never -0

    def clipping(self, values: NDArray) -> Clipping:
        """How many values ``scale`` clips."""
        if self.by_type and values.dtype.kind != "f":
            return Clipping(values.size)
        low, high = type_range(values.dtype) if self.by_type else (self.low, self.high)
        return Clipping(values.size, int((values < low).sum()), int((values > high).sum()))

    def store(self, values: NDArray, size: int) -> NDArray:
        """Values ``[H, W, C]`` as integers ``[size, size, C]``: shorter side resized, centre cut out."""
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UnreadableError("expected finite values; got infinite ones or nan")
        scaled = self.scale(values)
        if scaled.shape[:2] != (size, size):
            scaled = _resize(torch.from_numpy(scaled)[None], size)[0].numpy()
        return np.rint(scaled).astype(self.stored_as)

    def describe(self) -> str:
        """The range and the type of the values: ``values 0 to 4095 (uint16)``."""
        kind = "several types" if self.dtype is None else self.dtype
        return f"values in the range {self} ({kind})" if self.by_type else f"values {self} ({kind})"

    def __str__(self) -> str:
        if self.by_type:
            return "of each file's type"
        return f"{self.low:g} to {self.high:g}"


def _suggested(values: NDArray) -> str:
    if values.dtype.kind == "u":
        return f"0,{_full_scale(int(values.max()))}"
    shares = values.dtype.kind == "f" and values.min() >= 0 and values.max() <= 1
    return "dtype, which is 0 to 1" if shares else "LOW,HIGH, the least and greatest value of all files"


def _full_scale(highest: int) -> int:
    """The largest value of the fewest bits, 8 or more, that hold a value: 4095 for 3000."""
    return 2 ** max(8, highest.bit_length()) - 1


def type_range(dtype: DTypeLike) -> tuple[float, float]:
    found = np.dtype(dtype)
    if found.kind == "f":
        return 0.0, 1.0
    return float(np.iinfo(found).min), float(np.iinfo(found).max)


def parse_range(text: str, *, auto: bool = True) -> tuple[float, float] | None:
    """LOW and HIGH; None for ``auto``, if it may be given, and ``dtype``. Raises DataError otherwise."""
    if text == "dtype" or (auto and text == "auto"):
        return None
    try:
        low, high = map(float, text.split(","))
        PixelRange(None, low, high)
    except ValueError as error:
        expected = f"auto, {LIMITS}" if auto else LIMITS
        if isinstance(error, DataError) and -math.inf < low < high < math.inf:
            raise
        raise DataError(f"range: expected {expected}; got {text!r}") from None
    return low, high


def choose_range(
    text: str, dtypes: Collection[str], extent: Callable[[], tuple[float, float]], what: str
) -> PixelRange:
    """The range of a data set.

    Args:
        text: ``"auto"``, ``"dtype"`` or ``"LOW,HIGH"``. Automatic is 0 to 255 for bytes; for other unsigned
            integers 0 to the largest value of as many bits as the images use (4095 for a 12-bit camera); for
            all other types the least and the greatest value.
        dtypes: of the files.
        extent: gives the least and the greatest value of all images; called only if it is needed.
    """
    given, kinds = parse_range(text), sorted(dtypes)
    only = kinds[0] if len(kinds) == 1 else None
    if given is not None:
        return PixelRange(only, *given)
    if text == "dtype":
        return PixelRange(only, 0, 255 if only == "uint8" else DEEPEST, by_type=True)
    if only is None:
        raise DataError(
            f"{what}: expected values of one type; got {', '.join(kinds)}: give --range dtype, by which each "
            "file has the range of its type, or --range LOW,HIGH"
        )
    if only == "uint8":
        return PixelRange()
    low, high = extent()
    if max(abs(low), abs(high)) > LARGEST:
        raise DataError(f"{what}: expected values of at most {LARGEST:.2g}; got {low:g} to {high:g}")
    if np.dtype(only).kind == "u" and high <= DEEPEST:
        return PixelRange(only, 0, _full_scale(int(high)))
    return PixelRange(only, low, high if high > low else low + 1)


def in_channels(values: NDArray, channels: int) -> NDArray:
    """Converts grey to colour or colour to grey; any other difference in channels is an error."""
    found = values.shape[-1]
    if found == channels:
        return values
    if (found, channels) == (1, 3):
        return np.repeat(values, 3, -1)
    if (found, channels) == (3, 1):
        if (values == values[..., :1]).all():
            return values[..., :1]
        mixed = (values @ np.array(LUMA))[..., None]
        return mixed if values.dtype.kind == "f" else np.rint(mixed).astype(values.dtype)
    raise UnreadableError(f"expected {channels} channel{'s' * (channels > 1)}; got {found}")


def as_bytes(images: NDArray, levels: int) -> NDArray[np.uint8]:
    """Stored integers 0..levels as 0..255, to look at."""
    if levels == 255:
        return images.astype(np.uint8)
    return np.rint(images * (255 / levels)).astype(np.uint8)


def visible_channels(channels: int) -> int:
    """How many of an image's channels a picture shows: the first three as red, green and blue, or one."""
    return 3 if channels >= 3 else 1


def fit(images: NDArray, size: int) -> NDArray:
    """Images [N, H, W, C] resized so that the shorter side is ``size``, then cropped to the centre."""
    if images.shape[1:3] == (size, size):
        return images
    out = np.empty((len(images), size, size, images.shape[3]), images.dtype)
    for start in range(0, len(images), 1024):
        chunk = torch.from_numpy(images[start : start + 1024].astype(np.float32))
        out[start : start + 1024] = np.rint(_resize(chunk, size).numpy())
    return out


def _resize(images: torch.Tensor, size: int) -> torch.Tensor:
    """Numbers [N, H, W, C]: the largest square about the centre, resized as ``ImageOps.fit`` of Pillow does.

    The square may begin between two pixels. The result is clamped to the minimum and maximum of the input.
    """
    height, width = images.shape[1:3]
    least, greatest = images.min(), images.max()
    if height == width:
        planes = images.permute(0, 3, 1, 2)
        resized = F.interpolate(planes, (size, size), mode="bilinear", antialias=True).permute(0, 2, 3, 1)
    else:
        side = min(height, width)
        for axis, length in ((1, height), (2, width)):
            weights, used = _box_weights(length, side, size)
            part = images.narrow(axis, used.start, len(used))
            mixed = torch.tensordot(part, torch.from_numpy(weights).to(part.dtype), ([axis], [1]))
            images = mixed.movedim(-1, axis)
        resized = images
    return resized.clamp(least, greatest)


def _box_weights(length: int, side: int, size: int) -> tuple[NDArray[np.float64], range]:
    """Weights [size, pixels] of a line's pixels in the ``size`` pixels of its central ``side``; which pixels.

    Bilinear with antialiasing. As in Pillow, pixels beside the square take part in its first and last pixel.
    """
    scale = side / size
    support = max(1.0, scale)
    centres = (length - side) / 2 + (np.arange(size) + 0.5) * scale
    used = range(max(0, math.floor(centres[0] - support)), min(length, math.ceil(centres[-1] + support)))
    distance = np.abs(np.array(used) + 0.5 - centres[:, None]) / support
    weights = np.clip(1 - distance, 0, None)
    return weights / weights.sum(1, keepdims=True), used
