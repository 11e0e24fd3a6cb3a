"""Layers that take maps and sequences alike: a sequence is a map of one row, without its axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.cases import C2
from torch import Tensor, nn

from selfconv.groups import IDENTITY, MIRROR, Group, get_group
from selfconv.nn import AffineSelfConv1d, GlobalPool, GroupDropout, SqueezeExcite
from selfconv.testing import equivariance_error

REFLECTION = Group("mirror", (IDENTITY, MIRROR))


class SameDraw(GroupDropout):
    """Draws one mask, again and again."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return super().forward(x)


ON_SEQUENCES: dict[str, Callable[[Group], nn.Module]] = {
    "squeeze and excite": lambda group: SqueezeExcite(3, 2, group=group, dtype=torch.float64),
    "dropout of channels": lambda group: SameDraw(0.5, group=group),
    "dropout of points": lambda group: SameDraw(0.5, "point", group=group),
    "mean": lambda group: GlobalPool("mean", group=group),
    "maximum": lambda group: GlobalPool("max", group=group),
    "maximum over the group": lambda group: GlobalPool("group_max", group=group),
}


@pytest.mark.parametrize("group", ["z2", REFLECTION, C2], ids=str)
@pytest.mark.parametrize("name", ON_SEQUENCES)
def test_layers_of_maps_take_sequences(name: str, group: str | Group) -> None:
    """As maps of one row; equivariant to reversal, and their gradients are right."""
    g = get_group(group)
    torch.manual_seed(0)
    layer, x = ON_SEQUENCES[name](g), torch.randn(2, 3, *(() if len(g) == 1 else (2,)), 8).double()
    pools = isinstance(layer, GlobalPool)
    expected = layer(x.unsqueeze(-2))
    assert torch.equal(layer(x), expected if pools else expected.squeeze(-2))
    assert layer(x).shape == ((2, 3) if pools else x.shape)
    if name == "dropout of points":  # one draw for all planes; reversed, another place is dropped
        kept = (layer(torch.ones_like(x)) != 0).reshape(2, 3, -1, 8)
        assert torch.equal(kept, kept[:, :, :1].expand_as(kept))
        assert 0 < kept.double().mean() < 1
    elif len(g) == 2:
        outputs: Any = "invariant" if pools else "group sequence"
        assert max(equivariance_error(layer, x, g, inputs="group sequence", outputs=outputs)) < 1e-10
    assert torch.autograd.gradcheck(layer, (x.requires_grad_(),))


@pytest.mark.parametrize("name", ON_SEQUENCES)
def test_sequences_need_a_group_that_maps_rows_to_rows(name: str) -> None:
    layer = ON_SEQUENCES[name](get_group("p4"))
    kind = "GroupDropout" if "dropout" in name else type(layer).__name__
    for shape in ((2, 3, 9), (2, 3, 4, 9)):
        with pytest.raises(ValueError) as error:
            layer(torch.randn(shape, dtype=torch.float64))
        channels = "3" if kind == "SqueezeExcite" else "C"
        assert str(error.value) == (
            f"{kind} on group 'p4' expects [N, {channels}, 4, h, w]; got shape {list(shape)}"
        )
    reversing = ON_SEQUENCES[name](REFLECTION)
    for x, message in (
        (torch.zeros(2, 3, 3, 9).double(), r"on group 'mirror' expects .*; got shape \[2, 3, 3, 9\]"),
        (torch.zeros(2, 3, 2, 0).double(), r"on group 'mirror' expects .*; got shape \[2, 3, 2, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            reversing(x)
    with pytest.raises(TypeError, match=r"floating-point features; got torch\.int64"):
        reversing(torch.zeros(2, 3, 2, 9, dtype=torch.long))


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^AffineSelfConv1d: expected options .*; got foo$"):
        AffineSelfConv1d(3, 8, num_heads=2, foo=1)
