"""What an input or output is, by name: invariant, planar, on the group, a vector field, a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfconv.examples import UNet
from selfconv.groups import IDENTITY, MIRROR, P4, Group, get_group
from selfconv.nn import (
    AffineSelfConv1d,
    AffineSelfConv2d,
    GlobalPool,
    GroupBatchNorm,
    GroupConv2d,
    GroupPool,
    LiftingConv2d,
    RestrictGroup,
)
from selfconv.testing import (
    FeaturesOn,
    assert_equivariant,
    audit,
    equivariance_error,
    relative_error,
    transform,
)


class VectorHead(nn.Module):
    """Features on p4 as a vector field: v(x) = Σ_R f(R, x) R e, or their mean, a vector."""

    def __init__(self, *, pooled: bool = False, wrong: bool = False) -> None:
        super().__init__()
        self.pooled, self.wrong = pooled, wrong

    def forward(self, x: Tensor) -> Tensor:
        arrows = torch.tensor([[m[0][0], m[1][0]] for m in P4.matrices], dtype=x.dtype)  # R (1, 0)
        arrows = arrows.flip(1) if self.wrong else arrows
        field = torch.einsum("ncrhw,rk->nckhw", x, arrows).flatten(1, 2)
        return field.mean((-2, -1)) if self.pooled else field


def net(*head: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        LiftingConv2d(3, 4, 3, padding=1, group="p4"), nn.ReLU(), GroupConv2d(4, 2, 1, group="p4"), *head
    )


class Both(nn.Module):
    """A segmentation head and a regression head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.maps, self.vector = net(), GroupPool(group="p4"), VectorHead(pooled=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return {"maps": self.maps(y), "vector": self.vector(y)}


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (net(VectorHead()), "vector"),
        (net(VectorHead(pooled=True)), "vector"),
        (net(GroupPool(group="p4")), "planar"),
        (net(), "group"),
        (net(GlobalPool(group="p4")), "invariant"),
        (Both(), ("planar", "vector")),
    ],
)
def test_any_output_can_be_audited(model: nn.Module, outputs: Any) -> None:
    found = audit(model, 8, "p4", outputs=outputs)
    assert found.passed, found.summary()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert max(equivariance_error(model.double(), x, "p4", outputs=outputs)) < 1e-10


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).norm(dim=2)


class Planes(nn.Module):
    """Features on the group without a map, [N, C, |H|]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax(-1)


def test_features_inside_a_network_may_be_of_any_kind() -> None:
    """Nobody names them: a vector field whose norm is the output, and planes without a map."""
    for model in (net(VectorHead(), Norm()), net(VectorHead(pooled=True), Norm()), net(Planes(), Largest())):
        found = audit(model, 8, "p4")
        assert found.passed, found.summary()
    assert audit(net(VectorHead(wrong=True), nn.ReLU()), 8, "p4").culprit == "3"


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (net(VectorHead(wrong=True)), "vector"),
        (net(VectorHead()), "planar"),
        (net(VectorHead(pooled=True)), "invariant"),
        (net(GroupPool(group="p4")), "vector"),
        (net(GroupPool(group="p4")), "invariant"),
    ],
)
def test_wrong_kinds_of_output_fail_the_audit(model: nn.Module, outputs: Any) -> None:
    assert not audit(model, 8, "p4", outputs=outputs).passed
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not equivariant to p4"):
        assert_equivariant(model.double(), x, "p4", outputs=outputs)


class Two(nn.Module):
    """An image turned by features, and a number for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GroupConv2d(4, 3, 3, padding=1, group="p4")
        self.scale = nn.Linear(2, 3)

    def forward(self, features: Tensor, numbers: Tensor) -> Tensor:
        return self.conv(features) * self.scale(numbers)[:, :, None, None, None]


def test_several_inputs() -> None:
    found = audit(Two(), 6, "p4", in_channels=(4, 2), inputs=("group", "invariant"))
    assert found.passed, found.summary()
    with pytest.raises(ValueError, match="in_channels: expected 2 numbers"):
        audit(Two(), 6, "p4", in_channels=(4,), inputs=("group", "invariant"))
    x = torch.randn(1, 4, 4, 5, 5), torch.randn(1, 2)
    assert_equivariant(Two(), x, "p4", inputs=("group", "invariant"), outputs="group")


def test_vectors_turn() -> None:
    up = torch.tensor([[-1.0, 0.0]])  # one row up
    assert transform(up, 1, "p4", "vector").round().tolist() == [[0.0, -1.0]]  # to the left
    field = torch.randn(1, 4, 3, 3)
    assert torch.allclose(transform(transform(field, 1, "p4", "vector"), 3, "p4", "vector"), field)
    planes = torch.randn(1, 2, 4)
    assert torch.equal(transform(planes, 1, "p4", "group"), planes.roll(1, 2))


def test_bad_kinds_are_refused() -> None:
    x = torch.zeros(1, 3, 4, 4)
    with pytest.raises(ValueError, match=r"outputs: expected some of 'invariant', 'planar', .*; got 'map'"):
        equivariance_error(lambda t: t, x, "p4", outputs="map")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outputs: expected a kind for each of 1 tensors; got"):
        equivariance_error(lambda t: t, x, "p4", outputs=("planar", "planar"))
    with pytest.raises(ValueError, match=r"two channels for each vector.*; got shape \[1, 3, 4, 4\]"):
        equivariance_error(lambda t: t, x, "p4", outputs="vector")
    with pytest.raises(ValueError, match="inputs: expected some of"):
        audit(net(), 8, "p4", inputs="image")  # type: ignore[arg-type]


def test_defaults_come_from_the_layers() -> None:
    """Without attributes of its own, a network is audited on the group and the channels of its layers."""
    found = audit(nn.Sequential(LiftingConv2d(5, 4, 3, padding=1, group="p4m"), GroupPool(group="p4m")), 8)
    assert found.passed
    assert found.group.name == "p4m"
    broken = nn.Sequential(
        LiftingConv2d(5, 4, 3, padding=1, group="p4m"), nn.Conv3d(4, 4, 1), nn.Flatten(1, 2)
    )
    assert audit(nn.Sequential(broken, nn.Conv2d(32, 2, 3, padding=1)), 8).culprit == "1"
    lift, restrict = LiftingConv2d(2, 4, 3, padding=1, group="p4m"), RestrictGroup("p4", group="p4m")
    found = audit(nn.Sequential(lift, restrict, GroupConv2d(8, 2, 3, padding=1, group="p4")), 8)
    assert found.passed
    assert found.group.name == "p4"
    assert audit(nn.Conv2d(2, 2, 3, padding=1), 8).group.name == "z2"
    mirror = Group("mirror", (IDENTITY, MIRROR))
    several = nn.Sequential(GroupPool(group="p4"), GroupPool(group=mirror))
    with pytest.raises(ValueError, match=r"group: expected the one to test.*; got None for 'p4', 'mirror'"):
        audit(several, 8)


# ---- sequences ----


REVERSAL = Group("reversal", (IDENTITY, MIRROR))
HALF_TURNS = Group("half turns", (IDENTITY, ((-1, 0), (0, -1))))


def attention(group: str | Group = "z2", stride: int = 1) -> AffineSelfConv1d:
    torch.manual_seed(0)
    return AffineSelfConv1d(4, 4, 3, stride, num_heads=2, group=group).double()


def test_sequences_reverse() -> None:
    x = torch.randn(2, 4, 2, 9, dtype=torch.float64)
    assert torch.equal(transform(x, 1, REVERSAL, "group sequence"), x.flip(2, 3))
    assert torch.equal(transform(x[:, :, 0], 1, REVERSAL, "sequence"), x[:, :, 0].flip(2))
    assert torch.equal(transform(x, 1, HALF_TURNS, "group sequence"), x.flip(2, 3))
    assert max(equivariance_error(attention(REVERSAL), x, REVERSAL, inputs="group sequence")) < 1e-12
    assert max(equivariance_error(attention(), x[:, :, 0], REVERSAL, inputs="sequence")) > 0.1
    weights = lambda t: attention(REVERSAL)(t, need_weights=True)  # noqa: E731
    assert max(equivariance_error(weights, x, REVERSAL, inputs="group sequence")) < 1e-12
    with pytest.raises(
        ValueError, match=r"a group that maps rows to rows.* group 'p4'; got shape \[2, 4, 9\]"
    ):
        transform(x[:, :, 0], 1, "p4", "sequence")


def test_nothing_passes_because_nothing_was_transformed() -> None:
    x = torch.randn(2, 4, 9, dtype=torch.float64)
    for inputs in (None, "invariant"):
        with pytest.raises(ValueError, match=r"inputs: expected a kind that transforms.*shape \[2, 4, 9\]"):
            equivariance_error(attention(), x, REVERSAL, inputs=inputs)
    with pytest.raises(ValueError, match="inputs: expected a kind that transforms"):
        audit(nn.Linear(3, 3), 8, "p4", inputs="invariant")


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


class Ramp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype).square()


class WithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = attention(REVERSAL)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, need_weights=True)


@pytest.mark.parametrize(
    ("model", "inputs", "size", "culprit"),
    [
        (nn.Sequential(attention(REVERSAL), GroupBatchNorm(4, group=REVERSAL)), "group sequence", 50, None),
        (nn.Sequential(attention(REVERSAL, 2), nn.ReLU(), attention(REVERSAL)), "group sequence", 50, None),
        (nn.Sequential(attention(REVERSAL, 2), attention(REVERSAL)), "group sequence", 51, "0"),
        (WithWeights(), "group sequence", 12, None),
        (nn.Sequential(attention(), ChannelsLast(), attention()), "sequence", 50, None),
        (nn.Sequential(attention(), Ramp()), "sequence", 50, "1"),
        (nn.Sequential(attention(), nn.AvgPool1d(2), Ramp()), "sequence", 50, "2"),
    ],
    ids=["norm", "stride", "stride off centre", "weights", "channels last", "places", "pooled places"],
)
def test_networks_of_sequences(model: nn.Module, inputs: Any, size: int, culprit: str | None) -> None:
    found = audit(model, size, in_channels=4, inputs=inputs)
    assert found.culprit == culprit, found.summary()
    assert f"at length {size}:" in found.summary()
    assert any(layer.shift is not None for layer in found.layers) or isinstance(model, WithWeights)
    if size == 51:
        assert found.sizes == [50, 52, 48]
        assert "stride 2 on an odd-sized sequence (51)" in found.summary()


def test_a_layer_for_sequences_that_does_not_reverse() -> None:
    assert audit(attention(), 20, REVERSAL, inputs="sequence").culprit == "the model"
    with pytest.raises(ValueError, match="inputs: expected maps or sequences, not both"):
        audit(attention(), 20, REVERSAL, inputs=("sequence", "planar"))


# ---- groups of one element, and larger ones ----


def test_on_a_group_of_one_element_features_have_no_axis_for_it() -> None:
    layer = AffineSelfConv2d(4, 4, 3, num_heads=2)
    assert audit(layer, 8, inputs="group", outputs="group").passed
    for shape in ((1, 4, 6, 6), (1, 4, 1, 6, 6), (1, 4), (1, 4, 1)):
        x = torch.randn(shape)
        assert torch.equal(transform(x, 0, "z2", "group"), x)
    assert transform(torch.randn(1, 4, 7), 0, "z2", "group sequence").shape == (1, 4, 7)


def test_features_on_a_larger_group() -> None:
    on_p4m = FeaturesOn("p4m")
    layer = AffineSelfConv2d(4, 4, 3, num_heads=2, group="p4m")
    net = nn.Sequential(layer, RestrictGroup("p4", group="p4m"))
    found = audit(net, 6, inputs=on_p4m)
    assert found.passed, found.summary()
    assert found.group.name == "p4"
    assert audit(layer, 6, "p4", inputs=on_p4m).passed  # nobody names its output
    assert not audit(nn.Sequential(net, RestrictGroup("z2", group="p4")), 6, "p4", inputs=on_p4m).passed
    x = torch.randn(1, 3, 4, 5, 5)
    restrict = RestrictGroup(HALF_TURNS, group="p4")
    assert equivariance_error(restrict, x, HALF_TURNS, inputs=FeaturesOn("p4")) == [0.0, 0.0]
    assert torch.equal(transform(x, 1, HALF_TURNS, FeaturesOn("p4")), transform(x, 2, "p4"))
    with pytest.raises(ValueError, match="FeaturesOn: expected a group that contains 'p4'; got 'half turns'"):
        transform(x, 0, "p4", FeaturesOn(HALF_TURNS))
    with pytest.raises(ValueError, match=r"FeaturesOn: kind: expected one of 'invariant', .*; got 'map'"):
        FeaturesOn("p4", "map")  # type: ignore[arg-type]


def test_a_strided_layer_before_a_restriction() -> None:
    lift = LiftingConv2d(3, 4, 3, stride=2, padding=1, group="p4m")
    strided = GroupConv2d(4, 4, 3, stride=2, padding=1, group="p4m")
    found = audit(nn.Sequential(lift, strided, RestrictGroup("p4", group="p4m")), 11)
    assert found.culprit == "1"
    assert "stride 2 on an even-sized map (6x6)" in found.summary()
    assert found.sizes == [9, 13, 5]


class StridedWithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = AffineSelfConv2d(4, 4, 3, 2, num_heads=2, group="p4")

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, need_weights=True)


def test_a_strided_layer_with_two_outputs_off_centre() -> None:
    found = audit(StridedWithWeights(), 9, inputs="group")
    assert "attention: stride 2 on an odd-sized map (9x9)" in found.summary()
    assert found.sizes == [8, 10, 6]


# ---- labels, weights and other outputs ----


class Head(nn.Module):
    """Any function of features [N, 4, h, w], or on the group, and attention weights α."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], group: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.lift = function, LiftingConv2d(3, 4, 3, padding=1, group=group)
        self.attention = AffineSelfConv2d(4, 4, 3, num_heads=2, group=group)
        self.pool = GroupPool(group=group)

    def forward(self, x: Tensor) -> Any:
        y, alpha = self.attention(self.lift(x), need_weights=True)
        return self.function(self.pool(y), alpha)


ANY_OUTPUT: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any]] = {
    "labels": (lambda y, a: y.argmax(1), "pixels"),
    "scores": (lambda y, a: y.amax(1), "pixels"),
    "booleans": (lambda y, a: y > 0, "planar"),
    "classes": (lambda y, a: y.mean((2, 3)).argmax(1), None),
    "weights": (lambda y, a: (y, a), None),
    "named weights": (lambda y, a: (y, a), ("planar", "attention")),
    "a number beside it": (lambda y, a: (y, 3), "planar"),
    "None beside it": (lambda y, a: (None, y, "maps"), ("planar",)),
}


@pytest.mark.parametrize("group", ["z2", "p4", "c8"])
@pytest.mark.parametrize("name", ANY_OUTPUT)
def test_labels_weights_and_mixed_outputs(name: str, group: str) -> None:
    function, outputs = ANY_OUTPUT[name]
    model, g = Head(function, group), get_group(group)
    found = audit(model, 9, outputs=outputs)
    assert found.passed, found.summary()
    if group == "z2":
        return
    x = torch.randn(1, 3, 9, 9, dtype=torch.float64)
    errors = equivariance_error(model.double(), x, group, outputs=outputs)
    assert max(e for e, exact in zip(errors, g.exact, strict=True) if exact) < 1e-12


@pytest.mark.parametrize("group", ["p4", "c8"])
def test_wrong_labels_and_weights_fail(group: str) -> None:
    for function, outputs in (
        (lambda y, a: y.roll(1, -1).argmax(1), "pixels"),
        (lambda y, a: y.roll(1, -1) > 0, "planar"),
        (lambda y, a: a.roll(1, -1), "attention"),
        (lambda y, a: a.flip(2), None),
        (lambda y, a: (y, float(y[0, 0, 0, 0])), "planar"),
    ):
        found = audit(Head(function, group), 9, outputs=outputs)  # type: ignore[arg-type]
        assert found.culprit == "the model's output", found.summary()
    found = audit(Head(lambda y, a: y.argmax(1), group), 9)
    assert "(shape [2, 9, 9], taken for 'invariant'; outputs= names other kinds)" in found.summary()


def test_integers_differ_in_a_share_of_their_values() -> None:
    a, b = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 9])
    assert relative_error(a, b) == relative_error(a > 3, b > 2) == 0.25
    labels = torch.zeros(1, 1, 9, 9, dtype=torch.long)
    labels[..., 4, 4] = 7
    for kind, x in (("planar", labels), ("pixels", labels[:, 0]), ("planar", labels > 0)):
        turned = transform(x, 1, "c8", kind)  # type: ignore[arg-type]
        assert turned.dtype == x.dtype
        assert torch.equal(turned, x)  # the centre remains where it is


@pytest.mark.parametrize(("output", "given"), [(None, "NoneType"), ([], "nothing"), ((3, "a"), "int, str")])
def test_a_module_returns_a_tensor(output: Any, given: str) -> None:
    message = f"expected a model that returns a tensor to compare; got {given}$"
    with pytest.raises(ValueError, match=message):
        equivariance_error(lambda x: output, torch.randn(1, 3, 4, 4), "p4")
    with pytest.raises(ValueError, match=message):
        audit(Head(lambda y, a: output, "p4"), 8)


def test_bad_elements_kinds_and_sizes_are_refused() -> None:
    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(ValueError, match="s: expected an element of 'p4', 0 to 3; got 7"):
        transform(x, 7, "p4")
    with pytest.raises(ValueError, match=r"kind: expected one of 'invariant', .*; got 'map'"):
        transform(x, 1, "p4", "map")  # type: ignore[arg-type]
    planes = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match=r"\[N, C, 4\] for 'group' .* group 'p4'; got shape \[2, 3, 8\]"):
        transform(planes, 1, "p4", "group")
    with pytest.raises(ValueError, match=r"got shape \[2, 3, 8\]"):
        equivariance_error(nn.Identity(), planes, "p4", inputs="group", outputs="group")
    for size in ((1, 50), 8.0, "8"):
        with pytest.raises(ValueError, match="input_size: expected a positive number of pixels; got"):
            audit(net(), size, "p4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"inputs: expected features.*; got 'attention'"):
        audit(net(), 8, "p4", inputs="attention")


def test_a_size_that_the_model_does_not_take() -> None:
    with pytest.raises(ValueError) as error:
        audit(UNet(3, 2, (4, 8, 16)), 9)
    message = str(error.value)
    assert "cannot be audited, in float64, on inputs of shape [2, 3, 9, 9] ('planar'): UNet ex" in message
    assert message.endswith("; sizes that it takes: 8, 12, 4")
    with pytest.raises(
        ValueError, match=r"inputs of shape \[2, 4, 4, 6, 6\] \('group'\): AffineSelfConv2d on"
    ):
        audit(AffineSelfConv2d(4, 4, 3, num_heads=2, group="p4m"), 6, "p4", inputs="group")
