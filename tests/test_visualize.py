"""The numbers behind the pictures are those that the layers compute with."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from selfconv.nn import (
    AffineSelfConv2d,
    LiftingConv2d,
    LocalAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from selfconv.ops import reference
from selfconv.visualize import layer_filters, look

KINDS: list[tuple[type[LocalAttention2d], dict[str, Any]]] = [
    (AffineSelfConv2d, {}),
    (AffineSelfConv2d, {"psi": "dense"}),
    (AffineSelfConv2d, {"key_channels": 4}),
    (SimpleAffineSelfConv2d, {}),
    (SimpleAffineSelfConv2d, {"psi": "dense"}),
    (StandAloneSelfAttention2d, {}),
]
SIDE, CHANNELS, HEADS = 5, 8, 2


def network(kind: int, group: str, kernel_size: int, stride: int) -> nn.Sequential:
    """A lifting convolution and one layer whose output map passes its values on as they are."""
    torch.manual_seed(kind)
    make, options = KINDS[kind]
    layer = make(6, CHANNELS, kernel_size, stride, num_heads=HEADS, group=group, **options)
    with torch.no_grad():
        layer.w_out.zero_()
        for c in range(CHANNELS):
            layer.w_out[c, c * len(layer.group)] = 1  # R = P
        assert layer.b_in is not None
        layer.b_in.normal_()
    return nn.Sequential(LiftingConv2d(2, 6, 3, padding=1, group=group), layer).double()


def reference_alpha(layer: LocalAttention2d, features: Tensor, pixel: tuple[int, int], p: int) -> Tensor:
    """α of the paper's equations, [heads, k, k]."""
    packed, channels = layer.project(features)
    query, key = (t[0] if t.dim() == 5 else t[0].unsqueeze(1) for t in packed.split(list(channels), 1)[:2])
    filters = layer_filters(layer)
    alpha = reference.group_score(
        query, key, filters.psi_k, filters.beta_k, layer.group, p, pixel, layer.num_heads, layer.scale
    )
    return torch.stack(list(alpha.values()), 1).unflatten(1, (layer.kernel_size, -1))


@given(
    st.integers(0, len(KINDS) - 1),
    st.sampled_from(["z2", "p4", "p4m"]),
    st.sampled_from([1, 3, 5]),
    st.tuples(st.integers(0, SIDE - 1), st.integers(0, SIDE - 1)),
    st.integers(0, HEADS - 1),
)
def test_a_view_is_what_the_layer_computes(
    kind: int, group: str, kernel_size: int, pixel: tuple[int, int], head: int
) -> None:
    model = network(kind, group, kernel_size, 1)
    image = torch.randn(2, SIDE, SIDE, dtype=torch.float64)
    view = look(model, image, "1", pixel, head)
    with torch.no_grad():
        features = model[0](image[None])
        out = model[1](features)[0].unflatten(0, (HEADS, -1))[head]  # W^O is 1
        expected = out[..., pixel[0], pixel[1]].reshape(-1, len(view.group)).T  # [P, C]
        layer = model.get_submodule("1")
        assert isinstance(layer, LocalAttention2d)
        alpha = torch.stack([reference_alpha(layer, features, pixel, p)[head] for p in view.group])
    torch.testing.assert_close(view.output, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(view.response(), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(view.alpha, alpha, rtol=0, atol=1e-10)
    torch.testing.assert_close(view.scores.flatten(1).softmax(1).view_as(alpha), alpha, rtol=0, atol=1e-10)
    assert (view.alpha.sum((1, 2)) - 1).abs().max() < 1e-12
