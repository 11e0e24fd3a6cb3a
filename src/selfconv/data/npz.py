"""Arrays in an ``.npz`` file: x_train, y_train, x_test, y_test, and perhaps x_val, y_val, class_names."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from selfconv._memory import machine_memory
from selfconv.data.dataset import Arrays, DataError, Dataset, build


def load_npz(path: Path, *, image_size: int | None, seed: int, validation: float) -> Dataset:
    arrays, names = read_npz(path)
    return build(path.stem, arrays, names, image_size=image_size, seed=seed, validation=validation)


def read_npz(path: Path) -> tuple[Arrays, list[str] | None]:
    """Its arrays, and class names if it has them. Pickled objects in it are refused, not loaded."""
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: expected an .npz file; got something else, or a part of one")
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
        raise DataError(f"{path}: expected arrays; got members of another kind")
    return arrays, None if names is None else _class_names(path, names)


def _class_names(path: Path, names: np.ndarray) -> list[str]:
    if not isinstance(names, np.ndarray) or names.ndim != 1 or names.dtype.kind not in "US":
        raise DataError(
            f"{path}: class_names: expected strings [classes]; got {getattr(names, 'dtype', 'bytes')}"
        )
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names]
