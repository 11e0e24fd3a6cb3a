"""``load_data``: from a name or a path to a data set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from selfconv._arguments import describe_value, is_whole, of_python
from selfconv.data.dataset import MAX_SIZE, AbsentDataError, Dataset, warn_about_data
from selfconv.data.pixels import DataError, GroupError, parse_range
from selfconv.data.sources.cifar import ARCHIVES, load_cifar
from selfconv.data.sources.hugging_face import PREFIX, list_hub, list_parquet, parquet_files
from selfconv.data.sources.listing import Listing, list_folder, list_manifest, load_listing
from selfconv.data.sources.npz import load_digits, load_npz

NAMES = ("digits", *ARCHIVES)
"""Names of the built-in data sets; their images have 8 bits."""


def default_cache() -> Path:
    """The folder of downloads and decoded images: ``$SELFCONV_DATA``, or else ``~/.cache/selfconv``."""
    return Path(os.environ.get("SELFCONV_DATA") or "~/.cache/selfconv").expanduser()


def load_data(
    source: str | os.PathLike[str],
    *,
    image_size: int | None = None,
    seed: int = 0,
    validation: float = 0.1,
    pixel_range: str = "auto",
    group_by: str | None = None,
    channels: int | None = None,
    memory: float | None = None,
    download: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Loads a data set.

    Args:
        source: ``"digits"``, ``"cifar10"``, ``"cifar100"``, a folder of images, an ``.npz`` file, a CSV file
            with the columns path, label and perhaps split and group, Parquet files, or ``hf:NAME`` on the
            Hugging Face Hub. To load a folder with one of these names, write ``./digits``.
        image_size: side of the images: the shorter side is resized to it, then the image is centre-cropped.
            By default images keep their size (64 for files of mixed sizes).
        seed: of the split into training and validation; the test set does not depend on it.
        validation: fraction of the training images to hold out, stratified by class, if the source has no
            validation set. 45,000 + 5,000 images of CIFAR with the default.
        pixel_range: which values become the pixels 0 and 1: ``"auto"``, ``"dtype"`` or ``"LOW,HIGH"``.
        group_by: images of one group stay on one side of every split. For a folder, a regular expression,
            whose first capture group in the file's path is the group. For Parquet, a column. For a CSV file,
            a column, or if there is none with this name a regular expression on the path.
        channels: convert image files to grey (1) or colour (3), as ``read_image`` does; by default they are
            in colour if any is.
        memory: bytes for images; if files need more, they are decoded once into a memory-mapped file in the
            cache. By default a quarter of the machine's memory.
        download: whether an archive that is not in the cache may be downloaded.
        cache: folder of downloaded archives and decoded images; by default ``$SELFCONV_DATA`` or
            ``~/.cache/selfconv``.

    Raises:
        DataError: the data are invalid; the message is one line that names them and the reason.
    """
    if image_size is not None and not (is_whole(image_size) and 1 <= image_size <= MAX_SIZE):
        found = describe_value(image_size)
        raise DataError(f"image_size: expected an integer from 1 to {MAX_SIZE}; got {found}")
    if not 0 <= validation < 1:
        raise DataError(
            f"validation: expected a fraction of the training images, 0 ≤ validation < 1; got {validation}"
        )
    if not 0 <= seed < 2**32:
        raise DataError(f"seed: expected 0 ≤ seed < 2³²; got {seed}")
    if memory is not None and not memory >= 0:
        raise DataError(f"memory: expected a number of bytes ≥ 0; got {memory}")
    parse_range(pixel_range)
    size = None if image_size is None else of_python(image_size)
    cache = default_cache() if cache is None else Path(cache)
    split_options: dict[str, Any] = {"image_size": size, "seed": seed, "validation": validation}
    file_options: dict[str, Any] = {
        "pixel_range": pixel_range,
        "group_by": group_by,
        "channels": channels,
        "memory": memory,
        "cache": cache,
    }
    try:
        if source == "digits":
            _refuse_options(source, pixel_range, group_by)
            return load_digits(**split_options)
        if isinstance(source, str) and source in ARCHIVES:
            _refuse_options(source, pixel_range, group_by)
            return load_cifar(source, cache=cache, download=download, **split_options)
        data = _load_path(source, split_options, **file_options)
    except OSError as error:
        place = error.filename if error.filename is not None else source
        raise DataError(f"{place}: {error.strerror or error}") from error
    warn_about_data(data, has_groups=Path(source).suffix.lower() != ".npz")
    return data


def _refuse_options(name: str, pixel_range: str, group_by: str | None) -> None:
    for option, value, default in (("range", pixel_range, "auto"), ("group_by", group_by, None)):
        if value != default:
            kind = GroupError if option == "group_by" else DataError
            raise kind(f"{option}: applies to folders, .npz, CSV and Parquet files only; got {name}")


def _load_path(
    source: str | os.PathLike[str],
    split_options: Mapping[str, Any],
    *,
    pixel_range: str,
    group_by: str | None,
    channels: int | None,
    memory: float | None,
    cache: Path,
) -> Dataset:
    options = {**split_options, "pixel_range": pixel_range}
    path = Path(source).expanduser()
    kind = path.suffix.lower()
    if path.is_file() and kind == ".npz":
        if group_by is not None:
            raise GroupError(f"group_by: applies to folders, CSV and Parquet files only; got {path}")
        return load_npz(path, **options)
    listing: Listing
    if isinstance(source, str) and source.startswith(PREFIX):
        listing = list_hub(source, group_by)
    elif not os.fspath(source):  # Path("") is the working directory
        raise DataError("data: expected a name, a folder or a file; got an empty name")
    elif (kind == ".parquet" and path.is_file()) or (path.is_dir() and parquet_files(path)):
        listing = list_parquet(path, group_by)
    elif path.is_dir():
        listing = list_folder(path, group_by)
    elif path.is_file() and kind == ".csv":
        listing = list_manifest(path, group_by)
    else:
        found = "another kind of file" if path.exists() else "no such file or folder"
        close = get_close_matches(str(source), NAMES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        known = f"{', '.join(NAMES)}, a folder, an .npz, .csv or .parquet file, or hf:NAME"
        error = DataError if path.exists() else AbsentDataError
        raise error(f"data: expected {known}; got {os.fspath(source)!r}: {found}{hint}")
    return load_listing(listing, memory=memory, cache=cache, channels=channels, **options)
