"""Means, deviations, and the difference of means with a confidence interval (Welch).

For means m_i with sample deviations s_i of n_i runs and signs c_i = ±1, the difference Σ c_i m_i has the
standard error √Σ s_i²/n_i and, after Welch and Satterthwaite, (Σ s_i²/n_i)² / Σ (s_i²/n_i)²/(n_i-1) degrees
of freedom; the interval is the difference ± the quantile of Student's t times the standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Sample:
    """Summary statistics of several runs."""

    mean: float
    deviation: float | None  # divided by n-1; None for a single run
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        if not values:
            raise ValueError("expected at least one value; got none")
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        """``91.24 ± 0.32``; a single run has no deviation."""
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")

    @property
    def variance_of_mean(self) -> float | None:
        return None if self.deviation is None else self.deviation**2 / self.n


@dataclass(frozen=True)
class Difference:
    """A difference of means; ``low`` and ``high`` bound its confidence interval, and are None without one."""

    value: float
    low: float | None = None
    high: float | None = None
    degrees: float | None = None  # of freedom


def difference(plus: Sequence[Sample], minus: Sequence[Sample]) -> Difference:
    """Σ plus - Σ minus with its interval, if every sample has a deviation and one of them is not 0."""
    samples = [*plus, *minus]
    value = sum(s.mean for s in plus) - sum(s.mean for s in minus)
    parts = [s.variance_of_mean for s in samples]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not sum(known):
        return Difference(value)
    degrees = sum(known) ** 2 / sum(v**2 / (s.n - 1) for v, s in zip(known, samples, strict=True))
    reach = t_quantile(0.5 + CONFIDENCE / 2, degrees) * math.sqrt(sum(known))
    return Difference(value, value - reach, value + reach, degrees)


def t_quantile(probability: float, degrees: float) -> float:
    """The t below which Student's t distribution has this probability; any degrees > 0, whole or not."""
    if not (0.5 <= probability < 1 and degrees > 0):
        raise ValueError(f"expected 0.5 ≤ probability < 1, degrees > 0; got {probability}, {degrees}")
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):  # until they are neighbours
        if t_probability(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def t_probability(t: float, degrees: float) -> float:
    """P(T ≤ t) for t ≥ 0: 1 - I(ν/(ν+t²); ν/2, 1/2) / 2."""
    return 1 - _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised I(x; a, b) by its continued fraction, which converges fast for x < (a+1)/(a+b+2)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))  # modified Lentz
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / (1 + term * d), 1 + term / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a
