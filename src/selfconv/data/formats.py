"""Decoders of the formats that Pillow does not read as they are: TIFF, deep PNG, PGM and PPM files."""

from __future__ import annotations

import io
import math
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
PNM_HEADER = 4096  # bytes in which a header, with its comments, ends
_PNM = re.compile(rb"P([2356])" + 3 * rb"(?:\s|#[^\r\n]*[\r\n])+(\d{1,9})" + rb"(?:#[^\r\n]*)?\s")
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
        series = _only_image(file)
        page = series.keyframe
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
        first = page.index == file.pages.first.index  # the page that Pillow reads
        inks = page.photometric == tifffile.PHOTOMETRIC.SEPARATED
        coloured = page.photometric == tifffile.PHOTOMETRIC.PALETTE and page.colormap is not None
        if series.dtype.itemsize == 1 and (inks or page.photometric == tifffile.PHOTOMETRIC.PALETTE):
            one = math.prod(series.shape) == math.prod(page.shape)
            if not one or (inks and not first):
                kind = "CMYK" if inks else "palette"
                place = "behind another page" if one else f"of shape {list(series.shape)}"
                raise UnreadableError(f"expected one {kind} image, on the first page; got one {place}")
            if first and not (turned and coloured):
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
        palette = page.colormap if coloured and series.dtype == np.uint8 and samples == 1 else None
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


def _only_image(file: Any) -> Any:
    """The series of pages of a TIFF file, or the page, that is its image, without smaller copies and masks.

    An OME file lists the images of other files of its set too, which are not its own.
    """
    own = [series for series in file.series if series.keyframe.parent is file]
    if not own:
        raise UnreadableError(DAMAGED)
    whole = [series for series in own if not _beside(series.keyframe)]
    found = whole or own
    if len(found) == 1 and whole:
        pages = [page for page in found[0].pages if page is not None]
        images = [page for page in pages if not _beside(page)]
        if len(images) < len(pages):  # a mask of the image's own size and type
            found = images
    if len(found) != 1:
        described = ", ".join(f"{'×'.join(map(str, one.shape))} {one.dtype}" for one in found[:3])
        raise UnreadableError(f"expected one image, with its channels; got {len(found)} ({described})")
    return found[0]


def _beside(page: Any) -> bool:
    """Whether a page is a smaller copy or a mask of an image."""
    return bool(getattr(page, "is_reduced", False) or getattr(page, "is_mask", False))


def from_deep_png(source: Path | io.BytesIO, orientation: int) -> NDArray[Any]:
    import imagecodecs

    values = imagecodecs.png_decode(_content(source))
    values = values if values.ndim == 3 else values[..., None]
    if values.shape[2] in (2, 4):
        values = _on_white(values)
    return to_numbers(_UPRIGHT.get(orientation, lambda x: x)(values))


def from_pnm(source: Path | io.BytesIO) -> NDArray[Any] | None:
    """The values of a PGM or PPM as they are written; None where Pillow does so: where 255 is white.

    Pillow is also left to judge headers that are not understood.
    """
    header = _PNM.match(_content(source, PNM_HEADER))
    if header is None or int(header[4]) == 255:
        return None
    kind, width, height, white = map(int, header.groups())
    content, channels = _content(source), 1 if kind in (2, 5) else 3
    number, dtype = width * height * channels, np.uint8 if white < 256 else np.uint16
    if kind in (2, 3):  # in digits
        digits = re.sub(rb"#[^\r\n]*", b"", content[header.end() :])
        # of a given count, numbers that are not there would be unwritten memory
        values = np.fromstring(digits, np.uint32, sep=" ")[:number]
    else:
        values = np.frombuffer(content, np.dtype(dtype).newbyteorder(">"), number, header.end())
    if values.size < number:
        raise UnreadableError(DAMAGED)
    if values.max() > white:
        raise UnreadableError(
            f"expected values up to {white}, which the header calls white; got {values.max()}"
        )
    return values.astype(dtype).reshape(height, width, channels)


def _content(source: Path | io.BytesIO, most: int = -1) -> bytes:
    if isinstance(source, io.BytesIO):
        return source.getvalue()[: None if most < 0 else most]
    with open(source, "rb") as file:
        return file.read(most)


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
