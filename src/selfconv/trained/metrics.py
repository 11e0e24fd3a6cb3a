"""Measures of a classifier beside its accuracy, from labels and probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 10  # of confidence, for calibration
NORMAL_95 = 1.959964  # quantile of the normal distribution for an interval of 95%


@dataclass(frozen=True)
class ClassQuality:
    """Measures of one class; None if undefined, because it has no image or was never predicted."""

    images: int
    precision: float | None
    recall: float | None
    f1: float | None
    roc_auc: float | None  # of the class against all others


@dataclass(frozen=True)
class CalibrationBin:
    """The answers whose probability is in one tenth of 0..1."""

    images: int
    confidence: float  # mean probability of the answers
    accuracy: float


@dataclass(frozen=True)
class Quality:
    """Measures of a classifier. Intervals are of 95%."""

    classes: dict[str, ClassQuality]
    accuracy_interval: tuple[float, float]  # Wilson's
    balanced_accuracy: float  # mean recall of the classes
    balanced_accuracy_interval: tuple[float, float]  # of the recalls' Wilson intervals, by MOVER
    roc_auc: float | None  # mean over classes
    calibration_error: float  # mean |confidence − accuracy| over images, in bins of confidence
    calibration: list[CalibrationBin]

    def __post_init__(self) -> None:
        """Checks the values, which may come from a file."""
        numbers = [self.balanced_accuracy, self.calibration_error, self.roc_auc]
        numbers += [*self.accuracy_interval, *self.balanced_accuracy_interval]
        numbers += [v for c in self.classes.values() for v in (c.precision, c.recall, c.f1, c.roc_auc)]
        numbers += [v for b in self.calibration for v in (b.confidence, b.accuracy)]
        if not all(number is None or 0 <= number <= 1 for number in numbers):
            raise ValueError("quality: expected numbers from 0 to 1; got others")


def measure_quality(names: list[str], labels: NDArray[np.int64], probabilities: NDArray) -> Quality:
    """All measures, from labels ``[N]`` and probabilities ``[N, classes]``."""
    answers = probabilities.argmax(1)
    right = answers == labels
    classes = {
        name: _class_quality(labels == c, answers == c, probabilities[:, c]) for c, name in enumerate(names)
    }
    recalls = [c.recall for c in classes.values() if c.recall is not None]
    areas = [c.roc_auc for c in classes.values() if c.roc_auc is not None]
    bins = calibration_bins(probabilities.max(1), right)
    return Quality(
        classes=classes,
        accuracy_interval=wilson_interval(int(right.sum()), len(labels)),
        balanced_accuracy=math.fsum(recalls) / len(recalls),
        balanced_accuracy_interval=balanced_interval(labels, right),
        roc_auc=math.fsum(areas) / len(areas) if areas else None,
        calibration_error=sum(b.images * abs(b.confidence - b.accuracy) for b in bins) / len(labels),
        calibration=bins,
    )


def _class_quality(of_class: NDArray, answered: NDArray, probability: NDArray) -> ClassQuality:
    both, true, found = int((of_class & answered).sum()), int(of_class.sum()), int(answered.sum())
    return ClassQuality(
        images=true,
        precision=both / found if found else None,
        recall=both / true if true else None,
        f1=2 * both / (true + found) if true else None,
        roc_auc=roc_auc(of_class, probability),
    )


def roc_auc(positive: NDArray[np.bool_], score: NDArray) -> float | None:
    """The probability that a positive has a higher score than a negative; equal scores count one half."""
    count = int(positive.sum())
    if count in (0, len(positive)):
        return None
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # equal scores share the mean of their ranks
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(positive) - count)))


def wilson_interval(right: int, images: int) -> tuple[float, float]:
    z2 = NORMAL_95**2
    centre = (right + z2 / 2) / (images + z2)
    half = NORMAL_95 * math.sqrt(right * (images - right) / images + z2 / 4) / (images + z2)
    return centre - half if right else 0.0, centre + half if right < images else 1.0  # exact at the ends


def balanced_interval(labels: NDArray[np.int64], right: NDArray[np.bool_]) -> tuple[float, float]:
    """The interval of the mean recall, from those of the recalls: MOVER (Zou and Donner, 2008).

    The squared distances of their ends from the recalls are added, as variances of independent estimates are.
    """
    hits = [right[labels == label] for label in np.unique(labels)]
    recalls = [int(h.sum()) / len(h) for h in hits]
    ends = [wilson_interval(int(h.sum()), len(h)) for h in hits]
    mean = math.fsum(recalls) / len(recalls)  # as the estimate is computed, which the interval contains
    below = math.fsum((recall - low) ** 2 for recall, (low, _) in zip(recalls, ends, strict=True))
    above = math.fsum((high - recall) ** 2 for recall, (_, high) in zip(recalls, ends, strict=True))
    return max(0.0, mean - math.sqrt(below) / len(hits)), min(1.0, mean + math.sqrt(above) / len(hits))


def calibration_bins(confidence: NDArray, right: NDArray[np.bool_]) -> list[CalibrationBin]:
    """The bins that have answers, by rising confidence."""
    number = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    return [
        CalibrationBin(
            int(inside.sum()), min(1.0, float(confidence[inside].mean())), float(right[inside].mean())
        )
        for inside in (number == b for b in range(BINS))
        if inside.any()
    ]
