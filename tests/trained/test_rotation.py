"""Accuracy against angle: how images are turned, and what is counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from selfconv.data import DataInfo, Split
from selfconv.trained import evaluate_model, images_evaluated, rotation_curve, rotation_figure
from selfconv.trained.rotation import round_mask, turn


def blob(size: int, degrees: float, radius: float) -> Tensor:
    """A smooth spot at an angle, counter-clockwise from the right: [1, 1, size, size]."""
    axis = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    row, column = -radius * math.sin(math.radians(degrees)), radius * math.cos(math.radians(degrees))
    return torch.exp(-((axis[:, None] - row) ** 2 + (axis - column) ** 2) / 8)[None, None]


@given(st.integers(16, 25), st.integers(0, 359), st.integers(0, 359))
def test_turning_is_counter_clockwise_by_the_angle(size: int, start: int, angle: int) -> None:
    turned = turn(blob(size, start, size / 5), angle)
    torch.testing.assert_close(turned, blob(size, start + angle, size / 5), rtol=0, atol=0.03)


@given(st.integers(1, 9), st.integers(-4, 8))
def test_quarter_turns_move_pixels(size: int, quarters: int) -> None:
    images = torch.randn(2, 3, size, size)
    assert torch.equal(turn(images, 90 * quarters), images.rot90(quarters, (-2, -1)))


@pytest.mark.parametrize("size", [7, 8, 32])
def test_the_mask_is_the_same_from_every_side(size: int) -> None:
    mask = round_mask(size, size)
    assert torch.equal(mask, mask.rot90())
    assert torch.equal(mask, mask.flip(0))
    assert mask[0, 0] == 0
    assert mask[size // 2].all()


class Direction(nn.Module):
    """The quadrant in which the light is: knows right from wrong at any angle."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2] // 2, x.shape[-1] // 2
        quadrants = (x[..., :h, w:], x[..., :h, :w], x[..., h:, :w], x[..., h:, w:])  # counter-clockwise
        return torch.stack([q.sum((1, 2, 3)) for q in quadrants], 1)


class Counting(nn.Module):
    """Counts the images it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.images = 0

    def forward(self, x: Tensor) -> Tensor:
        self.images += len(x)
        return x.flatten(1)[:, :2]


@pytest.mark.parametrize("number", [3, 2500])  # fewer and more than a curve takes
def test_images_evaluated(number: int) -> None:
    split = Split(torch.zeros(number, 1, 4, 4, dtype=torch.uint8), torch.arange(number) % 2)
    info = DataInfo("spots", "", ["a", "b"], 1, 4, [0.5], [0.5], {"train": 0, "val": 0, "test": number})
    model = Counting()
    evaluate_model(model, split, info)
    assert model.images == images_evaluated(number)


def test_the_curve_counts_right_answers_at_each_angle() -> None:
    """Spots in the middle of a quadrant leave it when they are turned by more than 45°."""
    degrees = [45, 135, 225, 315]
    images = torch.cat([(255 * blob(32, d, 8.0)).round() for d in degrees]).to(torch.uint8)
    split = Split(images, torch.arange(4))
    info = DataInfo("spots", "", list("abcd"), 1, 32, [0.0], [1.0], {"train": 0, "val": 0, "test": 4})
    curve = rotation_curve(Direction(), split, info)
    assert curve.images == 4
    assert curve.angles == list(range(0, 360, 15))
    expected = {a: float(a < 45 or a > 315) for a in curve.angles if a % 90 != 45}
    assert {a: v for a, v in zip(curve.angles, curve.accuracy, strict=True) if a in expected} == expected
    assert curve.worst == 0.0
    drawn = np.asarray(rotation_figure({"direction": curve}, "spots").axes[0].lines[0].get_ydata())
    assert drawn[0] == drawn[-1] == 100
