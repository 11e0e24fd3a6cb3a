"""No measurement passes in which nothing was compared: it is refused in one line, or the verdict says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfconv.groups import IDENTITY, MIRROR, Group, cyclic
from selfconv.nn import GlobalPool, GroupConv2d, GroupPool, LiftingConv2d, SqueezeExcite
from selfconv.testing import (
    FeaturesOn,
    assert_equivariant,
    audit,
    centre_error,
    equivariance_error,
    resampling_error,
    shift_error,
)

C3, C5 = cyclic("c3", 3), cyclic("c5", 5)
X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3, padding=1)


class Then(nn.Module):
    """A layer, and a function of its features."""

    def __init__(self, function: Callable[[Tensor], Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer or LiftingConv2d(3, 4, 3, padding=1, group="p4")

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message), str(error.value)
    assert "\n" not in str(error.value)


# ---- equivariance_error and assert_equivariant ----


REFUSED: dict[str, tuple[Callable[..., Any], Tensor, str | Group, str]] = {
    "no images": (conv(), X[:0], "p4", "x: expected inputs of one entry or more; got shape [0, 3, 9, 9]"),
    "no pixels": (nn.ReLU(), X[..., :0], "p4", "x: expected inputs of one entry or more; got shape [2, 3, 9"),
    "no element": (conv(), X, "z2", "group: expected a group of two or more elements; got 'z2'"),
    "no output": (
        lambda x: x[:, :0], X, "p4",
        "expected a model that returns a tensor of one entry or more; got shape [2, 0, 9, 9]",
    ),
    "one pixel": (conv(), X[..., :1, :1], "p4", "x: expected values that an element of 'p4' changes; got"),
    "one pixel, c8": (conv(), X[..., :1, :1], "c8", "x: expected values that an element of 'c8' changes"),
    "one column": (
        conv(), X[..., :1], Group("mirror", (IDENTITY, MIRROR)),
        "x: expected values that an element of 'mirror' changes; got shape [2, 3, 9, 1], the same under all",
    ),
    "zeros": (nn.ReLU(), 0 * X, "p4", "x: expected values that an element of 'p4' changes; got shape [2,"),
    "a constant": (
        lambda x: torch.ones(2, 4), X, "p4",
        "expected an output that depends on x; got one of shape [2, 4] that is the same for 8 other inputs",
    ),
    "zeros after a layer": (lambda x: 0 * x, X, "p4", "expected an output that depends on x; got one"),
    "infinity": (lambda x: x.square() + math.inf, X, "p4", "expected an output that depends on x; got one"),
    "one label": (lambda x: 0 * x.argmax(1), X, "p4", "expected an output that depends on x; got one"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_errors_of_nothing_are_refused(name: str) -> None:
    module, x, group, message = REFUSED[name]
    refused(lambda: equivariance_error(module, x, group), message)
    refused(lambda: assert_equivariant(module, x, group), message)


def test_an_output_of_invariant_inputs_alone() -> None:
    numbers = torch.randn(2, 3)
    refused(
        lambda: equivariance_error(lambda x, n: n, (X, numbers), "p4", inputs=("planar", "invariant")),
        "expected an output that depends on x; got one of shape [2, 3]",
    )


def test_what_can_be_compared_is_not_refused() -> None:
    """Constant images, which zero padding tells from their border; one label among others; an empty output
    beside another; inputs that are empty and do not transform; planes of one pixel."""
    assert max(equivariance_error(conv(), torch.ones_like(X), "p4")) > 0.1
    labels = equivariance_error(lambda x: x.mean((2, 3)).argmax(1), X, "p4")
    assert labels == [0.0] * 4
    assert equivariance_error(lambda x: (x[:, :0], x), X, "p4") == [0.0] * 4
    inputs: Any = ("planar", "invariant")
    assert equivariance_error(lambda x, n: x, (X, torch.zeros(2, 0)), "p4", inputs=inputs) == [0.0] * 4
    assert max(equivariance_error(GroupConv2d(3, 4, 1, group="p4"), torch.randn(1, 3, 4, 1, 1), "p4")) < 1e-5
    assert all(map(math.isnan, equivariance_error(lambda x: x * math.nan, X, "p4")))


def test_a_module_that_takes_no_other_values_is_not_refused() -> None:
    def same_only(x: Tensor) -> Tensor:
        if not torch.equal(x.mean((2, 3)), torch.rot90(X, 2, (2, 3)).mean((2, 3))):
            assert torch.allclose(x.mean((2, 3)), X.mean((2, 3))), "other values"
        return torch.ones(2)

    assert equivariance_error(same_only, X, "p4") == [0.0] * 4


@pytest.mark.parametrize("group", [C3, C5], ids=str)
def test_between_the_pixels_alone(group: Group) -> None:
    """Rotations by 120° and 72°: measured by ``equivariance_error``, and judged where a limit is given."""
    rows = torch.arange(33.0) - 16
    smooth = torch.exp(-((rows[:, None] - 3) ** 2 + (rows + 2) ** 2) / 8).expand(2, 3, 33, 33).double()
    lift = LiftingConv2d(3, 4, 5, padding=2, group=group, dtype=torch.float64)
    assert 0 < max(equivariance_error(lift, smooth, group)[1:]) < 0.1
    assert min(equivariance_error(conv().double(), smooth, group)[1:]) > 0.3
    message = (
        f"between: expected the largest error that passes, as the identity alone of '{group}' maps the grid"
    )
    refused(lambda: assert_equivariant(lift, smooth, group), message)
    assert_equivariant(lift, smooth, group, between=0.1)
    with pytest.raises(AssertionError, match="between the pixels"):
        assert_equivariant(conv().double(), smooth, group, between=0.1)


NONE = "group: expected a group of two or more elements; got 'z2'"
SHAPE = "shape: expected [N, C, h, w] on group 'c8', N, C ≥ 1, with odd sides, which have a centre; got "


def test_centre_errors_of_nothing_are_refused() -> None:
    def centre(module: Any = None, shape: Any = (2, 3, 9, 9), group: str = "c8", **options: Any) -> Any:
        return lambda: centre_error(conv().double() if module is None else module, shape, group, **options)

    for frequency in (0, -1, math.nan, math.inf, True, "a", torch.tensor(0.5)):
        said = f"frequency: expected a finite number above 0; got {frequency!r}"
        refused(centre(frequency=frequency), said)
    refused(centre(seed="a"), "seed: expected an integer; got 'a'")
    refused(centre(group="z2"), NONE)
    for shape in (7, (3, 9, 9), (2, 3, 8, 9), (2, 3.0, 9, 9), "abcd"):
        refused(centre(shape=shape), f"{SHAPE}{shape!r}")
    refused(centre(shape=(2, 3, 1, 1)), "x: expected values that an element of 'c8' changes; got shape [2, 3")
    refused(centre(lambda x: torch.ones_like(x)), "expected an output that depends on x; got one of shape")
    refused(centre(7), "module: expected a function or an nn.Module; got 7")
    refused(centre(lambda x: [x]), "expected a module that returns one tensor; got list")
    refused(
        centre(lambda x: x.unsqueeze(2)), "expected a module that returns [N, C, h, w] or [N, C, 8, h, w]"
    )
    assert max(centre_error(lambda x: x, (2, 3, 9, 9), "c8")) < 1e-12  # which is the same at every angle


def test_resampling_errors_of_nothing_are_refused() -> None:
    refused(lambda: resampling_error(X, "z2"), NONE)
    refused(lambda: resampling_error(X[0], "c8"), "inputs: expected a kind that transforms, such as")
    refused(lambda: resampling_error(0 * X, "c8"), "x: expected values that an element of 'c8' changes; got")
    refused(lambda: resampling_error([1], "c8"), "x: expected a tensor; got list")  # type: ignore[arg-type]
    assert max(resampling_error(X[0], "c8", "pixels")) > 0
    assert max(resampling_error(X, "p4")) == 0  # of exact elements


def test_other_measurements_of_nothing_are_refused() -> None:
    refused(lambda: resampling_error(X[:0], "c8"), "x: expected one entry or more; got shape [0, 3, 9, 9]")
    refused(lambda: shift_error(conv(), X[:0]), "x: expected one entry or more; got shape [0, 3, 9, 9]")
    refused(lambda: shift_error(lambda x: x[:, :0], X), "expected a model that returns a tensor of one entry")
    refused(
        lambda: centre_error(conv(), (0, 3, 9, 9), "c8"),
        "shape: expected [N, C, h, w] on group 'c8', N, C ≥ 1",
    )
    ramp = torch.arange(9.0)
    assert shift_error(lambda x: x + ramp, X, 8) is None  # nearly once round the map
    refused(lambda: shift_error(lambda x: x + ramp, X, 9), "shift: expected less than the least side of x, 9")


@pytest.mark.parametrize("tolerance", [math.inf, math.nan, -1.0, "0"])
def test_tolerances_that_decide_nothing_are_refused(tolerance: Any) -> None:
    message = f": expected a finite number of 0 or more; got {tolerance!r}"
    for name in ("tolerance", "between"):
        refused(lambda name=name: assert_equivariant(conv(), X, "c8", **{name: tolerance}), name + message)  # type: ignore[misc]
        refused(lambda name=name: audit(conv(), 8, "c8", **{name: tolerance}), name + message)  # type: ignore[misc]


# ---- audits ----


class Hides(nn.Module):
    """Uses its layer for upright images only: those whose first row is that of the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.extra = LiftingConv2d(3, 4, 3, padding=1, group="p4"), nn.ReLU()
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.clone() if self.seen is None else self.seen
        y: Tensor = self.lift(x)
        return self.extra(y) if torch.equal(x, self.seen) else y.relu()


def test_audits_of_nothing_are_refused() -> None:
    constant = nn.Threshold(math.inf, 2.0)
    for model, size, options, message in (
        (Then(lambda y: y[:, :0]), 8, {}, "expected a model that returns a tensor of one entry or more"),
        (conv(), 1, {"group": "p4"}, "input_size: expected one at which an element of 'p4' changes"),
        (conv(), 1, {"group": C3, "between": 1}, "input_size: expected one at which an element of 'c3'"),
        (nn.ReLU(), 8, {"in_channels": 0}, "in_channels: expected integers ≥ 1; got 0"),
        (Then(torch.zeros_like, constant), 8, {"group": "p4"}, "expected a model whose output depends on"),
        (constant, 8, {}, "expected a model whose output depends on its input; got the same output"),
        (
            Then(lambda y: y.amax((2, 3)), nn.AdaptiveMaxPool2d(1)), 1, {},
            "input_size: expected one at which features can be shifted; got 1, too small for the model",
        ),
    ):  # fmt: skip
        refused(lambda: audit(model, size, **options), message)  # noqa: B023


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Then(lambda y: torch.ones(2, 4)), ["the model's output"]),
        (Then(lambda y: (0 * y, 3)), ["the model's output"]),
        (Then(lambda y: y.square() + math.inf), ["the model's output"]),
        (Hides(), ["extra"]),
        (
            nn.Sequential(
                LiftingConv2d(3, 4, 3, padding=1, group="p4"),
                nn.Threshold(math.inf, 0.0),
                SqueezeExcite(4, 2, group="p4"),
            ),
            ["1", "2", "2.reduce", "2.expand", "the model's output"],
        ),
    ],
    ids=["constant", "zeros", "infinity", "another way", "zeros within"],
)
def test_a_verdict_says_what_was_not_compared(model: nn.Module, names: list[str]) -> None:
    found = audit(model, 8, "p4")
    assert found.passed
    assert {*found.uncompared} == {*names}
    listed = ", ".join(found.uncompared[:3])
    assert f"; not compared: {listed}" in found.summary()


def test_a_verdict_of_everything_says_nothing_of_the_kind() -> None:
    found = audit(Then(lambda y: y.relu()), 8, "p4")
    assert found.uncompared == []
    assert "not compared" not in found.summary()


def test_an_output_that_is_not_a_number_fails() -> None:
    found = audit(Then(lambda y: y * math.nan), 8, "p4")
    assert not found.passed
    assert found.summary().endswith("the model's output: it is not a number")


def net(group: Group) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        LiftingConv2d(3, 4, 3, padding=1, group=group), GroupConv2d(4, 4, 3, padding=1, group=group)
    )


def pixels(x: Tensor) -> Tensor:
    return x.square()


def field(x: Tensor) -> Tensor:
    return x * x.square().sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (net(C3), {}),
        (nn.Sequential(net(C5), GlobalPool(group=C5)), {}),
        (nn.Sequential(net(C3), GroupPool("max", group=C3)), {"outputs": "planar"}),
        (net(C3)[1], {"inputs": "group", "in_channels": 4}),  # type: ignore[index]
        (Then(pixels, nn.Identity()), {"group": C3, "inputs": "pixels", "outputs": "pixels"}),
        (
            Then(field, nn.Identity()),
            {"group": C3, "inputs": "vector", "outputs": "vector", "in_channels": 2},
        ),
        (
            GroupConv2d(4, 4, 3, padding=1, group=cyclic("c6", 6)),
            {"group": C3, "inputs": FeaturesOn(cyclic("c6", 6)), "outputs": FeaturesOn(cyclic("c6", 6))},
        ),
    ],
    ids=["maps", "invariant", "planar", "group", "pixels", "vector", "larger group"],
)
def test_audits_between_the_pixels_alone(model: nn.Module, options: dict[str, Any]) -> None:
    """For every kind of input; a limit is needed."""
    found = audit(model, 24, between=0.15, **options)
    assert found.passed, found.summary()
    assert found.between is not None
    assert 0 < found.between < 0.15
    name = found.group.name
    assert found.summary().startswith(
        f"equivariant to {name} (within 15.0%) and shifts at 24x24: shift error "
    )
    assert f"; between the pixels, on smooth images, {found.between:.1%} of its deviation" in found.summary()
    assert all(line.split("  ")[3] == "-" for line in str(found).splitlines()[:-1])
    refused(
        lambda: audit(model, 24, **options),
        f"between: expected the largest error that passes, as the identity alone of '{name}' maps the grid "
        f"to itself; got None, where the error is {found.between:.1%} of the output's deviation",
    )
    failed = audit(model, 24, between=found.between / 2, **options)
    assert failed.culprit == "the model's output"
    assert failed.reason == (
        f"under elements between the pixels its error is {found.between:.1%} of its deviation, "
        f"above {found.between / 2:.1%}"
    )


def test_a_network_that_does_not_turn_fails_between_the_pixels() -> None:
    found = audit(conv(), 24, C3, between=0.5)
    assert found.summary().startswith(
        "not equivariant to c3 (within 50.0%) and shifts at 24x24: the model's output: under"
    )
    assert not audit(conv(), 24, "c8", between=0.5).passed


def test_the_verdict_states_the_limit_where_some_elements_are_exact() -> None:
    """The limit decides on c8 as on c3. Without one, the verdict is on the exact elements alone."""
    lift = LiftingConv2d(3, 4, 3, padding=1, group="c8")
    assert (
        audit(lift, 24, between=0.5)
        .summary()
        .startswith("equivariant to c8 (within 50.0%) and shifts at 24x24: ")
    )
    assert audit(lift, 24).summary().startswith("equivariant to the exact elements of c8 and shifts at")
    failed = audit(lift, 24, between=0.001)
    assert list(failed.faults) == ["the model's output"]
    assert failed.summary().startswith(
        "not equivariant to c8 (within 0.1%) and shifts at 24x24: the model's output: under elements between"
    )


class Weights(nn.Module):
    """Attention weights that the group cannot turn by interpolation."""

    group = C3

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None, :1, None, None].softmax(0).expand(-1, 1, 3, 3, 3, -1, -1)


def test_attention_weights_alone_cannot_be_judged_between_the_pixels() -> None:
    refused(
        lambda: audit(Weights(), 9, between=0.1), "between: expected an output that can be interpolated; got"
    )


class MeanTimesPositions(nn.Module):
    """The output is the same for a shifted image, and should move by a cell of its 2×2 map."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.AvgPool2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return y.mean((2, 3), keepdim=True) * torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def test_a_map_that_moves_once_round_did_not_move() -> None:
    found = audit(MeanTimesPositions(), 8)
    assert found.culprit == "the model's output" or "the model's output" in found.untested, found.summary()
