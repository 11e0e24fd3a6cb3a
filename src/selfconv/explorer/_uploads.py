"""Image files that somebody uploads: never trusted, checked by their header before anything is decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from selfconv.data import DataError, read_image, require_pillow

MAX_BYTES = 16 * 2**20
MAX_PIXELS = 40_000_000
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # none that starts another program


def read_upload(path: Path, size: int, channels: int) -> np.ndarray:
    """An uploaded file as uint8 ``[channels, size, size]``: the shorter side resized, the centre cut out.

    Raises:
        DataError: too large, not an image, or damaged; the line names the file, without its folder.
    """
    require_pillow()
    check_upload(path)
    try:
        return read_image(path, size, channels).numpy()
    except DataError as error:
        raise DataError(str(error).replace(str(path), path.name)) from None


def check_upload(path: Path) -> None:
    """Refuses by the file's length and by what its header says."""
    import PIL.Image

    length = path.stat().st_size
    if length > MAX_BYTES:
        raise DataError(f"{path.name}: expected up to {MAX_BYTES >> 20} MB; got {length / 2**20:.1f} MB")
    try:
        with PIL.Image.open(path, formats=FORMATS) as image:  # reads the header alone
            width, height = image.size
    except PIL.Image.DecompressionBombError:
        raise DataError(f"{path.name}: expected up to {_mega(MAX_PIXELS)} pixels; got far more") from None
    except Exception:  # decoders raise anything at all on damaged files
        known = ", ".join(FORMATS[:-1])
        raise DataError(f"{path.name}: expected an image ({known} or {FORMATS[-1]}); got none") from None
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{path.name}: expected up to {_mega(MAX_PIXELS)} pixels; got {width}×{height}, "
            f"{_mega(width * height)}"
        )


def _mega(pixels: int) -> str:
    return f"{pixels / 1e6:.0f} million"
