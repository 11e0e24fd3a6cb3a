"""Decoders of the formats that Pillow does not read, or reduces to 8 bits: deep TIFF, PNG and PPM files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfconv.data.pixels import MAX_CHANNELS, UnreadableError, type_range

BYTES_PER_PIXEL = 8  # of decoded values, for each of MAX_PIXELS: 16 bits in four channels
DAMAGED = "damaged or truncated"
ORIENTATION = 0x0112  # EXIF; from 5 on, width and height are exchanged
_EXTRA_SAMPLES, _ALPHA, _PREMULTIPLIED = 338, (1, 2), 1  # TIFF
_UPRIGHT: dict[int, Callable[[NDArray], NDArray]] = {
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: np.rot90,
}


def check_size(width: int, height: int, max_pixels: int, bytes_per_pixel: int = 1) -> None:
    """Raises UnreadableError if an image has more than ``max_pixels``, or its values need more memory."""
    if width * height > max_pixels:
        raise UnreadableError(
            f"expected up to {millions(max_pixels)} pixels; got {width}×{height}, {millions(width * height)}"
        )
    if (needed := width * height * bytes_per_pixel) > BYTES_PER_PIXEL * max_pixels:
        raise UnreadableError(
            f"expected values of up to {millions(BYTES_PER_PIXEL * max_pixels)} bytes; got "
            f"{millions(needed)}: {width}×{height} of {bytes_per_pixel} bytes each"
        )


def from_tiff(source: Path | io.BytesIO, max_pixels: int) -> NDArray[Any] | None:
    """Values [H, W, C]; None for 8 bits in one or three channels (plus alpha), which Pillow reads."""
    import tifffile

    with tifffile.TiffFile(source) as file:
        page, series = file.pages.first, file.series[0]
        lengths = dict(zip(series.axes, series.shape, strict=True))
        check_size(lengths.get("X", 0), lengths.get("Y", 0), max_pixels)
        extra = page.tags.get(_EXTRA_SAMPLES)
        alpha = extra.value[-1] if extra is not None and "S" in lengths else 0
        samples = lengths.get("S", 1) - (alpha in _ALPHA)
        orientation = page.tags.get(ORIENTATION)
        grey = (tifffile.PHOTOMETRIC.MINISBLACK, tifffile.PHOTOMETRIC.MINISWHITE)
        colours = page.photometric not in grey
        # Pillow exchanges rows and columns of 8-bit files that are not compressed before it reads them
        turned = (
            orientation is not None
            and orientation.value in (5, 6, 7, 8)
            and page.compression == tifffile.COMPRESSION.NONE
            and page.photometric in (*grey, tifffile.PHOTOMETRIC.RGB, tifffile.PHOTOMETRIC.PALETTE)
        )
        by_pillow = samples == 1 or (samples == 3 and colours)
        if series.dtype in (np.uint8, np.bool_) and len(file.pages) == 1 and by_pillow and not turned:
            return None
        if page.photometric in (tifffile.PHOTOMETRIC.PALETTE, tifffile.PHOTOMETRIC.SEPARATED) and (
            series.dtype.itemsize == 1 and not (turned and page.colormap is not None)
        ):
            return None
        channels = {axis: n for axis, n in lengths.items() if axis not in "YX" and n > 1}
        if not {"Y", "X"} <= {*lengths} or len(channels) > 1 or not {*channels} <= {*"CSQI"}:
            described = ", ".join(f"{axis} {n}" for axis, n in lengths.items())
            raise UnreadableError(f"expected one image, with its channels; got a stack ({described})")
        number = max(channels.values(), default=1)
        if number > MAX_CHANNELS:
            raise UnreadableError(f"expected 1 to {MAX_CHANNELS} channels; got {number} ({series.axes})")
        check_size(lengths["X"], lengths["Y"], max_pixels, number * series.dtype.itemsize)
        values = series.asarray()
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and values.dtype.kind in "ub":
            values = ~values
        palette = page.colormap if series.dtype == np.uint8 and samples == 1 and turned else None
    keep = tuple(i for i, axis in enumerate(series.axes) if axis in "YX" or axis in channels)
    axes = "".join(series.axes[i] for i in keep)
    values = values.reshape([values.shape[i] for i in keep])
    values = values.transpose([axes.index(axis) for axis in ("Y", "X", *channels)])
    values = values.reshape(*values.shape[:2], -1)
    if palette is not None:
        values = (palette.T[values[..., 0]] >> 8).astype(np.uint8)
    if alpha in _ALPHA and values.shape[2] > 1:
        values = _on_white(values, premultiplied=alpha == _PREMULTIPLIED)
    return to_numbers(_UPRIGHT.get(1 if orientation is None else orientation.value, lambda x: x)(values))


def from_deep_png(source: Path | io.BytesIO, orientation: int) -> NDArray[Any]:
    import imagecodecs

    content = source.read_bytes() if isinstance(source, Path) else source.getvalue()
    values = imagecodecs.png_decode(content)
    values = values if values.ndim == 3 else values[..., None]
    if values.shape[2] in (2, 4):
        values = _on_white(values)
    return to_numbers(_UPRIGHT.get(orientation, lambda x: x)(values))


def from_deep_ppm(source: Path | io.BytesIO) -> NDArray[Any] | None:
    """A PPM of more than 8 bits, of which Pillow keeps 8, scaled to 0..65535 as its PGM are; else None."""
    content = source.read_bytes() if isinstance(source, Path) else source.getvalue()
    header = re.match(rb"(P[36])" + 3 * rb"(?:\s|#[^\n]*\n)+(\d{1,9})" + rb"(?:#[^\n]*)?\s", content)
    if header is None:
        raise UnreadableError(DAMAGED)
    width, height, most = map(int, header.groups()[1:])
    if most <= 255:
        return None
    if header[1] == b"P3" or most > 65535:
        raise UnreadableError("expected a binary PPM (P6) of at most 16 bits; got ASCII (P3) or more bits")
    values = np.frombuffer(content, ">u2", 3 * width * height, header.end()).reshape(height, width, 3)
    return np.rint(np.minimum(values, most) * (65535 / most)).astype(np.uint16)


def _on_white(values: NDArray[Any], *, premultiplied: bool = False) -> NDArray[Any]:
    """Composites on white by the last channel, alpha, and drops it."""
    most = type_range(values.dtype)[1]
    colour, alpha = values[..., :-1].astype(np.float64), values[..., -1:] / most
    shown = (colour if premultiplied else colour * alpha) + (1 - alpha) * most
    shown = np.clip(shown, 0, most)
    return (shown if values.dtype.kind == "f" else np.rint(shown)).astype(values.dtype)


def to_numbers(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype == bool:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype.kind not in "uif":
        raise UnreadableError(f"expected integers or floating point; got {values.dtype}")
    return np.ascontiguousarray(values)


def millions(pixels: int) -> str:
    return f"{pixels / 1e6:.0f} million"
