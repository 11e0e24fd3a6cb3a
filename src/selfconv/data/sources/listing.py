"""Lists of image files with labels, from a folder or a CSV file, and the data set that they become."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from selfconv._files import FileRefused, check_file
from selfconv._text import count, nfc
from selfconv.data.dataset import Dataset, SourcePart, build
from selfconv.data.decoding import decode_all
from selfconv.data.images import (
    IMAGE_SUFFIXES,
    Item,
    files_key,
    is_image_name,
    require_image_readers,
    stack_items,
)
from selfconv.data.pixels import DataError, GroupError, UnreadableError
from selfconv.data.splits import Labels, check_groups, split_off

Files = dict[str, list[Item]]  # of each class

PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
TEST_SHARE = 0.2  # set aside where there is no test part: always the same images, whatever the seed
MANIFEST_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class Listed:
    """The images of a part, not yet decoded."""

    items: Sequence[Item]
    labels: Labels
    groups: Sequence[str] | None = None


@dataclass(frozen=True, eq=False)
class Listing:
    """A data set, not yet decoded. ``key`` gives a digest of its files."""

    what: str  # for messages
    name: str
    class_names: list[str]
    parts: dict[str, Listed]
    key: Callable[[], str]


def load_listing(listing: Listing, *, seed: int, validation: float, **decoding: Any) -> Dataset:
    """Decodes the images, and sets a fifth of them aside for the test if the source has no test part."""
    require_image_readers()
    items = [item for part in listing.parts.values() for item in part.items]
    check_groups(listing.what, {name: part.groups for name, part in listing.parts.items()})
    stack, pixels, clipping = decode_all(listing.name, items, listing.key(), **decoding)
    arrays, start = {}, 0
    for name, part in listing.parts.items():
        rows = np.arange(start, start + len(part.items))
        arrays[name] = SourcePart(
            stack.take(rows), part.labels, [item.name for item in part.items], part.groups
        )
        start += len(part.items)
    has_test_part = "test" in arrays
    if not has_test_part:
        train = arrays["train"]
        rest, aside = split_off(train.labels, TEST_SHARE, 0, train.groups)
        if len(aside) == 0:
            number = len(train.labels)
            raise DataError(f"{listing.what}: too few images to set some aside for a test; got {number}")
        arrays |= {"train": train.take(rest), "test": train.take(aside)}
    return build(
        listing.name,
        arrays,
        listing.class_names,
        image_size=None,
        seed=seed,
        validation=validation,
        pixels=pixels,
        clipping=clipping,
        has_test_part=has_test_part,
    )


# ---- a folder ----


def list_folder(root: Path, group_by: str | None) -> Listing:
    """A folder with a folder of images for each class, or with such folders in train/, val/ and test/."""
    require_image_readers()
    parts = _scan(root)
    names = list(parts["train"])
    find = None if group_by is None else _matcher(group_by)
    listed = {}
    for part, classes in parts.items():
        items = [item for found in classes.values() for item in found]
        labels = np.array([names.index(c) for c, found in classes.items() for _ in found], np.int64)
        listed[part] = Listed(items, labels, None if find is None else [find(item.name) for item in items])
    everything = [item for part in listed.values() for item in part.items]
    return Listing(str(root), root.resolve().name, names, listed, lambda: files_key(everything))


def _matcher(pattern: str, columns: Sequence[str] = ()) -> Callable[[str], str]:
    """From the name of a file to its group: what the first parentheses match, or else the whole match.

    Args:
        columns: of a list, one of which may have been meant.
    """
    known = f", or one of the columns {', '.join(columns)}" if columns else ""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise GroupError(f"group_by: expected a regular expression; got {pattern!r} ({error})") from None

    def find(name: str) -> str:
        match = compiled.search(name)
        if match is None:
            raise GroupError(
                f"group_by: expected {pattern!r} in the name of every file{known}; not in {name}"
            )
        if compiled.groups and match[1] is None:
            raise GroupError(
                f"group_by: expected the parentheses of {pattern!r} to match in every file; not in {name}"
            )
        return nfc(match[1] if compiled.groups else match[0])

    return find


def _scan(root: Path) -> dict[str, Files]:
    """The image files of each class of each part, all in order of name."""
    ignored, stray = list[Path](), list[Path]()
    folders = _folders_in(root, stray)
    if not folders:
        raise DataError(f"{root}: expected a folder of images for each class; got no folders")
    names = {path.name for path in folders}
    if {name.lower() for name in names} <= {*PARTS} or "train" in names:  # beside others, Train is a class
        parts = _scan_parts(root, folders, ignored, stray)
    else:
        parts = {"train": _scan_classes(root, folders, ignored)}
    train = parts["train"]
    if len(train) < 2:
        found = ", ".join(train) or "none"
        raise DataError(f"{root}: expected at least two classes; got {found}{_instead(root, ignored)}")
    for name, images in train.items():
        if not images:
            known = " ".join(sorted(IMAGE_SUFFIXES))
            expected = f"expected images ({known}) of class {name!r} to train on"
            raise DataError(f"{root}: {expected}; got none{_instead(root, ignored)}")
    for part, classes in parts.items():
        unknown = [c for c in classes if c not in train]
        if unknown:
            raise DataError(f"{root}: expected in {part}/ the classes of train/; got {unknown[0]!r} as well")
        if not any(classes.values()):
            raise DataError(f"{root}: expected images in {part}/; got none")
    for paths, kind in (
        (
            ignored,
            count(len(ignored), "file")
            + (" that is no image" if len(ignored) == 1 else " that are no images"),
        ),
        (stray, f"{count(len(stray), 'image')} outside the folders of classes"),
    ):
        if paths:
            warnings.warn(f"{root}: ignored {kind}; the first is {paths[0].relative_to(root)}", stacklevel=5)
    return parts


def _instead(root: Path, ignored: list[Path]) -> str:
    """What a folder has instead of images, if that is a data set of another kind, and how to give it."""
    for path in ignored:
        if path.suffix.lower() == ".parquet":
            return f": for the Parquet files in it, give {path.parent}"
        if path.suffix.lower() == ".npz":
            name = path.relative_to(root)
            return f": {name} is an archive, which is a data set by itself; save each image as .npy"
    return ""


def _folders_in(folder: Path, stray: list[Path]) -> list[Path]:
    """The folders in a folder; images beside them go to ``stray``."""
    found = _visible(folder)
    stray += [path for path in found if is_image_name(path)]
    return [path for path in found if path.is_dir()]


def _scan_parts(root: Path, folders: list[Path], ignored: list[Path], stray: list[Path]) -> dict[str, Files]:
    parts: dict[str, Files] = {}
    for folder in folders:
        part = PARTS.get(folder.name.lower())
        if part is None:
            raise DataError(f"{root}: expected train/, val/ and test/; got {folder.name}/ as well")
        if part in parts:
            same = ", ".join(f"{f.name}/" for f in folders if PARTS.get(f.name.lower()) == part)
            raise DataError(f"{root}: expected one folder of images for {part}; got {same}")
        parts[part] = _scan_classes(root, _folders_in(folder, stray), ignored)
    if "train" not in parts:
        raise DataError(f"{root}: expected train/ beside {', '.join(f'{path.name}/' for path in folders)}")
    return {part: parts[part] for part in ("train", "val", "test") if part in parts}


def _scan_classes(root: Path, folders: list[Path], ignored: list[Path]) -> Files:
    classes: Files = {}
    deeper: list[tuple[Path, str]] = []
    named: dict[str, Path] = {}
    for folder in sorted(folders, key=lambda folder: nfc(folder.name)):
        name = nfc(folder.name)
        if (other := named.setdefault(name, folder)) is not folder:  # which only ASCII tells apart
            raise DataError(
                f"expected one folder for each class; got {other.name!a} and {folder.name!a} in "
                f"{folder.parent}, two spellings of {name!r} in Unicode"
            )
        images = classes[name] = []
        for path in _files_in(folder):
            if is_image_name(path):
                images += _items(path, path.relative_to(root).as_posix(), root)
                deeper += [(path, name)] if path.parent != folder else []
            else:
                ignored.append(path)
    if deeper:
        first, name = deeper[0]
        as_what = "an image" if len(deeper) == 1 else "images"
        warnings.warn(
            f"{root}: read {count(len(deeper), 'image')} in subfolders of a class folder as {as_what} of "
            f"that class; the first is {first.relative_to(root)} (class {name!r})",
            stacklevel=6,
        )
    return classes


def _files_in(folder: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """All that is in a folder and its folders, in order of name, but nothing hidden, and no folders.

    Args:
        above: the folders that ``folder`` was found in.
    """
    found: list[Path] = []
    above = (*above, folder.resolve())
    for path in _visible(folder):
        if path.is_dir() and path.resolve() in above:
            raise DataError(f"{path}: expected a link to another folder; got one to a folder that it is in")
        found += _files_in(path, above) if path.is_dir() else [path]
    return found


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, in order of name, but nothing hidden. Raises DataError for a link to nothing."""
    found = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    for path in found:
        if path.is_symlink() and not path.exists():
            target = path.readlink()
            raise DataError(
                f"{path}: expected a link to a file or folder; got one to {target}, which does not exist"
            )
    return found


def _items(path: Path, name: str, what: Path) -> list[Item]:
    try:
        return stack_items(path, name)
    except UnreadableError as error:
        raise DataError(f"{what}: {name}: {error}") from error


# ---- a CSV file ----


def list_manifest(path: Path, group_by: str | None) -> Listing:
    """A CSV file with the columns path and label, and perhaps split and group; paths from its folder."""
    require_image_readers()
    numbered = _rows(path)
    columns = [*numbered[0][1]]
    if missing := [column for column in ("path", "label") if column not in columns]:
        found = ", ".join(columns)
        separators = {";": "semicolons", "\t": "tabs"}
        used = next((name for mark, name in separators.items() if mark in found), None)
        hint = f": separate columns by commas, not {used}" if used else ""
        found = found.expandtabs(1)
        raise DataError(
            f"{path}: expected columns path, label and perhaps split, group; got {found}, no "
            f"{missing[0]}{hint}"
        )
    column = (
        group_by if group_by in columns else ("group" if group_by is None and "group" in columns else None)
    )
    find = None if group_by is None or column is not None else _matcher(group_by, columns)
    names = sorted({row["label"] for _, row in numbered})
    _check_labels(path, numbered)
    parts: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for number, row in numbered:
        part = PARTS.get(row["split"].lower() or "train") if "split" in columns else "train"
        if part is None:
            raise DataError(
                f"{path}, line {number}: split: expected train, val or test; got {row['split']!r}"
            )
        parts.setdefault(part, []).append((number, row))
    if "train" not in parts:
        raise DataError(f"{path}: expected images to train on; got split {', '.join(parts)} alone")
    _check_files(path, numbered)
    listed: dict[str, Listed] = {}
    for part in (part for part in ("train", "val", "test") if part in parts):
        members: list[tuple[Item, int, str | None]] = []
        for number, row in parts[part]:
            group = None if find is None else find(row["path"])
            if column is not None:
                group = row[column] or f"(line {number})"  # an empty cell: a group of its own
            for item in _items(path.parent / row["path"], row["path"], path):
                members.append((item, names.index(row["label"]), group))
        items, labels, groups = zip(*members, strict=True)
        grouped = column is not None or find is not None
        listed[part] = Listed(items, np.array(labels, np.int64), groups if grouped else None)
    everything = [item for part in listed.values() for item in part.items]
    return Listing(str(path), path.stem, names, listed, lambda: files_key(everything))


def _check_labels(path: Path, numbered: Sequence[tuple[int, dict[str, str]]]) -> None:
    """Raises DataError unless every line has a path and a label, and no path, however spelt, has two.

    Warns of a path in several lines.
    """
    labels: dict[str, tuple[str, int]] = {}
    repeated: list[str] = []
    for number, row in numbered:
        if not row["path"] or not row["label"]:
            raise DataError(f"{path}, line {number}: expected a path and a label; got an empty one")
        label, first = labels.setdefault(os.path.realpath(path.parent / row["path"]), (row["label"], number))
        if first != number:
            repeated.append(f"{row['path']} in line {number}, as in line {first}")
        if label != row["label"]:
            raise DataError(
                f"{path}, line {number}: expected one label for each path; {row['path']} is "
                f"{row['label']!r}, and {label!r} in line {first}"
            )
    if repeated:
        warnings.warn(
            f"{path}: expected every path once; got {count(len(repeated), 'repeated line')}, whose images "
            f"count again; the first is {repeated[0]}",
            stacklevel=5,
        )


def _check_files(path: Path, numbered: Sequence[tuple[int, dict[str, str]]]) -> None:
    """Raises DataError if files do not exist."""
    absent = [(number, row["path"]) for number, row in numbered if not (path.parent / row["path"]).exists()]
    if absent:
        number, name = absent[0]
        raise DataError(
            f"{path}, line {number}: no such file: {name}; {len(absent)} of {len(numbered)} files are missing"
        )


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The lines by column, each with its number in the file, without spaces around the cells.

    All cells but paths are in one spelling of Unicode.
    """
    [(_, first), *rows] = _cells(path) or [(1, [])]
    columns = [column.strip() for column in first]
    for column in filter(None, columns):
        if (times := columns.count(column)) > 1:
            raise DataError(f"{path}: expected every column once; got {column!r} {times} times")
    if not rows:
        raise DataError(f"{path}: expected a line of column names and a line for each image; got none")
    if long := [number for number, row in rows if len(row) > len(columns)]:
        raise DataError(f"{path}, line {long[0]}: expected as many columns as the first line has; got more")
    found = []
    for number, row in rows:
        cells = dict(zip_longest(columns, (cell.strip() for cell in row), fillvalue=""))
        found.append((number, {key: cell if key == "path" else nfc(cell) for key, cell in cells.items()}))
    return found


def _cells(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of a CSV file that are not empty, each with the number of its first line in the file."""
    try:
        check_file(path, MANIFEST_BYTES)
    except FileRefused as error:
        raise DataError(f"{path}: {error}") from None
    content, rows, number = path.read_bytes(), list[tuple[int, list[str]]](), 1
    try:
        text = content.decode("utf-8-sig")
        lines = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
        for cells in lines:
            rows += [(number, cells)] if cells else []
            number = lines.line_num + 1
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        found = f"expected text in UTF-8; got the byte 0x{error.object[error.start]:02x}"
        raise DataError(f"{path}, line {number}: {found}") from None
    except csv.Error as error:
        raise DataError(f"{path}, line {number}: expected cells in CSV ({error})") from None
    return rows
