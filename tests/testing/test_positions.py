"""Absolute positions that a test of shifts could miss: before layers that return their input, those that a
shift along the diagonal keeps, and those of single rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from selfconv.nn import GlobalPool, GroupConv2d, GroupDropout, LiftingConv2d
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
    "a window of one row": lambda h: F.avg_pool2d(h, (1, 3), 1, (0, 1)),
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


def weights(n: int, row: int, group: str, column: int | None = None) -> Tensor:
    """1, and 2 in a row, or in one cell of it; on other groups than z2 in its images under them too."""
    factors = torch.ones(n, n, dtype=torch.float64)
    factors[row, slice(None) if column is None else column] = 2
    turned = [factors.rot90(k) for k in range(4 if group != "z2" else 1)]
    return torch.stack([*turned, *(t.mT for t in turned if group == "p4m")]).amax(0)


REDUCED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda h, w: (h * w).mean((-2, -1)),
    "maximum": lambda h, w: (h.abs() * w).amax((-2, -1)),
    "squares": lambda h, w: (h.square() * w).mean((-2, -1)),
    "products of neighbours": lambda h, w: (h * h.roll(1, -1) * w).mean((-2, -1)),
    "products of rows": lambda h, w: (h * h.roll((1, 1), (-2, -1)) * w).mean((-2, -1)),
}


class Reads(nn.Module):
    """A readout after the layers."""

    def __init__(self, group: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lift, self.function = LiftingConv2d(3, 4, 3, padding=1, group=group), function

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)  # [N, C, |H|, h, w], or [N, C, h, w] on z2
        return self.function(h.mean(2) if h.dim() == 5 else h)


class ReadsInLayer(Reads):
    """The same in a layer."""

    def __init__(self, group: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(group, nn.ReLU())
        self.function.forward = function  # type: ignore[attr-defined]


@pytest.mark.parametrize("reduced", REDUCED)
@pytest.mark.parametrize("make", [Reads, ReadsInLayer])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data(), n=st.sampled_from([12, 16, 17]), group=st.sampled_from(["z2", "p4", "p4m"]))
def test_one_row_of_a_readout(
    reduced: str, make: Callable[..., nn.Module], data: st.DataObject, n: int, group: str
) -> None:
    """Away from the border it is a fault; nearer to it, where windows may explain it, it is not claimed."""
    row = data.draw(st.integers(3, n - 4))
    inner = n // 4 < row < n - n // 4 - 1
    group = "z2" if "products" in reduced else group  # they do not turn with the image
    torch.manual_seed(0)
    factors = weights(n, row, group)
    found = audit(make(group, lambda h: REDUCED[reduced](h, factors)), n, group, in_channels=3)
    assert not found.passed or found.untested, found.summary()
    if inner:
        assert "absolute position" in found.summary(), found.summary()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(row=st.integers(4, 10), column=st.integers(4, 10), group=st.sampled_from(["z2", "p4"]))
def test_one_cell_of_a_readout(row: int, column: int, group: str) -> None:
    torch.manual_seed(0)
    factors = weights(16, row, group, column)
    found = audit(Reads(group, lambda h: (h * factors).mean((-2, -1))), 16, group)
    assert "absolute position" in found.summary(), found.summary()


@settings(max_examples=24, deadline=None, derandomize=True)
@given(data=st.data(), n=st.sampled_from([10, 16, 21]), group=st.sampled_from(["z2", "p4", "p4m"]))
def test_one_row_between_layers(data: st.DataObject, n: int, group: str) -> None:
    """Only the outermost row may be padding."""
    row = data.draw(st.integers(1, n - 2))
    torch.manual_seed(0)
    layers = LiftingConv2d(3, 4, 3, padding=1, group=group), GroupConv2d(4, 4, 3, padding=1, group=group)
    for last in (layers[1], GlobalPool(group=group)):
        found = audit(Positions(layers[0], weights(n, row, group), last), n)
        assert found.culprit == "last", found.summary()
        assert "its input does not shift with the image" in found.summary()


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    row=st.integers(2, 13),
    window=st.sampled_from([lambda h: F.avg_pool2d(h, 3, 1, 1), lambda h: F.pad(h, (1, -1, 1, -1))]),
)
def test_one_row_beside_a_window(row: int, window: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    factors = weights(16, row, "z2")
    found = audit(Between(lambda h: window(h) * factors), 16)
    assert found.culprit == "last", found.summary()


FILTERS = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WINDOWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "average": lambda h, k: F.avg_pool2d(h, 2 * k + 1, 1, k),
    "maximum": lambda h, k: F.max_pool2d(h, 2 * k + 1, 1, k),
    "dilated": lambda h, k: F.conv2d(h, FILTERS, padding=k, dilation=k, groups=4),
    "reflected": lambda h, k: F.conv2d(F.pad(h, (k,) * 4, mode="reflect"), FILTERS, dilation=k, groups=4),
    "wider": lambda h, k: F.pad(h, (k,) * 4),
    "wider, reflected": lambda h, k: F.pad(h, (k,) * 4, mode="reflect"),
    "wider on one side": lambda h, k: F.pad(h, (0, k, 0, k)),
    "cropped and wider": lambda h, k: F.pad(h[..., 1:-1, 1:-1], (k + 1,) * 4),
    "moved": lambda h, k: F.pad(h, (k, -k, 0, 0)),
    "rolled": lambda h, k: h.roll((k, -k), (-2, -1)),
    "compared": lambda h, k: h * (F.avg_pool2d(h, 2 * k + 1, 1, k) > 0),
    "products": lambda h, k: h * F.pad(h, (0, 0, k, -k)),
    "padded, every other": lambda h, k: F.pad(h, (k,) * 4)[..., ::2, ::2],
    "twice": lambda h, k: F.avg_pool2d(F.conv2d(h, FILTERS, padding=k, dilation=k, groups=4), 3, 1, 1),
}


@pytest.mark.parametrize("name", WINDOWS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    k=st.integers(1, 3),
    n=st.sampled_from([12, 16, 20, 21]),
    end=st.sampled_from([lambda h: h, lambda h: h.mean((2, 3)), lambda h: h.relu().amax((2, 3))]),
)
def test_windows_of_functions_are_no_fault(
    name: str, k: int, n: int, end: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    window = WINDOWS[name]
    found = audit(Between(lambda h: window(h, k)), n)
    assert found.passed, found.summary()
    found = audit(Reads("z2", lambda h: end(window(h, k))), n)
    assert found.passed, found.summary()


class Mean(nn.Module):
    """The mean of two layers over copies of the image: a function, and one that undoes it."""

    def __init__(self, copies: list[Callable[[Tensor], Tensor]], layers: list[nn.Module]) -> None:
        super().__init__()
        self.copies, self.layers = copies, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        function, back = self.copies[0::2], self.copies[1::2]
        return torch.stack([undo(self.net(do(x))) for do, undo in zip(function, back, strict=True)]).sum(0)

    def net(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mirror(*axes: int) -> list[Callable[[Tensor], Tensor]]:
    return [lambda x: x.flip(axes)] * 2


def turn(k: int) -> list[Callable[[Tensor], Tensor]]:
    return [lambda x: x.rot90(k, (-2, -1)), lambda x: x.rot90(-k, (-2, -1))]


class Mirror(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip((-2, -1))


COPIES: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "columns": [*mirror(), *mirror(-1)],
    "rows": [*mirror(), *mirror(-2)],
    "a mirrored copy alone": mirror(-1),
    "half a turn": [*mirror(), *mirror(-2, -1)],
    "in a layer": [Mirror(), Mirror()],
    "quarter turns": [*turn(0), *turn(1), *turn(2), *turn(3)],
    "turns and mirrors": [*turn(1), *mirror(-1), lambda x: x.mT, lambda x: x.mT],
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("size", [8, 13, 16])
def test_layers_on_mirrored_and_turned_copies(name: str, size: int) -> None:
    torch.manual_seed(0)
    copies = COPIES[name]
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2)]
    strided = [*layers[:2], nn.MaxPool2d(2), layers[2], nn.AdaptiveAvgPool2d(1)]
    for net in (layers, strided[:-1] if size % 2 == 0 else layers[:1], strided):
        found = audit(Mean(copies, net), size)
        assert found.passed, found.summary()
        assert found.untested == [], found.summary()


@pytest.mark.parametrize("name", COPIES)
def test_positions_on_mirrored_and_turned_copies_are_found(name: str) -> None:
    torch.manual_seed(0)
    function = Between(lambda h: h * weights(16, 5, "z2"))
    found = audit(Mean(COPIES[name], [function]), 16)
    assert found.culprit is not None
    assert found.culprit.startswith("layers.0.last"), found.summary()


def test_a_mirrored_output_is_not_claimed() -> None:
    found = audit(Mean([lambda x: x.flip(-1), lambda x: x], [nn.Conv2d(3, 4, 3, padding=1)]), 12)
    assert not found.passed or found.untested == ["the model's output"], found.summary()


def test_sequences_that_are_read_in_both_directions() -> None:
    torch.manual_seed(0)
    net = [nn.Conv1d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1)]
    found = audit(Mean([*mirror(), *mirror(-1)], net), 20, inputs="sequence")
    assert found.passed, found.summary()
    assert found.untested == [], found.summary()
