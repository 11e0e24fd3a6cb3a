"""Shifts of networks that crop or do not pad: correct ones pass at every size, or were not tested."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv.nn import GroupConv2d, LiftingConv2d, SpatialPool2d, Upsample2d
from selfconv.testing import audit


def cropped(x: Tensor, like: Tensor) -> Tensor:
    more = (x.shape[-1] - like.shape[-1]) // 2
    return x[..., more : x.shape[-2] - more, more : x.shape[-1] - more]


class Crop(nn.Module):
    """A skip connection around an unpadded convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Conv2d(4, 4, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        return self.d(torch.cat([cropped(x, y), y], 1))


def crops() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Crop(), nn.AvgPool2d(2))


def twice(channels: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU())


class OriginalUNet(nn.Module):
    """One level, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = twice(3, 4), twice(4, 8), twice(8, 4)
        self.down, self.up, self.out = nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        up = self.up(self.inner(self.down(h)))
        return self.out(self.last(torch.cat([cropped(h, up), up], 1)))


class Skip(nn.Module):
    """Pooling, a convolution without padding, upsampling, and a cropped skip connection."""

    def __init__(self, up: nn.Module, act: nn.Module, group: str | None = None) -> None:
        super().__init__()
        self.group = group or "z2"
        if group is None:
            self.first: nn.Module = nn.Conv2d(3, 4, 3, padding=1)
            self.down: nn.Module = nn.MaxPool2d(2)
            self.inner: nn.Module = nn.Conv2d(4, 4, 3)
            self.out: nn.Module = nn.Conv2d(8, 2, 1)
        else:
            self.first = LiftingConv2d(3, 4, 3, padding=1, group=group)
            self.down, self.inner = SpatialPool2d(2, group=group), GroupConv2d(4, 4, 3, group=group)
            self.out = GroupConv2d(8, 2, 1, group=group)
        self.up, self.act = up, act

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        up = self.up(self.act(self.inner(self.down(h))))
        return self.out(torch.cat([cropped(h, up), up], 1))


def upsampled(*front: nn.Module, up: nn.Module | None = None) -> nn.Module:
    middle = up or nn.Upsample(scale_factor=2)
    return nn.Sequential(*front, middle, nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.AvgPool2d(2))


def unpadded(*windows: int) -> list[nn.Module]:
    return [nn.Conv2d(3 if i == 0 else 4, 4, k) for i, k in enumerate(windows)]


CORRECT: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "crop": (crops, [6, 7, 8, 9, 10, 12, 13]),
    "original u-net": (OriginalUNet, [20, 24, 28]),
    "nearest": (lambda: Skip(nn.Upsample(scale_factor=2), nn.ReLU()), [10, 12, 14, 16]),
    "bilinear": (
        lambda: Skip(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Identity()), [10, 12, 14, 16]
    ),
    "p4": (lambda: Skip(Upsample2d(2, group="p4"), nn.ReLU(), "p4"), [8, 12, 16]),
    "upsampled": (lambda: upsampled(*unpadded(3)), [8, 9, 10, 11, 12, 13, 14, 15, 16, 18]),
    "transposed": (lambda: upsampled(*unpadded(3), up=nn.ConvTranspose2d(4, 4, 2, 2)), [9, 12, 15, 16]),
    "a larger window": (lambda: upsampled(*unpadded(5)), [12, 24]),
    "four windows": (lambda: upsampled(*unpadded(3, 3, 3, 3)), [32]),
    "transposed, unpadded": (lambda: upsampled(*unpadded(3), up=nn.ConvTranspose2d(4, 4, 5, 2)), [8, 9, 12]),
    "three times": (lambda: upsampled(*unpadded(3), up=nn.Upsample(scale_factor=3)), [10, 11]),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("seed", [0, 1])
def test_correct_networks_are_not_condemned_at_any_size(name: str, seed: int) -> None:
    make, sizes = CORRECT[name]
    torch.manual_seed(seed)
    model = make()
    for size in sizes:
        found = audit(model, size)
        assert found.passed, found.summary()


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (crops, 12),
        (OriginalUNet, 32),
        (lambda: Skip(nn.Upsample(scale_factor=2), nn.ReLU()), 20),
        (lambda: upsampled(*unpadded(3)), 12),
        (lambda: upsampled(*unpadded(3, 3, 3, 3)), 32),
    ],
    ids=["crop", "original u-net", "skip", "upsampled", "four windows"],
)
def test_on_larger_maps_shifts_are_claimed(make: Callable[[], nn.Module], size: int) -> None:
    torch.manual_seed(0)
    found = audit(make(), size)
    assert found.untested == [], found.summary()
    assert found.summary().startswith(f"equivariant to shifts at {size}x{size}"), found.summary()


class Flat(nn.Module):
    """The same for one size alone: the features are flattened, and viewed as a map again."""

    def __init__(self, front: nn.Module, side: int) -> None:
        super().__init__()
        self.front, self.side, self.last = front, side, nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.front(x).reshape(len(x), 4, self.side, self.side))


@pytest.mark.parametrize(("size", "side"), [(9, 3), (11, 4), (12, 5), (13, 5), (15, 6), (16, 7)])
def test_networks_of_one_size_alone_are_not_condemned(size: int, side: int) -> None:
    torch.manual_seed(0)
    for make in (lambda: upsampled(*unpadded(3)), crops):
        found = audit(Flat(make(), side), size)
        assert found.passed, found.summary()


class Positions(nn.Module):
    """Features of some layers, positions added to them, and one more layer."""

    def __init__(self, front: nn.Module, side: int) -> None:
        super().__init__()
        self.front, self.last = front, nn.Conv2d(4, 2, 1)
        self.positions = nn.Parameter(torch.randn(side, side))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.front(x) + self.positions)


class Ramp(Positions):
    def __init__(self, front: nn.Module, side: int) -> None:
        super().__init__(front, side)
        del self.positions

    def forward(self, x: Tensor) -> Tensor:
        y = self.front(x)
        return self.last(y + torch.arange(y.shape[-1], dtype=y.dtype) / 4)


@pytest.mark.parametrize("kind", [Positions, Ramp])
@pytest.mark.parametrize(("size", "side"), [(12, 5), (16, 7), (20, 9), (24, 11)])
def test_positions_after_unpadded_layers_are_found(
    kind: Callable[[nn.Module, int], nn.Module], size: int, side: int
) -> None:
    torch.manual_seed(0)
    for front in (upsampled(*unpadded(3)), crops()):
        found = audit(kind(front, side), size)
        assert found.culprit == "last", found.summary()
        assert "its input does not shift with the image" in found.summary()
        assert all((layer.shift or 0) < 1e-12 for layer in found.layers), str(found)


def test_positions_in_a_layer_after_upsampling_are_found() -> None:
    class AddsRamp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + torch.arange(x.shape[-1], dtype=x.dtype))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2), AddsRamp(), nn.AvgPool2d(2))
    found = audit(model, 12)
    assert found.culprit == "2", found.summary()
