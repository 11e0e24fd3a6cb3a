"""What the summary of a failed audit says: how large the error is, beside rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import GroupConv2d, LiftingConv2d
from selfconv.testing import audit, equivariance_error


class Tilt(nn.Module):
    def __init__(self, size: float, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.linspace(-1, 1, x.shape[-1], dtype=torch.float64)
        return (x * (1 + self.size * ramp)).to(self.dtype).double()


def test_a_failing_summary_states_the_size_of_the_error() -> None:
    lift = LiftingConv2d(3, 4, 3, padding=1, group="p4")
    for size in (1e-1, 1e-3, 1e-6):
        found = audit(nn.Sequential(lift, Tilt(size)), 8)
        excess = found.excess["1"]
        assert size / 10 < excess.error < 2 * size
        assert (
            f"with its input (error {excess.error:.1e}; rounding in float64 is about 2e-15)"
            in found.summary()
        )
        assert excess.error == found.layers[1].error
    found = audit(nn.Sequential(lift, Tilt(1e-1, torch.float32)), 8)
    assert found.summary().endswith("rounding in float32 is about 1e-06)")
    strided = audit(nn.Sequential(lift, GroupConv2d(4, 4, 3, 2, 1, group="p4")), 8)
    assert "rounding in float64 is about 2e-15); sizes that would work: 7, 9, 5" in strided.summary()


class After(nn.Module):
    """A function after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return Tilt(1e-2).forward(self.act(x))


def test_a_failing_summary_states_the_error_under_shifts() -> None:
    for model, culprit in ((nn.Sequential(Tilt(1e-2)), "0"), (After(), "the model's output")):
        found = audit(model, 12, in_channels=3)
        assert found.culprit == culprit
        error = found.excess[culprit].error
        assert 1e-4 < error < 2e-2
        assert f"(error {error:.1e}; rounding in float64 is about 2e-15)" in found.summary()


def test_parameters_in_a_lower_precision_are_named() -> None:
    """A filter that is symmetric up to the rounding of its dtype; and one that is not."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        conv = nn.Conv2d(3, 4, 3, padding=1, bias=False, dtype=dtype)
        turned = [torch.rot90(conv.weight.detach(), k, (2, 3)) for k in range(4)]
        conv.weight.data = torch.stack(turned).mul(1 / 3).sum(0)
        found = audit(conv, 8, "p4")
        if dtype == torch.float64:
            assert found.passed, found.summary()
        else:
            assert "parameters are stored in float32" in found.summary(), found.summary()
            assert "which tolerance=1e-06 allows" in found.summary()
            assert audit(conv, 8, "p4", tolerance=1e-6).passed
    tilted = nn.Conv2d(3, 4, 3, padding=1)
    assert "its filters do not turn with the image" in audit(tilted, 8, "p4").summary()


class Average(nn.Module):
    """Of a network that is not equivariant, over turned copies of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        turned = [self.net(x.rot90(k, (-2, -1))).rot90(-k, (-2, -1)) for k in range(4)]
        return torch.stack(turned).sum(0)


class Orbit(Average):
    """The turned copies in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(torch.cat([x.rot90(k, (-2, -1)) for k in range(4)])).mean((-1, -2))
        return y.unflatten(0, (4, -1)).mean(0)


class Gates(nn.Module):
    """One layer for the means of rows and of columns, which a turn exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x.mean(-1, keepdim=True)) + self.gate(x.mean(-2, keepdim=True)))


class HiddenBranch(nn.Module):
    """A broken branch times a parameter that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.gamma = LiftingConv2d(3, 4, 3, padding=1, group="p4"), nn.Parameter(torch.zeros(1))
        self.broken = Tilt(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        return h + self.gamma * self.broken(h)


@pytest.mark.parametrize("make", [Average, Orbit, Gates, HiddenBranch])
def test_an_output_that_is_equivariant_although_layers_are_not(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert max(equivariance_error(model.double(), x, "p4")) < 1e-14
    found = audit(model, 8, "p4", in_channels=3)
    assert not found.passed  # the output alone proves nothing
    assert found.summary().startswith("not every layer is equivariant to p4 and shifts at 8x8: ")
    assert f"; the output is equivariant to p4 on this input (error {found.error:.1e}): " in found.summary()
    assert found.summary().endswith("equivariance_error measures the whole")


def test_an_output_that_is_not_equivariant() -> None:
    torch.manual_seed(0)
    for model in (nn.Conv2d(3, 4, 3, padding=1), After()):
        found = audit(model, 8, "p4", in_channels=3)
        assert found.summary().startswith("not equivariant to p4 and shifts at 8x8: ")
        assert "the output is equivariant" not in found.summary()


def test_float64_is_not_blamed_on_the_dtype_of_the_parameters() -> None:
    torch.manual_seed(0)
    found = audit(LiftingConv2d(3, 4, 3, padding=1, group="p4"), 8, tolerance=0)
    assert (
        "the model: it is computed in float64, and an error of this size may be rounding" in found.summary()
    )
    assert "which tolerance=2e-15 allows" in found.summary()
