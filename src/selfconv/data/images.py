"""Image files as square arrays of bytes. Needs Pillow, which the extra ``train`` brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from selfconv._extras import require
from selfconv.data.dataset import DataError, Images

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_ORIENTATION = 0x0112  # EXIF; from 5 on, width and height are exchanged


class UnreadableError(Exception):
    """Why an image file cannot be used."""


def require_pillow() -> None:
    """Makes Pillow ready to read files from several threads; raises ModuleNotFoundError without it."""
    require("reading image files", "PIL")
    import PIL.Image

    PIL.Image.init()  # once, before threads do


def read_image(path: str | Path, size: int, channels: int) -> Tensor:
    """An image file as uint8 ``[channels, size, size]``, prepared as those of a training folder are.

    Raises:
        DataError: it is not there, not an image, or damaged.
    """
    if channels not in (1, 3) or size < 1:
        raise DataError(f"{path}: expected 1 or 3 channels and a positive size; got {channels} and {size}")
    require_pillow()
    from PIL.Image import fromarray

    try:
        rgb = decode(Path(path), size)
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from error
    if channels == 3:
        return torch.from_numpy(rgb).permute(2, 0, 1)
    return torch.from_numpy(np.array(fromarray(rgb).convert("L")))[None]  # exact where R = G = B


def image_size(path: Path) -> tuple[int, int]:
    """Width and height of the upright image, from the file's header."""
    import PIL.Image

    with _explained(), PIL.Image.open(path) as image:
        width, height = image.size
        return (height, width) if image.getexif().get(_ORIENTATION, 1) >= 5 else (width, height)


def decode(path: Path, size: int) -> Images:
    """An image [size, size, 3]: upright, the shorter side resized to ``size``, the centre cut out."""
    import PIL.Image
    from PIL.ImageOps import exif_transpose, fit

    with _explained(), PIL.Image.open(path) as image:
        image.draft(None, (2 * size, 2 * size))  # lets JPEG decode at a fraction of its size
        most = PIL.Image.MAX_IMAGE_PIXELS
        if most is not None and image.width * image.height > most:  # Pillow itself takes twice as many
            raise UnreadableError(f"expected at most {most} pixels; got {image.width}×{image.height}")
        return np.array(fit(_rgb(exif_transpose(image)), (size, size), PIL.Image.Resampling.BILINEAR))


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
def _explained() -> Iterator[None]:
    from PIL import UnidentifiedImageError

    try:
        yield
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        raise UnreadableError("not an image") from None
    except Exception as error:  # decoders raise anything at all on damaged files
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreadableError(" ".join(reason.split())[:100] or type(error).__name__) from error
