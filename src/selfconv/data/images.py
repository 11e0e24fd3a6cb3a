"""Reads image files in their own depth and channels, for every module. Needs the extra ``train``.

Pillow reads what has 8 bits in one or three channels, NumPy ``.npy``, and ``formats.py`` the rest: PGM and
PPM files in which 255 is not white; by tifffile, TIFF files that Pillow does not read as they are (16 and 32
bits, floating point, alpha, more channels, and 8 bits in some colours and compressions); by imagecodecs, PNG
files of 16 bits.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfconv._extras import require
from selfconv._files import FileRefused, check_file
from selfconv.data.dataset import MAX_PIXELS, MAX_SIZE, channels_may_be_first
from selfconv.data.formats import (
    DAMAGED,
    ORIENTATION,
    check_size,
    from_deep_png,
    from_pnm,
    from_tiff,
    millions,
    to_numbers,
)
from selfconv.data.pixels import (
    MAX_CHANNELS,
    Clipping,
    DataError,
    PixelRange,
    UnreadableError,
    in_channels,
)

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = {
    ".bmp",
    ".gif",
    ".jpeg",
    ".jpg",
    ".npy",
    ".pbm",
    ".pfm",
    ".pgm",
    ".png",
    ".pnm",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
}
_BEGINNINGS = re.compile(  # of GIF, JPEG, PNG, TIFF and WEBP
    rb"GIF8|\xff\xd8\xff|\x89PNG|II[*+]\0|MM\0[*+]|RIFF....WEBP", re.DOTALL
)
# Pillow detects formats by content, and some start another program (EPS: Ghostscript)
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_BYTES = 2**30  # of a file
_GREY_MODES = ("1", "L", "LA", "La", "I;16", "I;16B")


class Item(NamedTuple):
    """An image: a file, or one of the images in a stack; or a function that returns the bytes of a file."""

    name: str
    file: Path | Callable[[], bytes]
    row: int | None = None


class Header(NamedTuple):
    """Size, channels and type of an image. Reading it decodes the file, except formats that Pillow opens."""

    width: int
    height: int
    channels: int  # 3 for colour, even if every pixel turns out to be grey
    dtype: str


def require_image_readers() -> None:
    """Raises ModuleNotFoundError if an image library is missing; initialises Pillow before threads use it."""
    require("reading image files", "PIL", "tifffile", "imagecodecs")
    import PIL.Image

    PIL.Image.init()
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # our errors report what is wrong


def read_image(
    path: str | Path,
    size: int,
    channels: int,
    *,
    pixels: PixelRange | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """Reads an image file as integers ``[channels, size, size]``, preprocessed as in a training folder.

    Args:
        pixels: the range of the values; by default 0 to 255, of bytes. The integers are uint8, or uint16 if
            the range has more than 256 levels.

    Raises:
        DataError: the file does not exist, is not an image of a supported format (``IMAGE_FORMATS`` and
            ``.npy``), too large, damaged, or has other channels or another type of values.
    """
    first = Item(str(path), Path(path))  # of a stack, the others are not decoded
    return _read_items(Path(path), [first], size, channels, pixels, max_pixels)[0]


def read_images(
    path: Path,
    size: int,
    channels: int,
    *,
    pixels: PixelRange | None = None,
    tally: Callable[[Clipping], None] | None = None,
) -> Tensor:
    """All images of a file, ``[N, channels, size, size]``: several for an ``.npy`` stack.

    Args:
        tally: called for each image with the number of values that are outside the range.
    """
    try:
        items = stack_items(path, str(path))
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from error
    return _read_items(path, items, size, channels, pixels, MAX_PIXELS, tally)


def _read_items(
    path: Path,
    items: Sequence[Item],
    size: int,
    channels: int,
    pixels: PixelRange | None,
    max_pixels: int,
    tally: Callable[[Clipping], None] | None = None,
) -> Tensor:
    if not 1 <= channels <= MAX_CHANNELS or not 1 <= size <= MAX_SIZE:
        raise DataError(
            f"{path}: expected 1 to {MAX_CHANNELS} channels and a size of 1 to {MAX_SIZE}; got {channels} "
            f"and {size}"
        )
    require_image_readers()
    pixels = PixelRange() if pixels is None else pixels
    try:
        found = [decode(item, size, channels, pixels, max_pixels, tally) for item in items]
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from error
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)


def decode(
    item: Item,
    size: int,
    channels: int,
    pixels: PixelRange,
    max_pixels: int = MAX_PIXELS,
    tally: Callable[[Clipping], None] | None = None,
) -> NDArray[Any]:
    """An image as integers [size, size, channels]: upright, resized by its shorter side, centre-cropped."""
    import PIL.Image
    from PIL.ImageOps import exif_transpose, fit

    with _open(item, max_pixels) as image:
        if isinstance(image, np.ndarray):
            if tally is not None:
                tally(pixels.clipping(image))
            return pixels.store(in_channels(image, channels), size)
        image.draft(None, (2 * size, 2 * size))  # lets JPEG decode at a fraction of its size
        upright = fit(_rgb(exif_transpose(image)), (size, size), PIL.Image.Resampling.BILINEAR)
        if channels == 1:
            upright = upright.convert("L")  # exact where R = G = B
        values = np.array(upright).reshape(size, size, -1)
        if pixels == PixelRange() and channels in (1, 3):
            return values
        if tally is not None:
            tally(pixels.clipping(values))
        if channels != 1 and image.mode in _GREY_MODES:
            values = values[..., :1]
        return pixels.store(in_channels(values, channels), size)


def read_header(item: Item, max_pixels: int = MAX_PIXELS) -> Header:
    with _open(item, max_pixels) as image:
        if isinstance(image, np.ndarray):
            height, width, channels = image.shape
            return Header(width, height, channels, image.dtype.name)
        width, height = image.size
        if image.format != "TIFF" and image.getexif().get(ORIENTATION, 1) >= 5:  # Pillow turns TIFF itself
            width, height = height, width
        return Header(width, height, 1 if image.mode in _GREY_MODES else 3, "uint8")


def read_values(item: Item) -> NDArray[Any]:
    """The values of an image [H, W, C] as they are in the file, upright."""
    from PIL.ImageOps import exif_transpose

    with _open(item, MAX_PIXELS) as image:
        if isinstance(image, np.ndarray):
            return image
        return np.array(_rgb(exif_transpose(image)))


def is_image_name(path: Path) -> bool:
    """Whether a path is no folder and has an image's suffix, or has none and begins as a common format does.

    Dead links and devices with such names count: reading them gives an error that names them.
    """
    if path.suffix or not path.is_file():
        return path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()
    try:
        with open(path, "rb") as file:
            return _BEGINNINGS.match(file.read(12)) is not None
    except OSError:
        return False


def stack_items(path: Path, name: str) -> list[Item]:
    """The images in a file: one, or those of a stack ``[N, H, W]`` or ``[N, H, W, C]``."""
    if path.suffix.lower() != ".npy":
        return [Item(name, path)]
    with _decoder_errors(MAX_PIXELS):
        shape = _load_npy(path).shape
    _refuse_ambiguous(shape)
    if not _is_stack(shape):
        return [Item(name, path)]
    if not shape[0]:
        raise UnreadableError(f"expected one or more images; got an array of shape {list(shape)}")
    return [Item(f"{name}[{i}]", path, i) for i in range(shape[0])]


def files_key(items: Sequence[Item]) -> str:
    """A digest of the names, sizes and times of change of files."""
    digest = hashlib.sha256()
    seen: set[Path] = set()
    for item in items:
        assert isinstance(item.file, Path)
        digest.update(f"{item.name}\0".encode("utf-8", "surrogateescape"))
        if item.file not in seen:
            seen.add(item.file)
            found = item.file.stat()
            state = (os.fspath(item.file.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            digest.update(repr(state).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


# ---- files ----


@contextmanager
def _open(item: Item, max_pixels: int) -> Iterator[Image | NDArray[Any]]:
    """Yields a Pillow image, not decoded yet, or decoded values [H, W, C] in the file's own type."""
    import PIL.Image

    with _decoder_errors(max_pixels):
        if isinstance(item.file, Path):
            if item.file.suffix.lower() == ".npy":
                yield _from_npy(item, max_pixels)
                return
            check_file(item.file, MAX_BYTES)
            source: Path | io.BytesIO = item.file
            with open(item.file, "rb") as file:
                head = file.read(26)
        else:
            content = item.file()
            source, head = io.BytesIO(content), content[:26]
        page = 0
        if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
            found = from_tiff(source, max_pixels)
            if isinstance(found, int):
                page = found
            elif found.dtype == np.uint8 and found.shape[2] in (1, 3):
                yield PIL.Image.fromarray(found.squeeze(2) if found.shape[2] == 1 else found)
                return
            else:
                yield found
                return
        if head[:3].split() == [b"PF"]:
            raise UnreadableError("expected a PFM of one channel (Pf); got one in colour (PF)")
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with PIL.Image.open(source, formats=IMAGE_FORMATS) as image:
            image.seek(page)
            check_size(image.width, image.height, max_pixels)
            if head[:4] == b"\x89PNG" and head[24:25] == b"\x10":
                yield from_deep_png(source, image.getexif().get(ORIENTATION, 1))
            elif image.mode == "F":  # a PFM
                yield np.array(image)[..., None]
            elif head[:2] in (b"P2", b"P3", b"P5", b"P6") and (values := from_pnm(source)) is not None:
                yield values
            else:
                if image.mode == "L" and head[:4] == b"\x89PNG":
                    _scale_transparency(image, head[24])
                yield image


def _scale_transparency(image: Image, bits: int) -> None:
    """Scales the transparent value of a grey PNG to bytes, as Pillow does with the pixels alone."""
    transparent = image.info.get("transparency")
    if bits < 8 and isinstance(transparent, int):
        image.info["transparency"] = transparent * 255 // (2**bits - 1)


@lru_cache(maxsize=4)
def _mapped(path: Path, _size: int, _changed: int) -> NDArray[Any]:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _load_npy(path: Path) -> NDArray[Any]:
    check_file(path, float("inf"))  # it is mapped, not read
    found = path.stat()
    try:
        return _mapped(path, found.st_size, found.st_mtime_ns)
    except (ValueError, EOFError):
        raise UnreadableError(
            "expected an .npy array; the file is truncated, or holds objects or something else"
        ) from None


def _is_stack(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 or (len(shape) == 3 and shape[2] > MAX_CHANNELS)


def _refuse_ambiguous(shape: tuple[int, ...]) -> None:
    """Raises UnreadableError if channels may be first, or if it may be a stack or one image with channels."""
    if len(shape) not in (3, 4):
        return
    first, height, width = shape[-3:]
    may_count_images = len(shape) == 3 and first > 1 and width > MAX_CHANNELS
    if (may_count_images and first <= MAX_CHANNELS) or (
        (len(shape) == 4 or first > 1) and channels_may_be_first(shape[-3:])
    ):
        doubt = "which may have channels first"
    elif len(shape) == 3 and first == height and width > MAX_CHANNELS:
        doubt = f"which may have more than {MAX_CHANNELS} channels"
    elif len(shape) == 3 and 4 < height == width <= MAX_CHANNELS:
        doubt = "which may be a stack of grey images"
    else:
        return
    raise UnreadableError(
        "expected [H, W, C], or a stack [N, H, W, C] ([N, H, W, 1] of grey images); got "
        f"{list(shape)}, {doubt}"
    )


def _from_npy(item: Item, max_pixels: int) -> NDArray[Any]:
    assert isinstance(item.file, Path)
    values = _load_npy(item.file)
    _refuse_ambiguous(values.shape)
    if _is_stack(values.shape) and len(values):
        values = values[item.row or 0]
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or not 1 <= values.shape[2] <= MAX_CHANNELS or 0 in values.shape:
        raise UnreadableError(
            f"expected [H, W] or [H, W, C], or a stack [N, H, W] or [N, H, W, C], with 1 to {MAX_CHANNELS} "
            f"channels; got {list(_load_npy(item.file).shape)}"
        )
    height, width, number = values.shape
    check_size(width, height, max_pixels, number * values.dtype.itemsize)
    return to_numbers(values)


def _rgb(image: Image) -> Image:
    import PIL.Image

    if image.has_transparency_data:
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


@contextmanager
def _decoder_errors(max_pixels: int) -> Iterator[None]:
    from PIL import UnidentifiedImageError
    from PIL.Image import DecompressionBombError

    try:
        yield
    except (UnreadableError, DataError):
        raise
    except FileRefused as error:
        raise UnreadableError(str(error)) from error
    except UnidentifiedImageError:
        known = f"{', '.join(IMAGE_FORMATS)} or .npy"
        raise UnreadableError(f"not an image: expected {known}") from None
    except DecompressionBombError:  # raised by Pillow where the header claims far more
        raise UnreadableError(f"expected up to {millions(max_pixels)} pixels; got far more") from None
    except OSError as error:
        raise UnreadableError(error.strerror or DAMAGED) from error
    except Exception as error:  # decoders raise anything at all on damaged files
        raise UnreadableError(DAMAGED) from error
