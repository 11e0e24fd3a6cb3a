"""The entropy of attention that an evaluation reports."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch

from selfconv.data import DataInfo, Split, load_data, normalise
from selfconv.models import create_model
from selfconv.nn import LocalAttention2d
from selfconv.trained import attention_entropy, evaluate, open_trained
from selfconv.visualize import Inspection

OPTIONS: dict[str, Any] = {"depth": 11, "widths": (8, 8, 8), "num_heads": 4, "in_channels": 1}


@pytest.mark.parametrize("name", ["resnet29_asc", "p4resnet29_asc", "resnet29_simple_asc", "resnet29_sasa"])
def test_the_mean_over_images_heads_planes_and_pixels(name: str) -> None:
    data = load_data("digits", image_size=8)
    info, split = DataInfo.of(data), Split(data.test.images[:3], data.test.labels[:3])
    model = create_model(name, affine_std=2.0, **OPTIONS).eval()
    found = attention_entropy(model, split, info)
    views = [Inspection(model, image) for image in normalise(split.images, info.mean, info.std)]
    for layer, entropy in found.items():
        assert entropy == pytest.approx(fmean(float(view.entropy(layer).mean()) for view in views), abs=1e-5)
        assert 0 < entropy < 1
    assert list(found) == [n for n, m in model.named_modules() if isinstance(m, LocalAttention2d)]


def test_uniform_attention() -> None:
    data = load_data("digits", image_size=8)
    model = create_model("resnet29_asc", **OPTIONS).eval()
    for layer in model.modules():
        if isinstance(layer, LocalAttention2d):
            for parameter in layer.affine_parameters()[:2]:
                assert parameter is not None
                torch.nn.init.zeros_(parameter)
    found = attention_entropy(model, data.test, DataInfo.of(data))
    assert list(found.values()) == pytest.approx([1.0] * 3, abs=1e-6)


def test_without_attention() -> None:
    data = load_data("digits", image_size=8)
    options = {name: value for name, value in OPTIONS.items() if name != "num_heads"}
    assert attention_entropy(create_model("resnet29", **options), data.test, DataInfo.of(data)) == {}


def test_evaluate_reports_entropy() -> None:
    attention, convolution = (evaluate(open_trained(f"digits_{name}")) for name in ("asc", "conv"))
    assert attention.attention_entropy is not None
    assert 0.9 < min(attention.attention_entropy.values()) <= (attention.mean_entropy or 0) < 0.99
    assert (convolution.attention_entropy, convolution.mean_entropy) == ({}, None)
