"""timm for real: its registry, its interface, its training loop; and a network of its own, converted."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT
from helpers.timm_import import import_timm
from helpers.tiny_models import TINY, error_over_spread, tiny_options
from torch import nn

import selfconv
from selfconv.models import ResNet, list_models
from selfconv.nn import LocalAttention2d

timm = import_timm()


def test_every_model_is_registered() -> None:
    assert set(list_models()) <= set(timm.list_models())
    assert set(timm.list_models("p4mresnet*")) == set(list_models("p4m*"))
    assert timm.is_model("p4resnet29_asc")
    assert callable(timm.model_entrypoint("p4resnet29_asc"))


def test_created_by_timm() -> None:
    model = timm.create_model(
        "p4resnet29_asc",
        pretrained=False,
        num_classes=7,
        in_chans=1,
        global_pool="max",
        drop_rate=0.0,
        **TINY,
    )
    assert type(model) is ResNet
    assert model.config == selfconv.create_model("p4resnet29_asc", 7, 1, pool="max", **TINY).config
    cfg: Any = model.pretrained_cfg
    assert cfg["architecture"] == "p4resnet29_asc"
    from timm.data import resolve_data_config

    assert resolve_data_config({}, model=model)["input_size"] == (3, 32, 32)


@pytest.mark.parametrize("name", ["resnet29_asc", "p4resnet29_asc_se", "p4mresnet29"])
def test_the_interface(name: str) -> None:
    model = timm.create_model(name, **tiny_options(name, downsample="pool")).eval()
    images = torch.randn(2, 3, 8, 8)
    features = model.forward_features(images)
    assert features.shape[1] == model.num_features == 32
    assert torch.equal(model.forward_head(features), model(images))
    pooled = model.forward_head(features, pre_logits=True)
    assert torch.equal(model.get_classifier()(pooled), model(images))
    model.reset_classifier(5)
    assert model(images).shape == (2, 5)
    assert (model.num_classes, model.get_classifier().out_features) == (5, 5)
    model.reset_classifier(0, "max")
    assert isinstance(model.get_classifier(), nn.Identity)
    assert torch.equal(model(images), features.flatten(2).amax(2))
    model.reset_classifier(4, "avg")
    assert error_over_spread(model.forward_head(features, pre_logits=True), pooled) < 1e-5
    model.set_grad_checkpointing(True)
    model.train()(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match="num_classes: expected an integer ≥ 0; got -1"):
        model.reset_classifier(-1)
    with pytest.raises(ValueError, match="pool: expected one of 'mean', 'max', 'group_max'; got 'catavgmax'"):
        model.reset_classifier(3, "catavgmax")


def test_features_alone() -> None:
    model = timm.create_model("resnet29", num_classes=0, **tiny_options("resnet29")).eval()
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 32)


def test_a_new_classifier_is_where_the_model_is() -> None:
    model = timm.create_model("resnet29", **tiny_options("resnet29")).double()
    model.reset_classifier(3)
    assert model.get_classifier().weight.dtype == torch.float64


def test_unsupported_timm_options() -> None:
    with pytest.raises(ValueError, match=r"resnet29 has no dropout; got drop_rate=0\.5"):
        timm.create_model("resnet29", drop_rate=0.5)
    with pytest.raises(TypeError, match="unknown option features_only"):
        timm.create_model("resnet29", features_only=True)
    with pytest.raises(ValueError, match="no weights are shipped for 'resnet83'"):
        timm.create_model("resnet83", pretrained=True)
    with pytest.raises(ValueError, match="pool: expected one of 'mean', 'max', 'group_max'; got ''"):
        timm.create_model("resnet29", global_pool="")


@pytest.mark.parametrize("name", ["resnet29_asc_se", "p4resnet29_asc"])
def test_the_training_loop(name: str) -> None:
    """As timm's train script does it: channels_last, autocast, its optimizer, loss and EMA."""
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, accuracy

    model = timm.create_model(name, num_classes=4, **tiny_options(name)).to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
    ema = ModelEmaV3(model, decay=0.5)
    loss_of = LabelSmoothingCrossEntropy(0.1)
    labels = torch.arange(16) % 4
    images = (labels.float()[:, None, None, None] + 0.1 * torch.randn(16, 3, 8, 8)).to(
        memory_format=torch.channels_last
    )
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        ema.update(model, step)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    shadow = ema.module
    assert list(shadow.state_dict()) == list(model.state_dict())
    assert not torch.equal(shadow.fc.weight, model.fc.weight)
    (top1,) = accuracy(shadow.eval()(images), labels, topk=(1,))
    assert 0 <= top1 <= 100


def test_a_network_of_timms_converted() -> None:
    network = timm.create_model("resnet18", num_classes=10).eval()
    report = selfconv.convert(network, input_shape=(3, 64, 64))
    assert len(report.replaced) == 16  # two in each of eight blocks
    assert list(report.kept) == ["conv1"]
    assert isinstance(network.layer1[0].conv1, LocalAttention2d)
    assert network(torch.randn(1, 3, 64, 64)).shape == (1, 10)
    assert network(torch.randn(1, 3, 57, 71)).shape == (1, 10)  # odd maps meet their shortcuts too
    assert report.parameters[1] < report.parameters[0]
    assert report.flops is not None


def test_the_documented_example() -> None:
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "import timm" in b]
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["model"].num_classes == 100


def test_beside_a_broken_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the way out, in place of torchvision's own error."""
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "timm" or name == "selfconv.timm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ImportError,
        match=r"^selfconv.timm: timm cannot be imported beside torch .* \(operator torchvision::nms does not "
        r"exist\): install the torchvision that was built for this torch, from the same index$",
    ):
        importlib.import_module("selfconv.timm")
