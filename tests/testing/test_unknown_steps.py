"""Shifts where no layer says how maps change their size, and where the output has no places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv.nn import GroupConv2d, LiftingConv2d
from selfconv.testing import audit, shift_error


class Fn(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Then(nn.Module):
    """Layers, a function after each."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = parts
        self.layers = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def seq(*parts: Any) -> nn.Module:
    return nn.Sequential(*(part if isinstance(part, nn.Module) else Fn(part) for part in parts))


def conv(*args: Any, **options: Any) -> nn.Module:
    return nn.Conv2d(*(args or (3, 4, 3)), **(options or {"padding": 1}))


def lift() -> nn.Module:
    return LiftingConv2d(3, 4, 3, padding=1, group="p4")


def group_conv() -> nn.Module:
    return GroupConv2d(4, 4, 3, padding=1, group="p4")


class PadsItsSkip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = conv(3, 4, 3, padding=1), conv(7, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        up = F.interpolate(F.max_pool2d(self.down(x), 2), scale_factor=2)
        more = x.shape[-1] - up.shape[-1]
        return self.out(torch.cat([x, F.pad(up, (0, more, 0, more))], 1))


SEQUENCE = {"inputs": "sequence"}
CORRECT: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {
    "zero padding": (lambda: seq(nn.ZeroPad2d(1), conv(3, 4, 3)), 16, {}),
    "padding in a layer": (lambda: seq(lambda x: F.pad(x, (1, 1, 1, 1)), conv(3, 4, 3)), 16, {}),
    "padding between": (lambda: Then(lambda x: F.pad(x, (1, 1, 1, 1)), conv(3, 4, 3)), 16, {}),
    "padding on one side": (lambda: seq(nn.ZeroPad2d((0, 1, 0, 1)), conv(3, 4, 3, stride=2)), 16, {}),
    "causal": (lambda: seq(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(3, 4, 3)), 24, SEQUENCE),
    "causal by cropping": (
        lambda: seq(nn.Conv1d(3, 4, 3, padding=2), lambda h: h[..., :-2]), 24, SEQUENCE
    ),
    "causal after the layers": (
        lambda: Then(nn.Conv1d(3, 4, 3, padding=2), lambda h: h[..., :-2]), 24, SEQUENCE
    ),
    "pooling in a layer": (lambda: seq(lift(), lambda h: F.avg_pool3d(h, (1, 2, 2)), group_conv()), 8, {}),
    "pooling between": (lambda: Then(lift(), lambda h: F.avg_pool3d(h, (1, 2, 2)), group_conv()), 8, {}),
    "unshuffled": (lambda: seq(conv(), nn.PixelUnshuffle(2), conv(16, 4, 3, padding=1)), 16, {}),
    "root mean square": (lambda: seq(conv(), nn.LPPool2d(2, 2), conv(4, 4, 3, padding=1)), 16, {}),
    "adaptive": (lambda: seq(conv(), nn.AdaptiveAvgPool2d(8), conv(4, 4, 3, padding=1)), 16, {}),
    "pooling at the end": (lambda: Then(conv(), lambda h: F.max_pool2d(h, 2)), 16, {}),
    "every other at the end": (lambda: Then(conv(), lambda h: h[..., ::2, ::2]), 16, {}),
    "the same in a layer": (lambda: seq(conv(), lambda h: h[..., ::2, ::2]), 16, {}),
    "unflattened": (
        lambda: seq(nn.Conv1d(3, 4, 3, padding=1), lambda h: h.unflatten(-1, (-1, 2)).mean(-1)), 24, SEQUENCE
    ),
    "a stride of columns": (lambda: seq(conv(3, 4, 3, stride=(1, 2), padding=1)), 16, {}),
    "a stride of rows": (lambda: seq(conv(3, 4, 3, stride=(2, 1), padding=1)), 16, {}),
    "pairs of columns": (lambda: seq(conv(), nn.MaxPool2d((1, 2)), conv(4, 4, 3, padding=1)), 16, {}),
    "pairs of columns between": (
        lambda: Then(conv(), lambda h: F.max_pool2d(h, (1, 2)), conv(4, 4, 3, padding=1)), 16, {}
    ),
    "columns twice": (
        lambda: seq(conv(), nn.Upsample(scale_factor=(1, 2)), conv(4, 4, 3, padding=1)), 16, {}
    ),
    "columns twice, transposed": (
        lambda: seq(conv(), nn.ConvTranspose2d(4, 4, (1, 2), (1, 2)), conv(4, 4, 3, padding=1)), 16, {}
    ),
    "odd": (lambda: Then(conv(), lambda h: F.max_pool2d(h, 2), conv(4, 4, 3, padding=1)), 17, {}),
    "odd in a layer": (lambda: seq(conv(), lambda h: F.max_pool2d(h, 2), conv(4, 4, 3, padding=1)), 17, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
def test_unknown_strides_and_padding_are_no_fault(name: str) -> None:
    torch.manual_seed(0)
    make, size, options = CORRECT[name]
    found = audit(make(), size, **options)
    assert found.passed, found.summary()
    assert found.untested == [], found.summary()


def ring(n: int) -> Tensor:
    rows = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    return ((rows.square() + rows[:, None].square()).sqrt() > n / 4).double()


READOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda h: h[..., 0, 0],
    "last": lambda h: h[..., -1, -1],
    "centre": lambda h: h[..., h.shape[-2] // 2, h.shape[-1] // 2],
    "flattened": lambda h: h.flatten(2)[:, :, 0],
    "quadrant": lambda h: h[..., :8, :8].mean((2, 3)),
    "ring": lambda h: (h * (1 + ring(16))).mean((2, 3)),
    "left third": lambda h: (h * (torch.arange(16) < 5)).mean((2, 3)),
}


@pytest.mark.parametrize("name", READOUTS)
@pytest.mark.parametrize("make", [seq, Then], ids=["a layer", "after the layers"])
def test_readouts_of_some_places_are_not_claimed(name: str, make: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    found = audit(make(conv(), READOUTS[name]), 16)
    assert not found.passed or found.untested, found.summary()
    assert not found.summary().startswith("equivariant to shifts")
    if name in ("ring", "left third"):  # which cannot be taken for a border
        assert "absolute position" in found.summary()
    then_linear = audit(make(conv(), READOUTS[name], nn.Linear(4, 5)), 16)
    assert not then_linear.passed or then_linear.untested, then_linear.summary()


def test_readouts_of_all_places_are_claimed() -> None:
    torch.manual_seed(0)

    def pooled(h: Tensor) -> Tensor:
        return F.avg_pool2d(h, 3, 1, 1).relu().mean((2, 3))

    for model in (seq(conv(), pooled), Then(conv(), pooled), Then(conv(), pooled, nn.Linear(4, 5))):
        found = audit(model, 16)
        assert found.summary().startswith("equivariant to shifts at 16x16: shift error"), found.summary()


def test_what_sizes_do_not_decide_is_not_tested() -> None:
    torch.manual_seed(0)
    for model, size in (
        (PadsItsSkip(), 17),
        (seq(conv(), lambda h: F.pad(h, (1, 1, 1, 1)) * (1 + ring(18))), 16),
        (seq(conv(), nn.AdaptiveAvgPool2d(7)), 17),
    ):
        found = audit(model, size)
        assert found.passed, found.summary()
        assert found.summary().startswith(f"no fault found at {size}x{size}; shifts: not tested in ")


@pytest.mark.parametrize(("size", "pooled"), [(8, 3), (7, 5), (20, 6), (10, 4), (8, 12)])
def test_pooling_to_sizes_without_a_stride_is_not_tested(size: int, pooled: int) -> None:
    """Copies of a map may be pooled with a stride: 24 cells to 3."""
    torch.manual_seed(0)
    for model in (
        seq(conv(), nn.AdaptiveAvgPool2d(pooled)),
        Then(conv(), lambda h: F.adaptive_avg_pool2d(h, pooled), conv(4, 4, 3, padding=1)),
    ):
        found = audit(model, size)
        assert found.passed, found.summary()
        assert found.summary().startswith(f"no fault found at {size}x{size}; shifts: not tested in ")


def halved(h: Tensor) -> Tensor:
    return F.interpolate(F.avg_pool2d(h, 2), scale_factor=2)


def test_a_step_that_sizes_do_not_show_is_not_tested() -> None:
    """Down and up again in one function: it may also be a pattern of that period."""
    for model in (seq(conv(), halved), Then(conv(), halved, conv(4, 4, 3, padding=1))):
        found = audit(model, 16)
        assert found.passed, found.summary()
        assert "shifts: not tested in " in found.summary()


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h + torch.arange(h.shape[-1]),
        lambda h: h[..., ::2, ::2] * (1 + ring(8)),
        lambda h: h[..., ::2] * (1 + torch.arange(8)),
        lambda h: h[..., ::2] * (1 + torch.arange(16)[:, None]),
        lambda h: torch.where(torch.arange(16) < 8, h, 0.0),
    ],
    ids=[
        "ramp",
        "after a step",
        "after a step of columns",
        "rows after a step of columns",
        "half of it zero",
    ],
)
def test_positions_are_found_beside_steps_and_padding(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    for model in (seq(conv(), function), Then(conv(), function)):
        found = audit(model, 16)
        assert "absolute position" in found.summary(), found.summary()


def test_shift_error_of_padding() -> None:
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    assert shift_error(nn.ZeroPad2d(1), x) == 0
    assert shift_error(nn.ZeroPad2d((0, 1, 0, 1)), x) == 0
    assert shift_error(nn.ConstantPad1d((2, 0), 1.0), x[:, 0], axes=1) == 0
    half = shift_error(lambda x: torch.where(torch.arange(12) < 6, x, 0.0), x)
    assert half is not None
    assert half > 0.1
