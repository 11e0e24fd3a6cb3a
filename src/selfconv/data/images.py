"""Reads image files as square byte arrays; no other module opens them. Needs Pillow (extra ``train``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from selfconv._extras import require
from selfconv._files import check_file
from selfconv.data.dataset import DataError, Images

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
# Pillow goes by the content, not by the name, and knows formats that start another program (Ghostscript)
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 89_478_485  # of an image: 256 MB in three channels
MAX_BYTES = 2**30  # of a file: more than that many pixels of 16 bits in four channels
MAX_SIZE = math.isqrt(MAX_PIXELS)  # side of a square one
_ORIENTATION = 0x0112  # EXIF; from 5 on, width and height are exchanged


class UnreadableError(Exception):
    """Why an image file cannot be used."""


def require_pillow() -> None:
    """Makes Pillow ready to read files from several threads; raises ModuleNotFoundError without it."""
    require("reading image files", "PIL")
    import PIL.Image

    PIL.Image.init()  # once, before threads do


def read_image(path: str | Path, size: int, channels: int, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Reads an image file as uint8 ``[channels, size, size]``, with the preprocessing of a training folder.

    Raises:
        DataError: the file does not exist, is not an image of a supported format (``IMAGE_FORMATS``), too
            large, or damaged.
    """
    if channels not in (1, 3) or not 1 <= size <= MAX_SIZE:
        raise DataError(
            f"{path}: expected 1 or 3 channels and a size of 1 to {MAX_SIZE}; got {channels} and {size}"
        )
    require_pillow()
    from PIL.Image import fromarray

    try:
        rgb = decode(Path(path), size, max_pixels)
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from error
    if channels == 3:
        return torch.from_numpy(rgb).permute(2, 0, 1)
    return torch.from_numpy(np.array(fromarray(rgb).convert("L")))[None]  # exact where R = G = B


def image_size(path: Path, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height of the upright image, from the file's header."""
    with _opened(path, max_pixels) as image:
        width, height = image.size
        return (height, width) if image.getexif().get(_ORIENTATION, 1) >= 5 else (width, height)


def decode(path: Path, size: int, max_pixels: int = MAX_PIXELS) -> Images:
    """An image [size, size, 3]: upright, the shorter side resized to ``size``, the centre cut out."""
    import PIL.Image
    from PIL.ImageOps import exif_transpose, fit

    with _opened(path, max_pixels) as image:
        image.draft(None, (2 * size, 2 * size))  # lets JPEG decode at a fraction of its size
        return np.array(fit(_rgb(exif_transpose(image)), (size, size), PIL.Image.Resampling.BILINEAR))


@contextmanager
def _opened(path: Path, max_pixels: int) -> Iterator[Image]:
    """An image whose header alone has been read, and allows the rest to be."""
    import PIL.Image

    with _explained(max_pixels):
        check_file(path, MAX_BYTES)
        with PIL.Image.open(path, formats=IMAGE_FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise UnreadableError(
                    f"expected up to {_millions(max_pixels)} pixels; got {image.width}×{image.height}, "
                    f"{_millions(image.width * image.height)}"
                )
            yield image


def _millions(pixels: int) -> str:
    return f"{pixels / 1e6:.0f} million"


def _rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip to 255
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UnreadableError(f"expected 8 or 16 bits a pixel; got values {values.min()}..{values.max()}")
        image = PIL.Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise UnreadableError("expected 8 or 16 bits a pixel; got floating point")
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
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        known = f"{', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"
        raise UnreadableError(f"not an image: expected {known}") from None
    except DecompressionBombError:  # raised by Pillow where the header claims far more
        raise UnreadableError(f"expected up to {_millions(max_pixels)} pixels; got far more") from None
    except Exception as error:  # decoders raise anything at all on damaged files
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreadableError(" ".join(reason.split())[:100] or type(error).__name__) from error
