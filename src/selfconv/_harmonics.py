"""Band-limited filters: a basis on the k×k window that can be evaluated at any angle.

A free filter is known at the pixels alone; to turn it by 45° is to guess what lies between them. A filter
that is a sum of smooth functions is known everywhere. Ours are circular harmonics on rings,

    B(r, φ) = exp(−(r − ρ)² / 2σ²) · {1, cos mφ, sin mφ}

with rings at ρ = 0, 0.9, 1.8, … (one for each pixel from the centre of the window to its side), σ = 0.5, and
on ring j the frequencies m ≤ j + 1 (at the centre m = 0 alone): 6 functions for 3×3, 13 for 5×5, 22 for 7×7.
Higher frequencies alias: at the pixels they look like lower ones, and turn wrongly. docs/angles.md has the
measurements.

All of it is a constant of the window and the angle, in float64.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from selfconv._matrices import Array, Matrix

SPACING, SIGMA = 0.9, 0.5  # pixels
ROUNDING = 1e-9


@cache
def basis(k: int, matrix: Matrix = ((1, 0), (0, 1))) -> Array:
    """Every function turned by an element S, B(S⁻¹y) at the pixels y of the window: ``[functions, k·k]``.

    Unturned, they all have the same norm, such that coefficients ~ N(0, 1) make filters whose values have
    variance 1, averaged over the window.
    """
    return at(k, _pixels(k) @ np.array(matrix))  # S⁻¹y = Sᵀy, as rows: yᵀS


@cache
def expansion(k: int) -> Array:
    """Takes a filter's values to the coefficients of the nearest sum of functions: ``[k·k, functions]``."""
    return np.linalg.pinv(basis(k)).astype(np.float64)


def at(k: int, points: Array) -> Array:
    """Every function at points (row, column) from the centre, [points, 2]: ``[functions, points]``."""
    return _functions(k, points) / _norms(k)


def _functions(k: int, points: Array) -> Array:
    """Harmonics on rings, not yet normalised."""
    distance, angle = np.hypot(*points.T), np.arctan2(points[:, 1], points[:, 0])
    off_centre = distance > ROUNDING  # where an angle is defined
    values = []
    for ring in range(k // 2 + 1):
        profile = np.exp(-((distance - SPACING * ring) ** 2) / (2 * SIGMA**2))
        values.append(profile)
        for m in range(1, ring + 2 if ring else 1):
            values += [off_centre * profile * wave(m * angle) for wave in (np.cos, np.sin)]
    return np.stack(values)


def _pixels(k: int) -> Array:
    """Offsets (row, column) from the centre of the window: ``[k·k, 2]``."""
    return np.stack(np.meshgrid(*[np.arange(k) - k // 2] * 2, indexing="ij"), -1).reshape(-1, 2).astype(float)


@cache
def _norms(k: int) -> Array:
    values = _functions(k, _pixels(k))
    return np.linalg.norm(values, axis=1, keepdims=True) * math.sqrt(len(values)) / k
