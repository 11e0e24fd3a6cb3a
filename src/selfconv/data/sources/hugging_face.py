"""Data sets of the Hugging Face Hub (``hf:NAME``) and Parquet files, through the package ``datasets``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from selfconv._extras import require
from selfconv.data.images import Item
from selfconv.data.pixels import DataError, GroupError
from selfconv.data.sources.listing import PARTS, Listed, Listing

PREFIX = "hf:"


def list_parquet(path: Path, group_by: str | None) -> Listing:
    """A Parquet file, or a folder of them whose names begin with train, val or test."""
    files: dict[str, list[str]] = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.parquet")):
        stem = file.stem.lower()
        part = next((part for name, part in PARTS.items() if stem.startswith(name)), "train")
        files.setdefault(part if path.is_dir() else "train", []).append(str(file))
    listing = _list(str(path), path.stem, {"path": "parquet", "data_files": files}, group_by)
    _check_class_names(str(path), [Path(name) for names in files.values() for name in names])
    return listing


def _check_class_names(what: str, files: list[Path]) -> None:
    """Raises DataError if two files have other names for the numbers in the column of labels."""
    import datasets
    import pyarrow.parquet

    first: tuple[Path, list[str]] | None = None
    for file in files:
        features = datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(file))
        label = _label_column(what, features)
        names = getattr(features[label], "names", None)
        if names is None:
            continue
        other, known = first = first or (file, names)
        if names != known:
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
    return _list(source, name.rpartition("/")[2], options, group_by)


def _list(what: str, name: str, options: dict[str, Any], group_by: str | None) -> Listing:
    require("Parquet files and Hugging Face data sets", "datasets")
    import datasets

    datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our errors report what is wrong
    try:
        found = datasets.load_dataset(**options)
    except Exception as error:  # its own and those of the network, of pyarrow and of files
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{what}: cannot be loaded by datasets ({type(error).__name__}: {reason})") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
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
        pictures = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        items = [Item(f"{part}[{i}]", partial(_content, pictures, image, i)) for i in range(len(rows))]
        labels = np.array([_label(what, names, value) for value in rows[label]], np.int64)
        groups = (
            None
            if group_by is None
            else [
                f"({part}[{i}])" if value in (None, "") else str(value)
                for i, value in enumerate(rows[group_by])
            ]
        )
        listed[part] = Listed(items, labels, groups)
    fingerprints = repr([(part, rows._fingerprint) for part, rows in parts.items()])
    return Listing(what, name, list(map(str, names)), listed, lambda: fingerprints)


def _content(rows: Any, column: str, index: int) -> bytes:
    cell = rows[index][column]
    return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()


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
    names = getattr(rows.features[label], "names", None)
    if names is not None:
        return list(names)
    values = list(rows[label])
    for row, value in enumerate(values):
        if not isinstance(value, str | int | float) or type(value) is not type(values[0]):
            kinds = "a text or a number, of one type,"
            raise DataError(f"{what}: expected {kinds} in column {label!r}; got {value!r} in train[{row}]")
    return sorted({*values})


def _label(what: str, names: list[Any], value: Any) -> int:
    if isinstance(value, int) and not (names and isinstance(names[0], int)):
        return value  # of a ClassLabel
    if value not in names:
        raise DataError(f"{what}: expected labels that are in the training part; got {value!r}")
    return names.index(value)
