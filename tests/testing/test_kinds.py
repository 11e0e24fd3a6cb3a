"""What an input or output is, said by the caller: invariant, planar, on the group, a vector field."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfconv.groups import IDENTITY, MIRROR, P4, Group
from selfconv.nn import GlobalPool, GroupConv2d, GroupPool, LiftingConv2d, RestrictGroup
from selfconv.testing import assert_equivariant, audit, equivariance_error, transform


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
