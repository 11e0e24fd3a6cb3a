"""Modules that work in place: every run has inputs of its own, and the caller's stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import GroupConv2d, LiftingConv2d
from selfconv.testing import assert_equivariant, audit, equivariance_error, shift_error


class Fn(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.function(x))
        return y


def lift() -> nn.Module:
    torch.manual_seed(0)
    return LiftingConv2d(3, 4, 3, padding=1, group="p4")


def normalised(x: Tensor) -> Tensor:
    return x.sub_(0.5).div_(0.2)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.ReLU(inplace=True), lift()),
        nn.Sequential(Fn(normalised), lift()),
        Fn(normalised, lift()),
        nn.Sequential(lift(), Fn(normalised, GroupConv2d(4, 4, 3, padding=1, group="p4"))),
    ],
    ids=["a layer", "a function in a layer", "a function before the layers", "a function between them"],
)
def test_audits_of_modules_that_work_in_place(model: nn.Module) -> None:
    found = audit(model, 8)
    assert found.passed, found.summary()
    assert found.untested == []


def test_errors_of_modules_that_work_in_place() -> None:
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    kept, model = x.clone(), Fn(normalised, lift().double())
    assert max(equivariance_error(model, x, "p4")) < 1e-12
    assert_equivariant(model, x, "p4")
    assert shift_error(model, x) == 0.0
    assert torch.equal(x, kept)
    constant = Fn(lambda x: x.zero_())
    with pytest.raises(ValueError, match="depends on x"):
        equivariance_error(constant, x, "p4")
    assert torch.equal(x, kept)
