"""Runs after the first: what a model raises there is one line, and models that differentiate are audited."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import GroupConv2d, LiftingConv2d
from selfconv.testing import audit, equivariance_error


class RefusesLater(nn.Module):
    """A layer that raises at its second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("expected to be called once;\ngot another call")
        return x * 1


class RefusesNaN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.conv.register_forward_pre_hook(lambda module, args: finite(args[0]))
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(finite(torch.nn.functional.avg_pool2d(self.conv(x), 3, 1, 1)))
        return y


def finite(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise FloatingPointError("not finite")
    return x


def test_what_a_layer_raises_in_a_later_run_is_one_line() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), RefusesLater())
    with pytest.raises(
        ValueError, match="the model cannot be audited: 1: expected to be called once"
    ) as error:
        audit(model, 8)
    assert "\n" not in str(error.value)

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.once = nn.Conv2d(3, 4, 3, padding=1), [RefusesLater()]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.once[0](self.conv(x))
            return y

    with pytest.raises(
        ValueError, match="the model cannot be audited: the model: expected to be called once"
    ):
        audit(Between(), 8)


def test_a_model_that_refuses_what_is_not_a_number() -> None:
    found = audit(RefusesNaN(), 12)
    assert found.passed, found.summary()


class Score(nn.Module):
    """The gradient of an energy."""

    def __init__(self, weight: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = weight
        self.lift = LiftingConv2d(3, 4, 3, padding=1, group="p4")
        self.conv = GroupConv2d(4, 4, 3, padding=1, group="p4")

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.weight(self.conv(self.lift(x).tanh()).square()).sum()
            return torch.autograd.grad(energy, x)[0]


def test_models_that_differentiate() -> None:
    torch.manual_seed(0)
    found = audit(Score(lambda h: h), 12)
    assert found.passed, found.summary()
    broken = Score(lambda h: h * torch.arange(12))
    assert max(equivariance_error(broken.double(), torch.randn(1, 3, 12, 12).double(), "p4")) > 0.1
    assert not audit(broken, 12).passed


class ChannelsLast(nn.Module):
    """Features on the group with channels last: [N, |H|, h, w, C]."""

    def __init__(self, group: str, channels: int, size: int | None = None) -> None:
        super().__init__()
        self.lift, self.norm = LiftingConv2d(3, channels, 3, padding=1, group=group), nn.LayerNorm(channels)
        self.linear = nn.Linear(channels, channels)
        self.conv = GroupConv2d(channels, 4, 3, padding=1, group=group)
        self.positions = nn.Parameter(torch.randn(size, channels)) if size else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x).movedim(1, -1)
        h = h + self.linear(self.norm(h if self.positions is None else h + self.positions))
        y: Tensor = self.conv(h.movedim(-1, 1))
        return y


@pytest.mark.parametrize(
    ("group", "size", "channels"),
    [("p4m", 8, 8), ("p4m", 8, 16), ("p4m", 8, 3), ("p4", 4, 4), ("p4", 4, 8), ("c8", 8, 8), ("p4m", 9, 8)],
)
def test_channels_last_where_a_side_is_the_order_of_the_group(group: str, size: int, channels: int) -> None:
    torch.manual_seed(0)
    found = audit(ChannelsLast(group, channels), size)
    assert found.passed, found.summary()
    assert not audit(ChannelsLast(group, channels, size), size).passed


class Mask(nn.Module):
    def __init__(self, threshold: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lift, self.threshold = LiftingConv2d(3, 4, 3, padding=1, group="p4"), threshold

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        return h > self.threshold(h)


@pytest.mark.parametrize("group", ["z2", "p4"])
def test_booleans(group: str) -> None:
    torch.manual_seed(0)
    assert audit(Mask(lambda h: h.mean()), 8, group).passed
    found = audit(Mask(lambda h: torch.linspace(-1, 1, 8, dtype=h.dtype)), 8, group)
    assert found.culprit == "the model's output", found.summary()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda h: torch.quantize_per_tensor(h.float(), 0.1, 0, torch.qint8),
            "expected tensors of numbers; got a quantized one",
        ),
        (lambda h: torch.nested.nested_tensor(list(h)), "expected dense tensors; got a nested one"),
        (lambda h: h.to_sparse(), "expected dense tensors; got one of layout torch.sparse_coo"),
    ],
    ids=["quantized", "nested", "sparse"],
)
def test_tensors_that_are_refused(function: Callable[[Tensor], Tensor], message: str) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.conv(x))

    with pytest.raises(ValueError, match=message):
        audit(Returns(), 8)
