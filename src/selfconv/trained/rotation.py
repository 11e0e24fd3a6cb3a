"""Accuracy against angle: test images rotated by every multiple of 15°, under a round mask.

The mask is the inscribed disc of the image, with the mean colour outside, so that the corners of a rotated
square do not reveal its angle. It is applied at every angle, 0° included. Rotations by multiples of 90°
permute pixels; other angles interpolate bicubically, by one operator of torch: ``_resample.resample``, with
which equivariance is measured, reads 36 pixels in turn, and a curve turns up to 2,000 images 20 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv._resample import round_mask
from selfconv._text import escape_for_terminal
from selfconv.data import DataInfo, Split
from selfconv.train import Watch
from selfconv.trained.outputs import logits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP = 15  # degrees
ANGLES = range(0, 360, STEP)
MOST_IMAGES = 2000  # a curve is 24 evaluations; so many images leave a standard error of at most 1.1 points


@dataclass(frozen=True)
class RotationCurve:
    """The accuracy at each angle."""

    angles: list[int]  # degrees, counter-clockwise
    accuracy: list[float]
    images: int  # of the test images, evenly spaced

    def __post_init__(self) -> None:
        if self.angles != [*ANGLES] or len(self.accuracy) != len(ANGLES):
            raise ValueError(f"expected an accuracy at every multiple of {STEP}°; got {self.angles}")
        if not all(0 <= value <= 1 for value in self.accuracy) or self.images < 1:
            raise ValueError("expected accuracies from 0 to 1, of one image or more; got others")

    @property
    def mean(self) -> float:
        return sum(self.accuracy) / len(self.accuracy)

    @property
    def worst(self) -> float:
        return min(self.accuracy)

    @property
    def worst_angle(self) -> int:
        return self.angles[self.accuracy.index(self.worst)]


def turn(images: Tensor, degrees: float) -> Tensor:
    """Images ``[N, C, h, w]`` rotated counter-clockwise about their centre; zero outside."""
    quarters, rest = divmod(degrees % 360, 90)
    images = images.rot90(int(quarters), (-2, -1))
    if not rest:
        return images
    h, w = images.shape[-2:]
    cos, sin = math.cos(math.radians(rest)), math.sin(math.radians(rest))
    # grid_sample takes (x, y) in units of half the width and half the height, y downwards
    theta = images.new_tensor([[cos, -sin * h / w, 0.0], [sin * w / h, cos, 0.0]])
    grid = F.affine_grid(theta.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bicubic", align_corners=False)


def rotation_curve(
    model: nn.Module, split: Split, info: DataInfo, watch: Watch | None = None
) -> RotationCurve:
    """The accuracy of a model on a split at every multiple of 15°.

    Args:
        watch: called with the share that is done, and a line on what is being done.
    """
    count = min(len(split), MOST_IMAGES)
    chosen = torch.arange(count, device=split.labels.device) * len(split) // count
    part = split.take(chosen)
    mask = round_mask(*part.shape[-2:]).to(part.device)

    def seen(degrees: int) -> Callable[[Tensor], Tensor]:
        return lambda images: turn(images * mask, degrees) * mask

    accuracy = []
    for degrees in ANGLES:
        if watch is not None:
            watch(degrees / 360, f"evaluating, turned by {degrees}°")
        correct = logits(model, part, info, seen(degrees)).argmax(1) == part.labels
        accuracy.append(correct.sum().item() / count)
    return RotationCurve([*ANGLES], accuracy, count)


def rotation_figure(curves: dict[str, RotationCurve], data: str) -> Figure:
    """Accuracy against angle on the test images of a data set, a line for each curve."""
    from matplotlib.figure import Figure

    images = max(curve.images for curve in curves.values())
    title = f"{escape_for_terminal(data)}: {images:,} test images, rotated, in a round mask"

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        angles, accuracy = [*curve.angles, 360], [*curve.accuracy, curve.accuracy[0]]
        label = f"{escape_for_terminal(name)}, mean {curve.mean:.1%}"
        axes.plot(
            angles, [100 * a for a in accuracy], marker="o", markersize=3, label=label.replace("$", r"\$")
        )
    axes.set_xticks(range(0, 361, 45), [f"{a}°" for a in range(0, 361, 45)])
    axes.set_xlabel("angle of the test images")
    axes.set_ylabel("accuracy, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.set_title(title, parse_math=False)
    axes.legend(fontsize=8)
    return figure
