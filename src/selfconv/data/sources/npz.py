"""Data sets in ``.npz`` files, and the digits in the package: 1,797 images of 8×8 pixels, enlarged to 16×16.

Arrays: x_train, y_train, x_test, y_test, and perhaps x_val, y_val, class_names.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from selfconv._memory import machine_memory
from selfconv.data.dataset import Arrays, Dataset, SourcePart, build, store_arrays
from selfconv.data.pixels import DataError
from selfconv.data.stored import Images


def load_npz(
    path: Path, *, image_size: int | None, seed: int, validation: float, pixel_range: str
) -> Dataset:
    arrays, names = read_npz(path)
    stored, pixels, clipping = store_arrays(path.stem, arrays, pixel_range)
    return build(
        path.stem,
        stored,
        names,
        image_size=image_size,
        seed=seed,
        validation=validation,
        pixels=pixels,
        clipping=clipping,
    )


def read_npz(path: Path) -> tuple[Arrays, list[str] | None]:
    """Its arrays, and class names if it has them. Pickled objects in it are refused, not loaded."""
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: expected an .npz file; got another format or a truncated file")
    try:
        with zipfile.ZipFile(path) as archive:
            size, memory = sum(member.file_size for member in archive.infolist()), machine_memory()
        if size > memory / 2:
            raise DataError(f"{path}: {size} bytes when unpacked; this machine has {memory:.0f} of memory")
        with np.load(path, allow_pickle=False) as file:
            parts = ["train", "test"] + (["val"] if "x_val" in file or "y_val" in file else [])
            keys = [f"{axis}_{part}" for part in parts for axis in "xy"]
            missing = [key for key in keys if key not in file]
            if missing:
                raise DataError(f"{path}: expected arrays {', '.join(keys)}; missing {', '.join(missing)}")
            arrays = {part: (file[f"x_{part}"], file[f"y_{part}"]) for part in parts}
            names = file.get("class_names")
    except DataError:
        raise
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, MemoryError) as error:
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    if any(not isinstance(array, np.ndarray) for pair in arrays.values() for array in pair):
        raise DataError(f"{path}: expected arrays; got members that are not .npy arrays")
    named = {
        part: SourcePart(x, y, [f"x_{part}[{i}]" for i in range(len(x) if x.ndim else 0)])
        for part, (x, y) in arrays.items()
    }
    return named, None if names is None else _class_names(path, names)


def _class_names(path: Path, names: np.ndarray) -> list[str]:
    if not isinstance(names, np.ndarray) or names.ndim != 1 or names.dtype.kind not in "US":
        raise DataError(
            f"{path}: class_names: expected strings [classes]; got {getattr(names, 'dtype', 'bytes')}"
        )
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names]


def load_digits(*, image_size: int | None, seed: int, validation: float) -> Dataset:
    with as_file(files("selfconv.data") / "digits.npz") as path:
        arrays, names = read_npz(path)
    larger = {
        part: replace(given, images=enlarge(np.asarray(given.images))) for part, given in arrays.items()
    }
    return build("digits", larger, names, image_size=image_size, seed=seed, validation=validation)


def enlarge(counts: NDArray[np.uint8]) -> Images:
    """Counts 0..16 [N, 8, 8] as grey images [N, 16, 16, 1], by bilinear interpolation.

    At twice the size its weights are 3/4 and 1/4 along each side, so integers suffice: the result
    is the same on every machine, and commutes with flips and quarter turns.
    """
    sums = counts.astype(np.int64)
    for axis in (1, 2):
        sums = np.moveaxis(sums, axis, -1)
        padded = np.pad(sums, [(0, 0)] * 2 + [(1, 1)], mode="edge")
        before, after = 3 * sums + padded[..., :-2], 3 * sums + padded[..., 2:]
        sums = np.moveaxis(np.stack([before, after], -1).reshape(*sums.shape[:-1], -1), -1, axis)
    return ((sums * 255 + 128) // 256).astype(np.uint8)[..., None]  # sums are 16 times the counts: 0..256
