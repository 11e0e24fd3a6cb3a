"""What counts as rounding: the precision of what depends on the image, and errors that layers explain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import GroupConv2d, LiftingConv2d
from selfconv.testing import audit
from selfconv.testing.layers.rounding import Precision


class Between(nn.Module):
    """A function before a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.conv = function, LiftingConv2d(3, 4, 3, padding=1, group="p4")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.function(x))


def ramp(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 1, x.shape[-1], dtype=dtype)


def written(x: Tensor) -> Tensor:
    """Positions in bfloat16, in a buffer of the shape of x."""
    places = torch.empty_like(x, dtype=torch.bfloat16)
    places[:] = ramp(x, torch.bfloat16)
    return x + 0.1 * places


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16 positions": lambda x: x + 0.1 * ramp(x, torch.bfloat16),
    "float32 positions": lambda x: x + 1e-5 * ramp(x, torch.float32),
    "float16 factors": lambda x: x * (1 + 1e-3 * ramp(x, torch.float16)),
    "like the image": lambda x: x + 1e-3 * torch.ones_like(x, dtype=torch.bfloat16).cumsum(-1),
    "new": lambda x: x + 1e-3 * x.new_ones(x.shape, dtype=torch.float16).cumsum(-1),
    "written": written,
}


@pytest.mark.parametrize("name", BROKEN)
def test_constants_of_a_low_precision_hide_no_fault(name: str) -> None:
    """The sum of float64 and bfloat16 is computed in float64, and is judged as such."""
    found = audit(Between(BROKEN[name]), 8)
    assert not found.passed, found.summary()
    assert found.culprit == "conv"
    assert found.rounded == {}


def float32_sum(x: Tensor) -> Tensor:
    return x / x.float().abs().sum((-2, -1), keepdim=True)


@pytest.mark.parametrize(
    ("function", "dtype", "tolerance"),
    [
        (float32_sum, torch.float32, "1e-05"),
        (lambda x: x.bfloat16().double(), torch.bfloat16, "0.1"),
        (
            lambda x: torch.fft.ifft2(torch.fft.fft2(x.to(torch.complex64))).real.double(),
            torch.float32,
            "1e-05",
        ),
        (lambda x: torch.zeros_like(x, dtype=torch.float16).copy_(x).double(), torch.float16, "0.01"),
    ],
    ids=["sum", "cast", "Fourier", "written"],
)
def test_a_summary_names_the_precision_of_values(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, tolerance: str
) -> None:
    found = audit(Between(function), 8)
    assert found.passed, found.summary()
    assert found.rounded == {"the input of conv": dtype}
    name = str(dtype).removeprefix("torch.")
    assert f"; passed with tolerance {tolerance}: {name} in the input of conv" in found.summary()
    assert "rounding that grows" not in found.summary()


class Branches(nn.Module):
    """One branch in bfloat16, and one with a fault in float64: [N, 4, 4, h, w] each."""

    def __init__(self, fault: float) -> None:
        super().__init__()
        self.fault, self.lift = fault, LiftingConv2d(3, 4, 3, padding=1, group="p4")
        self.coarse, self.fine = (GroupConv2d(4, 4, 1, group="p4") for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.lift(x)
        coarse = y.bfloat16().double()
        fine = self.fine(y + self.fault * ramp(y, torch.float64))
        return self.coarse(coarse), fine


def test_a_low_precision_elsewhere_hides_no_fault() -> None:
    found = audit(Branches(0.0), 8)
    assert found.rounded == {"the input of coarse": torch.bfloat16}
    assert found.passed
    assert audit(Branches(1e-3), 8).culprit == "fine"


class EveryOther(nn.Module):
    """Shifts its output in runs 10 to 13 only: those of the whole network, after its layers were judged."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.runs = LiftingConv2d(3, 4, 3, padding=1, group="p4"), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y: Tensor = self.lift(x)
        return y.roll(1, -1) if 9 < self.runs <= 13 else y


def test_rounding_is_claimed_only_where_the_layers_explain_the_error() -> None:
    found = audit(EveryOther(), 8)
    assert found.error > 1e-2, "the case is not one"
    assert found.culprit == "the model's output"
    assert found.reason is not None
    assert "where the errors of the layers, each within its tolerance, explain" in found.reason


def test_precision_follows_values() -> None:
    x, constant = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.bfloat16)
    precision = Precision()
    precision.follow(x)
    with precision:
        promoted, cast, buffer = x + constant, x.half(), torch.zeros(3, 4)
        buffer[1].copy_(cast)
        torch._foreach_add_([first := torch.zeros(4, dtype=torch.float64)], [cast.double()])
        chosen = cast.argmax()
    assert precision.rounded(constant) is None
    assert precision.rounded(torch.zeros_like(x)) is None
    assert precision.rounded(promoted) == torch.float64
    assert precision.rounded(buffer) == precision.rounded(first) == precision.rounded(chosen) == torch.float16
