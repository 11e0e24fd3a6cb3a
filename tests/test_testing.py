"""The measuring tools themselves: they must see what is broken, and name it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import (
    AffineSelfConv2d,
    GlobalPool,
    GroupBatchNorm,
    GroupConv2d,
    LiftingConv2d,
    SpatialPool2d,
)
from selfconv.testing import assert_equivariant, audit, equivariance_error, relative_error, shift_error


def network(**changes: nn.Module) -> nn.Sequential:
    layers: dict[str, nn.Module] = {
        "stem": LiftingConv2d(3, 4, 3, padding=1, group="p4"),
        "norm": GroupBatchNorm(4, group="p4"),
        "act": nn.ReLU(inplace=True),
        "attend": AffineSelfConv2d(4, 4, 5, stride=2, num_heads=2, group="p4"),
        "conv": GroupConv2d(4, 4, 3, padding=1, group="p4"),
        "pool": GlobalPool(group="p4"),
        "head": nn.Linear(4, 5),
    }
    model = nn.Sequential()
    for name, layer in (layers | changes).items():
        model.add_module(name, layer)
    return model


class MirroredHalf(nn.Module):
    """Deliberately broken: flips the map left to right, which does not commute with quarter turns."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.flip(-1).roll(1, -1)


class PositionBias(nn.Module):
    """Deliberately broken: adds something that depends on the place."""

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.arange(x.shape[-1], dtype=x.dtype)
        return x + ramp + ramp.flip(0) * 0.5 + ramp[:, None]


def test_error_is_per_element_and_relative() -> None:
    errors = equivariance_error(nn.Conv2d(1, 1, 3, padding=1), torch.randn(1, 1, 6, 6), "p4")
    assert errors[0] == 0
    assert all(e > 1e-2 for e in errors[1:])
    assert relative_error(torch.tensor([1.0, 11.0]), torch.tensor([1.0, 10.0])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(3)) == math.inf


def test_assert_equivariant_lists_the_errors() -> None:
    x = torch.randn(1, 1, 6, 6)
    assert_equivariant(nn.AvgPool2d(2), x, "p4m")
    with pytest.raises(
        AssertionError, match=r"not equivariant to p4 within 1e-05; error by element 0: 0.0e\+00, 1: "
    ):
        assert_equivariant(nn.Conv2d(1, 1, 3, padding=1), x, "p4")
    with pytest.raises(AssertionError):
        assert_equivariant(lambda x: x * math.nan, x, "p4")


def test_shift_error_ignores_the_border_and_nothing_else() -> None:
    x = torch.randn(1, 2, 12, 12, dtype=torch.float64)
    conv = nn.Conv2d(2, 2, 5, padding=2, dtype=torch.float64)
    assert shift_error(conv, x, 2) == pytest.approx(0, abs=1e-12)
    assert shift_error(nn.MaxPool2d(2), x, 2, 2) == 0
    assert shift_error(lambda x: x - x.mean((-2, -1), keepdim=True), x) is None
    found = shift_error(PositionBias(), x)
    assert found is not None
    assert found > 0.01
    with pytest.raises(ValueError, match="shift: expected a positive multiple of stride=2; got 3"):
        shift_error(conv, x, 3, 2)


@pytest.mark.parametrize("size", [16, 20])
def test_audit_passes_an_equivariant_network(size: int) -> None:
    model = network()
    report = audit(model, size, "p4")
    assert report.passed
    assert report.error < 1e-10
    assert [layer.name for layer in report.layers] == [n for n, _ in model.named_children()]
    assert all(layer.error < 1e-10 for layer in report.layers)
    assert report.layers[0].shift is not None
    assert report.summary().startswith(f"equivariant to p4 and shifts at {size}x{size}")


@pytest.mark.parametrize(
    ("name", "layer", "size", "reason", "sizes"),
    [
        ("conv", GroupConv2d(4, 4, 3, 2, 1, group="p4"), 32, "stride 2 on an even-sized map", [30, 34, 26]),
        ("attend", SpatialPool2d(2, group="p4"), 15, "stride 2 on an odd-sized map (15x15)", [14, 16, 12]),
        ("act", MirroredHalf(), 16, "its output does not turn with its input", [14, 18, 12]),
    ],
    ids=["strided", "pooled", "mirrored"],
)  # fmt: skip
def test_audit_names_the_first_layer_that_breaks(
    name: str, layer: nn.Module, size: int, reason: str, sizes: list[int]
) -> None:
    report = audit(network(**{name: layer}), size, "p4")
    assert not report.passed
    assert report.culprit == name
    assert report.reason is not None
    assert reason in report.reason
    assert sorted(report.sizes) == sorted(sizes)
    for works in report.sizes:
        if name != "act":
            assert audit(network(**{name: layer}), works, "p4").passed


def test_audit_sees_planar_layers_and_positions() -> None:
    planar = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    report = audit(planar, 8, "p4")
    assert report.culprit == "0"
    assert report.reason == "an ordinary convolution: its filters do not turn with the image"
    assert report.sizes == []
    assert audit(planar, 8).passed  # shifts alone
    report = audit(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), PositionBias()), 10)
    assert report.culprit == "1"
    assert report.reason is not None
    assert "treats places differently" in report.reason


class FunctionalBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = LiftingConv2d(3, 4, 3, padding=1, group="p4")
        self.conv = GroupConv2d(4, 4, 3, padding=1, group="p4")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.stem(x).roll(1, -1))


class BreakAfter(FunctionalBreak):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.stem(x)).roll(1, -1)


def test_audit_sees_what_happens_between_layers() -> None:
    report = audit(FunctionalBreak(), 8, "p4")
    assert report.culprit == "conv"
    assert report.reason == (
        "its input does not turn with the image: a function before it, outside any layer, breaks it"
    )
    report = audit(BreakAfter(), 8, "p4")
    assert report.culprit == "the model's output"


def test_audit_leaves_the_model_alone_and_prints() -> None:
    from rich.console import Console

    model = network().train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = audit(model, 16, "p4")
    assert model.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    printed = console.export_text()
    assert "AffineSelfConv2d" in printed
    assert "equivariant to p4 and shifts at 16x16" in printed
    assert str(report).splitlines()[-1] == report.summary()
