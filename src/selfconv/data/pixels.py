"""From the values in image files to the integers that are kept in memory: one range for a whole data set."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import DTypeLike, NDArray

from selfconv._text import escape_for_terminal

MAX_CHANNELS = 16
DEEPEST = 65535  # the largest stored value; images are kept in 16 bits at most
RANGE_HELP = "auto, dtype, or LOW,HIGH with LOW < HIGH"
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in grey, as Pillow weights them


class DataError(ValueError):
    """Invalid data; the message is one line that names the data and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_for_terminal(message))


class UnreadableError(Exception):
    """Why an image file cannot be used."""


@dataclass(frozen=True)
class PixelRange:
    """Which values in the files become the pixels 0 and 1. Values outside are clipped.

    In memory a pixel is an integer from 0 to ``levels``: every value of the files, if there are up to 65536
    of them in the range, and otherwise the nearest of 65536.

    Attributes:
        dtype: of the values in the files; None if files of several types are mixed.
        by_type: the type of each file gives its range (floating point: 0 to 1) instead of ``low`` and
            ``high``, which are then those of the integers in memory.
    """

    dtype: str | None = "uint8"
    low: float = 0.0
    high: float = 255.0
    by_type: bool = False

    def __post_init__(self) -> None:
        for name in ("low", "high"):  # 255 and 255.0 are one range, with one digest
            object.__setattr__(self, name, float(getattr(self, name)))
        if not self.low < self.high or max(abs(self.low), abs(self.high)) > 2**64:
            raise ValueError(f"range: expected numbers LOW < HIGH; got {self.low}, {self.high}")

    @property
    def levels(self) -> int:
        """The integer in memory that stands for the pixel 1."""
        width = self.high - self.low
        whole = float(self.low).is_integer() and float(self.high).is_integer()
        return int(width) if whole and width <= DEEPEST else DEEPEST

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

    def store(self, values: NDArray, size: int) -> NDArray:
        """Values ``[H, W, C]`` as integers ``[size, size, C]``: shorter side resized, centre cut out."""
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UnreadableError("expected finite values; got infinite ones or nan")
        scaled = self.scale(values)
        if scaled.shape[:2] != (size, size):
            scaled = _resize(torch.from_numpy(scaled)[None], size)[0].numpy()
        return np.rint(scaled).astype(self.stored_as)

    def __str__(self) -> str:
        if self.by_type:
            return "the range of each file's type"
        return f"{self.low:g} to {self.high:g}"


def _suggested(values: NDArray) -> str:
    if values.dtype.kind == "u":
        return f"0,{_full_scale(int(values.max()))}"
    low, high = values.min(), values.max()
    return f"{low},{high}" if low < high else "LOW,HIGH"


def _full_scale(highest: int) -> int:
    """The largest value of the fewest bits, 8 or more, that hold a value: 4095 for 3000."""
    return 2 ** max(8, highest.bit_length()) - 1


def type_range(dtype: DTypeLike) -> tuple[float, float]:
    found = np.dtype(dtype)
    if found.kind == "f":
        return 0.0, 1.0
    return float(np.iinfo(found).min), float(np.iinfo(found).max)


def parse_range(text: str) -> tuple[float, float] | None:
    """LOW and HIGH; None for ``auto`` and ``dtype``. Raises DataError for anything else."""
    if text in ("auto", "dtype"):
        return None
    try:
        low, high = map(float, text.split(","))
        PixelRange(None, low, high)
    except ValueError:
        raise DataError(f"range: expected {RANGE_HELP}; got {text!r}") from None
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
    """Numbers [N, H, W, C], resized and cropped; never beyond the least and the greatest."""
    height, width = images.shape[1:3]
    scale = size / min(height, width)
    target = (max(size, round(height * scale)), max(size, round(width * scale)))
    top, left = (target[0] - size) // 2, (target[1] - size) // 2
    resized = F.interpolate(images.permute(0, 3, 1, 2), target, mode="bilinear", antialias=True)
    cropped = resized[:, :, top : top + size, left : left + size].clamp_(images.min(), images.max())
    return cropped.permute(0, 2, 3, 1)
