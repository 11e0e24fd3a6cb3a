"""Reads image files in their own depth and channels; no other module opens them. Needs the extra ``train``.

Pillow reads what has 8 bits in one or three channels. tifffile reads all other TIFF files (16 and 32 bits,
floating point, more channels), imagecodecs PNG files of 16 bits, of which Pillow keeps 8, NumPy ``.npy``.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfconv._extras import require
from selfconv._files import check_file
from selfconv.data.dataset import MAX_PIXELS, MAX_SIZE
from selfconv.data.pixels import MAX_CHANNELS, DataError, PixelRange, UnreadableError, in_channels, type_range

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".npy", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
# Pillow goes by the content, not by the name, and knows formats that start another program (Ghostscript)
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_BYTES = 2**30  # of a file: more than that many pixels of 16 bits in four channels
_ORIENTATION = 0x0112  # EXIF; from 5 on, width and height are exchanged
_EXTRA_SAMPLES, _ALPHA, _PREMULTIPLIED = 338, (1, 2), 1  # TIFF
_GREY_MODES = ("1", "L", "LA", "La", "I;16", "I;16B")
_UPRIGHT: dict[int, Callable[[NDArray], NDArray]] = {
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: np.rot90,
}


class Item(NamedTuple):
    """An image: a file, or one of the images in a stack; or something that yields the bytes of a file."""

    name: str
    file: Path | Callable[[], bytes]
    number: int | None = None


class Header(NamedTuple):
    """What an image is, known before its pixels are decoded."""

    width: int
    height: int
    channels: int  # 3 for colour, even if every pixel turns out to be grey
    dtype: str


def require_pillow() -> None:
    """Makes the readers ready for several threads; raises ModuleNotFoundError without them."""
    require("reading image files", "PIL", "tifffile", "imagecodecs")
    import PIL.Image

    PIL.Image.init()  # once, before threads do
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what is wrong with a file, our errors say


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
    return read_images(Path(path), size, channels, pixels=pixels, max_pixels=max_pixels)[0]


def read_images(
    path: Path,
    size: int,
    channels: int,
    *,
    pixels: PixelRange | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """All images of a file, ``[N, channels, size, size]``: several for an ``.npy`` stack."""
    if not 1 <= channels <= MAX_CHANNELS or not 1 <= size <= MAX_SIZE:
        raise DataError(
            f"{path}: expected 1 to {MAX_CHANNELS} channels and a size of 1 to {MAX_SIZE}; got {channels} "
            f"and {size}"
        )
    require_pillow()
    pixels = PixelRange() if pixels is None else pixels
    try:
        found = [decode(item, size, channels, pixels, max_pixels) for item in stack_items(path, str(path))]
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from error
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)


def decode(
    item: Item, size: int, channels: int, pixels: PixelRange, max_pixels: int = MAX_PIXELS
) -> NDArray[Any]:
    """An image as integers [size, size, channels]: upright, shorter side resized, the centre cut out."""
    import PIL.Image
    from PIL.ImageOps import exif_transpose, fit

    with _opened(item, max_pixels) as image:
        if isinstance(image, np.ndarray):
            return pixels.store(in_channels(image, channels), size)
        image.draft(None, (2 * size, 2 * size))  # lets JPEG decode at a fraction of its size
        upright = fit(_rgb(exif_transpose(image)), (size, size), PIL.Image.Resampling.BILINEAR)
        if channels == 1:
            upright = upright.convert("L")  # exact where R = G = B
        values = np.array(upright).reshape(size, size, -1)
        if pixels == PixelRange() and channels in (1, 3):
            return values
        return pixels.store(in_channels(values, channels), size)


def read_header(item: Item, max_pixels: int = MAX_PIXELS) -> Header:
    with _opened(item, max_pixels) as image:
        if isinstance(image, np.ndarray):
            height, width, channels = image.shape
            return Header(width, height, channels, image.dtype.name)
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) >= 5:
            width, height = height, width
        return Header(width, height, 1 if image.mode in _GREY_MODES else 3, "uint8")


def read_values(item: Item) -> NDArray[Any]:
    """The values of an image [H, W, C] as they are in the file, upright."""
    from PIL.ImageOps import exif_transpose

    with _opened(item, MAX_PIXELS) as image:
        if isinstance(image, np.ndarray):
            return image
        return np.array(_rgb(exif_transpose(image)))


def stack_items(path: Path, name: str) -> list[Item]:
    """The images in a file: one, or those of a stack ``[N, H, W]`` or ``[N, H, W, C]``."""
    if path.suffix.lower() != ".npy":
        return [Item(name, path)]
    with _explained(MAX_PIXELS):
        shape = _load_npy(path).shape
    if not _is_stack(shape):
        return [Item(name, path)]
    return [Item(f"{name}[{i}]", path, i) for i in range(shape[0])]


# ---- files ----


@contextmanager
def _opened(item: Item, max_pixels: int) -> Iterator[Image | NDArray[Any]]:
    """An image of Pillow of which only the header was read, or values [H, W, C] in their own type."""
    import PIL.Image

    with _explained(max_pixels):
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
        if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
            values = _from_tiff(source, max_pixels)
            if values is not None:
                yield values
                return
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with PIL.Image.open(source, formats=IMAGE_FORMATS) as image:
            _check_size(image.width, image.height, max_pixels)
            if head[:4] == b"\x89PNG" and head[24:25] == b"\x10":
                yield _from_deep_png(source, image.getexif().get(_ORIENTATION, 1))
            elif image.mode == "I":  # a PGM of 16 bits, which Pillow scales to 0..65535
                yield np.asarray(image).astype(np.uint16)[..., None]
            else:
                yield image


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise UnreadableError(
            f"expected up to {_millions(max_pixels)} pixels; got {width}×{height}, "
            f"{_millions(width * height)}"
        )


def _from_tiff(source: Path | io.BytesIO, max_pixels: int) -> NDArray[Any] | None:
    """Values [H, W, C]; None if it has 8 bits in one or three channels, perhaps with alpha, for Pillow."""
    import tifffile

    with tifffile.TiffFile(source) as file:
        page, series = file.pages.first, file.series[0]
        lengths = dict(zip(series.axes, series.shape, strict=True))
        _check_size(lengths.get("X", 0), lengths.get("Y", 0), max_pixels)
        extra = page.tags.get(_EXTRA_SAMPLES)
        alpha = extra.value[-1] if extra is not None and "S" in lengths else 0
        samples = lengths.get("S", 1) - (alpha in _ALPHA)
        if series.dtype in (np.uint8, np.bool_) and len(file.pages) == 1 and samples in (1, 3):
            return None
        if page.photometric in (tifffile.PHOTOMETRIC.PALETTE, tifffile.PHOTOMETRIC.SEPARATED) and (
            series.dtype.itemsize == 1
        ):
            return None
        others = {axis: n for axis, n in lengths.items() if axis not in "YX" and n > 1}
        if not {"Y", "X"} <= {*lengths} or len(others) > 1 or not {*others} <= {*"CSQI"}:
            described = ", ".join(f"{axis} {n}" for axis, n in lengths.items())
            raise UnreadableError(f"expected one image, with its channels; got a stack ({described})")
        if max(others.values(), default=1) > MAX_CHANNELS:
            raise UnreadableError(
                f"expected 1 to {MAX_CHANNELS} channels; got {max(others.values())} ({series.axes})"
            )
        values = series.asarray()
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and values.dtype.kind == "u":
            values = np.iinfo(values.dtype).max - values
        turned = page.tags.get(_ORIENTATION)
    keep = tuple(i for i, axis in enumerate(series.axes) if axis in "YX" or axis in others)
    axes = "".join(series.axes[i] for i in keep)
    values = values.reshape([values.shape[i] for i in keep])
    values = values.transpose([axes.index(axis) for axis in ("Y", "X", *others)])
    values = values.reshape(*values.shape[:2], -1)
    if alpha in _ALPHA and values.shape[2] > 1:
        values = _on_white(values, premultiplied=alpha == _PREMULTIPLIED)
    return _checked(_UPRIGHT.get(1 if turned is None else turned.value, lambda x: x)(values))


def _from_deep_png(source: Path | io.BytesIO, orientation: int) -> NDArray[Any]:
    import imagecodecs

    content = source.read_bytes() if isinstance(source, Path) else source.getvalue()
    values = imagecodecs.png_decode(content)
    values = values if values.ndim == 3 else values[..., None]
    if values.shape[2] in (2, 4):
        values = _on_white(values)
    return _checked(_UPRIGHT.get(orientation, lambda x: x)(values))


def _on_white(values: NDArray[Any], *, premultiplied: bool = False) -> NDArray[Any]:
    """Without the last channel, alpha: what is transparent shows white."""
    most = type_range(values.dtype)[1]
    colour, alpha = values[..., :-1].astype(np.float64), values[..., -1:] / most
    shown = (colour if premultiplied else colour * alpha) + (1 - alpha) * most
    shown = np.clip(shown, 0, most)
    return (shown if values.dtype.kind == "f" else np.rint(shown)).astype(values.dtype)


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
            "expected an array in an .npy file; got something else, or a part of one"
        ) from None


def _is_stack(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 or (len(shape) == 3 and shape[2] > MAX_CHANNELS)


def _from_npy(item: Item, max_pixels: int) -> NDArray[Any]:
    assert isinstance(item.file, Path)
    values = _load_npy(item.file)
    if _is_stack(values.shape):
        values = values[item.number or 0]
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or not 1 <= values.shape[2] <= MAX_CHANNELS or 0 in values.shape:
        raise UnreadableError(
            f"expected [H, W] or [H, W, C], or a stack [N, H, W] or [N, H, W, C], with 1 to {MAX_CHANNELS} "
            f"channels; got {list(_load_npy(item.file).shape)}"
        )
    _check_size(values.shape[1], values.shape[0], max_pixels)
    return _checked(values)


def _checked(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype == bool:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype.kind not in "uif":
        raise UnreadableError(f"expected integers or floating point; got {values.dtype}")
    return np.ascontiguousarray(values)


def _millions(pixels: int) -> str:
    return f"{pixels / 1e6:.0f} million"


def _rgb(image: Image) -> Image:
    import PIL.Image

    if image.has_transparency_data:
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


@contextmanager
def _explained(max_pixels: int) -> Iterator[None]:
    from PIL import UnidentifiedImageError
    from PIL.Image import DecompressionBombError

    try:
        yield
    except (UnreadableError, DataError):
        raise
    except UnidentifiedImageError:
        known = f"{', '.join(IMAGE_FORMATS)} or .npy"
        raise UnreadableError(f"not an image: expected {known}") from None
    except DecompressionBombError:  # raised by Pillow where the header claims far more
        raise UnreadableError(f"expected up to {_millions(max_pixels)} pixels; got far more") from None
    except OSError as error:
        raise UnreadableError(error.strerror or "damaged, or only a part of an image") from error
    except ValueError as error:
        if str(error).startswith("expected "):  # ours
            raise UnreadableError(str(error)) from error
        raise UnreadableError("damaged, or only a part of an image") from error
    except Exception as error:  # decoders raise anything at all on damaged files
        raise UnreadableError("damaged, or only a part of an image") from error
