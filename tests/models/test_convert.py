"""Affine self convolution put into other people's networks."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from helpers import ROOT
from torch import Tensor, nn

import selfconv
from selfconv.models import convert, count_flops, count_parameters, create_model
from selfconv.nn import (
    AffineSelfConv2d,
    GroupConv2d,
    LocalAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)


class Block(nn.Module):
    """A basic block as torchvision's ResNet18 has it."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1))
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.conv1(x))).mean((2, 3)))


IN_BLOCKS = [f"layer{i}.{j}.conv{k}" for i in (1, 2) for j in (0, 1) for k in (1, 2)]


def test_by_rule() -> None:
    network = Network()
    parameters, flops = count_parameters(network), count_flops(network, (3, 32, 32))
    report = convert(network, num_heads=4, input_shape=(3, 32, 32))
    assert report.model is network
    assert list(report.replaced) == IN_BLOCKS
    assert report.kept == {"conv1": "it is the first convolution of the network"}
    assert report.parameters == (parameters, count_parameters(network))
    assert report.flops == (flops, count_flops(network, (3, 32, 32)))
    assert isinstance(network.layer1[0].conv1, AffineSelfConv2d)
    assert type(network.get_submodule("layer2.0.downsample.0")) is nn.Conv2d  # 1×1: not spatial
    last = network.get_submodule("layer2.1.conv2")
    assert (last.in_channels, last.out_channels) == (32, 32)
    network(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("size", [(32, 32), (33, 33), (29, 37), (31, 30), (9, 5)])
def test_converted_layers_keep_output_sizes(size: tuple[int, int]) -> None:
    network = Network().eval()
    images = torch.randn(1, 3, *size)
    shapes: dict[str, list[torch.Size]] = {name: [] for name in IN_BLOCKS}

    def watch() -> None:
        handles = [
            network.get_submodule(n).register_forward_hook(lambda _, __, y, n=n: shapes[n].append(y.shape))
            for n in IN_BLOCKS
        ]
        network(images)
        for handle in handles:
            handle.remove()

    watch()
    convert(network, num_heads=4)
    watch()
    assert all(before == after for before, after in shapes.values())


def test_by_name() -> None:
    network = Network()
    report = convert(network, where=["layer1.*", "layer2.1.conv2"], num_heads=4)
    assert list(report.replaced) == [*IN_BLOCKS[:4], "layer2.1.conv2"]
    assert report.kept["layer2.0.conv1"] == "it was not asked for"
    assert report.flops is None
    assert type(network.layer2[0].conv1) is nn.Conv2d
    assert list(convert(Network(), where="conv1", num_heads=4).replaced) == [
        "conv1"
    ]  # even the stem, if asked


def test_by_function() -> None:
    report = convert(Network(), where=lambda name, conv: conv.stride[0] > 1 and name != "conv1", num_heads=4)
    assert list(report.replaced) == ["layer2.0.conv1"]


@pytest.mark.parametrize(
    ("layer", "kind"),
    [("asc", AffineSelfConv2d), ("simple_asc", SimpleAffineSelfConv2d), ("sasa", StandAloneSelfAttention2d)],
)
def test_the_kind_of_layer(layer: Any, kind: type) -> None:
    network = Network()
    convert(network, layer=layer, kernel_size=7, num_heads=2, backend="eager")
    new = network.get_submodule("layer1.1.conv2")
    assert type(new) is kind
    assert (new.kernel_size, new.num_heads, new.backend) == (7, 2, "eager")


def test_conversion_keeps_dtype_device_and_mode() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding="same", dtype=torch.float64)
    ).eval()
    convert(network, num_heads=2)
    new = network[1]
    assert isinstance(new, AffineSelfConv2d)
    assert new.b_out is not None
    assert new.w_in.dtype == torch.float64
    assert not new.training


def test_shared_convolution_stays_shared() -> None:
    shared = nn.Conv2d(8, 8, 3, padding=1)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), shared, nn.ReLU(), shared)
    report = convert(network, num_heads=2)
    assert list(report.replaced) == ["1", "3"]
    assert network[1] is network[3]
    assert isinstance(network[3], AffineSelfConv2d)


def test_a_layer_in_two_places_stays_one_if_one_place_is_named() -> None:
    shared = nn.Conv2d(8, 8, 3, padding=1)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), shared, nn.ReLU(), shared)
    report = convert(network, where="3", num_heads=2)
    assert list(report.replaced) == ["1", "3"]
    assert network[1] is network[3]


class DefinedBackwards(nn.Module):
    """The stem is defined last, and runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.stem(x))


def test_first_convolution_by_order_of_execution() -> None:
    report = convert(DefinedBackwards(), num_heads=4, input_shape=(3, 8, 8))
    assert list(report.replaced) == ["body"]
    assert report.kept == {"stem": "it is the first convolution of the network"}
    report = convert(DefinedBackwards(), num_heads=4)
    assert list(report.replaced) == ["stem"]
    assert report.kept["body"] == (
        "it is the first convolution of the network by order of definition "
        "(with input_shape, by order of execution)"
    )


def test_tracing_leaves_the_network_unchanged() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)).train()
    convert(network, num_heads=4, input_shape=(3, 8, 8))
    assert network[1].num_batches_tracked == 0
    assert network.training
    assert not any(module._forward_pre_hooks for module in network.modules())


class Functional(DefinedBackwards):
    """Uses the weights of its convolution by hand, as no attention layer has them."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(self.stem(x), self.body.weight, padding=1)


class Listed(DefinedBackwards):
    """Holds its convolution in a list as well, which nobody told PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [self.stem, self.body]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Functional, "AttributeError: 'AffineSelfConv2d' object has no attribute 'weight'"),
        (Listed, "ValueError: it still calls the convolution that was body, which it holds elsewhere too"),
    ],
)
def test_conversion_that_breaks_the_network_is_undone(kind: type[DefinedBackwards], reason: str) -> None:
    network = kind()
    body = network.body
    with pytest.raises(ValueError, match=rf"image of shape \[3, 8, 8\], and was left as it was: {reason}$"):
        convert(network, num_heads=4, input_shape=(3, 8, 8))
    assert network.body is body


@pytest.mark.parametrize("network", [nn.Sequential(), nn.Identity(), nn.ReLU(), nn.ModuleDict()])
def test_an_empty_network(network: nn.Module) -> None:
    shape = None if isinstance(network, nn.ModuleDict) else (3, 8, 8)
    lines = str(convert(network, input_shape=shape)).splitlines()
    assert lines[:2] == ["replaced 0 of 0 spatial convolutions", "parameters: 0 → 0"]
    assert lines[2:] == ([] if shape is None else ["FLOPs: 0 → 0"])


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (lambda: nn.Sequential(nn.LazyConv2d(8, 3)), "expected initialised weights; got lazy layers"),
        (lambda: torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3))), "got a ScriptModule"),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 8, 3)),
            r"the network does not run on an image of shape \[3, 8, 8\]: RuntimeError: Given groups=1",
        ),
    ],
    ids=["lazy", "scripted", "other channels"],
)
@pytest.mark.filterwarnings("ignore")
def test_networks_that_cannot_be_converted(network: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        convert(network(), num_heads=4, input_shape=(3, 8, 8))
    assert "\n" not in str(error.value)


def test_our_own_baseline_becomes_our_own_model() -> None:
    for name in ("resnet29", "p4resnet29_se"):
        model = create_model(name)
        report = convert(model, num_heads=8)
        assert len(report.replaced) == 9
        wanted = create_model(name.replace("29", "29_asc"))
        assert count_parameters(model) == count_parameters(wanted)
        assert not [m for m in model.modules() if isinstance(m, GroupConv2d) and m.kernel_size > 1]


def test_the_report_reads_well() -> None:
    lines = str(convert(Network(), num_heads=4, input_shape=(3, 32, 32))).splitlines()
    assert lines[0] == "replaced 8 of 9 spatial convolutions"
    assert lines[1].startswith("  layer1.0.conv1: Conv2d(16, 16, kernel_size=(3, 3), ")
    assert " → AffineSelfConv2d(16, 16, kernel_size=5" in lines[1]
    assert "  conv1: kept, it is the first convolution of the network" in lines
    assert re.fullmatch(r"parameters: [\d,]+ → [\d,]+ \([+-]\d+\.\d%\)", lines[-2])
    assert re.fullmatch(r"FLOPs: [\d,]+ → [\d,]+ \([+-]\d+\.\d%\)", lines[-1])


# ---- what cannot be replaced: kept by rule, refused by name ----

OBSTACLES = {
    "grouped": (
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        "it has groups=8, dilation=(1, 1); expected 1 and 1",
    ),
    "dilated": (nn.Conv2d(8, 8, 3, padding=2, dilation=2), "it has groups=1, dilation=(2, 2)"),
    "valid": (nn.Conv2d(8, 8, 3), "its padding (0, 0) does not keep the size of a map; expected 1"),
    "even": (nn.Conv2d(8, 8, 4, padding=2), "its kernel is (4, 4) with stride (1, 1); expected squares"),
    "oblong": (nn.Conv2d(8, 8, (1, 3), padding=(0, 1)), "its kernel is (1, 3) with stride (1, 1)"),
    "reflected": (nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), "it pads with 'reflect'"),
    "odd_width": (nn.Conv2d(8, 6, 3, padding=1), "4 heads do not divide its 6 output channels"),
    "parametrised": (
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1)),
        "ParametrizedConv2d may be more than a convolution",
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_layers_that_cannot_be_replaced_are_named(name: str) -> None:
    conv, reason = OBSTACLES[name]
    network = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3), name: conv})
    report = convert(network, num_heads=4)
    assert report.replaced == {}
    assert report.kept[name].startswith(reason)
    with pytest.raises(ValueError, match=rf"^{name} \(.*\) cannot be replaced: {re.escape(reason)}") as error:
        convert(network, where=name, num_heads=4)
    assert "\n" not in str(error.value)
    assert network[name] is conv


def _without_warning(adorn: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def silent(conv: nn.Module) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and in use
            adorn(conv)

    return silent


def _tagged(conv: nn.Conv2d) -> None:
    conv.tag = "of the user's own"  # type: ignore[assignment]


def _own_forward(conv: nn.Conv2d) -> None:
    conv.forward = lambda x: -x  # type: ignore[method-assign, assignment]


ADDITIONS: dict[str, tuple[Callable[[nn.Conv2d], Any], str]] = {
    "forward hook": (lambda c: c.register_forward_hook(lambda *_: None), "forward hooks"),
    "forward pre-hook": (lambda c: c.register_forward_pre_hook(lambda *_: None), "forward pre hooks"),
    "backward hook": (lambda c: c.register_full_backward_hook(lambda *_: None), "backward hooks"),
    "backward pre-hook": (
        lambda c: c.register_full_backward_pre_hook(lambda *_: None),
        "backward pre hooks",
    ),
    "saving": (lambda c: c.register_state_dict_post_hook(lambda *_: None), "state dict hooks"),
    "loading": (lambda c: c.register_load_state_dict_pre_hook(lambda *_: None), "load state dict pre hooks"),
    "gradient hook": (lambda c: c.weight.register_hook(lambda g: g), "hooks on its weight"),
    "accumulated": (
        lambda c: c.weight.register_post_accumulate_grad_hook(lambda p: None),
        "hooks on its weight",
    ),
    "weight_norm": (_without_warning(nn.utils.weight_norm), "forward pre hooks"),
    "spectral_norm": (nn.utils.spectral_norm, "forward pre hooks"),
    "pruned": (lambda c: nn.utils.prune.l1_unstructured(c, "weight", 0.5), "forward pre hooks"),
    "tagged": (_tagged, "an attribute of its own (tag)"),
    "forward": (_own_forward, "an attribute of its own (forward)"),
    "buffer": (lambda c: c.register_buffer("mask", torch.ones(3)), "an attribute of its own (mask)"),
    "child": (lambda c: c.add_module("act", nn.ReLU()), "an attribute of its own (act)"),
}


@pytest.mark.parametrize("name", ADDITIONS)
@pytest.mark.parametrize("kind", [nn.Conv2d, partial(GroupConv2d, group="p4")], ids=["planar", "group"])
def test_convolutions_with_hooks_or_norms_are_kept(name: str, kind: Any) -> None:
    adorn, what = ADDITIONS[name]
    conv = kind(8, 8, 3, padding=1)
    adorn(conv)
    network = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3), "conv": conv})
    report = convert(network, num_heads=4)
    assert report.replaced == {}
    assert report.kept["conv"] == f"it has {what}, which a new layer would not have"
    with pytest.raises(ValueError, match=r"^conv \(.*\) cannot be replaced: it has"):
        convert(network, where="conv", num_heads=4)
    assert network["conv"] is conv


def test_tied_weights_stay_tied() -> None:
    network = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
    network[3].weight = network[1].weight
    report = convert(network, num_heads=4)
    assert list(report.replaced) == ["2"]
    assert report.kept["1"].startswith("it has a weight that another layer has too")
    assert network[3].weight is network[1].weight


def test_heads_of_sasa_need_two_halves() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1))
    assert "even number of channels per head" in convert(network, layer="sasa", num_heads=8).kept["1"]


def test_an_error_leaves_the_network_as_it_was() -> None:
    network = Network()
    with pytest.raises(ValueError, match="kernel_size"):
        convert(network, kernel_size=4, num_heads=4)
    with pytest.raises(TypeError, match="nonsense"):
        convert(network, nonsense=1, num_heads=4)
    assert not [m for m in network.modules() if isinstance(m, LocalAttention2d)]


def test_where_matches_no_convolution() -> None:
    with pytest.raises(
        ValueError, match=r"no spatial convolution is named 'layer1.0.conv'; the nearest are 'layer1.0"
    ):
        convert(Network(), where="layer1.0.conv", num_heads=4)
    with pytest.raises(ValueError, match=r"^convert: num_heads: expected an integer ≥ 1; got 0$"):
        convert(Network(), num_heads=0)
    with pytest.raises(ValueError, match="no spatial convolution is named 'x'; there are none"):
        convert(nn.Sequential(nn.Linear(3, 3)), where="x")
    with pytest.raises(
        ValueError, match="layer: expected one of 'asc', 'simple_asc', 'sasa'; got 'attention'"
    ):
        convert(Network(), layer="attention")  # type: ignore[arg-type]


def test_a_convolution_that_is_the_whole_model() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1)
    assert convert(conv).replaced == {}
    with pytest.raises(ValueError, match="cannot be replaced: it is the whole model"):
        convert(conv, where=lambda name, layer: True)


def test_the_documented_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/models.md, in order, but the one that needs timm."""
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    blocks = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "import timm" not in b]
    assert len(blocks) == text.count("```python") - text.count("import timm") > 0
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert set(os.listdir()) == {"my-model", "small.pt2", "small.onnx"}
    assert names["report"].replaced.keys() == {"2", "4"}
    assert selfconv.convert is convert
