"""2×2 matrices of rotations and reflections, and when two of them are one element of a group."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]
Matrix = tuple[tuple[float, float], tuple[float, float]]

NEAR = 1e-6  # matrices that differ by less are of one element


def multiply(a: Matrix, b: Matrix) -> Matrix:
    (a00, a01), (a10, a11) = a
    (b00, b01), (b10, b11) = b
    return (
        (a00 * b00 + a01 * b10, a00 * b01 + a01 * b11),
        (a10 * b00 + a11 * b10, a10 * b01 + a11 * b11),
    )


def power(a: Matrix, n: int) -> Matrix:
    return multiply(a, power(a, n - 1)) if n else ((1, 0), (0, 1))


def as_matrix(rows: Any) -> Matrix:
    """The matrix as floats; as integers if every entry is within NEAR of one, as cos(π/2) is of 0."""
    # 0.0 + entry raises TypeError for a string, which float() would read
    matrix = tuple(tuple(float(0.0 + entry) for entry in row) for row in rows)
    if [*map(len, matrix)] != [2, 2]:
        raise ValueError("not 2×2")
    whole = tuple(tuple(map(round, row)) for row in matrix)
    return whole if near(whole, matrix) else matrix  # type: ignore[return-value, arg-type]


def near(a: Matrix, b: Matrix) -> bool:
    return all(
        abs(x - y) < NEAR for row, other in zip(a, b, strict=True) for x, y in zip(row, other, strict=True)
    )


def nearest(matrices: Array, elements: Array) -> tuple[Index, Array]:
    """For each of some rotations and reflections the nearest element, and the difference from it."""
    found = (matrices.reshape(-1, 4) @ elements.reshape(-1, 4).T).argmax(1)
    return found, matrices - elements[found]
