"""Decodes the image files of a data set: into memory, or, if they need too much, once into a cache on disk.

The cache of a data set is a folder, named by a digest of its files (names, sizes, times of change) and of the
options: ``layout.json`` (the shape and type of the array), ``images`` (the array), ``chunks.jsonl`` (a line
for each chunk on disk, so that an interrupted process continues where it stopped), ``images.final`` (the
array with fewer channels or bits, if the images need no more), and ``done.json`` when it is complete, with a
checksum. Checksums are of the array or chunk and of its description: what is damaged is decoded again. One
process writes the cache, and others that need it wait on its lock.

Channels and range may need two passes. The first decodes every file by a provisional layout: with three
channels if any header says so, and, for 16-bit files with an automatic range, all values of uint16
(``range_is_final`` is False). It notes of each chunk whether it is grey, and the largest value (``highest``).
From these ``final_layout`` finds how many channels and bits the images need, and the second pass copies the
array if they need fewer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from selfconv._files import parse, parse_json, read_as, write_json
from selfconv._memory import machine_memory
from selfconv._text import format_bytes, progress
from selfconv.data.dataset import MAX_PIXELS
from selfconv.data.images import Header, Item, decode, read_header, read_values
from selfconv.data.pixels import (
    DEEPEST,
    Clipping,
    DataError,
    PixelRange,
    UnreadableError,
    choose_range,
    in_channels,
    parse_range,
)
from selfconv.data.stored import CHUNK, Stack

MIXED_SIZE = 64  # of images that do not have one square size
MAX_NAMED = 3  # unreadable files in a message
MEMORY_FRACTION = 0.25  # of the machine's, for images
CACHE_VERSION = 7  # part of the cache's name; it rises when files are read in another way


@dataclass(frozen=True)
class ArrayLayout:
    """The array that a data set's images become."""

    count: int
    size: int
    channels: int
    pixels: PixelRange
    range_is_final: bool  # False: ``pixels`` is all of uint16, and the range is chosen after decoding
    clipping: Clipping = field(default_factory=Clipping)  # of all files, once they are decoded
    fixed_channels: bool = False  # colour stays colour, even if every image is grey

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.count, self.size, self.size, self.channels

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.pixels.stored_as).itemsize

    @property
    def chunk(self) -> int:
        """Images in a chunk."""
        return max(1, min(1024, CHUNK * self.count // max(1, self.nbytes)))


@dataclass(frozen=True)
class StoredLayout:
    """The content of ``layout.json`` and ``done.json``."""

    layout: ArrayLayout
    checksum: int  # CRC-32 of the layout, and in ``done.json`` of the array behind it


@dataclass(frozen=True)
class ChunkSummary:
    """A decoded chunk: whether all its pixels are grey, the largest of its values, how many were clipped."""

    number: int
    checksum: int  # CRC-32 of the other fields, and of its pixels behind them
    grey: bool
    highest: int
    values: int = 0
    below: int = 0
    above: int = 0

    @property
    def clipping(self) -> Clipping:
        return Clipping(self.values, self.below, self.above)


def decode_all(
    what: str,
    items: Sequence[Item],
    key: str,
    *,
    image_size: int | None,
    pixel_range: str,
    memory: float | None,
    cache: Path,
    channels: int | None = None,
) -> tuple[Stack, PixelRange, Clipping]:
    """All images, the range of their values, and how many are outside.

    Args:
        what: the data set, for messages.
        key: a digest of the files.
        channels: to convert the images to, grey or colour; by default colour if any image is in colour.
        memory: limit in bytes; larger arrays are written to the cache and memory-mapped. None: a quarter of
            the machine's memory.
    """
    parse_range(pixel_range)
    limit = MEMORY_FRACTION * machine_memory() if memory is None else memory
    options = json.dumps([CACHE_VERSION, key, image_size, pixel_range, channels])
    folder = cache / "images" / hashlib.sha256(options.encode()).hexdigest()[:32]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        reader = _Reader(what, items, pool)
        if (cached := _open_or_discard(folder, limit)) is not None:
            return cached
        layout = _read_layout(folder, len(items)) or reader.layout(image_size, pixel_range, channels)
        if layout.nbytes <= limit:
            return _in_memory(reader, layout)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / ".lock").acquire()
        except OSError as error:
            raise DataError(
                f"{what}: the images need {format_bytes(layout.nbytes)}, more than the {format_bytes(limit)} "
                f"of memory for them, and {folder.parent} cannot be written ({error.strerror}): name another "
                "folder in $SELFCONV_DATA"
            ) from None
        with lock:
            if not (folder / "done.json").exists():
                _check_disk_space(what, folder, layout, limit)
                try:
                    stored = StoredLayout(layout, _description_checksum(layout))
                    write_json(folder / "layout.json", asdict(stored))
                    _write_cache(reader, layout, folder)
                except OSError as error:  # images that cannot be read are no OSError
                    raise DataError(
                        f"{folder}: the decoded images of {what} cannot be written "
                        f"({error.strerror or error}): name another folder in $SELFCONV_DATA"
                    ) from error
    try:
        return _open_cache(folder, limit)
    except DataError as error:  # of damaged files that could not be deleted above
        raise DataError(f"{error}: delete this folder") from error


class _Reader:
    """The files of a data set, read in parallel."""

    def __init__(self, what: str, items: Sequence[Item], pool: ThreadPoolExecutor) -> None:
        self.what, self.items, self.pool = what, items, pool

    def layout(self, image_size: int | None, pixel_range: str, channels: int | None) -> ArrayLayout:
        """Reads all headers, and, if the range has to be found, the values."""

        def header_of(item: Item) -> Header | None:
            try:
                return read_header(item)
            except UnreadableError:
                return None  # reported when it is decoded

        with progress(f"{self.what}: sizes", len(self.items), unit="images") as show:
            headers = []
            for done, header in enumerate(self.pool.map(header_of, self.items, chunksize=64), 1):
                headers.append(header)
                show(done)
        readable = [(item, h) for item, h in zip(self.items, headers, strict=True) if h is not None]
        sides = {side for _, h in readable for side in (h.width, h.height)}
        common = sides.pop() if len(sides) == 1 else MIXED_SIZE
        channel_counts = {h.channels for _, h in readable} or {1}
        if not channel_counts <= {1, 3} and len(channel_counts) > 1:
            first, *_ = (item.name for item, h in readable if h.channels not in (1, 3))
            known = ", ".join(map(str, sorted(channel_counts)))
            raise DataError(
                f"{self.what}: expected images with the same number of channels; got {known} ({first})"
            )
        dtypes = {h.dtype for _, h in readable} or {"uint8"}
        pixels, final = self._range(pixel_range, dtypes)
        return ArrayLayout(
            len(self.items),
            image_size or common,
            max(channel_counts) if channels is None else channels,
            pixels,
            final,
            fixed_channels=channels is not None,
        )

    def _range(self, pixel_range: str, dtypes: set[str]) -> tuple[PixelRange, bool]:
        if pixel_range == "auto" and dtypes == {"uint16"}:
            return PixelRange("uint16", 0, DEEPEST), False  # every value is stored; the maximum decides later
        return choose_range(pixel_range, dtypes, self._extent, self.what), True

    def _extent(self) -> tuple[float, float]:
        def extent_of(item: Item) -> tuple[float, float] | None:
            try:
                values = read_values(item)
            except UnreadableError:
                return None
            return float(values.min()), float(values.max())

        with progress(f"{self.what}: range", len(self.items), unit="images") as show:
            extents = []
            for done, extent in enumerate(self.pool.map(extent_of, self.items), 1):
                extents += [extent] if extent is not None and all(map(math.isfinite, extent)) else []
                show(done)
        return min((low for low, _ in extents), default=0.0), max((high for _, high in extents), default=1.0)

    def decode_chunks(
        self, layout: ArrayLayout, done: set[int], store: Callable[[NDArray, ChunkSummary], None]
    ) -> None:
        """Decodes the chunks that are not done, and passes each to ``store``."""
        failures: list[str] = []

        def decoded(index: int) -> tuple[NDArray, int, list[Clipping]] | str:
            """An image, the largest value (0 if the range is final), what was clipped; or why it failed."""
            item = self.items[index]
            clipped: list[Clipping] = []
            try:
                if layout.range_is_final:
                    size, channels = layout.size, layout.channels
                    return decode(item, size, channels, layout.pixels, MAX_PIXELS, clipped.append), 0, clipped
                values = read_values(item)  # whose maximum resizing would lower
                stored = layout.pixels.store(in_channels(values, layout.channels), layout.size)
                return stored, int(values.max()), clipped
            except UnreadableError as error:
                return f"{item.name} ({error})"

        starts = range(0, layout.count, layout.chunk)
        with progress(f"reading {self.what}", layout.count, unit="images") as show:
            ready = sum(min(layout.chunk, layout.count - starts[number]) for number in done)
            for number, start in enumerate(starts):
                if number in done:
                    continue
                images = np.zeros(
                    (min(layout.chunk, layout.count - start), *layout.shape[1:]), layout.pixels.stored_as
                )
                failures_before, highest, clipped = len(failures), 0, list[Clipping]()
                for row, result in enumerate(self.pool.map(decoded, range(start, start + len(images)))):
                    ready += 1
                    show(ready)
                    if isinstance(result, str):
                        failures.append(result)
                    else:
                        images[row], highest = result[0], max(highest, result[1])
                        clipped += result[2]
                if len(failures) == failures_before:
                    grey, total = bool((images == images[..., :1]).all()), Clipping.total(clipped)
                    chunk = ChunkSummary(number, 0, grey, highest, **asdict(total))
                    checksum = zlib.crc32(images.data, _description_checksum(chunk))
                    store(images, replace(chunk, checksum=checksum))
        if failures:
            more = f" and {len(failures) - MAX_NAMED} more" if len(failures) > MAX_NAMED else ""
            named = ", ".join(failures[:MAX_NAMED]) + more
            raise DataError(f"{self.what}: {len(failures)} of {layout.count} images cannot be read: {named}")


def final_layout(layout: ArrayLayout, chunks: Sequence[ChunkSummary]) -> ArrayLayout:
    """The layout with one channel if every image is grey, and the range that the values use."""
    grey = layout.channels == 3 and not layout.fixed_channels and all(chunk.grey for chunk in chunks)
    pixels = layout.pixels
    if not layout.range_is_final:
        highest = float(max(chunk.highest for chunk in chunks))
        pixels = choose_range("auto", ["uint16"], lambda: (0.0, highest), "")
    clipping = Clipping.total(chunk.clipping for chunk in chunks)
    return ArrayLayout(layout.count, layout.size, 1 if grey else layout.channels, pixels, True, clipping)


def _in_memory(reader: _Reader, layout: ArrayLayout) -> tuple[Stack, PixelRange, Clipping]:
    images, chunks = np.empty(layout.shape, layout.pixels.stored_as), []

    def store(pixels: NDArray, chunk: ChunkSummary) -> None:
        start = chunk.number * layout.chunk
        images[start : start + len(pixels)] = pixels
        chunks.append(chunk)

    reader.decode_chunks(layout, set(), store)
    final = final_layout(layout, chunks)
    stored = np.ascontiguousarray(images[..., : final.channels], final.pixels.stored_as)
    return Stack(stored), final.pixels, final.clipping


# ---- the cache ----


def _check_disk_space(what: str, folder: Path, layout: ArrayLayout, limit: float) -> None:
    """Raises DataError if the array does not fit on the disk, where a part of it may be already."""
    disk = os.statvfs(folder)
    images = folder / "images"
    free = disk.f_bavail * disk.f_frsize + (512 * images.stat().st_blocks if images.exists() else 0)
    if layout.nbytes > free:
        raise DataError(
            f"{what}: {layout.count} images of {layout.size}×{layout.size} need "
            f"{format_bytes(layout.nbytes)}, more than the {format_bytes(limit)} of memory for images; "
            f"{folder.parent} has room for {format_bytes(free)}: "
            "give a smaller image_size, or a folder on a larger disk in $SELFCONV_DATA"
        )


def _read_layout(folder: Path, count: int) -> ArrayLayout | None:
    """The layout of a cache that is not complete; None if there is none, or none that can be read."""
    try:
        stored = read_as(StoredLayout, folder / "layout.json")
    except (ValueError, OSError):
        return None
    unchanged = stored.checksum == _description_checksum(stored.layout)
    return stored.layout if unchanged and stored.layout.count == count else None


def _write_cache(reader: _Reader, layout: ArrayLayout, folder: Path) -> None:
    journal = folder / "chunks.jsonl"
    chunks = _chunks_on_disk(journal, folder / "images", layout)
    with (
        open(folder / "images", "r+b" if chunks else "w+b") as file,
        open(journal, "a" if chunks else "w") as lines,
    ):
        file.truncate(layout.nbytes)

        def store(pixels: NDArray, chunk: ChunkSummary) -> None:
            file.seek(chunk.number * layout.chunk * pixels[0].nbytes)
            file.write(pixels.data)
            file.flush()
            os.fdatasync(file.fileno())  # first the data, then their line in the journal
            lines.write(json.dumps(asdict(chunk)) + "\n")
            lines.flush()
            chunks[chunk.number] = chunk

        reader.decode_chunks(layout, {*chunks}, store)
    final = final_layout(layout, [*chunks.values()])
    if final.shape != layout.shape or final.pixels.stored_as != layout.pixels.stored_as:
        # if the process is killed before done.json exists, the next one makes this copy again
        stored = Stack(_map(folder / "images", layout))
        with open(folder / "images.final", "wb") as copy:
            for pixels in stored.chunks():
                copy.write(np.ascontiguousarray(pixels[..., : final.channels], final.pixels.stored_as).data)
            copy.flush()
            os.fsync(copy.fileno())
    checksum = _checksum(_map(_array_file(folder), final), final)
    write_json(folder / "done.json", asdict(StoredLayout(final, checksum)))


def _chunks_on_disk(journal: Path, images: Path, layout: ArrayLayout) -> dict[int, ChunkSummary]:
    """The chunks that were written, and have not changed since."""
    chunks, chunk_bytes = {}, layout.nbytes // layout.count * layout.chunk
    known = journal.exists() and images.exists()
    for line in journal.read_text(errors="replace").splitlines() if known else ():
        try:
            chunk = parse(ChunkSummary, parse_json(line), "")
        except ValueError:
            break  # the line that was being written
        if chunk.number * layout.chunk not in range(layout.count):
            continue
        with open(images, "rb") as file:
            file.seek(chunk.number * chunk_bytes)
            pixels = file.read(min(chunk_bytes, layout.nbytes - chunk.number * chunk_bytes))
            if zlib.crc32(pixels, _description_checksum(chunk)) == chunk.checksum:
                chunks[chunk.number] = chunk
    if chunks:  # drops an incomplete last line
        journal.write_text("".join(json.dumps(asdict(chunk)) + "\n" for chunk in chunks.values()))
    return chunks


def _map(path: Path, layout: ArrayLayout) -> NDArray:
    # copy-on-write, since torch wants memory that may be written to; nobody writes to it
    return np.memmap(path, layout.pixels.stored_as, "c", shape=layout.shape)


def _array_file(folder: Path) -> Path:
    copy = folder / "images.final"
    return copy if copy.exists() else folder / "images"


def _description_checksum(described: ArrayLayout | ChunkSummary) -> int:
    fields = {name: value for name, value in asdict(described).items() if name != "checksum"}
    return zlib.crc32(json.dumps(fields).encode())


def _checksum(array: NDArray, layout: ArrayLayout) -> int:
    checksum = _description_checksum(layout)
    for pixels in Stack(array).chunks():
        checksum = zlib.crc32(np.ascontiguousarray(pixels).data, checksum)
    return checksum


def _open_or_discard(folder: Path, limit: float) -> tuple[Stack, PixelRange, Clipping] | None:
    """What is in a complete cache; a damaged one is emptied, with a warning, to be written again."""
    if not (folder / "done.json").exists():
        return None
    try:
        return _open_cache(folder, limit)
    except DataError:
        pass
    try:
        with FileLock(folder / ".lock"):
            if not (folder / "done.json").exists():  # another process is at it
                return None
            try:
                return _open_cache(folder, limit)  # another process has written it again
            except DataError as error:
                warnings.warn(f"{error}; decoding the files again", stacklevel=6)
            # done.json last: if this is interrupted, the next process finds the cache damaged and goes on
            for name in ("chunks.jsonl", "layout.json", "images", "images.final", "done.json"):
                (folder / name).unlink(missing_ok=True)
    except OSError:  # of a cache that cannot be written: the images may fit into memory
        warnings.warn(f"{folder}: ignored, since its images have changed; decoding the files", stacklevel=6)
    return None


def _open_cache(folder: Path, limit: float) -> tuple[Stack, PixelRange, Clipping]:
    try:
        complete = read_as(StoredLayout, folder / "done.json")
        layout = complete.layout
        if (folder / "images.final").exists():
            with suppress(OSError):  # a cache that cannot be written, or another process was faster
                # here, so that a process killed right after done.json leaves it until now
                (folder / "images").unlink()
        array = _map(_array_file(folder), layout)
    except (ValueError, OSError) as error:
        raise DataError(f"{folder}: expected decoded images ({error})") from None
    if _checksum(array, layout) != complete.checksum:
        raise DataError(f"{folder}: expected decoded images as they were written; some have changed")
    stack = Stack(np.array(array) if layout.nbytes <= limit else array)
    return stack, layout.pixels, layout.clipping
