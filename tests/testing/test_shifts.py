"""Shifts in an audit: in layers, between them and in the output; what is not tested is not claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv.examples import Autoencoder, UNet
from selfconv.nn import AffineSelfConv1d, AffineSelfConv2d, GroupConv2d, LiftingConv2d
from selfconv.testing import audit


class Between(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.function, self.first, self.second = function, first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def convs() -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)


def adds(*shape: int) -> Callable[[Tensor], Tensor]:
    positions = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return lambda x: x + positions


def radial(n: int) -> Callable[[Tensor], Tensor]:
    rows = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    return lambda x: x + (rows.square() + rows[:, None].square()) / n


class FlatMap(nn.Module):
    """A linear map of all places, without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.matrix = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.randn(5, 4 * 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.conv(x).flatten(1), self.matrix)


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ramp = torch.arange(x.shape[-1], dtype=x.dtype)
        return x, x + ramp


class UsesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = TwoOutputs()

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.two(x))


def sequences() -> tuple[nn.Module, nn.Module]:
    return AffineSelfConv1d(3, 8, num_heads=2), AffineSelfConv1d(8, 8, num_heads=2)


def lifted() -> tuple[nn.Module, nn.Module]:
    return LiftingConv2d(3, 4, 3, padding=1, group="p4"), GroupConv2d(4, 4, 3, padding=1, group="p4")


BROKEN: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any], str]] = {
    "positions": (lambda: Between(adds(10, 10), *convs()), 10, {}, "second"),
    "positions, p4": (lambda: Between(radial(10), *lifted()), 10, {}, "second"),
    "mask": (lambda: Between(lambda x: x * x.new_tensor([1, 1, 2, 2, 2, 1, 1]), *convs()), 7, {}, "second"),
    "sequence": (lambda: Between(adds(8, 40), *sequences()), 40, {"inputs": "sequence"}, "second"),
    "flattened": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 10)), 8, {}, "1"
    ),
    "flattened and back": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 192), nn.Unflatten(1, (3, 8, 8))), 8, {}, "0"
    ),
    "flattened without a layer": (FlatMap, 8, {}, "the model's output"),
    "two outputs": (UsesTwo, 8, {"in_channels": 3}, "two"),
    "strided, then positions": (
        lambda: Between(adds(8, 8), nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)), 16, {}, "second"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_places_that_are_treated_differently_are_found(name: str) -> None:
    torch.manual_seed(0)
    make, size, options, culprit = BROKEN[name]
    found = audit(make(), size, **options)
    assert found.culprit == culprit, found.summary()
    assert "depends on absolute position" in found.summary()


class Pools(nn.Module):
    """Windows with zero padding and global pooling in one layer, which the border changes."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filters, padding=1).relu().mean((2, 3))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(7, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        up = F.interpolate(self.down(x), scale_factor=2, mode="bilinear")
        return self.out(torch.cat([x, up], 1))


class Last(nn.Module):
    """Channels last, with a window in the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x.movedim(-1, 1), self.filters, padding=1).movedim(1, -1)


def window(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (2, 2, 2, 2)), 5, 1)


class Scale(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * factor


class ComputedNumber(nn.Module):
    """A layer with an argument that is another object in each run, after a function with a border."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(window(x), x.shape[-1] / 3)


CORRECT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a window between the layers": (lambda: Between(window, *convs()), 8),
    "borders in a mean": (lambda: nn.Sequential(Pools(), nn.Linear(4, 5)), 8),
    "a mean between the layers": (
        lambda: Between(lambda x: window(x).relu().mean((2, 3)), nn.Conv2d(3, 4, 3), nn.Linear(4, 5)), 9
    ),
    "a context": (lambda: Between(lambda x: x * x.mean((2, 3), keepdim=True), *convs()), 9),
    "a skip connection": (Skip, 12),
    "a computed number": (ComputedNumber, 9),
    "channels last": (
        lambda: Between(lambda x: x.movedim(1, -1).contiguous(), nn.Conv2d(3, 4, 3, padding=1), Last()), 9
    ),
    "stride on odd sizes": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1)), 17
    ),
    "no padding": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)), 14),
    "up": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.Conv2d(4, 4, 3, 1, 1)), 8),
    "a window as large as the map": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), AffineSelfConv2d(4, 4, num_heads=2)), 8
    ),
    "u-net": (lambda: UNet(3, 2, (4, 8), group="z2"), 8),
    "u-net, p4": (lambda: UNet(3, 2, (4, 8)), 8),
    "autoencoder, p4": (lambda: Autoencoder(3, width=4), 16),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
def test_borders_and_strides_are_no_fault(name: str) -> None:
    torch.manual_seed(0)
    make, size = CORRECT[name]
    found = audit(make(), size, in_channels=3)
    assert found.passed, found.summary()
    assert found.untested == [], found.summary()
    assert "shifts at" in found.summary()


def test_what_is_not_compared_is_not_claimed() -> None:
    """Down to one pixel, no shift is a whole number of cells on all maps."""
    found = audit(UNet(3, 2, (4, 8, 16), group="z2"), 4)
    assert found.passed
    assert found.untested
    assert found.summary().startswith("no fault found at 4x4; shifts: not tested in ")
    found = audit(UNet(3, 2, (4, 8, 16)), 4)
    assert found.summary().startswith("equivariant to p4 at 4x4: output error ")
    assert "; shifts: not tested in " in found.summary()
