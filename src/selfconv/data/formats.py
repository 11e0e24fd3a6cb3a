"""Decoders of the formats that Pillow does not read as they are: TIFF, deep PNG, PGM and PPM files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from selfconv.data.pixels import MAX_CHANNELS, UnreadableError, type_range

BYTES_PER_PIXEL = 8  # of decoded values, for each of MAX_PIXELS: 16 bits in four channels
DAMAGED = "damaged or truncated"
ORIENTATION = 0x0112  # EXIF; from 5 on, width and height are exchanged
_ALPHA, _PREMULTIPLIED = (1, 2), 1  # of extra samples, in TIFF
_JPEG = (6, 7, 33007, 34892)  # compressions in TIFF
_LOSSLESS = (
    *("CCITTRLE", "CCITTFAX3", "CCITTFAX4", "CCIRLEW", "THUNDERSCAN"),
    *("LZW", "ADOBE_DEFLATE", "DEFLATE", "PACKBITS"),
)
_READ_BY_PILLOW = {  # samples and compressions by photometric interpretation
    "MINISWHITE": (1, ("NONE", *_LOSSLESS, "JPEG")),
    "MINISBLACK": (1, ("NONE", *_LOSSLESS, "JPEG")),
    "PALETTE": (1, ("NONE", *_LOSSLESS)),
    "RGB": (3, ("NONE", *_LOSSLESS, "JPEG", "OJPEG")),
    "YCBCR": (3, (*_LOSSLESS, "JPEG", "OJPEG")),
    "SEPARATED": (4, ("JPEG",)),
    "CIELAB": (3, ("JPEG",)),
}
_UNPREDICTED_BY_PILLOW = ("LZW", "ADOBE_DEFLATE", "DEFLATE")
PNM_HEADER = 4096  # bytes in which a header, with its comments, ends
_PNM = re.compile(rb"P([2356])" + 3 * rb"(?:\s|#[^\r\n]*[\r\n])+(\d{1,9})" + rb"(?:#[^\r\n]*)?\s")
_COMMENT = re.compile(rb"#[^\r\n]*([\r\n]?)")
BLOCK = 2**16  # bytes of a text in which numbers are searched at a time
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


def from_tiff(source: Path | io.BytesIO, max_pixels: int) -> NDArray[Any] | int:
    """Values [H, W, C], or the number of the page that Pillow reads as it is."""
    with _open_tiff(source) as file:
        series = _only_image(file)
        page = series.keyframe
        axes, shape = series.axes, series.shape
        width, height = (shape[axes.index(axis)] if axes.count(axis) == 1 else 0 for axis in "XY")
        check_size(width, height, max_pixels)
        one = math.prod(shape) == math.prod(page.shape)
        by_pillow = one and isinstance(page.index, int) and not (file.is_bigtiff and file.byteorder == ">")
        if by_pillow and all(map(_pillow_reads, (page, file.pages.first))):
            return page.index
        _check_colours(page, one, shape)
        beside = [i for i, axis in enumerate(axes) if axis not in "YX"]
        channels = [i for i in beside if shape[i] > 1]  # letters of axes may repeat: QQYX
        if not width * height or len(channels) > 1 or not {axes[i] for i in channels} <= {*"CSQI"}:
            described = ", ".join(f"{axis} {n}" for axis, n in zip(axes, shape, strict=True))
            raise UnreadableError(f"expected one image, with its channels; got a stack ({described})")
        number = math.prod(shape[i] for i in beside)
        if number > MAX_CHANNELS:
            raise UnreadableError(f"expected 1 to {MAX_CHANNELS} channels; got {number} ({axes})")
        check_size(width, height, max_pixels, number * series.dtype.itemsize)
        try:
            values = series.asarray()
        except ImportError:  # imagecodecs was built without it
            raise UnreadableError(_unknown_compression(page)) from None
        values = values.reshape(shape).transpose([axes.index("Y"), axes.index("X"), *beside])
        values = _shown(values.reshape(*values.shape[:2], -1), page)
        orientation = page.tags.valueof(ORIENTATION, 1)
    return to_numbers(_UPRIGHT.get(orientation, lambda x: x)(values))


def _open_tiff(source: Path | io.BytesIO) -> Any:
    """Opens a TIFF file; pages that were written one by one, each an image to tifffile, are one series."""
    import tifffile

    file = tifffile.TiffFile(source)
    if not file.is_shaped or len(file.series) < 2 or any(one.axes != "YX" for one in file.series):
        return file
    file.close()
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return tifffile.TiffFile(source, is_shaped=False)


def _pillow_reads(page: Any) -> bool:
    """Whether Pillow reads a page of a TIFF file as it is: up to 8 bits, no alpha, a usual compression."""
    kind, compression = _name(page.photometric), _name(page.compression)
    samples, compressions = _READ_BY_PILLOW.get(kind, (0, ()))
    # Pillow exchanges rows and columns of files that are not compressed before it reads them
    turned = page.tags.valueof(ORIENTATION, 1) in (5, 6, 7, 8) and compression == "NONE"
    return (
        page.dtype in (np.uint8, np.bool_)
        and page.bitspersample in ((1, 2, 4, 8) if samples == 1 and compression != "JPEG" else (8,))
        and page.samplesperpixel == samples
        and compression in compressions
        and (page.predictor == 1 or compression in _UNPREDICTED_BY_PILLOW)
        and (kind != "PALETTE" or (page.colormap is not None and not _has_byte_colours(page)))
        and (kind != "CIELAB" or _of_raw_samples(page))
        and not turned
    )


def _of_raw_samples(page: Any) -> bool:
    """Whether the pixels of a JPEG in a TIFF file are its samples, which tifffile would take for YCbCr."""
    return page.compression in _JPEG and page.planarconfig == 1 and not page.is_jfif


def _has_byte_colours(page: Any) -> bool:
    """Whether the colours of a palette end at 255, as old programs wrote them; to Pillow they are black."""
    return bool(page.colormap.max(initial=0) < 256)


def _check_colours(page: Any, one: bool, shape: tuple[int, ...]) -> None:
    """Raises UnreadableError if a page's colours or compression are not known."""
    from tifffile import PHOTOMETRIC, TIFF

    kind, deep = page.photometric, page.dtype not in (np.uint8, np.bool_)
    if page.compression not in TIFF.DECOMPRESSORS:
        raise UnreadableError(_unknown_compression(page))
    if not deep and kind in (PHOTOMETRIC.PALETTE, PHOTOMETRIC.SEPARATED) and not one:
        name = "CMYK" if kind == PHOTOMETRIC.SEPARATED else "palette"
        raise UnreadableError(f"expected one {name} image, on one page; got one of shape {list(shape)}")
    colours = page.samplesperpixel - len(page.extrasamples)
    jpeg = page.compression in _JPEG and page.planarconfig == 1 and colours == page.samplesperpixel
    known = {
        PHOTOMETRIC.MINISBLACK: True,
        PHOTOMETRIC.RGB: True,
        PHOTOMETRIC.MINISWHITE: page.dtype.kind in "uib",
        PHOTOMETRIC.YCBCR: jpeg,  # whose decoder converts
        PHOTOMETRIC.PALETTE: not deep and page.colormap is not None,
        PHOTOMETRIC.SEPARATED: not deep and colours == 4,
        PHOTOMETRIC.CIELAB: not deep and colours == 3 and not _of_raw_samples(page),
    }
    if not known.get(kind, False):
        raise UnreadableError(
            "expected a photometric interpretation that can be converted; got "
            f"{_name(kind)} of {colours} × {page.dtype}, compression {_name(page.compression)}"
        )


def _shown(values: NDArray[Any], page: Any) -> NDArray[Any]:
    """The samples [H, W, C] of a TIFF file as they are to be seen: 0 is black, colours are RGB, on white."""
    from tifffile import PHOTOMETRIC

    kind, bits, most = page.photometric, page.bitspersample, 1.0
    if values.dtype.kind in "ui":
        most = type_range(values.dtype)[1]
    if values.dtype.kind == "u" and isinstance(bits, int) and 2**bits - 1 < most:
        most = 2**bits - 1
        if values.max() > most:  # as tifffile reads big-endian integers of 24 bits
            raise UnreadableError(f"expected values of {bits} bits; got {values.max()}")
        if values.dtype == np.uint8 and kind != PHOTOMETRIC.PALETTE:  # as Pillow does
            values, most = np.rint(values * (255 / most)).astype(np.uint8), 255
    extra = page.extrasamples
    place = next((i for i, meaning in enumerate(extra, -len(extra)) if meaning in _ALPHA), None)
    alpha, premultiplied = None, False
    if place is not None:
        alpha, premultiplied = values[..., [place]], extra[place] == _PREMULTIPLIED
        values = np.delete(values, place, -1)
    if kind == PHOTOMETRIC.MINISWHITE:
        grey = values[..., :1] if extra else values  # extra samples are no colours
        if values.dtype.kind != "u":
            grey = ~grey
        elif alpha is not None and premultiplied:
            grey = alpha - np.minimum(grey, alpha)
        else:
            grey = grey.dtype.type(most) - grey
        values = np.concatenate([grey, values[..., grey.shape[2] :]], -1)
    if values.dtype.itemsize == 1 and kind == PHOTOMETRIC.PALETTE:
        colours = page.colormap if _has_byte_colours(page) else page.colormap >> 8
        values = colours.T[values[..., 0].astype(np.uint8)].astype(np.uint8)
    elif values.dtype == np.uint8 and kind in (PHOTOMETRIC.SEPARATED, PHOTOMETRIC.CIELAB):
        values = _in_rgb(values, "CMYK" if kind == PHOTOMETRIC.SEPARATED else "LAB")
    if alpha is None:
        return values
    white = 255 if values.dtype == np.uint8 else most
    return _on_white(values, alpha / most, white, premultiplied=premultiplied)


def _in_rgb(values: NDArray[Any], mode: str) -> NDArray[Any]:
    import PIL.Image

    needed = np.ascontiguousarray(values[..., : len(mode)])
    size = (values.shape[1], values.shape[0])
    return np.array(PIL.Image.frombytes(mode, size, needed.tobytes(), "raw", mode).convert("RGB"))


def _unknown_compression(page: Any) -> str:
    return f"expected a compression that tifffile and imagecodecs read; got {_name(page.compression)}"


def _name(value: Any) -> str:
    """The name of a tag's value, or its number if it has no name."""
    return str(getattr(value, "name", value))


def _only_image(file: Any) -> Any:
    """The series of pages of a TIFF file, or the page, that is its image, without smaller copies and masks.

    An OME file lists the images of other files of its set too, which are not its own.
    """
    own = [series for series in file.series if series.keyframe.parent is file]
    for series in [series for series in own if series.kind == "generic"]:  # levels by their sizes alone
        own += [
            level for level in series.levels[1:] if not (_beside(level.keyframe) or level.keyframe.is_subifd)
        ]
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
        most = type_range(values.dtype)[1]
        values = _on_white(values[..., :-1], values[..., -1:] / most, most)
    return to_numbers(_UPRIGHT.get(orientation, lambda x: x)(values))


def from_pnm(source: Path | io.BytesIO) -> NDArray[Any] | None:
    """The values of a PGM or PPM as they are written; None where Pillow does so: where 255 is white.

    Pillow is also left to judge headers that are not understood.
    """
    header = _PNM.match(_content(source, PNM_HEADER))
    if header is None or int(header[4]) == 255:
        return None
    kind, width, height, white = map(int, header.groups())
    channels, dtype = 1 if kind in (2, 5) else 3, np.dtype(np.uint8 if white < 256 else np.uint16)
    number = width * height * channels
    with io.BytesIO(source.getvalue()) if isinstance(source, io.BytesIO) else open(source, "rb") as file:
        file.seek(header.end())
        if kind in (2, 3):
            values = _in_digits(file, number)
        else:
            values = np.frombuffer(file.read(number * dtype.itemsize), dtype.newbyteorder(">"))
    if values.size < number:
        raise UnreadableError(DAMAGED)
    strange = values[~((values >= 0) & (values <= white) & (values % 1 == 0))]
    if strange.size:
        raise UnreadableError(
            f"expected integers from 0 to {white}, which the header calls white; got {strange[0]:.10g}"
        )
    return values.astype(dtype).reshape(height, width, channels)


def _in_digits(file: IO[bytes], number: int) -> NDArray[np.float64]:
    """The first numbers of a text, as floating point, since integers would wrap; no more of it is read."""
    values, found, rest = np.empty(number), 0, b""
    while found < number:
        block = file.read(BLOCK)
        text = _COMMENT.sub(lambda match: b" " if match[1] else b"#", rest + block)
        text, comment, _ = text.partition(b"#")  # one that goes on in the next block
        end = len(text)
        if block and not comment:  # the last number may go on in the next block
            end = max(text.rfind(space) for space in (b" ", b"\t", b"\n", b"\v", b"\f", b"\r")) + 1
        rest = text[end:] + comment
        words = text[:end].split(None, number - found)[: number - found]
        if len(rest) > BLOCK or b"_" in text or (not block and found + len(words) < number):
            raise UnreadableError(DAMAGED)
        values[found : found + len(words)] = [float(word) for word in words]
        found += len(words)
    return values


def _content(source: Path | io.BytesIO, most: int = -1) -> bytes:
    if isinstance(source, io.BytesIO):
        return source.getvalue()[: None if most < 0 else most]
    with open(source, "rb") as file:
        return file.read(most)


def _on_white(
    values: NDArray[Any], opacity: NDArray[Any], white: float, *, premultiplied: bool = False
) -> NDArray[Any]:
    """Composites on white, by opacity from 0 to 1."""
    colour = values.astype(np.float64)
    shown = (colour if premultiplied else colour * opacity) + (1 - opacity) * white
    shown = np.clip(shown, 0, white)
    return (shown if values.dtype.kind == "f" else np.rint(shown)).astype(values.dtype)


def to_numbers(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype == bool:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype.kind not in "uif":
        raise UnreadableError(f"expected integers or floating point; got {values.dtype}")
    return np.ascontiguousarray(values)


def millions(pixels: int) -> str:
    return f"{pixels / 1e6:.0f} million"
