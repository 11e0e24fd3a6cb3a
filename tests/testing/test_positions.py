"""Absolute positions that a test of shifts could miss: before layers that return their input, and those that
a shift along the diagonal keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import GroupConv2d, GroupDropout, LiftingConv2d
from selfconv.testing import audit, shift_error


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


def difference(x: Tensor) -> Tensor:
    """i − j at row i and column j, which a shift along the diagonal keeps."""
    i = torch.arange(x.shape[-1], dtype=x.dtype)
    return i[:, None] - i


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(3, 4, 3, padding=1), function
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Inside(Between):
    """The function in a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.ReLU())
        self.function.forward = function  # type: ignore[attr-defined]


DIAGONAL: dict[str, Callable[[Tensor], Tensor]] = {
    "difference": lambda h: h + difference(h),
    "triangle": lambda h: h.tril(),
    "waves": lambda h: h * difference(h).sin(),
    "rows": lambda h: h + difference(h)[:, :1],
    "columns": lambda h: h + difference(h)[:1],
}


@pytest.mark.parametrize("name", DIAGONAL)
def test_positions_that_a_diagonal_shift_keeps(name: str) -> None:
    torch.manual_seed(0)
    function = DIAGONAL[name]
    found = audit(Between(function), 16)
    assert found.culprit == "last", found.summary()
    assert "absolute position" in found.summary()
    found = audit(Inside(function), 16)
    assert found.culprit == "function", found.summary()
    error = shift_error(function, torch.randn(1, 2, 16, 16, dtype=torch.float64))
    assert error is not None
    assert error > 0.01


@pytest.mark.parametrize("group", ["z2", "p4", "p4m"])
def test_a_checkerboard_is_not_claimed(group: str) -> None:
    """It commutes with shifts by two cells, as a stride of 2 does."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = LiftingConv2d(3, 4, 3, padding=1, group=group)
            self.conv = GroupConv2d(4, 4, 3, padding=1, group=group)

        def forward(self, x: Tensor) -> Tensor:
            mask, h = difference(x) % 2, self.lift(x)
            return h + (1 - mask) * self.conv(mask * h)

    found = audit(Coupling(), 15)
    assert "and shifts" not in found.summary().partition(";")[0]
    assert "shifts: not tested in conv" in found.summary()


CORRECT: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed twice": lambda h: h.mT.contiguous().mT,
    "gates of rows": lambda h: h * h.mean(-1, keepdim=True).sigmoid(),
    "gates of rows and columns": lambda h: h * (h.mean(-1, keepdim=True) + h.mean(-2, keepdim=True)),
    "a window of one row": lambda h: torch.nn.functional.avg_pool2d(h, (1, 3), 1, (0, 1)),
}


@pytest.mark.parametrize("name", CORRECT)
def test_rows_and_columns_may_differ(name: str) -> None:
    torch.manual_seed(0)
    for model in (Between(CORRECT[name]), Inside(CORRECT[name])):
        found = audit(model, 16)
        assert found.passed, found.summary()
        assert found.untested == [], found.summary()


def test_layers_on_transposed_maps() -> None:
    class Transposed(nn.Module):
        def __init__(self, turn: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.first, self.turn, self.back = nn.Conv2d(3, 4, 3, padding=1), turn, back
            self.last = nn.Conv2d(4, 4, (1, 3), padding=(0, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.back(self.last(self.turn(self.first(x))))

    class Turn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mT

    torch.manual_seed(0)
    for model in (Transposed(lambda h: h.mT, lambda h: h.mT), Transposed(Turn(), Turn())):
        found = audit(model, 12)
        assert found.passed, found.summary()
        assert found.untested == [], found.summary()
    found = audit(Transposed(lambda h: h.mT, lambda h: h), 12)
    assert found.untested == ["the model's output"], found.summary()  # not claimed
