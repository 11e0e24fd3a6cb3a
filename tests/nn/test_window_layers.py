"""Attention layers with any window: the paper's equations, their weights and dropout; sequences; blocks."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from helpers.cases import C2, MODES, TESTED_GROUPS
from torch import Tensor, nn

import selfconv.nn.attention.local_attention as local_attention
from selfconv.groups import IDENTITY, MIRROR, Group, get_group
from selfconv.nn import (
    AffineSelfConv1d,
    AffineSelfConv2d,
    Bottleneck,
    GlobalPool,
    GroupPool,
    LiftingSelfConv2d,
    LocalAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
    concatenate,
)
from selfconv.ops import affine_self_conv, reference
from selfconv.testing import centre_error, equivariance_error, relative_error

KINDS = (AffineSelfConv2d, LiftingSelfConv2d, SimpleAffineSelfConv2d, StandAloneSelfAttention2d)
WINDOW_GROUPS = (*TESTED_GROUPS, C2)
REFLECTION = Group("mirror", (IDENTITY, MIRROR))
kinds_and_groups = pytest.mark.parametrize(
    ("kind", "group"),
    [
        pytest.param(kind, group, id=f"{kind.__name__}-{group}")
        for kind in KINDS
        for group in WINDOW_GROUPS
        if not (kind is StandAloneSelfAttention2d and get_group(group).band_limited)
    ],
)


def make(kind: Any, group: str | Group, **options: Any) -> LocalAttention2d:
    torch.manual_seed(0)
    layer = kind(2, 4, **{"kernel_size": 3, "num_heads": 2, "group": group, "dtype": torch.float64} | options)
    nn.init.normal_(layer.b_in)
    return layer


def image(layer: LocalAttention2d, size: tuple[int, int] = (3, 2)) -> Tensor:
    torch.manual_seed(1)
    axis = () if len(layer.domain) == 1 else (len(layer.domain),)
    return torch.randn(2, 2, *axis, *size, dtype=torch.float64)


def by_the_equations(layer: LocalAttention2d, x: Tensor) -> Tensor:
    """The layer on one image [2, (R,) h, w], in the reference's functions: [4, P, h, w]."""
    g, lifts = layer.group, len(layer.domain) < len(layer.group)
    w, b = layer.w_in.reshape(-1, 2, len(layer.domain)), layer.b_in
    assert b is not None
    if lifts:
        maps = reference.linear_map(x, w[..., 0], b)
    else:
        maps = reference.group_linear_map(x if x.dim() == 4 else x.unsqueeze(1), w, b, g)
    psi_k, beta_k, psi_v, beta_v = layer.affine_parameters()
    if not lifts and len(g) == 1:
        psi_k, psi_v = (None if psi is None else psi.unsqueeze(1) for psi in (psi_k, psi_v))
    zero = torch.zeros(4, *layer.window.size, dtype=torch.float64)
    beta_k, beta_v = (zero if beta is None else beta for beta in (beta_k, beta_v))
    if isinstance(layer, SimpleAffineSelfConv2d):
        i, j = (n // 2 for n in layer.window.size)
        assert psi_k is not None
        query, key, value = reference.group_query(maps, psi_k[..., i, j], beta_k[:, i, j], g), maps, maps
    else:
        query, key, value = maps.split(4)
    if isinstance(layer, AffineSelfConv2d):
        assert layer.psi_q is not None
        assert layer.beta_q is not None
        if lifts:
            query = reference.asc_query(query, layer.psi_q[:, 0], layer.beta_q)
        else:
            query = reference.group_query(query, layer.psi_q, layer.beta_q, g)
    out = reference.group_asc(
        query, key, value, psi_k, beta_k, psi_v, beta_v, g, 2, layer.scale, layer.window
    )
    return reference.group_convolution(out, layer.w_out.reshape(4, 4, -1, 1, 1), g)


def windows(layer: type[LocalAttention2d], group: str | Group) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"padding_mode": mode, "dilation": dilation}
        for mode, dilation in zip(MODES, itertools.cycle((2, 3, 1)), strict=False)
    ]
    if get_group(group).keeps_axes and layer is not StandAloneSelfAttention2d:
        found += [{"kernel_size": (1, 5), "padding_mode": "exclude"}]
        found += [{"kernel_size": (3, 1), "dilation": (2, 1), "padding_mode": "circular"}]
    return found


@kinds_and_groups
def test_every_window_is_the_equations(kind: type[LocalAttention2d], group: str | Group) -> None:
    for options in windows(kind, group):
        layer = make(kind, group, **options)
        x = image(layer)
        for out, one in zip(layer(x), x, strict=True):
            expected = by_the_equations(layer, one).reshape(out.shape)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


# ---- weights and dropout ----


def turn_weights(alpha: Tensor, group: Group, s: int) -> Tensor:
    """L_S[α] for α [N, heads, P, k, k, h, w]: planes, map and window turn."""
    k = alpha.shape[3]
    maps = alpha.movedim(2, 4).flatten(1, 3)  # [N, heads·k·k, P, h, w]
    moved = group.act(maps, s).unflatten(1, (-1, k, k)).movedim((2, 3), (-2, -1))
    return group.act_planar(moved, s).movedim((-2, -1), (3, 4))


@kinds_and_groups
def test_weights_come_with_the_output_in_one_pass(
    kind: type[LocalAttention2d], group: str | Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = get_group(group)
    layer = make(kind, group, dilation=2, padding_mode="exclude")
    x = image(layer, (4, 4))
    expected, alone = layer(x), layer.attention_weights(x)
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return affine_self_conv(*args, **options)

    monkeypatch.setattr(local_attention, "affine_self_conv", counted)
    out, alpha = layer(x, need_weights=True)
    assert len(calls) == 1
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    assert torch.equal(alpha, alone)
    torch.testing.assert_close(alpha.sum((-4, -3)), torch.ones_like(alpha[..., 0, 0, :, :]))
    for s in (s for s in g if g.exact[s] and len(g) > 1):
        turned = g.act_planar(x, s) if x.dim() == 4 else g.act(x, s)
        assert relative_error(layer.attention_weights(turned), turn_weights(alpha, g, s)) < 1e-10

    parameters = dict(layer.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Any:
        given = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(layer, given, (x,), {"need_weights": True})

    few = x[:1, ..., :2, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (few, *parameters.values()), fast_mode=True)


@kinds_and_groups
def test_attention_dropout(kind: type[LocalAttention2d], group: str | Group) -> None:
    """The output is that of the weights returned; right on average; and differentiable, for a given mask."""
    layer = make(kind, group, dropout=0.25)
    x = image(layer, (2, 2))
    plain = layer.eval()(x)
    layer.train()
    many = layer(x[:1].expand(3000, *x.shape[1:]))
    error = (many.mean(0) - plain[0]).abs() / (many.std(0) / len(many) ** 0.5)
    assert error.max() < 6

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return layer(x)

    assert torch.equal(run(x), run(x))
    assert torch.autograd.gradcheck(run, x[:1].clone().requires_grad_(), fast_mode=True)
    torch.manual_seed(2)
    out, alpha = layer(x, need_weights=True)
    assert torch.equal(out, run(x))
    kept = alpha != 0
    torch.testing.assert_close(alpha[kept], layer.eval().attention_weights(x)[kept] / 0.75)


def test_dropped_weights_are_those_that_aggregate() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 5, dtype=torch.float64).unbind()
    out, alpha = affine_self_conv(
        q, k, v, None, None, None, None, num_heads=2, kernel_size=3, dropout_p=0.5, return_attention=True
    )
    assert (alpha == 0).any()
    taps = F.unfold(v, 3, padding=1).reshape(2, 2, 2, 3, 3, 5, 5)  # [N, heads, C, k, k, h, w]
    torch.testing.assert_close(out, (alpha.unsqueeze(2) * taps).sum((3, 4)).flatten(1, 2))


# ---- sequences ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", ["z2", REFLECTION, C2], ids=str)
def test_sequences(group: str | Group, mode: Any) -> None:
    """Equal to the layer on maps of one row; equivariant to reversal and, in a circle, to shifts."""
    g = get_group(group)
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_heads": 2, "group": group, "padding_mode": mode, "dtype": torch.float64}
    layer = AffineSelfConv1d(3, 4, 5, 2, dilation=2, **options)
    row = AffineSelfConv2d(3, 4, (1, 5), dilation=(1, 2), **options)
    row.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, *(() if len(g) == 1 else (2,)), 8, dtype=torch.float64)
    expected = F.avg_pool2d(row(x.unsqueeze(-2)).flatten(1, -3), (1, 2)).reshape(layer(x).shape)
    torch.testing.assert_close(layer(x), expected)
    assert repr(layer).startswith("AffineSelfConv1d(3, 4, kernel_size=5, stride=2, dilation=2, ")
    if len(g) == 2:
        reverse = (2, 3)  # planes and positions
        torch.testing.assert_close(layer(x.flip(reverse)), layer(x).flip(reverse), rtol=0, atol=1e-10)
    if mode == "circular":
        torch.testing.assert_close(layer(x.roll(2, -1)), layer(x).roll(1, -1), rtol=0, atol=1e-10)
    parameters = dict(layer.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *parameters.values()), fast_mode=True)


# ---- concatenation, pooling to invariants, blocks ----


@pytest.mark.parametrize("group", WINDOW_GROUPS, ids=str)
def test_concatenation_and_pooling_on_every_group(group: str | Group) -> None:
    g = get_group(group)
    torch.manual_seed(0)
    axis = () if len(g) == 1 else (len(g),)
    x, planar = (torch.randn(2, 3, *shape, 4, 4, dtype=torch.float64) for shape in (axis, ()))

    def join(a: Tensor, b: Tensor) -> Tensor:
        return concatenate(a, b, a, group=g)

    if axis:
        errors = equivariance_error(join, (x, planar), g)
        assert max(error for error, exact in zip(errors, g.exact, strict=True) if exact) == 0
    repeated = planar.unsqueeze(2).expand(2, 3, len(g), 4, 4) if axis else planar
    assert torch.equal(join(x, planar), torch.cat([x, repeated, x], 1))
    inputs = x[..., :2, :2].clone().requires_grad_(), planar[..., :2, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(join, inputs, fast_mode=True)

    planes = x.reshape(2, 3, len(g), 4, 4)
    for mode, reduce in (("mean", torch.mean), ("max", torch.amax)):
        torch.testing.assert_close(GroupPool(mode, group=g)(x), reduce(planes, 2))  # type: ignore[arg-type]
        torch.testing.assert_close(GlobalPool(mode, group=g)(x), reduce(planes, (2, 3, 4)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("channels", "stride"), [(4, 1), (8, 1), (4, 2)])
def test_a_planar_bottleneck_is_torchs(channels: int, stride: int) -> None:
    """With torch's own convolution, in torch's functions; without a shortcut map where shapes agree."""
    torch.manual_seed(0)
    block = Bottleneck(
        channels, 2, stride, zero_gamma=False, dtype=torch.float64,
        spatial=lambda width, stride: nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
    )  # fmt: skip
    x = torch.randn(2, channels, 6, 6, dtype=torch.float64)

    def normal(y: Tensor) -> Tensor:
        return F.batch_norm(y, None, None, training=True)

    y = normal(F.conv2d(x, block.reduce.conv.weight)).relu()  # type: ignore[arg-type]
    y = normal(F.conv2d(y, block.spatial.conv.weight, stride=stride, padding=1)).relu()  # type: ignore[arg-type]
    y = normal(F.conv2d(y, block.expand.conv.weight))  # type: ignore[arg-type]
    shortcut = x
    if not isinstance(block.shortcut, nn.Identity):
        shortcut = normal(F.conv2d(F.avg_pool2d(x, stride), block.shortcut.conv.weight))  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(block(x), (y + shortcut).relu())
    assert isinstance(block.shortcut, nn.Identity) == (channels == 8)
    assert block(x).shape[1] == block.out_channels == 8


def test_the_table_of_dilations_is_true() -> None:
    """Of docs/angles.md: between the pixels dilation costs equivariance."""
    text = (ROOT / "docs" / "angles.md").read_text("utf-8")
    rows = re.findall(r"^\| `dilation=(\d)` \| ([\d.]+)% \| ([\d.]+)% \|", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for dilation, *told in rows:
        side = 2 * int(dilation) + 5
        for frequency, percent in zip((0.25, 0.5), told, strict=True):
            found = []
            for seed in range(4):
                torch.manual_seed(seed)
                layer = AffineSelfConv2d(
                    8, 8, 3, dilation=int(dilation), num_heads=4, group="c8", dtype=torch.float64
                )
                shape = (16, 8, 8, side, side)
                found.append(centre_error(layer, shape, "c8", frequency=frequency, seed=seed))
            assert abs(sum(errors[1] for errors in found) / 4 - float(percent) / 100) < 0.006
            assert max(errors[2] for errors in found) < 1e-14
