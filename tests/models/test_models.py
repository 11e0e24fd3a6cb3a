"""The models by name: what they are made of, exactly, and what they say to bad input."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.printed import EXACT, PAPER
from helpers.tiny_models import tiny, tiny_options
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import selfconv
from selfconv import models
from selfconv._threads import torch_threads
from selfconv.groups import P4, get_group
from selfconv.models import (
    MODELS,
    SPATIAL_KINDS,
    ResNet,
    ResNetConfig,
    count_flops,
    count_parameters,
    create_model,
    list_models,
    model_facts,
    model_info,
    models_table,
)
from selfconv.models.table import _VARIANTS, DEPTHS, _at_every_depth
from selfconv.nn import GroupBatchNorm, LocalAttention2d
from selfconv.ops import affine_self_conv_flops
from selfconv.train import paper_recipe


def counted_by_hand(name: str, classes: int) -> int:
    """Parameters by the arithmetic of the paper's appendix: nothing here knows of layers or modules."""
    prefix, depth, suffix = re.fullmatch(r"(p4m|p4|c8|)resnet(\d+)_?(.*)", name).groups()  # type: ignore[union-attr]
    order = {"": 1, "p4": 4, "p4m": 8, "c8": 8}[prefix]
    base = {"": 16, "p4": 8, "p4m": 6, "c8": 6}[prefix]
    three, five = (6, 13) if prefix == "c8" else (9, 25)  # what is learned of a 3×3 and of a 5×5 filter
    spatial = re.sub(r"(^|_)se$", "", suffix)
    reduction = {1: 16, 4: 4, 8: 2}[order]
    total = 3 * base * three + 2 * base
    channels = base
    for width in (base, 2 * base, 4 * base):
        out = 4 * width
        linear, window = width * width * order, five * width
        layer = {
            "": three * linear,
            "pool": three * linear,
            "depthwise": window * order,
            "affine": (linear + width) + window * order + window + linear,
            "sasa": 3 * (linear + width) + 5 * width + linear,
            "simple_asc": (linear + width) + window * order + window + linear,
            "asc": 3 * (linear + width) + 2 * (window * order + window) + width * order + width + linear,
        }[spatial]
        se = (2 * out * (out // reduction) + out // reduction + out) if re.search(r"(^|_)se$", suffix) else 0
        for block in range((int(depth) - 2) // 9):
            total += channels * width * order + 2 * width + layer + 2 * width + width * out * order + 2 * out
            total += se
            if block == 0:
                total += channels * out * order + 2 * out
            channels = out
    return total + channels * classes + classes


@pytest.mark.parametrize("name", list_models())
def test_parameters_are_those_of_the_arithmetic(name: str) -> None:
    for classes in (10, 100):
        assert count_parameters(create_model(name, classes)) == counted_by_hand(name, classes)


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_as_stated(name: str) -> None:
    for classes, stated, printed in zip((10, 100), EXACT[name], PAPER[name], strict=True):
        if stated is not None:
            counted = count_parameters(create_model(name, num_classes=classes))
            assert counted == stated
            if (name, classes) != ("p4resnet29", 10):  # printed as 310, against its own count for 100 classes
                assert round(counted / 1000) == printed


def test_the_paper_contradicts_itself_about_p4resnet29() -> None:
    ten, hundred = EXACT["p4resnet29"]
    assert hundred is not None
    assert hundred - ten == 90 * (128 + 1) == 11_610  # 90 more classes, 128 features and a bias each
    assert round(hundred / 1000) == PAPER["p4resnet29"][1]
    assert round((hundred - 11_610) / 1000) == 309 != PAPER["p4resnet29"][0]


def test_the_documentation_tells_the_counts_we_have() -> None:
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+resnet\d\w+|resnet\d\w+)` \|.*\| ([\d,]+) \|", text, re.MULTILINE)
    told = {name: int(count.replace(",", "")) for name, count in rows}
    assert told == {name: count_parameters(create_model(name)) for name in list_models()}
    assert "310k" in text


def test_a_variant_may_have_any_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in ``_VARIANTS`` is all the code needs, also with options that ``ModelFacts`` has not."""
    line = {"resnet{}_wide_window": {"kernel_size": 7, "pool": "max"}}
    for name, options in _at_every_depth(_VARIANTS | line).items():
        monkeypatch.setitem(MODELS, name, options)
    assert list_models("*_wide_window") == ["resnet29_wide_window", "resnet83_wide_window"]
    facts = model_facts("resnet29_wide_window", group="p4")
    assert facts is not None
    assert facts.label == "p4ResNet29+kernel_size=7+pool=max"  # not that of the baseline
    assert paper_recipe("resnet29_wide_window").epochs == 100
    model = create_model("resnet29_wide_window", depth=11)
    assert (model.config["kernel_size"], model.config["pool"]) == (7, "max")


def test_kinds_of_spatial_layers_differ_in_label_and_title() -> None:
    labels = {model_facts("resnet29", spatial=spatial).label for spatial in SPATIAL_KINDS}  # type: ignore[union-attr]
    titles = {kind.title for kind in SPATIAL_KINDS.values()}
    assert len(labels) == len(titles) == len(SPATIAL_KINDS)
    for spatial, kind in SPATIAL_KINDS.items():
        heads: dict[str, Any] = {"num_heads": 4} if kind.attention else {}
        config = ResNetConfig.of(spatial=spatial, **heads)
        assert (config.attention, config.zero_gamma) == (kind.attention, kind.zero_gamma)
        layers = create_model("resnet29", spatial=spatial, depth=11, **heads).modules()
        assert any(isinstance(layer, LocalAttention2d) for layer in layers) == kind.attention


def test_the_names_of_the_models() -> None:
    """A name for each variant and depth, among them the paper's; patterns select from them."""
    names = list_models()
    assert len(names) == len(_VARIANTS) * len(DEPTHS)
    assert {n for n in names if "29" in n} >= set(EXACT)
    assert {n.replace("29", "83") for n in EXACT} <= set(names)
    assert {"p4resnet29_simple_asc", "p4resnet29_asc_se", "p4mresnet29", "p4mresnet29_asc"} <= set(names)
    assert list_models("p4mresnet83*") == [n for n in names if n.startswith("p4mresnet83")] != []
    assert list_models("*_sasa") == ["resnet29_sasa", "resnet83_sasa"]
    assert list_models("vgg*") == []
    assert selfconv.list_models is list_models
    assert selfconv.create_model is create_model


@pytest.mark.parametrize("name", sorted({*list_models("*29*")} - {*list_models("c8*")}))
def test_initialisation_is_the_papers(name: str) -> None:
    model = create_model(name)
    attention = any(isinstance(layer, LocalAttention2d) for layer in model.modules())
    last = {f"{path}.expand.norm" for path, m in model.named_modules() if hasattr(m, "expand")}
    for path, layer in model.named_modules():
        if isinstance(layer, GroupBatchNorm):
            gamma = 0.0 if (attention or name.endswith("affine")) and path in last else 1.0
            assert torch.equal(layer.weight, torch.full_like(layer.weight, gamma)), path
            assert not layer.bias.any()
    maps = (".conv.weight", ".w_in", ".w_out", ".value.weight", ".output.weight")
    weights = [p for n, p in model.named_parameters() if n.endswith(maps)]
    spread = torch.cat([(w * (w[0].numel() / 2) ** 0.5).flatten() for w in weights])  # fan counts every plane
    assert abs(spread.std().item() - 1) < 0.03
    affine = [p for n, p in model.named_parameters() if n.rsplit(".", 1)[1].startswith(("psi", "beta"))]
    assert bool(affine) == (attention or name.endswith("affine"))
    if affine:  # the paper's 1 on the plane, less on a group
        spread = torch.cat([p.flatten() for p in affine]) * len(model.group)
        assert abs(spread.std().item() - 1) < 0.05


def test_the_papers_literal_initialisation_on_a_group() -> None:
    model = create_model("p4resnet29_asc", affine_std=1.0)
    affine = [p for n, p in model.named_parameters() if n.rsplit(".", 1)[1].startswith(("psi", "beta"))]
    assert abs(torch.cat([p.flatten() for p in affine]).std().item() - 1) < 0.05
    with pytest.raises(ValueError, match="affine_std: expected a finite number of 0 or more; got -1"):
        create_model("p4resnet29_asc", affine_std=-1)


def test_every_override_reaches_the_network() -> None:
    model = create_model(
        "resnet29_asc", 7, 1, group=P4, widths=[8, 8, 16], depth=20, kernel_size=3, num_heads=4, psi="dense",
        affine="psi", scale="head", downsample="stride", pool="max",
    )  # fmt: skip
    layer = model.get_submodule("stages.2.1.spatial.conv")
    assert (model.group, layer.group) == (get_group("p4"), P4)
    assert (layer.in_channels, layer.kernel_size, layer.num_heads, layer.psi) == (16, 3, 4, "dense")
    assert layer.affine == "psi"
    assert layer.scale == 4 / 16
    assert len(model.stages) == 3
    assert [len(list(stage.children())) for stage in model.stages] == [2, 2, 2]
    assert model.get_submodule("stages.1.0.shortcut.conv").downsample == "stride"
    assert model.pool.mode == "max"
    with pytest.warns(UserWarning, match="8×12 images"):
        assert model(torch.randn(2, 1, 8, 12)).shape == (2, 7)
    assert model.config["widths"] == (8, 8, 16)


def test_overriding_the_group_gives_the_model_of_that_group() -> None:
    for planar, group in (
        ("resnet29_asc_se", "p4"),
        ("resnet29", "p4m"),
        ("p4resnet29_simple_asc", "p4m"),
        ("resnet29", "c8"),
        ("resnet29_asc", "c8"),
    ):
        name = group + planar.removeprefix("p4")
        assert create_model(planar, group=group).config == create_model(name).config
    assert create_model("p4resnet29_asc", group="z2", depth=83).config == create_model("resnet83_asc").config


def test_c8_models_have_near_300_thousand_parameters_and_pool() -> None:
    assert list_models("c8*29*") == ["c8resnet29", "c8resnet29_asc"]
    assert [count_parameters(create_model(name)) for name in list_models("c8*29*")] == [291_802, 286_510]
    assert all(create_model(name).config["downsample"] == "pool" for name in list_models("c8*29*"))


def test_making_filters_from_coefficients_is_not_counted() -> None:
    """c8 and p4m have eight planes and the same widths, so the same convolutions of an image."""
    of_c8, of_p4m = (
        model_info(name, depth=11, input_size=16).flops for name in ("c8resnet29", "p4mresnet29_pool")
    )
    assert of_c8 == of_p4m


@given(
    st.sampled_from(list_models("*29*")),
    st.integers(4, 14),
    st.integers(4, 14),
    st.integers(1, 3),
    st.sampled_from([1, 3, 4]),
)
def test_any_image_size_batch_and_channels(name: str, h: int, w: int, n: int, channels: int) -> None:
    overrides = tiny_options(name, **({"num_heads": 1} if "sasa" in name else {}))
    model = create_model(name, 5, channels, **overrides).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes, which have their own test
        features = model.forward_features(torch.randn(n, channels, h, w))
    group_axis = () if len(model.group) == 1 else (len(model.group),)
    strided = model.config["downsample"] == "stride"
    sides = [(s + 3) // 4 if strided else s // 4 for s in (h, w)]
    assert features.shape == (n, 32, *group_axis, *sides)
    assert model.forward_head(features).shape == (n, 5)


def test_config_rebuilds_the_model() -> None:
    for name in list_models("*29*"):
        model = create_model(name, 3, 1)
        again = ResNet.from_config(model.config)
        assert {k: v.shape for k, v in again.state_dict().items()} == {
            k: v.shape for k, v in model.state_dict().items()
        }
        assert again.config == model.config
        assert repr(again) == repr(model)


def test_state_dict_keys_are_the_same_in_train_and_eval() -> None:
    model = tiny("p4resnet29_asc_se")
    keys = list(model.eval().state_dict())
    model(torch.randn(1, 3, 12, 8))
    assert list(model.train().state_dict()) == keys


# ---- information ----


def test_flops_of_the_operation_by_hand() -> None:
    n, c, h, k = 2, 6, 5, 3
    query, psi, beta = (n, c, h, h), (c, k, k), (c, k, k)
    per_neighbour = 2 + 2 + 2 + 2  # A^K, score, A^V, aggregation: a multiply-add each
    full = n * h * h * k * k * c * per_neighbour
    assert affine_self_conv_flops(query, query, query, psi, beta, psi, beta) == full
    no_affine = affine_self_conv_flops(query, query, query, None, None, None, None, kernel_size=k)
    assert no_affine == full // 2
    only_beta = affine_self_conv_flops(query, query, query, None, beta, None, None)
    assert only_beta == no_affine + n * h * h * k * k * c
    f, psi_p4 = (n, c, 4, h, h), (c, 4, k, k)
    on_p4 = affine_self_conv_flops(f, f, f, psi_p4, beta, psi_p4, beta)
    assert on_p4 == n * 4 * h * h * k * k * c * (8 + 2 + 8 + 2)
    dense = affine_self_conv_flops(query, query, query, (c, c, k, k), beta, (c, c, k, k), beta)
    assert dense == n * h * h * k * k * c * (2 * c + 2 + 2 * c + 2)
    with pytest.raises(ValueError, match="kernel_size"):
        affine_self_conv_flops(query, query, query, None, None, None, None)


def test_flops_of_a_network_by_hand() -> None:
    """resnet29: 2 · multiply-adds of its convolutions and its classifier."""
    total, channels = 32 * 32 * 9 * 3 * 16, 16
    for width, side in ((16, 32), (32, 16), (64, 8)):
        out = 4 * width
        for block in range(3):
            before = 2 * side if block == 0 and width > 16 else side  # the 1×1 map sees the larger map
            total += before**2 * channels * width + side**2 * (9 * width * width + width * out)
            if block == 0:
                total += side**2 * channels * out
            channels = out
    assert model_info("resnet29").flops == 2 * (total + 256 * 10)


@pytest.mark.parametrize("name", ["resnet29_asc_se", "p4resnet29_simple_asc", "p4mresnet29", "resnet29_sasa"])
def test_info_agrees_with_the_model(name: str) -> None:
    overrides: dict[str, Any] = {"input_size": 16, "depth": 38}
    info = model_info(name, **overrides)
    model = create_model(name, depth=38)
    assert info.parameters == count_parameters(model)
    assert info.flops == count_flops(model.to("meta"), (3, 16, 16))
    assert info.group == model.group.name
    assert info.config == model.config
    spatial = {
        "_asc_se": "AffineSelfConv2d",
        "_simple_asc": "SimpleAffineSelfConv2d",
        "_sasa": "StandAloneSelfAttention2d",
    }
    suffix = name.partition("29")[2]
    if suffix:
        assert info.layers[spatial[suffix]] == 12
    assert info.layers["Linear"] == 1 + 24 * name.endswith("_se")


def test_flops_of_models_by_name_load_no_compiler() -> None:
    """Loading torch's compiler takes as long as loading torch, and counting on "meta" would load it."""
    program = (
        "import sys, selfconv.models; print(selfconv.models.model_info('p4resnet29_asc').flops,"
        " selfconv.models.model_info('resnet29_asc', input_size=224).flops,"
        " selfconv.models.model_info('resnet29', in_channels=300).flops,"
        " [name for name in ('torch._dynamo', 'sympy', 'numba') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out == "441321984 5126788096 181801984 []\n"


@pytest.mark.parametrize("group", ["p4m", "c8"])
def test_groups_of_one_order_take_as_many_flops(group: str) -> None:
    """Steering filters is no work of an image, whether it permutes values or computes them."""
    on_group = create_model("p4mresnet29_asc", depth=11, group=group)
    on_p4m = create_model("p4mresnet29_asc", depth=11)
    assert count_flops(on_group, (3, 32, 32)) == count_flops(on_p4m, (3, 32, 32))


def test_flops_do_not_depend_on_the_backend_or_device() -> None:
    model = tiny("p4resnet29_asc")
    counts = {count_flops(selfconv.nn.set_backend(model, backend), (3, 8, 8)) for backend in (None, "eager")}
    assert counts == {count_flops(model.to("meta"), (3, 8, 8))}
    assert model.get_submodule("stages.0.0.spatial.conv").backend == "eager"  # the model itself is left alone


class Tokens(nn.Module):
    """A layer that reads the pixels of a map one after the other."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2).transpose(1, 2)
        attention = isinstance(self.layer, nn.MultiheadAttention)
        out = self.layer(x, x, x, need_weights=False) if attention else self.layer(x)
        return out[0] if isinstance(out, tuple) else out


PROJECTIONS, PRODUCTS, FEEDFORWARD = 2 * 64 * 16 * 64, 2 * 2 * 4 * 64 * 64 * 4, 2 * 2 * 64 * 16 * 2048


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.MultiheadAttention(16, 4, batch_first=True), PROJECTIONS + PRODUCTS),
        (nn.TransformerEncoderLayer(16, 4, batch_first=True), PROJECTIONS + PRODUCTS + FEEDFORWARD),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2),
            2 * (PROJECTIONS + PRODUCTS + FEEDFORWARD),
        ),
        (nn.LSTM(16, 16, batch_first=True), 2 * 64 * 4 * (16 * 16 + 16 * 16)),
        (nn.LSTM(16, 8, 2, bidirectional=True, batch_first=True), 2 * 64 * 2 * 2 * 4 * (16 * 8 + 8 * 8)),
        (nn.GRU(16, 16, batch_first=True), 2 * 64 * 3 * (16 * 16 + 16 * 16)),
    ],
)
def test_flops_of_torchs_fused_layers(layer: nn.Module, expected: int) -> None:
    """On the CPU these layers are one operator each, without a formula of torch."""
    model = Tokens(layer)
    assert count_flops(model, (16, 8, 8)) == expected
    assert count_flops(model.to("meta"), (16, 8, 8)) == expected
    assert torch.backends.mha.get_fastpath_enabled()


def test_flops_of_a_recurrent_layer_on_a_gpu() -> None:
    """Its operator, on tensors without values."""

    class Fused(nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            state = x.new_empty(2, x.shape[1], self.hidden_size)
            weights, switches = list(self.parameters()), (False, 0.0, False, False)
            return torch.ops.aten._cudnn_rnn(
                x, weights, 4, None, state, state, 2, self.hidden_size, 0, 2, *switches, [], None
            )[0]

    sizes = 2 * 64 * 4 * (16 * 8 + 3 * 8 * 8)
    assert count_flops(Tokens(Fused(16, 8, 2)).to("meta"), (16, 8, 8)) == sizes


def test_flops_of_layers_that_are_called_with_keywords() -> None:
    class Keywords(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.layer(need_weights=False, x=image)

    layer = selfconv.nn.AffineSelfConv2d(4, 8, 3, num_heads=2)
    assert count_flops(Keywords(layer), (4, 8, 8)) == count_flops(layer, (4, 8, 8))


@pytest.mark.parametrize("size", [24, 256, 260])  # the last is counted on "meta", the others on the CPU
def test_flops_by_name_at_any_size(size: int) -> None:
    model = create_model("p4resnet29_asc", depth=11)
    flops = model_info("p4resnet29_asc", depth=11, input_size=size).flops
    assert flops == count_flops(model, (3, size, size)) == count_flops(model.to("meta"), (3, size, size))


def test_flops_of_attention_that_another_module_calls() -> None:
    """A layer's parts may be called one by one, as ``forward`` calls them."""

    class InParts(nn.Module):
        def __init__(self, layer: selfconv.nn.AffineSelfConv2d) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer.output_map(self.layer.attend(self.layer.project(x)))

    layer = selfconv.nn.AffineSelfConv2d(4, 8, 3, num_heads=2)
    assert count_flops(InParts(layer), (4, 8, 8)) == count_flops(layer, (4, 8, 8))


def test_flops_of_torchs_control_flow() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, self.first, self.second, (x,))

    with pytest.raises(NotImplementedError, match="expected a network without torch's control flow"):
        count_flops(Choice(), (5,))


def test_asking_for_information_leaves_the_number_of_threads() -> None:
    numbers = []
    models.registry._counted.cache_clear()
    with torch_threads(3), ThreadPoolExecutor(3) as pool:
        for _ in pool.map(
            lambda name: model_info(name, depth=11), ["resnet29", "resnet29_asc", "resnet29_se"]
        ):
            numbers.append(torch.get_num_threads())
        numbers.append(torch.get_num_threads())
    assert numbers == [3] * 4


def test_another_number_of_threads_is_for_a_while() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), torch_threads(before + 2):
        raise KeyError
    assert torch.get_num_threads() == before


def test_asking_for_information_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    model_info("p4resnet29_asc", depth=11)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_table_of_models() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(models_table("*resnet29_asc"))
    text = console.export_text()
    for name in list_models("*resnet29_asc"):
        (line,) = [line for line in text.splitlines() if f" {name} " in line]
        assert f"{model_info(name).parameters:,}" in line
        assert f"{model_info(name).flops / 1e6:,.1f}" in line
    assert "6 heads" in text
    console.print(models_table("resnet29_[ad]*"))
    lines = {line.split()[1]: line for line in console.export_text().splitlines() if " resnet29" in line}
    assert [name for name, line in lines.items() if "heads" in line] == ["resnet29_asc", "resnet29_asc_se"]


# ---- bad input: one line that restates what was given ----


@pytest.mark.parametrize(
    ("name", "near"),
    [("resnet29asc", "resnet29_asc"), ("p4_resnet29", "p4resnet29"), ("ResNet83_SE", "resnet83_se")],
)
def test_misspelt_names_are_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown model '{name}'; the nearest are .*\b{near}\b") as error:
        create_model(name)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=near):
        model_info(name)


def test_unknown_name_without_a_near_match() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'x'; selfconv.list_models\(\) lists them"):
        create_model("x")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet29", {"num_classes": 0}, "num_classes: expected an integer ≥ 1; got 0"),
        ("resnet29", {"num_classes": -3}, "num_classes: expected an integer ≥ 1; got -3"),
        ("resnet29", {"num_classes": 2.5}, "num_classes: expected an integer ≥ 1; got 2.5"),
        ("resnet29", {"in_channels": 0}, "in_channels: expected an integer ≥ 1; got 0"),
        ("resnet29", {"group": "p6"}, "unknown group 'p6'"),
        ("resnet29", {"depth": 30}, "depth: expected 9n[+]2 up to 1001, such as 29 or 38; got 30"),
        ("resnet29", {"depth": 9_000_002}, "depth: expected 9n[+]2 up to 1001, such as 992 or 1001; got"),
        ("resnet29", {"depth": 2}, "depth: expected an integer ≥ 11; got 2"),
        ("resnet29", {"widths": (16, 32)}, "widths: expected three positive integers; got [(]16, 32[)]"),
        ("resnet29", {"widths": (16, 32, 0)}, "widths: expected three positive integers"),
        ("resnet29", {"widths": 16}, "widths: expected three positive integers; got 16"),
        ("resnet29", {"kernel_size": 4}, "kernel_size: expected an odd integer; got 4"),
        ("resnet29", {"downsample": "max"}, "downsample: expected one of 'stride', 'pool'; got 'max'"),
        ("resnet29", {"pool": "avg"}, "pool: expected one of 'mean', 'max', 'group_max'; got 'avg'"),
        ("resnet29_asc", {"psi": "full"}, "psi: expected one of 'channel', 'dense'; got 'full'"),
        ("resnet29_asc", {"affine": "ψ"}, "affine: expected one of 'both', 'psi', 'beta'; got 'ψ'"),
        ("resnet29_sasa", {"affine": "beta"}, "affine='beta' needs spatial='asc'; got spatial='sasa'"),
        (
            "resnet29_asc",
            {"affine": "beta", "psi": "dense"},
            "affine='beta' has no ψ; expected psi='channel'",
        ),
        (
            "resnet29",
            {"spatial": "conv3"},
            "spatial: expected one of 'conv', 'depthwise', 'affine', 'asc', 'simple_asc', 'sasa'",
        ),
        ("resnet29", {"squeeze_excite": 16}, "squeeze_excite: expected True or False; got 16"),
        (
            "p4resnet29_asc",
            {"num_heads": 3},
            "asc: num_heads=3 does not divide the widths .* on group 'p4'; expected one of 1, 2, 4, 8$",
        ),
        (
            "resnet29_asc",
            {"widths": (6, 12, 24)},
            "num_heads=8 does not divide the widths [(]6, 12, 24[)] on group 'z2'",
        ),
        (
            "resnet29_sasa",
            {"group": "p4"},
            "sasa: num_heads=8 leaves an odd number of channels per head for the widths [(]8, 16, 32[)]",
        ),
        ("resnet29_sasa", {"widths": (5, 5, 5)}, "the widths [(]5, 5, 5[)] .*; expected even widths$"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        create_model(name, **options)
    assert "\n" not in str(error.value)


USES: dict[str, tuple[Any, set[str]]] = {  # an option, a value and the kinds of spatial layers that have it
    "num_heads": (4, {"asc", "simple_asc", "sasa"}),
    "scale": ("head", {"asc", "simple_asc", "sasa"}),
    "affine_std": (0.5, {"asc", "simple_asc", "sasa"}),
    "psi": ("dense", {"asc", "simple_asc"}),
    "affine": ("psi", {"asc"}),
}


@pytest.mark.parametrize("spatial", SPATIAL_KINDS)
@pytest.mark.parametrize("option", USES)
def test_options_that_a_spatial_layer_does_not_have_are_refused(option: str, spatial: str) -> None:
    value, kinds = USES[option]

    def make(**options: Any) -> ResNet:
        torch.manual_seed(0)
        return create_model("resnet29", spatial=spatial, depth=11, **options)

    plain = make(**{option: None})
    assert make(**{option: plain.config[option]}).config == plain.config  # what it has anyway
    if spatial in kinds:
        model = make(**{option: value})
        state, before = model.state_dict(), plain.state_dict()
        alike = state.keys() == before.keys() and all(torch.equal(state[key], before[key]) for key in state)
        assert repr(model) != repr(plain) or not alike
        return
    said = f"^{option}={value!r} needs spatial='asc'.*; got spatial='{spatial}'$"
    with pytest.raises(ValueError, match=said):
        make(**{option: value})


def test_stored_options_without_effect_can_be_read() -> None:
    """As in configurations that earlier versions saved; beside them a new option is still refused."""
    config = create_model("resnet29", depth=11).config | {"scale": "head", "num_heads": 3, "psi": "dense"}
    model = ResNet.from_config(config)
    assert model.config["scale"] == "head"
    model.reset_classifier(3)
    name, said = "resnet29.cifar10", r"^psi='dense' needs spatial='asc' or 'simple_asc'; got spatial='conv'$"
    with pytest.raises(ValueError, match=said):
        create_model(name, pretrained=True, psi="dense")
    assert create_model(name, pretrained=True, psi="channel").config["psi"] == "channel"


def test_numbers_of_numpy_are_saved_as_numbers() -> None:
    classes: Any = np.int64(7)
    options: dict[str, Any] = {
        "depth": np.int64(11),
        "widths": [*np.full(3, 8)],
        "affine_std": np.float32(0.5),
    }
    model = create_model("resnet29_asc", classes, zero_gamma=np.True_, **options)
    assert json.loads(json.dumps(model.config)) == model.config | {"widths": [8, 8, 8]}
    for std in (True, torch.tensor(1.0)):
        with pytest.raises(ValueError, match="affine_std: expected a finite number of 0 or more; got"):
            create_model("resnet29_asc", affine_std=std)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="unknown option kernel; expected some of depth, group, "):
        create_model("resnet29", kernel=3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 8, 8), r"expected images \[N, 3, h, w\] of 4×4 or more; got shape \[2, 1, 8, 8\]"),
        ((3, 8, 8), r"got shape \[3, 8, 8\]"),
        ((1, 3, 8, 3), r"of 4×4 or more; got shape \[1, 3, 8, 3\]"),
    ],
)
def test_images_of_another_shape(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("p4resnet29_asc")(torch.zeros(shape))


def test_images_of_integers() -> None:
    with pytest.raises(TypeError, match=r"expected floating-point images; got torch.uint8 of shape"):
        tiny("resnet29")(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


def test_attention_beside_strided_shortcuts_needs_even_maps() -> None:
    model = tiny("resnet29_asc", downsample="stride")
    assert model(torch.zeros(1, 3, 8, 12)).shape == (1, 10)
    with pytest.raises(ValueError, match=r"multiples of 4; got shape \[1, 3, 8, 10\]"):
        model(torch.zeros(1, 3, 8, 10))


def test_a_description_is_checked_however_it_is_made() -> None:
    with pytest.raises(ValueError, match="unknown group"):
        ResNetConfig(group="c3", widths=(8, 8, 8), kernel_size=3, num_heads=1, downsample="pool")


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        selfconv.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_layers_of_the_network_know_their_group() -> None:
    model = create_model("p4mresnet29_asc_se")
    assert {str(layer.group) for layer in model.modules() if hasattr(layer, "group")} == {"p4m"}
    assert isinstance(model.get_classifier(), nn.Linear)
