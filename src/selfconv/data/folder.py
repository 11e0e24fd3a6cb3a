"""A folder with a folder of images for each class, or with such folders in train/, val/ and test/."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from selfconv._memory import machine_memory
from selfconv.data.dataset import DataError, Dataset, Images, Labels, build, stratified
from selfconv.data.images import IMAGE_SUFFIXES, UnreadableError, decode, image_size, require_pillow
from selfconv.data.progress import progress

Files = dict[str, list[Path]]  # of each class

PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
TEST_SHARE = 0.2  # set aside where there is no test folder: always the same images, whatever the seed
MIXED_SIZE = 64  # of images that do not have one square size
NAMED = 3  # how many unreadable files a message names


def load_folder(root: Path, *, image_size: int | None, seed: int, validation: float) -> Dataset:
    require_pillow()
    parts = _scan(root)
    names = list(parts["train"])
    files = [path for classes in parts.values() for paths in classes.values() for path in paths]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        size = _common_size(files, pool) if image_size is None else image_size
        images = _decode_all(root, files, size, pool)
    arrays: dict[str, tuple[Images, Labels]] = {}
    for part, classes in parts.items():
        labels = np.array([names.index(c) for c, paths in classes.items() for _ in paths], np.int64)
        arrays[part], images = (images[: len(labels)], labels), images[len(labels) :]
    if "test" not in arrays:
        x, y = arrays["train"]
        rest, aside = stratified(y, TEST_SHARE, seed=0)
        if len(aside) == 0:
            raise DataError(f"{root}: too few images to set some aside for a test; got {len(y)}")
        arrays |= {"train": (x[rest], y[rest]), "test": (x[aside], y[aside])}
    name = root.resolve().name
    data = build(name, arrays, names, image_size=None, seed=seed, validation=validation)
    return replace(data, own_test="test" in parts)


def _scan(root: Path) -> dict[str, Files]:
    """The image files of each class of each part, all in order of name."""
    folders = [path for path in _visible(root) if path.is_dir()]
    if not folders:
        raise DataError(f"{root}: expected a folder of images for each class; got no folders")
    ignored: list[Path] = []
    if all(path.name in PARTS for path in folders) or "train" in {path.name for path in folders}:
        parts = _scan_parts(root, folders, ignored)
    else:
        parts = {"train": _scan_classes(folders, ignored)}
    train = parts["train"]
    if len(train) < 2:
        raise DataError(f"{root}: expected at least two classes; got {', '.join(train) or 'none'}")
    for name, paths in train.items():
        if not paths:
            known = " ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"{root}: expected images ({known}) of class {name!r} to train on; got none")
    for part, classes in parts.items():
        unknown = [c for c in classes if c not in train]
        if unknown:
            raise DataError(f"{root}: expected in {part}/ the classes of train/; got {unknown[0]!r} as well")
        if not any(classes.values()):
            raise DataError(f"{root}: expected images in {part}/; got none")
    if ignored:
        first = ignored[0].relative_to(root)
        warnings.warn(
            f"{root}: {len(ignored)} entries that are not images ignored, {first} first", stacklevel=5
        )
    return parts


def _scan_parts(root: Path, folders: list[Path], ignored: list[Path]) -> dict[str, Files]:
    parts: dict[str, Files] = {}
    for folder in folders:
        part = PARTS.get(folder.name)
        if part is None or part in parts:
            raise DataError(f"{root}: expected train/, val/ and test/; got {folder.name}/ as well")
        parts[part] = _scan_classes([path for path in _visible(folder) if path.is_dir()], ignored)
    if "train" not in parts:
        raise DataError(f"{root}: expected train/ beside {', '.join(f'{path.name}/' for path in folders)}")
    return {part: parts[part] for part in ("train", "val", "test") if part in parts}


def _scan_classes(folders: list[Path], ignored: list[Path]) -> Files:
    classes: Files = {}
    for folder in folders:
        images = classes[folder.name] = []
        for path in _visible(folder):
            is_image = path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
            (images if is_image else ignored).append(path)
    return classes


def _visible(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))


def _common_size(files: list[Path], pool: ThreadPoolExecutor) -> int:
    def measure(path: Path) -> tuple[int, int] | None:
        try:
            return image_size(path)
        except UnreadableError:
            return None  # decoding names it

    sizes = {size for size in pool.map(measure, files) if size is not None}
    sides = {side for size in sizes for side in size}
    return sides.pop() if len(sides) == 1 else MIXED_SIZE


def _decode_all(root: Path, files: list[Path], size: int, pool: ThreadPoolExecutor) -> Images:
    """All images [N, size, size, 1 or 3]: grey if every one of them is."""
    needed, memory = 2 * len(files) * size * size * 3, machine_memory()
    if needed > memory:
        raise DataError(
            f"{root}: {len(files)} images of {size}×{size} need {needed / 1e9:.1f} GB of memory; "
            f"this machine has {memory / 1e9:.1f} GB: give a smaller image_size"
        )
    images = np.empty((len(files), size, size, 3), np.uint8)

    def fill(index: int) -> str | None:
        try:
            images[index] = decode(files[index], size)
        except UnreadableError as error:
            return f"{files[index].relative_to(root)} ({error})"
        return None

    failures = []
    with progress(f"reading {root.name}", len(files), unit="images") as show:
        for done, failure in enumerate(pool.map(fill, range(len(files))), 1):
            show(done)
            if failure is not None:
                failures.append(failure)
    if failures:
        more = f" and {len(failures) - NAMED} more" if len(failures) > NAMED else ""
        named = ", ".join(failures[:NAMED]) + more
        raise DataError(f"{root}: {len(failures)} of {len(files)} images cannot be read: {named}")
    grey = all((image == image[..., :1]).all() for image in images)
    return np.ascontiguousarray(images[..., :1]) if grey else images
