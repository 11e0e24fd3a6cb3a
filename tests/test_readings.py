"""The readings of the paper in docs/paper_map.md: what its printed counts force, and what was chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.printed import PAPER

from selfconv.models import create_model, list_models
from selfconv.nn import AffineSelfConv2d, GroupConv2d, LiftingConv2d, LocalAttention2d, SimpleAffineSelfConv2d
from selfconv.ops import reference
from selfconv.train import paper_recipe

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "paper_map.md").read_text("utf-8")


def thousands(name: str, *left_out: str, added: int = 0) -> int:
    """Parameters for 10 classes as the paper rounds them, without those whose names end so."""
    parameters = create_model(name).named_parameters()
    return round((sum(p.numel() for n, p in parameters if not n.endswith(left_out)) + added) / 1000)


def attention_width(name: str) -> int:
    """Channels of all attention layers of a network together: parameters of one bias in each."""
    return sum(m.out_channels for m in create_model(name).modules() if isinstance(m, LocalAttention2d))


@pytest.mark.parametrize("name", ["resnet29_asc", "p4resnet29_asc", "resnet29_sasa"])
def test_the_counts_force_biases_of_q_k_v(name: str) -> None:
    assert thousands(name) == PAPER[name][0]
    assert thousands(name, ".b_in") == PAPER[name][0] - 1
    if name == "resnet29_asc":  # neither two of the three, nor that of W^O alone are enough
        assert thousands(name, added=-attention_width(name)) == PAPER[name][0] - 1
        assert thousands(name, ".b_in", added=attention_width(name)) == PAPER[name][0] - 1


def test_the_counts_leave_no_bias_for_the_output_map() -> None:
    name = "resnet29_simple_asc"
    assert thousands(name) == PAPER[name][0]
    assert thousands(name, added=attention_width(name)) == PAPER[name][0] + 1


@pytest.mark.parametrize("name", ["resnet29_se", "p4resnet29_se", "resnet29_asc_se"])
def test_the_counts_force_the_bias_of_squeeze_and_excite(name: str) -> None:
    assert thousands(name) == PAPER[name][0]
    assert thousands(name, "se.expand.bias", "se.reduce.bias") < PAPER[name][0]
    assert (thousands(name, "se.expand.bias") < PAPER[name][0]) == (not name.startswith("p4"))
    assert thousands(name, "se.reduce.bias") == PAPER[name][0]  # too few to tell


@pytest.mark.parametrize("name", ["p4resnet29_se", "p4resnet29_asc"])
def test_the_counts_force_a_head_that_reduces_the_group(name: str) -> None:
    model = create_model(name)
    assert isinstance(model.fc, torch.nn.Linear)
    assert model.fc.in_features == 128
    assert thousands(name, added=3 * model.fc.weight.numel()) > PAPER[name][0] + 3  # a weight for each plane
    features = torch.randn(2, 128, 4, 8, 8)
    torch.testing.assert_close(model.pool(features), features.mean((2, 3, 4)))


@pytest.mark.parametrize("group", ["z2", "p4"])
@pytest.mark.parametrize("bias", [False, True])
def test_pooling_and_the_output_map_commute(group: str, bias: bool) -> None:
    torch.manual_seed(0)
    pooled = AffineSelfConv2d(4, 4, stride=2, num_heads=2, group=group, bias=bias, dtype=torch.float64)
    full = AffineSelfConv2d(4, 4, num_heads=2, group=group, bias=bias, dtype=torch.float64)
    if pooled.b_out is not None:
        torch.nn.init.normal_(pooled.b_out)
    full.load_state_dict(pooled.state_dict())
    x = torch.randn(2, 4, *([4] if group == "p4" else []), 8, 8, dtype=torch.float64)
    y = full(x)
    expected = F.avg_pool2d(y.flatten(1, -3), 2).reshape(*y.shape[:-2], 4, 4)
    torch.testing.assert_close(pooled(x), expected, rtol=0, atol=1e-12)


def test_attention_models_alone_warm_up() -> None:
    for name in list_models():
        attention = attention_width(name) > 0
        assert (paper_recipe(name).warmup > 0) == attention, name


def test_the_fan_of_the_stem_counts_one_plane() -> None:
    lifting = LiftingConv2d(64, 256, 3, group="p4")
    assert lifting.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert GroupConv2d(64, 256, 3, group="p4").weight.std().item() == pytest.approx(
        (2 / (4 * 64 * 9)) ** 0.5, rel=0.02
    )


@pytest.mark.parametrize("name", list_models("*29*asc"))
def test_d_k_is_the_channels_of_the_layer(name: str) -> None:
    layers = [m for m in create_model(name).modules() if isinstance(m, LocalAttention2d)]
    assert layers
    for layer in layers:  # on a group as well: its planes are summed before the score, and do not count
        assert layer.key_channels == layer.out_channels
        assert layer.scale == pytest.approx(1 / layer.out_channels)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("unit", [True, False])
def test_eq4_needs_unit_maps_and_no_beta(beta: float, unit: bool) -> None:
    """ψ = 1 alone does not make simple ASC equation 4."""
    torch.manual_seed(0)
    layer = SimpleAffineSelfConv2d(4, 4, 3, num_heads=2, qkv_bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.psi_kv.fill_(1)
        layer.beta_kv.mul_(beta)
        if unit:
            for w in (layer.w_in, layer.w_out):
                w.copy_(torch.eye(4)[..., None, None])
    f = torch.randn(4, 5, 6, dtype=torch.float64)
    difference = layer(f[None])[0] - reference.simple_attention(f, 3, 2, layer.scale)
    assert (difference.abs().max().item() < 1e-12) == (unit and beta == 0)


def test_every_reading_names_a_test_that_exists() -> None:
    section = PAGE.partition("## Where the paper leaves a choice")[2]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| **")]
    assert len(rows) >= 12
    for row in rows:
        names = re.findall(r"`(test_\w+)\.(test_\w+)`", row[-1])
        assert names or row[-1].strip() in ("", "–"), row
        for file, name in names:
            [path] = TESTS.rglob(f"{file}.py")
            assert re.search(rf"^def {name}\(", path.read_text("utf-8"), re.MULTILINE), name
