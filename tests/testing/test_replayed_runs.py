"""Runs after the first: what a model raises there is one line, and models that differentiate are audited."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from selfconv.nn import GroupConv2d, LiftingConv2d
from selfconv.testing import audit, equivariance_error, shift_error


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
        y: Tensor = self.last(finite(F.avg_pool2d(self.conv(x), 3, 1, 1)))
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


class Gradient(nn.Module):
    """The same, without a word about gradients; by x itself, it cannot be differentiated."""

    def __init__(self, factors: float | Tensor = 1.0, *, by_x: bool = False) -> None:
        super().__init__()
        self.conv, self.factors, self.by_x = nn.Conv2d(3, 4, 3, padding=1), factors, by_x

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.by_x else x.detach().requires_grad_()
        return torch.autograd.grad((self.conv(x).square() * self.factors).sum(), x)[0]


def test_models_that_differentiate_without_enabling_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 12, 12, dtype=torch.float64)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert audit(Gradient(), 12).summary().startswith("equivariant to shifts at 12x12")
            assert shift_error(Gradient().double(), x) == pytest.approx(0, abs=1e-12)
            assert max(equivariance_error(Gradient().double(), x, "p4")) > 0.1
            assert torch.is_grad_enabled() == enabled
    broken = Gradient(torch.arange(12))
    assert not audit(broken, 12).passed
    assert (shift_error(broken.double(), x) or 0) > 0.01


def test_models_that_differentiate_by_tensors_without_gradients() -> None:
    x = torch.randn(1, 3, 12, 12, dtype=torch.float64)
    model = Gradient(by_x=True)
    message = "expected a module that calls requires_grad_\\(\\) where it differentiates"
    for measure in (
        lambda: audit(model, 12),
        lambda: shift_error(model.double(), x),
        lambda: equivariance_error(model.double(), x, "p4"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            measure()
        assert "\n" not in str(error.value)


TABLE = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def looked_up(h: Tensor) -> Tensor:
    """Only for values that are numbers."""
    if h.isnan().any():
        raise IndexError("out of range")  # as the next line does on a CPU
    return TABLE[(h.sigmoid() * 63).long()]


@pytest.mark.parametrize("size", [8, 12, 17])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_values_as_indices(size: int, window: int) -> None:
    torch.manual_seed(0)

    def function(h: Tensor) -> Tensor:
        return looked_up(F.avg_pool2d(h, window, 1, window // 2))

    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    assert shift_error(function, x) == 0
    assert (shift_error(lambda x: function(x) + torch.arange(size), x) or 0) > 0.01

    class Looks(nn.Module):
        def __init__(self, factors: float | Tensor = 1.0) -> None:
            super().__init__()
            self.conv, self.last, self.factors = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), factors

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(function(self.conv(x)) * self.factors)
            return y

    found = audit(Looks(), size)
    assert found.passed, found.summary()
    assert not audit(Looks(1 + torch.arange(size)), size).passed


def test_a_module_that_takes_one_input_alone() -> None:
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    images = [x, x.roll(1, -1), x.roll(1, -2)]

    def function(t: Tensor) -> Tensor:
        if not any(torch.equal(t, image) for image in images):
            raise RuntimeError("not an image of mine\nor of others")
        return t * torch.arange(12)

    message = "expected a module that takes other values at the border; got not an image of mine$"
    with pytest.raises(ValueError, match=message):
        shift_error(function, x)


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


DISCRETE: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda h: h > 0,
    "one channel": lambda h: h[:, :1] > 0.5,
    "rare": lambda h: h[:, :1] > 1.5,
    "labels": lambda h: h.argmax(1),
    "two labels": lambda h: h[:, :2].argmax(1),
    "signs": lambda h: h.sign(),
    "chosen": lambda h: torch.where(h > 0, 1.0, -1.0),
    "rounded": lambda h: h.round(),
    "bins": lambda h: torch.bucketize(h, torch.linspace(-1, 1, 4, dtype=h.dtype)),
}


@pytest.mark.parametrize("name", DISCRETE)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    window=st.sampled_from([3, 5, 7]),
    size=st.sampled_from([15, 18]),
    batch=st.sampled_from([1, 2]),
)
def test_the_shift_error_of_labels_and_booleans(
    name: str, seed: int, window: int, size: int, batch: int
) -> None:
    torch.manual_seed(seed)
    conv = nn.Conv2d(3, 4, window, padding=window // 2).double()
    x = torch.randn(batch, 3, size, size, dtype=torch.float64)
    discrete = DISCRETE[name]
    assert not shift_error(lambda x: discrete(conv(x)), x)  # 0, or None if it is False everywhere
    ramp = torch.linspace(-4, 4, size, dtype=torch.float64) * torch.tensor([1.0, -1, 2, -2])[:, None, None]
    assert shift_error(lambda x: discrete(conv(x) + ramp), x) != 0


@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.parametrize("seed", range(3))
def test_labels_and_booleans_after_the_layers(name: str, seed: int) -> None:
    torch.manual_seed(seed)

    class Discrete(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.filters = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.randn(4, 4, 5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return DISCRETE[name](F.conv2d(self.conv(x), self.filters, padding=2))

    found = audit(Discrete(), 14, outputs="pixels" if "labels" in name else "planar")
    assert found.passed, found.summary()


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
