"""Layers on every group: equal to the paper's equations, equivariant, differentiable, at home in PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.cases import C2, D3, TESTED_GROUPS, TILTED, Layout, channels_last, contiguous, strided
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from selfconv.groups import Group, get_group
from selfconv.nn import (
    AffineConv2d,
    AffineSelfConv2d,
    Bottleneck,
    DepthwiseConv2d,
    GlobalPool,
    GroupBatchNorm,
    GroupConv2d,
    GroupDropout,
    GroupLayerNorm,
    GroupPool,
    LiftingConv2d,
    LiftingSelfConv2d,
    LocalAttention2d,
    RestrictGroup,
    SimpleAffineSelfConv2d,
    SpatialPool2d,
    SqueezeExcite,
    StandAloneSelfAttention2d,
    Upsample2d,
    relative_entropy,
    set_backend,
)
from selfconv.ops import affine_self_conv, reference
from selfconv.testing import assert_equivariant, centre_error, shift_error


class SameMask(GroupDropout):
    """Dropout that draws the same numbers at every call: one mask."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return super().forward(x)


NO: Any = "no"  # which is true
ANY: Any = "odd"  # a word that no argument takes
Make = Callable[..., nn.Module]
LAYERS: dict[str, Make] = {
    "asc": lambda **k: AffineSelfConv2d(4, 6, 5, num_heads=2, **k),
    "asc_key_channels": lambda **k: AffineSelfConv2d(4, 6, 3, num_heads=2, key_channels=8, bias=True, **k),
    "asc_dense": lambda **k: AffineSelfConv2d(4, 6, 3, num_heads=2, psi="dense", **k),
    "asc_psi": lambda **k: AffineSelfConv2d(4, 6, 5, num_heads=2, affine="psi", **k),
    "asc_psi_dense": lambda **k: AffineSelfConv2d(4, 6, 3, num_heads=2, psi="dense", affine="psi", **k),
    "asc_beta": lambda **k: AffineSelfConv2d(4, 6, 5, num_heads=2, affine="beta", **k),
    "asc_beta_stride": lambda **k: AffineSelfConv2d(
        4, 6, 3, stride=2, num_heads=2, affine="beta", qkv_bias=False, **k
    ),
    "asc_stride": lambda **k: AffineSelfConv2d(4, 6, 3, stride=2, num_heads=2, qkv_bias=False, **k),
    "simple_asc": lambda **k: SimpleAffineSelfConv2d(4, 6, 5, num_heads=2, **k),
    "simple_asc_dense": lambda **k: SimpleAffineSelfConv2d(4, 6, 3, num_heads=2, psi="dense", **k),
    "simple_asc_no_bias": lambda **k: SimpleAffineSelfConv2d(4, 6, 3, num_heads=3, qkv_bias=False, **k),
    "sasa": lambda **k: StandAloneSelfAttention2d(4, 8, 5, num_heads=2, **k),
    "asc_dilated": lambda **k: AffineSelfConv2d(4, 6, 3, dilation=2, num_heads=2, **k),
    "asc_circular": lambda **k: AffineSelfConv2d(
        4, 6, 3, dilation=3, padding_mode="circular", num_heads=2, **k
    ),
    "asc_exclude": lambda **k: AffineSelfConv2d(4, 6, 5, 2, padding_mode="exclude", num_heads=2, **k),
    "asc_exclude_dense": lambda **k: AffineSelfConv2d(
        4, 6, 3, dilation=2, padding_mode="exclude", num_heads=2, psi="dense", **k
    ),
    "asc_dropout": lambda **k: AffineSelfConv2d(4, 6, 3, dropout=0.5, num_heads=2, **k).eval(),
    "simple_asc_dilated": lambda **k: SimpleAffineSelfConv2d(4, 6, 3, dilation=2, num_heads=2, **k),
    "simple_asc_circular": lambda **k: SimpleAffineSelfConv2d(
        4, 6, 3, padding_mode="circular", num_heads=2, **k
    ),
    "sasa_exclude": lambda **k: StandAloneSelfAttention2d(
        4, 8, 3, dilation=2, padding_mode="exclude", num_heads=2, **k
    ),
    "lifting_asc": lambda **k: LiftingSelfConv2d(4, 6, 5, num_heads=2, bias=True, **k),
    "lifting_asc_stride": lambda **k: LiftingSelfConv2d(4, 6, 3, 2, affine="beta", num_heads=2, **k),
    "lifting_asc_circular": lambda **k: LiftingSelfConv2d(
        4, 6, 3, dilation=2, padding_mode="circular", num_heads=2, **k
    ),
    "lifting_asc_dense": lambda **k: LiftingSelfConv2d(
        4, 6, 3, padding_mode="exclude", psi="dense", num_heads=2, **k
    ),
    "bottleneck": lambda **k: Bottleneck(4, 2, zero_gamma=False, **k),
    "bottleneck_stride": lambda **k: Bottleneck(4, 2, 2, zero_gamma=False, **k),
    "affine_conv": lambda **k: AffineConv2d(4, 6, 5, **k),
    "affine_conv_stride": lambda **k: AffineConv2d(4, 6, 3, stride=2, **k),
    "depthwise": lambda **k: DepthwiseConv2d(4, 3, **k),
    "depthwise_stride": lambda **k: DepthwiseConv2d(4, 5, stride=2, **k),
    "conv": lambda **k: GroupConv2d(4, 6, 3, padding=1, **k),
    "conv_valid": lambda **k: GroupConv2d(4, 6, 2, padding="valid", bias=False, **k),
    "conv_stride_pool": lambda **k: GroupConv2d(4, 6, 3, stride=2, padding="same", downsample="pool", **k),
    "conv_pointwise_pool": lambda **k: GroupConv2d(4, 6, 1, stride=2, downsample="pool", **k),
    "lifting": lambda **k: LiftingConv2d(4, 6, 3, padding=1, **k),
    "lifting_wide_padding": lambda **k: LiftingConv2d(4, 6, 3, padding=2, **k),
    "lifting_stride_pool": lambda **k: LiftingConv2d(4, 6, 3, stride=2, padding=1, downsample="pool", **k),
    "batch_norm": lambda **k: GroupBatchNorm(4, **k),
    "layer_norm": lambda **k: GroupLayerNorm(4, **k),
    "layer_norm_plain": lambda **k: GroupLayerNorm(4, elementwise_affine=False, **k),
    "squeeze_excite": lambda **k: SqueezeExcite(4, 2, **k),
    "dropout": lambda **k: SameMask(0.5, group=k["group"]),
    "dropout_point": lambda **k: GroupDropout(0.5, "point", group=k["group"]).eval(),
    "restrict": lambda **k: RestrictGroup(k["group"], group=k["group"]),
    "group_pool_mean": lambda **k: GroupPool("mean", group=k["group"]),
    "group_pool_max": lambda **k: GroupPool("max", group=k["group"]),
    "avg_pool": lambda **k: SpatialPool2d(2, "mean", group=k["group"]),
    "max_pool": lambda **k: SpatialPool2d(2, "max", group=k["group"]),
    "avg_pool_overlapping": lambda **k: SpatialPool2d(3, "mean", stride=1, padding=1, group=k["group"]),
    "max_pool_overlapping": lambda **k: SpatialPool2d(4, "max", stride=2, padding=1, group=k["group"]),
    "upsample_nearest": lambda **k: Upsample2d(2, "nearest", group=k["group"]),
    "upsample_nearest_3": lambda **k: Upsample2d(3, "nearest", group=k["group"]),
    "upsample_bilinear": lambda **k: Upsample2d(2, "bilinear", group=k["group"]),
    "upsample_bilinear_3": lambda **k: Upsample2d(3, "bilinear", group=k["group"]),
    "global_mean": lambda **k: GlobalPool("mean", group=k["group"]),
    "global_max": lambda **k: GlobalPool("max", group=k["group"]),
    "global_group_max": lambda **k: GlobalPool("group_max", group=k["group"]),
}
NOT_BAND_LIMITED = ("sasa", "sasa_exclude", "conv_valid")  # as they cannot be turned by less than 90°
LIFTING = (LiftingConv2d, LiftingSelfConv2d)
every_layer = pytest.mark.parametrize("name", LAYERS)
every_group = pytest.mark.parametrize("group", [*TESTED_GROUPS, C2], ids=str)
LAYERS_AND_GROUPS = [
    (name, group)
    for group in (*TESTED_GROUPS, C2)
    for name in LAYERS
    if not (get_group(group).band_limited and name in NOT_BAND_LIMITED)
]


def on_pairs(pairs: list[tuple[str, str | Group]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("name", "group"), [pytest.param(name, group, id=f"{name}-{group}") for name, group in pairs]
    )


every_layer_and_group = on_pairs(LAYERS_AND_GROUPS)


def features(
    layer: nn.Module, group: str | Group, dtype: torch.dtype, size: tuple[int, int] = (6, 8)
) -> Tensor:
    order = len(get_group(group))
    axis = () if order == 1 or isinstance(layer, LIFTING) else (order,)
    return torch.randn(2, 4, *axis, *size, dtype=dtype)


@on_pairs([(name, group) for name, group in LAYERS_AND_GROUPS if len(get_group(group)) > 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_equivariant_to_every_element(name: str, group: str | Group, dtype: torch.dtype) -> None:
    layer = LAYERS[name](group=group, dtype=dtype)
    assert_equivariant(layer, features(layer, group, dtype), group)


@every_layer_and_group
def test_equivariant_to_shifts(name: str, group: str | Group) -> None:
    layer = LAYERS[name](group=group, dtype=torch.float64).eval()
    stride = getattr(layer, "stride", 1)
    x = features(layer, group, torch.float64, (14, 16))
    if name.startswith("global"):  # the map is gone: a cyclic shift changes nothing
        torch.testing.assert_close(layer(x.roll((1, 2), (-2, -1))), layer(x), rtol=0, atol=1e-12)
    elif name == "squeeze_excite":  # the gate sees the whole map, border and all: again a cyclic shift
        moved, expected = layer(x.roll((1, 2), (-2, -1))), layer(x).roll((1, 2), (-2, -1))
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-12)
    elif isinstance(layer, Upsample2d):  # one cell of the input is several of the output
        s, inner = layer.scale_factor, slice(2 * layer.scale_factor, -2 * layer.scale_factor)
        moved, expected = layer(x.roll((1, 1), (-2, -1))), layer(x).roll((s, s), (-2, -1))
        assert torch.equal(moved[..., inner, inner], expected[..., inner, inner])
    else:
        error = shift_error(layer, x, stride, stride)
        assert error is not None
        assert error < 1e-10


@every_layer_and_group
def test_memory_formats_agree_and_are_kept(name: str, group: str | Group) -> None:
    layer = LAYERS[name](group=group, dtype=torch.float64)
    x = features(layer, group, torch.float64)
    y, y_last = layer(x), layer(channels_last(x))
    torch.testing.assert_close(y_last, y, rtol=0, atol=1e-10)
    if y.dim() > 3 and name not in ("group_pool_mean", "group_pool_max"):
        assert y.is_contiguous()
        if not name.endswith("_dense"):  # eager: contiguous
            assert y_last.stride(1) == 1
    torch.testing.assert_close(layer(strided(x)), y, rtol=0, atol=1e-10)


@every_layer_and_group
def test_gradcheck(name: str, group: str | Group) -> None:
    layer = LAYERS[name](group=group, dtype=torch.float64)
    x = features(layer, group, torch.float64, (4, 4))[:1].requires_grad_()
    names = [n for n, _ in layer.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


# ---- against the reference ----


def values(stored: Tensor, group: Group, k: int = 3) -> Tensor:
    """A stored filter on the k×k window: as it is, or a sum of the group's basis functions."""
    basis = group.basis(k)
    return stored if basis is None else torch.einsum("...f,fij->...ij", stored, basis)


def heads_map(out: Tensor, layer: LocalAttention2d) -> Tensor:
    """W^O of aggregated values [C, |H|, h, w], by the reference's group convolution."""
    w = layer.w_out.reshape(layer.out_channels, layer.out_channels, -1, 1, 1)
    return reference.group_convolution(out, w, layer.group)


@pytest.mark.parametrize(
    ("psi", "affine"),
    [("channel", "both"), ("dense", "both"), ("channel", "psi"), ("dense", "psi"), ("channel", "beta")],
)
@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_asc_is_equations_17_to_20(group: str | Group, psi: Any, affine: Any) -> None:
    """What ``affine`` leaves out is in the equations a ψ that is 1 at the identity, or a β that is 0."""
    layer = AffineSelfConv2d(2, 4, 3, num_heads=2, group=group, psi=psi, affine=affine, dtype=torch.float64)
    names = {name for name, _ in layer.named_parameters()} - {"w_in", "b_in", "w_out"}
    kept = ("psi", "beta") if affine == "both" else (affine,)
    assert names == {f"{filters}_{feature}" for filters in kept for feature in "qkv"}
    assert layer.b_in is not None
    nn.init.normal_(layer.b_in)
    g = layer.group
    x = torch.randn(2, len(g), 3, 2, dtype=torch.float64)
    w_q, w_k, w_v = layer.w_in.reshape(3, 4, 2, len(g))
    b_q, b_k, b_v = layer.b_in.reshape(3, 4)
    q, k, v = (reference.group_linear_map(x, w, b, g) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    shape = (4, 4, len(g)) if psi == "dense" else (4, len(g))
    one, none = torch.zeros(shape, dtype=torch.float64), torch.zeros(4, 3, 3, dtype=torch.float64)
    one[:, 0] = 1  # where there is no ψ: never if it is dense
    psi_q = one if layer.psi_q is None else layer.psi_q.reshape(shape)
    psi_k, psi_v = (
        None if p is None else values(p, g).reshape(*shape, 3, 3) for p in (layer.psi_k, layer.psi_v)
    )
    beta_q = none[:, 0, 0] if layer.beta_q is None else layer.beta_q
    beta_k, beta_v = (none if b is None else values(b, g) for b in (layer.beta_k, layer.beta_v))
    query = reference.group_query(q, psi_q, beta_q, g)
    out = reference.group_asc(query, k, v, psi_k, beta_k, psi_v, beta_v, g, 2, layer.scale)
    batch = x[None] if len(g) > 1 else x[None, :, 0]
    torch.testing.assert_close(layer(batch).reshape(out.shape), heads_map(out, layer), rtol=0, atol=1e-10)


@pytest.mark.parametrize("psi", ["channel", "dense"])
@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_simple_asc_is_equation_14(group: str | Group, psi: str) -> None:
    layer = SimpleAffineSelfConv2d(2, 4, 3, num_heads=2, group=group, psi=psi, dtype=torch.float64)  # type: ignore[arg-type]
    assert layer.b_in is not None
    nn.init.normal_(layer.b_in)
    g = layer.group
    x = torch.randn(2, len(g), 3, 2, dtype=torch.float64)
    f = reference.group_linear_map(x, layer.w_in.reshape(4, 2, len(g)), layer.b_in, g)
    psi_kv = values(layer.psi_kv, g).reshape((4, 4, len(g), 3, 3) if psi == "dense" else (4, len(g), 3, 3))
    out = reference.simple_group_asc(f, psi_kv, values(layer.beta_kv, g), g, 2, layer.scale)
    batch = x[None] if len(g) > 1 else x[None, :, 0]
    torch.testing.assert_close(layer(batch).reshape(out.shape), heads_map(out, layer), rtol=0, atol=1e-10)


def test_planar_convolution_is_equation_1() -> None:
    layer = GroupConv2d(2, 4, 3, padding=1, bias=False, group="z2", dtype=torch.float64)
    f = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(f[None])[0], reference.convolution(f, layer.weight), rtol=0, atol=1e-12)


def planar_maps(layer: LocalAttention2d, f: Tensor) -> list[Tensor]:
    """Of query, key and value, or of the one map of simple ASC, by Eq. 8; their biases are made random."""
    assert layer.b_in is not None
    nn.init.normal_(layer.b_in)
    maps = zip(
        layer.w_in.flatten(1).split(layer.out_channels), layer.b_in.split(layer.out_channels), strict=True
    )
    return [reference.linear_map(f, w, b) for w, b in maps]


def test_planar_simple_asc_is_equation_7() -> None:
    layer = SimpleAffineSelfConv2d(2, 4, 3, num_heads=2, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    (f,) = planar_maps(layer, x)
    out = reference.simple_asc(f, layer.psi_kv, layer.beta_kv, 2, layer.scale)
    torch.testing.assert_close(layer(x[None]), F.conv2d(out[None], layer.w_out), rtol=0, atol=1e-10)


def test_planar_asc_is_equations_8_to_11() -> None:
    layer = AffineSelfConv2d(2, 4, 3, num_heads=2, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    q, k, v = planar_maps(layer, x)
    stored = dict(layer.named_parameters())
    psi_q, psi_k, psi_v, beta_q, beta_k, beta_v = (stored[f"{a}_{m}"] for a in ("psi", "beta") for m in "qkv")
    query = reference.asc_query(q, psi_q.flatten(), beta_q)
    alpha = layer.attention_weights(x[None])[0]  # [num_heads, k, k, h, w]
    for i, j in reference.positions(query):
        scores = reference.asc_score(query, k, psi_k, beta_k, (i, j), 2, layer.scale)
        expected = torch.stack(list(scores.values()), 1).reshape(2, 3, 3)
        torch.testing.assert_close(alpha[..., i, j], expected, rtol=0, atol=1e-10)
    out = reference.asc(query, k, v, psi_k, beta_k, psi_v, beta_v, 2, layer.scale)
    torch.testing.assert_close(layer(x[None]), F.conv2d(out[None], layer.w_out), rtol=0, atol=1e-10)


def test_sasa_without_offsets_is_equation_5() -> None:
    layer = StandAloneSelfAttention2d(2, 8, 3, num_heads=2, dtype=torch.float64)
    nn.init.zeros_(layer.beta_k)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    q, k, v = planar_maps(layer, x)
    out = reference.attention(q, k, v, 3, 2, layer.scale)
    torch.testing.assert_close(layer(x[None]), F.conv2d(out[None], layer.w_out), rtol=0, atol=1e-10)


def test_sasa_scores_with_row_and_column_offsets() -> None:
    """Section 4: in each head half of β^K depends on the row offset alone, half on the column offset."""
    layer = StandAloneSelfAttention2d(2, 8, 3, num_heads=2, dtype=torch.float64)
    psi_k, beta_k, psi_v, beta_v = layer.affine_parameters()
    assert psi_k is None
    assert psi_v is None
    assert beta_v is None
    assert beta_k is not None
    for head in (slice(0, 4), slice(4, 8)):
        by_row, by_column = beta_k[head][:2], beta_k[head][2:]
        assert torch.equal(by_row, by_row[:, :, :1].expand(-1, -1, 3))
        assert torch.equal(by_column, by_column[:, :1].expand(-1, 3, -1))
    assert layer.beta_k.numel() == 8 * 3
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    q, k, v = F.conv2d(x, layer.w_in, layer.b_in)[0].split(8)
    one, none = torch.ones(8, 3, 3, dtype=torch.float64), torch.zeros(8, 3, 3, dtype=torch.float64)
    out = reference.asc(q, k, v, one, beta_k, one, none, 2, layer.scale)
    torch.testing.assert_close(layer(x), F.conv2d(out[None], layer.w_out), rtol=0, atol=1e-10)


@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_convolutions_are_equations_1_and_3(group: str | Group, k: int) -> None:
    g = get_group(group)
    lift = LiftingConv2d(2, 3, k, padding="same", bias=False, group=g, dtype=torch.float64)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    lifted = reference.lifting_convolution(x, values(lift.weight, g, k), g)
    out = lift(x[None]).reshape(lifted.shape)
    torch.testing.assert_close(out, lifted, rtol=0, atol=1e-12)
    conv = GroupConv2d(3, 2, k, padding="same", bias=False, group=g, dtype=torch.float64)
    filters = values(conv.weight, g, k).reshape(2, 3, len(g), k, k)
    expected = reference.group_convolution(lifted, filters, g)
    actual = conv(lift(x[None])).reshape(expected.shape)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@given(
    k=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
)
def test_every_stride_and_padding_samples_the_same_convolution(
    k: int, stride: int, padding: int, size: tuple[int, int]
) -> None:
    """A strided group convolution is the dense one, sampled; on z2 it is conv2d."""
    for group in ("z2", "p4"):
        conv = GroupConv2d(2, 3, k, stride, padding, group=group, dtype=torch.float64)
        dense = copy.deepcopy(conv)
        dense.stride = 1
        x = features(conv, group, torch.float64, size)[:, :2]
        expected = dense(x)[..., ::stride, ::stride]
        torch.testing.assert_close(conv(x), expected, rtol=0, atol=1e-12)
        if group == "z2":
            plain = F.conv2d(x, conv.weight, conv.bias, stride, padding)
            torch.testing.assert_close(conv(x), plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_squeeze_excite_is_equations_15_and_16(group: str | Group) -> None:
    layer = SqueezeExcite(4, 2, group=group, dtype=torch.float64)
    x = features(layer, group, torch.float64, (3, 2))
    w_1, b_1, w_2, b_2 = layer.expand.weight, layer.expand.bias, layer.reduce.weight, layer.reduce.bias
    expected = torch.stack([reference.excite(image, w_1, b_1, w_2, b_2) for image in x])
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", [contiguous, channels_last], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_batch_norm_shares_statistics_over_the_group(group: str | Group, layout: Layout) -> None:
    layer = GroupBatchNorm(4, group=group, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = layout(features(layer, group, torch.float64))
    plain = nn.BatchNorm1d(4, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    for _ in range(2):  # in training, then with the running statistics
        expected = plain(x.flatten(2)).reshape(x.shape)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
        layer.eval()
        plain.eval()
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=0, atol=1e-12)


def test_converts_to_sync_batch_norm() -> None:
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(GroupBatchNorm(4, group="p4")))
    assert isinstance(converted[0], nn.SyncBatchNorm)


def test_the_maximum_over_the_group_is_of_means_over_space() -> None:
    x = torch.randn(2, 4, 4, 3, 5)
    expected = torch.stack([x[:, :, p].flatten(2).mean(2) for p in range(4)]).max(0).values
    torch.testing.assert_close(GlobalPool("group_max", group="p4")(x), expected)
    planar = torch.randn(2, 4, 3, 5)
    assert torch.equal(GlobalPool("group_max")(planar), GlobalPool("mean")(planar))


# ---- at home in PyTorch ----


@every_layer_and_group
def test_layers_follow_pytorch_conventions(name: str, group: str | Group) -> None:
    layer = LAYERS[name](group=group, dtype=torch.float32)
    before = {n: t.shape for n, t in layer.state_dict().items()}
    x = features(layer, group, torch.float32)
    expected = layer.eval()(x)
    # as every training loop does
    layer = copy.deepcopy(layer).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    layer(features(layer, group, torch.float32, (4, 6)))
    layer.train()
    assert {n: t.shape for n, t in layer.state_dict().items()} == before
    assert all(p.dim() <= 4 for p in layer.parameters())
    assert f"group='{group}'" in repr(layer)


def test_printing_shows_sizes() -> None:
    layer = AffineSelfConv2d(16, 32, 5, stride=2, num_heads=8, group="p4")
    assert repr(layer) == (
        "AffineSelfConv2d(16, 32, kernel_size=5, stride=2, num_heads=8, scale=0.03125, group='p4')"
    )


def test_device_and_dtype_arguments() -> None:
    for name in (
        "asc",
        "simple_asc",
        "sasa",
        "conv",
        "lifting",
        "batch_norm",
        "layer_norm",
        "squeeze_excite",
    ):
        layer = LAYERS[name](group="p4", device="meta", dtype=torch.bfloat16)
        assert all(p.device.type == "meta" and p.dtype == torch.bfloat16 for p in layer.parameters())


def test_initialisation_is_the_papers() -> None:
    conv = GroupConv2d(64, 256, 3, group="p4")
    assert conv.weight.std().item() == pytest.approx((2 / (64 * 4 * 9)) ** 0.5, rel=0.02)
    asc = AffineSelfConv2d(64, 256, 5, group="p4")
    assert asc.w_in.std().item() == pytest.approx((2 / (64 * 4)) ** 0.5, rel=0.02)
    for name in ("psi_q", "beta_q", "psi_k", "beta_k", "psi_v", "beta_v"):
        parameter = getattr(asc, name)
        assert parameter.std().item() == pytest.approx(1 / 4, rel=0.15), name  # 1/|H|: on z2 the paper's 1
        assert parameter.mean().item() == pytest.approx(0, abs=0.04), name
    assert asc.b_in is not None
    assert not asc.b_in.any()


def test_initialisation_between_the_pixels() -> None:
    """The filters have the variance of free ones, averaged over the window; ψ and β are as on every group."""
    for k in (1, 3, 5):
        conv = GroupConv2d(32, 64, k, group="c8")
        steered = conv.steered_filters()
        assert steered[:, :, 0].std().item() == pytest.approx((2 / (32 * 8 * k * k)) ** 0.5, rel=0.03)
    asc = AffineSelfConv2d(64, 256, 5, group="c8")
    psi_k, beta_k, psi_v, beta_v = asc.affine_parameters()  # at the pixels
    for sampled, planar in ((psi_k, False), (psi_v, False), (beta_k, True), (beta_v, True)):
        assert sampled is not None
        assert sampled.std().item() == pytest.approx(1 / 8, rel=0.05)
        turned = asc.group.steer(sampled, planar=planar)[:, 1]
        assert turned.std().item() == pytest.approx(1 / 8, rel=0.1)  # 4% more, on average
    for parameter in (asc.psi_q, asc.beta_q):
        assert parameter is not None
        assert parameter.std().item() == pytest.approx(1 / 8, rel=0.15)


@pytest.mark.parametrize(
    ("layer", "planar", "limit"),
    [
        (lambda group: LiftingConv2d(4, 6, 3, padding=1, group=group, dtype=torch.float64), True, 0.05),
        (lambda group: GroupConv2d(4, 6, 3, padding=1, group=group, dtype=torch.float64), False, 0.05),
        (lambda group: GroupConv2d(4, 6, 5, padding=2, group=group, dtype=torch.float64), False, 0.05),
        (lambda group: AffineSelfConv2d(4, 8, 5, num_heads=2, group=group, dtype=torch.float64), False, 0.2),
        (lambda group: SimpleAffineSelfConv2d(4, 8, 5, group=group, dtype=torch.float64), False, 0.2),
    ],
    ids=["lifting", "conv 3", "conv 5", "asc", "simple asc"],
)
@pytest.mark.parametrize("group", ["c8", D3, TILTED], ids=str)
def test_turns_between_the_pixels(
    layer: Callable[[str | Group], nn.Module], planar: bool, limit: float, group: str | Group
) -> None:
    """On smooth functions of the plane: near for every element, rounding for the exact ones among them."""
    g = get_group(group)
    shape = (12, 4, *(() if planar else (len(g),)), 7, 7)
    for s, error in enumerate(centre_error(set_backend(layer(group), "eager"), shape, group)):
        assert error < (1e-12 if g.exact[s] else limit)
        assert g.exact[s] or error > 1e-3  # or else nothing was turned


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (AffineSelfConv2d(16, 16), 16 * 16 * 4 + 3 * 16 + 4 * 25 * 16 + 2 * 16),
        (SimpleAffineSelfConv2d(16, 16), 16 * 16 * 2 + 16 + 2 * 25 * 16),
        (StandAloneSelfAttention2d(16, 16), 16 * 16 * 4 + 3 * 16 + 5 * 16),
        (AffineSelfConv2d(8, 8, group="p4"), 8 * 8 * 4 * 4 + 3 * 8 + 2 * 25 * 5 * 8 + 5 * 8),
        (AffineSelfConv2d(16, 16, affine="psi"), 16 * 16 * 4 + 3 * 16 + 2 * 25 * 16 + 16),
        (AffineSelfConv2d(6, 6, num_heads=6, group="c8"), 6 * 6 * 8 * 4 + 3 * 6 + 2 * 13 * 9 * 6 + 9 * 6),
        (AffineSelfConv2d(8, 8, group="p4", affine="beta"), 8 * 8 * 4 * 4 + 3 * 8 + 2 * 25 * 8 + 8),
        (SqueezeExcite(64), 64 * 4 * 2 + 4 + 64),
    ],
)
def test_parameter_counts(layer: nn.Module, expected: int) -> None:
    assert sum(p.numel() for p in layer.parameters()) == expected


def test_set_backend_reaches_every_layer() -> None:
    model = nn.Sequential(
        AffineSelfConv2d(2, 2, num_heads=1), nn.Sequential(SimpleAffineSelfConv2d(2, 2, num_heads=1))
    )
    set_backend(model, "eager")
    assert [m.backend for m in model.modules() if isinstance(m, LocalAttention2d)] == ["eager", "eager"]
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        set_backend(model, "fast")


@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_layer_attention_weights_sum_to_one(group: str | Group) -> None:
    for name in {"asc", "simple_asc", "sasa"} - ({"sasa"} if get_group(group).band_limited else set()):
        layer = LAYERS[name](group=group, dtype=torch.float64)
        assert isinstance(layer, LocalAttention2d)
        alpha = layer.attention_weights(features(layer, group, torch.float64, (3, 4)))
        assert alpha.shape[-4:] == (5, 5, 3, 4)
        torch.testing.assert_close(alpha.sum((-4, -3)), torch.ones_like(alpha[..., 0, 0, :, :]))


# ---- bad input ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AffineSelfConv2d(4, 6, num_heads=4),
            "num_heads=4 does not divide 6 key channels, 6 value channels",
        ),
        (
            lambda: AffineSelfConv2d(4, 8, 4),
            "kernel_size: expected an odd integer ≥ 1, or two, (rows, columns); got 4",
        ),
        (
            lambda: AffineSelfConv2d(4, 8, (3, 2)),
            "expected an odd integer ≥ 1, or two, (rows, columns); got (3, 2)",
        ),
        (lambda: AffineSelfConv2d(10, 10), "10 value channels; expected one of 1, 2, 5, 10"),
        (lambda: AffineSelfConv2d(8, 8, stride=2)(torch.ones(1, 8, 1, 1)), "expected maps of 2×2 or more"),
        (
            lambda: AffineSelfConv2d(0, 8),
            "AffineSelfConv2d: expected sizes that are integers ≥ 1; got in_channels=0",
        ),
        (lambda: AffineSelfConv2d(4, 8, psi=ANY), "psi: expected 'channel' or 'dense'; got 'odd'"),
        (lambda: SimpleAffineSelfConv2d(4, 8, psi=ANY), "psi: expected 'channel' or 'dense'; got 'odd'"),
        (lambda: AffineSelfConv2d(4, 8, affine=ANY), "affine: expected 'both', 'psi' or 'beta'; got 'odd'"),
        (
            lambda: AffineSelfConv2d(4, 8, affine="beta", psi="dense"),
            "affine='beta' has no ψ; expected psi='channel'; got psi='dense'",
        ),
        (lambda: AffineSelfConv2d(4, 8, group="p3"), "unknown group 'p3'"),
        (lambda: AffineSelfConv2d(4, 8, backend="c"), "unknown backend 'c'"),
        (lambda: StandAloneSelfAttention2d(4, 8), "8 key channels in 8 heads, 1 each"),
        (
            lambda: StandAloneSelfAttention2d(4, 8, num_heads=2, group="c8"),
            "expected a group of quarter turns and mirrors, such as 'p4'; got 'c8'",
        ),
        (
            lambda: GroupConv2d(4, 8, 2, group="c8"),
            "group 'c8' turns filters about a pixel: expected a window of odd size; got 2×2",
        ),
        (
            lambda: GroupConv2d(4, 8, 3, stride=0),
            "GroupConv2d: expected sizes that are integers ≥ 1; got in_channels=4, out_channels=8",
        ),
        (lambda: GroupConv2d(4, 8, 2, padding="same"), "padding='same' expects an odd kernel_size; got 2"),
        (
            lambda: GroupConv2d(4, 8, 3, padding=-1),
            "padding: expected an integer ≥ 0, 'same' or 'valid'; got -1",
        ),
        (
            lambda: GroupConv2d(4, 8, 3, downsample=ANY),
            "downsample: expected 'stride' or 'pool'; got 'odd'",
        ),
        (
            lambda: SqueezeExcite(0),
            "SqueezeExcite: expected sizes that are integers ≥ 1; got channels=0, reduction=16",
        ),
        (lambda: GroupPool(ANY), "mode: expected 'mean' or 'max'; got 'odd'"),
        (lambda: GlobalPool(ANY), "mode: expected 'mean', 'max' or 'group_max'; got 'odd'"),
        (lambda: SpatialPool2d(0), "SpatialPool2d: expected sizes that are integers ≥ 1; got kernel_size=0"),
        (lambda: SpatialPool2d(2, stride=0), "got kernel_size=2, stride=0"),
        (
            lambda: SpatialPool2d(3, padding=0.5),  # type: ignore[arg-type]
            "padding: expected an integer from 0 to half of kernel_size=3; got 0.5",
        ),
        (
            lambda: SpatialPool2d(3, padding=2),
            "padding: expected an integer from 0 to half of kernel_size=3; got 2",
        ),
        (
            lambda: SpatialPool2d(3, "max")(torch.ones(1, 1, 2, 8)),
            "SpatialPool2d expects maps of 3×3 or more; got shape [1, 1, 2, 8]",
        ),
        (
            lambda: GroupConv2d(1, 1, 7, padding=1)(torch.ones(1, 1, 8, 4)),
            "GroupConv2d with kernel_size=7, padding=1 expects maps of 5×5 or more; got shape [1, 1, 8, 4]",
        ),
        (
            lambda: LiftingConv2d(1, 1, 3, group="p4")(torch.ones(1, 1, 2, 8)),
            "LiftingConv2d with kernel_size=3, padding=0 expects maps of 3×3 or more; got shape [1, 1, 2, 8]",
        ),
        (lambda: Upsample2d(0), "Upsample2d: expected sizes that are integers ≥ 1; got scale_factor=0"),
        (lambda: Upsample2d(1.5), "integers ≥ 1; got scale_factor=1.5"),  # type: ignore[arg-type]
        (lambda: Upsample2d(2, ANY), "mode: expected 'nearest' or 'bilinear'; got 'odd'"),
        (
            lambda: Upsample2d(2)(torch.ones(1, 1, 0, 8)),
            "Upsample2d expects maps of 1×1 or more; got shape [1, 1, 0, 8]",
        ),
        (
            lambda: GroupLayerNorm(0),
            "GroupLayerNorm: expected sizes that are integers ≥ 1; got num_channels=0",
        ),
        (lambda: GroupLayerNorm((4, 8)), "integers ≥ 1; got num_channels=(4, 8)"),  # type: ignore[arg-type]
        (lambda: GroupDropout(1.5), "p: expected a probability, 0 to 1; got 1.5"),
        (lambda: GroupDropout(ANY), "p: expected a probability, 0 to 1; got 'odd'"),
        (lambda: GroupDropout(mode=ANY), "mode: expected 'channel' or 'point'; got 'odd'"),
        (
            lambda: RestrictGroup("p4m", group="p4"),
            "group 'p4m' is not a subgroup of 'p4': ((1, 0), (0, -1)) is no element of it",
        ),
        (
            lambda: AffineSelfConv2d(4, 8, 0),
            "kernel_size: expected an odd integer ≥ 1, or two, (rows, columns); got 0",
        ),
        (
            lambda: AffineSelfConv2d(4, 8, -3),
            "kernel_size: expected an odd integer ≥ 1, or two, (rows, columns); got -3",
        ),
        (lambda: AffineSelfConv2d(4.0, 8), "in_channels=4.0"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv2d(4, 8, num_heads=0), "num_heads: expected an integer ≥ 1; got 0"),
        (lambda: AffineSelfConv2d(4, 8, key_channels=0), "out_channels=8, key_channels=0, stride=1"),
        (lambda: StandAloneSelfAttention2d(4, 0), "key_channels=0, out_channels=0"),
        (lambda: StandAloneSelfAttention2d(4, 8, num_heads=0), "num_heads: expected an integer ≥ 1; got 0"),
        (lambda: GroupConv2d(4, 8, (3, 3)), "kernel_size=(3, 3), stride=1"),  # type: ignore[arg-type]
        (
            lambda: GroupBatchNorm(0),
            "GroupBatchNorm: expected sizes that are integers ≥ 1; got num_features=0",
        ),
        (
            lambda: GroupBatchNorm(4, float("nan")),
            "GroupBatchNorm: eps: expected a finite number of 0 or more; got nan",
        ),
        (lambda: GroupBatchNorm(4, momentum=-1), "momentum: expected a probability, 0 to 1; got -1"),
        (
            lambda: GroupLayerNorm(4, ANY),
            "GroupLayerNorm: eps: expected a finite number of 0 or more; got 'odd'",
        ),
        (lambda: AffineConv2d(4, 8, -1), "AffineConv2d: kernel_size: expected an odd integer ≥ 1; got -1"),
    ],
)
def test_bad_arguments_are_restated(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


ATTENTION_LAYERS = [AffineSelfConv2d, LiftingSelfConv2d, SimpleAffineSelfConv2d, StandAloneSelfAttention2d]


@pytest.mark.parametrize("kind", ATTENTION_LAYERS)
def test_a_scale_cannot_be_trained(kind: Any) -> None:
    """The kernels take a number: a parameter would get no gradient, and nobody would be told."""
    said = f"{kind.__name__}: scale: expected a number, which is not trained; got a tensor of shape"
    for scale in (nn.Parameter(torch.tensor(1.0)), torch.tensor(1.0), torch.ones(2)):
        with pytest.raises(ValueError, match=said):
            kind(4, 4, 3, num_heads=2, scale=scale)
        layer = kind(4, 4, 3, num_heads=2)
        with pytest.raises(ValueError, match=said):
            layer.scale = scale
        assert layer.scale == 0.25
        assert "scale" not in layer.state_dict()
    layer.scale = np.float32(0.5)
    assert type(layer.scale) is float


def test_a_compiled_call_refuses_a_scale_to_train() -> None:
    x = torch.randn(1, 2, 4, 4)

    def call(scale: Any) -> Tensor:
        return affine_self_conv(x, x, x, None, None, None, None, num_heads=1, kernel_size=3, scale=scale)

    with pytest.raises(Exception, match="scale: expected a number"):
        torch.compile(call, backend="eager")(torch.tensor(1.0, requires_grad=True))


INTEGERS: Any = torch.int32
NAMED: dict[str, Callable[[], Any]] = {  # the beginning of a message, and what is refused
    "DepthwiseConv2d: bias: expected True or False; got 'no'": lambda: DepthwiseConv2d(4, 3, bias=NO),
    "GroupLayerNorm: bias: expected True or False; got 'no'": lambda: GroupLayerNorm(4, bias=NO),
    "GroupConv2d: bias: expected True or False; got 1": lambda: GroupConv2d(4, 4, 3, bias=1),  # type: ignore[arg-type]
    "Bottleneck: squeeze_excite: expected True or False": lambda: Bottleneck(4, 2, squeeze_excite=NO),
    "Bottleneck: zero_gamma: expected True or False": lambda: Bottleneck(4, 2, zero_gamma=NO),
    "AffineSelfConv2d: need_weights: expected True or False; got 'no'": lambda: AffineSelfConv2d(
        4, 4, num_heads=2
    )(torch.ones(1, 4, 5, 5), need_weights=NO),
    "GroupConv2d: padding: expected an integer ≥ 0": lambda: GroupConv2d(4, 4, 3, padding=True),
    "DepthwiseConv2d: dtype: expected one of floating": lambda: DepthwiseConv2d(4, 3, dtype=INTEGERS),
    "AffineConv2d: dtype: expected one of floating": lambda: AffineConv2d(4, 4, 3, dtype=INTEGERS),
    "GroupBatchNorm: dtype: expected one of floating": lambda: GroupBatchNorm(4, dtype=INTEGERS),
    "GroupLayerNorm: dtype: expected one of floating": lambda: GroupLayerNorm(4, dtype=INTEGERS),
    "SqueezeExcite: dtype: expected one of floating": lambda: SqueezeExcite(4, dtype=INTEGERS),
    "Bottleneck: spatial: expected a function of width and stride": lambda: Bottleneck(4, 2, spatial=ANY),
    "Bottleneck: spatial: expected a function of width": lambda: Bottleneck(4, 2, spatial=nn.Conv2d(2, 2, 1)),
    "GroupConv2d: expected maps of 3×3 or more, to pool": lambda: GroupConv2d(1, 1, 1, 3, downsample="pool")(
        torch.ones(1, 1, 2, 2)
    ),
    "AffineSelfConv2d: num_heads=3 does not divide": lambda: AffineSelfConv2d(4, 4, num_heads=3),
    "AffineSelfConv2d: scale: expected a finite": lambda: AffineSelfConv2d(4, 4, num_heads=2, scale=ANY),
}


@pytest.mark.parametrize("message", NAMED)
def test_messages_name_the_layer_and_the_argument(message: str) -> None:
    with pytest.raises(ValueError) as caught:
        NAMED[message]()
    assert str(caught.value).startswith(message)


def test_padding_may_be_a_number_of_numpy() -> None:
    assert type(GroupConv2d(4, 4, 3, padding=np.int64(1)).padding) is int  # type: ignore[arg-type]
    assert type(SpatialPool2d(3, padding=np.int64(1)).padding) is int  # type: ignore[arg-type]


def test_relative_entropy_of_windows_of_one_two_and_three() -> None:
    found = [relative_entropy(torch.full((n,), 1 / n), 0).item() for n in (1, 2, 3)]
    assert found == pytest.approx([0, 1, 1])


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "AffineSelfConv2d: dropout": lambda n: AffineSelfConv2d(4, 4, num_heads=2, dropout=n).dropout,
    "GroupDropout: p": lambda n: GroupDropout(n).p,
    "GroupBatchNorm: eps": lambda n: GroupBatchNorm(4, n).eps,
    "GroupBatchNorm: momentum": lambda n: GroupBatchNorm(4, momentum=n).momentum,
    "GroupLayerNorm: eps": lambda n: GroupLayerNorm(4, n).eps,
    "AffineSelfConv2d: affine_std": lambda n: AffineSelfConv2d(4, 4, num_heads=2).reset_parameters(n),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_neither_tensors_nor_switches(name: str) -> None:
    for value in (torch.tensor(0.1), nn.Parameter(torch.tensor(0.1)), True, "1", -1.0, math.nan):
        with pytest.raises(ValueError, match=f"^{name}: expected a"):
            NUMBERS[name](value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_numbers(name: str) -> None:
    found = NUMBERS[name](np.float32(0.5))
    assert found is None or (type(found), found) == (float, 0.5)


@every_layer
def test_bad_features_are_restated(name: str) -> None:
    layer = LAYERS[name](group="p4", dtype=torch.float32)
    for shape in ((2, 4), (2, 4, 3, 5, 5), (2, 4, 5)):
        with pytest.raises(ValueError, match=r"expects \[N, .*\]; got shape \[2, 4"):
            layer(torch.zeros(shape))
    if any(True for _ in layer.parameters()):
        wrong = torch.zeros(2, 5, 6, 6) if isinstance(layer, LIFTING) else torch.zeros(2, 5, 4, 6, 6)
        with pytest.raises(ValueError, match=r"expects \[N, 4, .*\]; got shape \[2, 5"):
            layer(wrong)


@every_layer
def test_maps_without_pixels_are_refused(name: str) -> None:
    layer = LAYERS[name](group="p4", dtype=torch.float32)
    shape = (2, 4, 0, 6) if isinstance(layer, LIFTING) else (2, 4, 4, 0, 6)
    with pytest.raises(ValueError, match=r"expects maps of 1×1 or more; got shape \[2, 4, .*0, 6\]"):
        layer(torch.zeros(shape))


@every_layer
def test_features_of_another_dtype_are_refused_outside_autocast(name: str) -> None:
    layer = LAYERS[name](group="p4", dtype=torch.float32)
    if not any(True for _ in layer.parameters()):
        return
    x = torch.zeros(2, 4, 6, 6) if isinstance(layer, LIFTING) else torch.zeros(2, 4, 4, 6, 6)
    said = r"has weights of torch.float32 and expects such features; got torch.float64"
    with pytest.raises(TypeError, match=said):
        layer(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        layer(x.bfloat16())


def test_integer_images_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expects floating-point features; got torch\.uint8"):
        LiftingConv2d(3, 4, 3)(torch.zeros(1, 3, 5, 5, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"expects floating-point features; got torch\.int64"):
        GroupConv2d(3, 4, 3)(torch.zeros(1, 3, 5, 5, dtype=torch.int64))


# ---- the controls ----


@every_group
def test_affine_conv_is_asc_without_attention(group: str | Group) -> None:
    """With equal scores α is 1/k²: k² times ASC's output is the affine convolution of its values."""
    asc = AffineSelfConv2d(4, 6, 3, num_heads=2, scale=0.0, group=group, dtype=torch.float64)
    plain = AffineConv2d(4, 6, 3, group=group, dtype=torch.float64)
    with torch.no_grad():
        plain.value.weight.copy_(asc.w_in[-6:].reshape(plain.value.weight.shape))
        assert plain.value.bias is not None
        assert asc.b_in is not None
        plain.value.bias.copy_(asc.b_in[-6:].normal_())
        plain.psi_v.copy_(asc.psi_v)  # type: ignore[arg-type]
        plain.beta_v.copy_(asc.beta_v)  # type: ignore[arg-type]
        plain.output.weight.copy_(asc.w_out.reshape(plain.output.weight.shape))
    x = features(asc, group, torch.float64)
    torch.testing.assert_close(plain(x), 9 * asc(x), rtol=0, atol=1e-10)


def test_depthwise_is_torchs_on_the_plane() -> None:
    layer = DepthwiseConv2d(4, 5, dtype=torch.float64)
    assert layer.bias is not None
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 4, 7, 9, dtype=torch.float64)
    expected = F.conv2d(x, layer.weight[:, None], layer.bias, padding=2, groups=4)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(4, 4), (0, 3), (4, 3, 0), (4, -1)])
def test_depthwise_convolution_refuses_bad_sizes(sizes: Any) -> None:
    with pytest.raises(ValueError, match=r"DepthwiseConv2d: .*expected .* ≥ 1; got"):
        DepthwiseConv2d(*sizes)
