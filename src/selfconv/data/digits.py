"""The digits in the package: 1,797 handwritten ones of 8×8 pixels, enlarged to 16×16."""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np
from numpy.typing import NDArray

from selfconv.data.dataset import Dataset, Images, build
from selfconv.data.npz import read_npz


def load_digits(*, image_size: int | None, seed: int, validation: float) -> Dataset:
    with as_file(files(__package__) / "digits.npz") as path:
        arrays, names = read_npz(path)
    larger = {part: (enlarge(x), y) for part, (x, y) in arrays.items()}
    return build("digits", larger, names, image_size=image_size, seed=seed, validation=validation)


def enlarge(counts: NDArray[np.uint8]) -> Images:
    """Counts 0..16 [N, 8, 8] as grey images [N, 16, 16, 1], by bilinear interpolation.

    At twice the size its weights are 3/4 and 1/4 along each side, so integers do: exact on every machine,
    and it commutes with flips and quarter turns.
    """
    sums = counts.astype(np.int64)
    for axis in (1, 2):
        sums = np.moveaxis(sums, axis, -1)
        padded = np.pad(sums, [(0, 0)] * 2 + [(1, 1)], mode="edge")
        before, after = 3 * sums + padded[..., :-2], 3 * sums + padded[..., 2:]
        sums = np.moveaxis(np.stack([before, after], -1).reshape(*sums.shape[:-1], -1), -1, axis)
    return ((sums * 255 + 128) // 256).astype(np.uint8)[..., None]  # sums are 16 times the counts: 0..256
