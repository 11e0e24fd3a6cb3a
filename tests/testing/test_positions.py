"""Absolute positions that a test of shifts could miss: before layers that return their input, and those that
a shift along the diagonal keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import GroupDropout, LiftingConv2d
from selfconv.testing import audit


class Positions(nn.Module):
    """Features times a factor at each place, then a layer."""

    def __init__(self, first: nn.Module, factors: Tensor, last: nn.Module) -> None:
        super().__init__()
        self.first, self.factors, self.last = first, nn.Parameter(factors), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.factors)


def radial(n: int) -> Tensor:
    rows = torch.arange(n) - (n - 1) / 2
    return 1 + rows.square() + rows[:, None].square()


class OverwritesItsInput(nn.Module):
    """Code after a layer that overwrites what the layer was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * radial(12)
        y: Tensor = self.last(h)
        h.zero_()
        return y


@pytest.mark.parametrize(
    "last",
    [nn.Identity, nn.Dropout, nn.Sequential, lambda: nn.Flatten(1, 1), nn.ReLU],
    ids=["identity", "dropout", "nothing", "flatten", "relu"],
)
def test_positions_before_a_layer_that_returns_its_input(last: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    found = audit(Positions(nn.Conv2d(3, 4, 3, padding=1), torch.randn(12, 12), last()), 12)
    assert found.culprit == "last", found.summary()
    assert "its input does not shift with the image" in found.summary()


def test_positions_before_dropout_on_the_group() -> None:
    model = Positions(
        LiftingConv2d(3, 4, 3, padding=1, group="p4"), radial(12), GroupDropout(0.1, group="p4")
    )
    found = audit(model, 12)
    assert found.culprit == "last", found.summary()
    assert "its input does not shift with the image" in found.summary()


def test_positions_in_a_tensor_that_is_overwritten_later() -> None:
    found = audit(OverwritesItsInput(), 12)
    assert found.culprit == "last", found.summary()


def test_positions_of_tokens_before_dropout() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.drop = nn.Conv2d(3, 8, 4, 4), nn.Dropout(0.1)
            self.positions = nn.Parameter(torch.randn(1, 16, 8))
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.patches(x).flatten(2).transpose(1, 2)
            encoded: Tensor = self.encoder(self.drop(tokens + self.positions))
            return encoded.mean(1)

    torch.manual_seed(0)
    found = audit(Tokens(), 16)
    assert found.culprit == "drop", found.summary()
