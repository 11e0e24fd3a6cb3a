"""What the group promises, for whole networks: turned images, flipped images, shifted images."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.tiny_models import (
    TINY,
    after_sgd_steps,
    error_over_spread,
    tiny,
    tiny_options,
    with_active_norms,
)
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from selfconv.models import ResNet, create_model, list_models
from selfconv.testing import audit


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@torch.no_grad()
def invariance_error(model: ResNet, images: Tensor) -> float:
    """The largest change of a logit under any element of the model's group, over the spread of the logits."""
    logits = model(images)
    return max(
        error_over_spread(model(model.group.act_planar(images, element)), logits) for element in model.group
    )


@pytest.mark.parametrize("name", ["p4resnet29_asc", "p4resnet29_simple_asc", "p4resnet29_asc_se"])
def test_p4_attention_models_are_invariant_to_quarter_turns(name: str) -> None:
    images = torch.randn(2, 3, 32, 32)
    model = create_model(name).eval()
    with no_warnings():
        assert invariance_error(model, images) < 1e-4
        assert invariance_error(after_sgd_steps(model), images) < 1e-4
    gammas = [m.weight for n, m in model.named_modules() if n.endswith("expand.norm")]
    assert all(gamma.any() for gamma in gammas)  # the blocks took part


def test_p4_convolution_with_pooling_is_invariant() -> None:
    images = torch.randn(2, 3, 32, 32)
    model = create_model("p4resnet29", downsample="pool").eval()
    with no_warnings():
        assert invariance_error(model, images) < 1e-4
        assert invariance_error(after_sgd_steps(model), images) < 1e-4


@pytest.mark.parametrize("name", ["p4mresnet29", "p4mresnet29_asc"])
def test_p4m_models_do_not_see_flips_either(name: str) -> None:
    images = torch.randn(2, 3, 32, 32)
    model = create_model(name, downsample="pool").eval()
    assert any(torch.equal(model.group.act_planar(images, s), images.flip(-1)) for s in model.group)
    with no_warnings():
        assert invariance_error(model, images) < 1e-4
        assert invariance_error(after_sgd_steps(model, batch=2), images) < 1e-4


@pytest.mark.parametrize("name", list_models("p4*29*"))
def test_equivariance_is_exact_for_any_weights(name: str) -> None:
    """In double precision, with no part of the network idle: the features turn with the image."""
    model = with_active_norms(create_model(name, **tiny_options(name, downsample="pool")).double())
    images = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    with torch.no_grad(), no_warnings():
        features = model.forward_features(images)
        for s in model.group:
            turned = model.forward_features(model.group.act_planar(images, s))
            assert error_over_spread(turned, model.group.act(features, s)) < 1e-9
    assert invariance_error(model, images) < 1e-9


def test_planar_models_do_see_quarter_turns() -> None:
    """The measure can fail."""
    images = torch.randn(2, 3, 32, 32)
    model = after_sgd_steps(create_model("resnet29"), batch=8)
    with torch.no_grad():
        assert error_over_spread(model(images.rot90(1, (-2, -1))), model(images)) > 1e-2


def test_audit_names_the_strided_layer_of_p4resnet29() -> None:
    model = create_model("p4resnet29", depth=11)
    report = audit(model, 32)
    assert report.culprit == "stages.1.0.spatial.conv"
    assert report.reason is not None
    assert report.reason.startswith("stride 2 on an even-sized map")
    assert set(report.sizes) == {29, 33, 37}  # the sizes that the model's own warning gives
    assert audit(model, 33).passed


@pytest.mark.parametrize("name", ["p4resnet29", "p4resnet29_asc", "p4mresnet29_se", "resnet29_sasa"])
def test_audit_passes_networks_that_pool(name: str) -> None:
    overrides = tiny_options(name, downsample="pool", num_heads=1)
    assert audit(with_active_norms(create_model(name, in_channels=1, **overrides)), 16).passed


# ---- sizes ----


@given(
    st.sampled_from(["p4resnet29", "p4resnet29_asc", "p4mresnet29"]),
    st.sampled_from(["stride", "pool"]),
    st.integers(4, 17),
    st.integers(4, 17),
)
@example("p4resnet29", "stride", 13, 9)
@example("p4mresnet29", "pool", 12, 12)
@example("p4resnet29_asc", "pool", 16, 4)
def test_a_size_is_warned_about_if_and_only_if_it_breaks_equivariance(
    name: str, downsample: str, h: int, w: int
) -> None:
    model = with_active_norms(
        create_model(name, **tiny_options(name, downsample=downsample)).double(), size=20
    )
    images = torch.randn(2, 3, h, w, dtype=torch.float64)
    if downsample == "stride" and name.endswith("asc") and {h % 4, w % 4} != {0}:
        with pytest.raises(ValueError, match="strided shortcuts needs images whose sides are multiples of 4"):
            model(images)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = invariance_error(model, images)
    sizes = {f"{h}×{w}", f"{w}×{h}"}
    warned = [str(c.message) for c in caught if str(c.message).split()[0] in sizes]
    assert len(warned) == (len(sizes) if error > 1e-9 else 0)


def test_the_warning_says_which_sizes_are_exact_once_for_each_size() -> None:
    model = tiny("p4resnet29_asc")
    expected = r"30×30 images.* to p4 only approximately.* multiples of 4 \(28 or 32\)"
    with pytest.warns(UserWarning, match=expected):
        model(torch.zeros(1, 3, 30, 30))
    with no_warnings():
        model(torch.zeros(1, 3, 32, 32))
        model(torch.zeros(1, 3, 30, 30))
    strided = create_model("p4resnet29", depth=11).eval()
    with pytest.warns(UserWarning, match=r"sides of 4n\+1 \(29 or 33\), or downsample='pool'"):
        strided(torch.zeros(1, 3, 32, 32))
    with no_warnings():
        create_model("resnet29", depth=11)(torch.zeros(2, 3, 30, 31))  # nothing was promised


# ---- the stem for large images ----


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("p4resnet29_asc", 32),
        ("p4mresnet29_pool", 32),
        ("p4resnet29", 36),  # stride: 4n+1 on the map after the stem
        ("c8resnet29_asc", 32),
        ("resnet29_sasa", 32),
    ],
)
def test_the_stem_for_large_images_is_exact(name: str, size: int) -> None:
    model = with_active_norms(
        create_model(name, **tiny_options(name, stem="pool4", num_heads=1)).double(), size=size
    )
    with no_warnings():
        assert audit(model, size).passed
    assert model.forward_features(torch.zeros(1, 3, 64, 64, dtype=torch.float64)).shape[-2:] == (4, 4)
    assert {*create_model(name, **tiny_options(name, num_heads=1)).state_dict()} < {*model.state_dict()}


def test_the_stem_for_large_images_says_which_sizes_are_exact() -> None:
    model = create_model("p4resnet29_asc", **TINY | {"stem": "pool4"}).eval()
    with pytest.warns(UserWarning, match=r"40×40 images: .* sides that are multiples of 16 \(32 or 48\)"):
        model(torch.zeros(1, 3, 40, 40))
    with pytest.raises(ValueError, match=r"of 16×16 or more; got shape \[1, 3, 12, 12\]"):
        model(torch.zeros(1, 3, 12, 12))
    strided = create_model("p4resnet29", **tiny_options("p4resnet29", stem="pool4")).eval()
    with pytest.warns(UserWarning, match=r"sides of 16n\+4 \(20 or 36\)"):
        strided(torch.zeros(1, 3, 32, 32))


def test_large_images_cause_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"112×112 images are large for this model.*: stem='pool4'"):
        create_model("resnet29", **tiny_options("resnet29")).eval()(torch.zeros(1, 3, 112, 112))
    with no_warnings():
        create_model("resnet29", **tiny_options("resnet29", stem="pool4")).eval()(torch.zeros(1, 3, 112, 112))


# ---- translations ----


@pytest.mark.parametrize(
    ("name", "size", "border", "overrides"),
    [
        # cells next to the border see outside: stem 1, each 5×5 window 2 at the size of its map
        ("resnet29_asc", 100, 10, {}),
        ("resnet29_simple_asc", 40, 3, {"depth": 11}),
        ("p4resnet29_asc", 40, 3, {"depth": 11}),
        ("resnet29_sasa", 40, 3, {"depth": 11}),
        ("resnet29", 40, 3, {"depth": 11}),
    ],
)
def test_a_shift_by_multiples_of_4_shifts_the_features(
    name: str, size: int, border: int, overrides: dict[str, Any]
) -> None:
    model = with_active_norms(create_model(name, **overrides).double(), size=16)
    scene = torch.randn(1, 3, size + 8, size + 8, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        features = model.forward_features(scene[..., :size, :size])
        for down, right in ((4, 0), (4, 8)):
            window = scene[..., down : down + size, right : right + size]
            moved = model.forward_features(window)
            i, j = down // 4, right // 4
            inner = slice(border, features.shape[-1] - border - 2)
            expected = features[..., border + i : features.shape[-1] - border - 2 + i,
                                border + j : features.shape[-1] - border - 2 + j]  # fmt: skip
            assert expected.numel() > 0
            assert error_over_spread(moved[..., inner, inner], expected) < 1e-9
