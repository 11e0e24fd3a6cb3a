"""Data sets of the Hugging Face Hub (``hf:NAME``) and Parquet files, through the package ``datasets``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from selfconv._extras import require
from selfconv._text import nfc
from selfconv.data.images import Item, files_key, stack_items
from selfconv.data.pixels import DataError, GroupError, UnreadableError
from selfconv.data.sources.listing import PARTS, Listed, Listing

PREFIX = "hf:"


def list_parquet(path: Path, group_by: str | None) -> Listing:
    """A Parquet file, or a folder of them whose names begin with train, val or test."""
    files: dict[str, list[str]] = {}
    for file in [path] if path.is_file() else parquet_files(path):
        files.setdefault(_part_of(file) if path.is_dir() else "train", []).append(str(file))
    others = files.pop("", [])
    if others and files:
        known = Path(next(iter(files.values()))[0]).name
        raise DataError(
            f"{path}: expected names of Parquet files that begin with train, val or test; got "
            f"{Path(others[0]).name} beside {known}"
        )
    files = files or {"train": others}
    try:
        found = _load(str(path), {"path": "parquet", "data_files": files})
    except DataError:
        _check_rows([name for names in files.values() for name in names])
        raise
    _check_class_names(str(path), [Path(name) for names in files.values() for name in names])
    folder = (path if path.is_dir() else path.parent).absolute()
    name = path.resolve().name if path.is_dir() else path.stem
    return _list(str(path), name, found, group_by, folder)


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files in a folder, but no hidden ones."""
    found = (path for path in folder.iterdir() if path.suffix.lower() == ".parquet")
    return sorted(path for path in found if not path.name.startswith("."))


def _part_of(file: Path) -> str:
    """The part with whose name a file's name begins, or an empty text."""
    return next((part for name, part in PARTS.items() if file.stem.lower().startswith(name)), "")


def _check_rows(files: list[str]) -> None:
    """Raises DataError if a file has no rows; says nothing about files that cannot be read."""
    import pyarrow.parquet

    for file in files:
        try:
            rows = pyarrow.parquet.read_metadata(file).num_rows
        except (ValueError, OSError):
            continue
        if rows == 0:
            raise DataError(f"{file}: expected a row for each image; got no rows")


def _check_class_names(what: str, files: list[Path]) -> None:
    """Raises DataError if two files have other names for the numbers in the column of labels.

    Nor may one have names and another none: ``datasets`` would convert all labels to those of one file.
    """
    import datasets
    import pyarrow.parquet

    first: tuple[Path, list[str] | None] | None = None
    for file in files:
        features = datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(file))
        label = _label_column(what, features)
        names = getattr(features[label], "names", None)
        other, known = first = first or (file, names)
        if (names is None) != (known is None):
            named, plain = (other, file) if names is None else (file, other)
            raise DataError(
                f"{what}: expected labels of one kind in every file; {label!r} has class names in "
                f"{named.name} and none in {plain.name}"
            )
        if names is not None and known is not None and names != known:
            both = enumerate(zip_longest(known, names))
            number, (expected, found) = next((i, pair) for i, pair in both if pair[0] != pair[1])
            raise DataError(
                f"{what}: expected the same class names in every file; {number} in {label!r} is {expected!r} "
                f"in {other.name} and {found!r} in {file.name}"
            )


def list_hub(source: str, group_by: str | None) -> Listing:
    """``hf:OWNER/NAME`` or ``hf:OWNER/NAME:CONFIGURATION``."""
    name, _, configuration = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise DataError(f"data: expected {PREFIX}NAME; got {source!r}")
    options = {"path": name} | ({"name": configuration} if configuration else {})
    return _list(source, name.rpartition("/")[2], _load(source, options), group_by, None)


def _load(what: str, options: dict[str, Any]) -> Any:
    require("Parquet files and Hugging Face data sets", "datasets")
    import datasets

    datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our errors report what is wrong
    try:
        return datasets.load_dataset(**options)
    except Exception as error:  # its own and those of the network, of pyarrow and of files
        cause = error.__cause__ or error  # its own errors say no more than that there was one
        reason = " ".join(str(cause).split())[:200]
        raise DataError(f"{what}: cannot be loaded by datasets ({type(cause).__name__}: {reason})") from error
    finally:
        datasets.logging.set_verbosity(verbosity)


def _list(what: str, name: str, found: Any, group_by: str | None, folder: Path | None) -> Listing:
    """The images and labels of a data set.

    Args:
        folder: where relative paths in the column of images start; None: all are absolute.
    """
    import datasets

    parts = {PARTS[part]: found[part] for part in found if part in PARTS}
    if "train" not in parts:
        raise DataError(f"{what}: expected a split called train; got {', '.join(map(str, found))}")
    features = parts["train"].features
    image = _column(what, features, "image", lambda kind: isinstance(kind, datasets.Image))
    label = _label_column(what, features)
    if group_by is not None and group_by not in features:
        raise GroupError(
            f"{what}: group_by: expected one of the columns {', '.join(features)}; got {group_by!r}"
        )
    names, listed = _classes(what, parts["train"], label), {}
    for part, rows in parts.items():
        pictures = _as_images(f"{what}: {part}", rows.select_columns([image]), image)
        items = _items(what, part, pictures, image, folder)
        labels = np.array(
            [_label(f"{part}[{row}]", what, names, value) for row, value in enumerate(rows[label])], np.int64
        )
        groups = (
            None
            if group_by is None
            else [
                f"({part}[{i}])" if value in (None, "") else nfc(str(value))
                for i, value in enumerate(rows[group_by])
            ]
        )
        listed[part] = Listed(items, labels, groups)
    fingerprints = repr([(part, rows._fingerprint) for part, rows in parts.items()])
    beside = [item for part in listed.values() for item in part.items if isinstance(item.file, Path)]
    return Listing(what, name, list(map(str, names)), listed, lambda: fingerprints + files_key(beside))


def _as_images(what: str, rows: Any, column: str) -> Any:
    """The rows with a column of images as bytes or paths; pixels in lists become files."""
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc

    pixels, axes = rows.data.column(column), 0
    while pa.types.is_list(pixels.type) or pa.types.is_large_list(pixels.type):
        pixels, axes = pc.list_flatten(pixels), axes + 1
    if axes > 2 and pa.types.is_integer(pixels.type):  # which would be bytes, modulo 256
        least, most = pc.min_max(pixels).as_py().values()
        if least is not None and not 0 <= least <= most <= 255:
            raise DataError(f"{what}: expected bytes in lists of colours; got values from {least} to {most}")
    with warnings.catch_warnings():  # of each image whose numbers get fewer bits
        warnings.filterwarnings("ignore", "Downcasting array dtype")
        return rows.cast_column(column, datasets.Image(decode=False))


def _items(what: str, part: str, rows: Any, column: str, folder: Path | None) -> list[Item]:
    """The images of a part: the bytes in the cells, or the files that they name by path."""
    import pyarrow.compute as pc

    cells = rows.data.column(column)
    inside = pc.is_valid(pc.struct_field(cells, "bytes")).to_pylist()
    items, absent = [], []
    for i, path in enumerate(pc.struct_field(cells, "path").to_pylist()):
        name = f"{part}[{i}]"
        if inside[i] or not path:
            items.append(Item(name, partial(_content, rows, column, i)))
            continue
        file = Path(path) if folder is None else folder / path
        if not file.is_absolute() or not file.exists():
            absent.append(f"{name}: no such file: {path}")
            continue
        try:
            items += (found := stack_items(file, f"{name} {path}"))
        except UnreadableError as error:
            raise DataError(f"{what}: {name} {path}: {error}") from error
        if len(found) > 1:
            raise DataError(f"{what}: {name} {path}: expected one image in a file; got {len(found)}")
    if absent:
        raise DataError(f"{what}: {absent[0]}; {len(absent)} of {len(inside)} files are missing")
    return items


def _content(rows: Any, column: str, index: int) -> bytes:
    cell = rows[index][column]
    if cell is None or cell["bytes"] is None:
        raise UnreadableError("expected an image; got an empty cell")
    return cell["bytes"]


def _label_column(what: str, features: Any) -> str:
    import datasets

    return _column(what, features, "label", lambda kind: isinstance(kind, datasets.ClassLabel))


def _column(what: str, features: Any, usual: str, fits: Callable[[Any], bool]) -> str:
    """The only column of a kind, or the one with the usual name."""
    fitting = [column for column, kind in features.items() if fits(kind)]
    if len(fitting) == 1:
        return fitting[0]
    if usual in features and (not fitting or usual in fitting):
        return usual
    known = ", ".join(features)
    raise DataError(f"{what}: expected a column {usual!r}; got {known}")


def _classes(what: str, rows: Any, label: str) -> list[Any]:
    values = [nfc(value) if isinstance(value, str) else value for value in rows[label]]
    for row, value in enumerate(values):
        known = isinstance(value, str | int | float) and type(value) is type(values[0])
        if not known or value != value:  # NaN
            kinds = "a text or a number, of one type,"
            raise DataError(f"{what}: expected {kinds} in column {label!r}; got {value!r} in train[{row}]")
    names = getattr(rows.features[label], "names", None)
    return sorted({*values}) if names is None else list(names)


def _label(row: str, what: str, names: list[Any], value: Any) -> int:
    if isinstance(value, int) and not (names and isinstance(names[0], int)):
        return value  # of a ClassLabel
    value = nfc(value) if isinstance(value, str) else value
    if value not in names:
        raise DataError(f"{what}: expected labels that are in the training part; got {value!r} in {row}")
    return names.index(value)
