"""``relative_error`` by its definition in plain Python: masking constants apart, equal infinities equal."""

from __future__ import annotations

import math

import torch
from helpers.cases import examples
from hypothesis import given
from hypothesis import strategies as st

from selfconv.testing import relative_error

VALUES = st.sampled_from(
    [0.0, 0.5, 1.0, -2.0, 3e-7, 9e3, 1e4, 1.0001e4, -1e9, 1e9, math.inf, -math.inf, math.nan]
)
PAIRS = st.lists(st.tuples(VALUES, VALUES | st.none()), min_size=1, max_size=9)  # None: both are equal


def masking(values: list[float]) -> list[bool]:
    """Which values are masking constants."""
    found = [False] * len(values)
    while True:
        left = [abs(b) if math.isfinite(b) and not f else 0.0 for b, f in zip(values, found, strict=True)]
        near = [b >= max(left) / 1.001 for b in left]
        rest = max((b for b, n in zip(left, near, strict=True) if not n), default=0.0)
        if not (max(left) >= 1e4 and sum(near) >= 2 and 0 < rest <= max(left) / 1000):
            return found
        found = [f or n for f, n in zip(found, near, strict=True)]


def ratio(pairs: list[tuple[float, float]]) -> float:
    differences = [0.0 if a == b else abs(a - b) for a, b in pairs]
    size = max(abs(b) if math.isfinite(b) else 0.0 for _, b in pairs)
    difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    return difference / size if size else difference


@examples(300)
@given(PAIRS)
def test_by_its_definition(drawn: list[tuple[float, float | None]]) -> None:
    pairs = [(b if a is None else a, b) for b, a in drawn]
    masks = masking([b for _, b in pairs])
    parts = [[p for p, m in zip(pairs, masks, strict=True) if m is wanted] for wanted in (True, False)]
    ratios = [ratio(part) for part in parts if part]
    expected = math.nan if any(map(math.isnan, ratios)) else max(ratios)
    a, b = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    found = relative_error(a, b)
    assert found == expected or (math.isnan(found) and math.isnan(expected)), (pairs, found, expected)
