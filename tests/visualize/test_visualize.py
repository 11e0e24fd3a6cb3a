"""The numbers behind the pictures are those that the layers compute with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny
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
from selfconv.testing import equivariance_error
from selfconv.visualize import Inspection, entropy_map, equivariance_view, layer_filters, list_layers, look

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
    query, key = (t[0] if t.dim() == 5 else t[0].unsqueeze(1) for t in layer.query_key_value(features)[:2])
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


@given(
    st.integers(0, len(KINDS) - 1),
    st.sampled_from(["z2", "p4", "p4m"]),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_views_of_a_layer_with_a_stride_are_before_its_pooling(
    kind: int, group: str, cell: tuple[int, int]
) -> None:
    model = network(kind, group, 3, 2)
    inspection = Inspection(model, torch.randn(2, 6, 6, dtype=torch.float64))
    assert inspection.layers[0].size == (6, 6)
    places = [(2 * cell[0] + i, 2 * cell[1] + j) for i in (0, 1) for j in (0, 1)]
    views = [torch.stack([v.response() for v in inspection.look_all("1", place)]) for place in places]
    mean = torch.stack(views).mean(0)  # [heads, P, C]
    out = inspection.maps["1"][..., cell[0], cell[1]].reshape(HEADS, CHANNELS // HEADS, -1)
    torch.testing.assert_close(mean, out.transpose(1, 2), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["resnet29_asc", "p4resnet29_asc", "p4mresnet29_simple_asc", "resnet29_sasa"]
)
def test_float32_agrees_with_the_reference(name: str) -> None:
    model = tiny(name, in_channels=3)
    inspection = Inspection(model, torch.randn(1, 3, 8, 8))
    for info in inspection.layers:
        pixel = (0, info.size[1] - 1)
        features = inspection._inputs[info.name]
        layer = info.layer
        for view in inspection.look_all(info.name, pixel):
            expected = torch.stack(
                [reference_alpha(layer, features, pixel, p)[view.head] for p in view.group]
            )
            assert (view.alpha - expected).abs().max() < 1e-6
            assert (view.alpha.sum((1, 2)) - 1).abs().max() < 1e-6
            torch.testing.assert_close(view.response(), view.output, rtol=1e-5, atol=1e-5)


def test_an_inspection_of_a_network() -> None:
    model = tiny("p4resnet29_asc", in_channels=3)
    model.train()
    model.stem.eval()
    modes = [module.training for module in model.modules()]
    image = torch.randn(3, 8, 8)
    inspection = Inspection(model, image)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(inspection.output, model.eval()(image[None])[0])
    names = [f"stages.{n}.0.spatial.conv" for n in range(3)]
    assert (
        [info.name for info in inspection.layers]
        == [info.name for info in list_layers(model, image)]
        == names
    )
    assert [info.size for info in inspection.layers] == [(8, 8), (8, 8), (4, 4)]
    assert list(inspection.maps) == ["stem.conv", *names]
    assert inspection.maps[names[2]].shape == (8, 4, 2, 2)
    assert inspection.to_map(names[2], (7, 5)) == (3, 2)
    views = inspection.look_all(names[1], (2, 3))
    for head, view in enumerate(views):
        assert torch.equal(view.effective, look(model, image, names[1], (2, 3), head).effective)


def test_the_crop_is_what_the_window_covers() -> None:
    image = torch.randn(3, 8, 8)
    inspection = Inspection(tiny("resnet29_asc", in_channels=3), image)
    view = inspection.look("stages.2.0.spatial.conv", (0, 2), 0)  # 3×3 on a 4×4 map of an 8×8 image
    assert view.window == (-2, 2, 4, 8)
    assert view.crop[:, :2].isnan().all()
    assert torch.equal(view.crop[:, 2:], image[:, 0:4, 2:8])


def test_entropy_goes_from_one_neighbour_to_all() -> None:
    model = network(0, "p4", 3, 1).float()
    layer = model.get_submodule("1")
    assert isinstance(layer, AffineSelfConv2d)
    image = torch.randn(2, 6, 6)
    entropy = entropy_map(model, image, "1")
    assert entropy.shape == (HEADS, 4, 6, 6)
    assert 0 <= entropy.min() <= entropy.max() <= 1
    alpha = Inspection(model, image).alpha("1")
    by_hand = -(alpha * alpha.clamp(min=1e-30).log()).sum((2, 3)) / torch.tensor(9.0).log()
    torch.testing.assert_close(entropy, by_hand)
    layer.scale = 0.0
    torch.testing.assert_close(entropy_map(model, image, "1"), torch.ones_like(entropy))
    layer.scale = 1e6
    assert entropy_map(model, image, "1").max() < 1e-3
    assert torch.equal(entropy_map(network(0, "z2", 1, 1), image, "1"), torch.zeros(2, 1, 6, 6).double())


@pytest.mark.parametrize("name", ["p4resnet29_asc", "p4mresnet29_asc", "p4resnet29_simple_asc"])
def test_maps_of_a_group_model_turn_with_the_image(name: str) -> None:
    model = tiny(name).double()
    image = torch.randn(3, 8, 8, dtype=torch.float64)
    for info in list_layers(model, image):
        view = equivariance_view(model, image, info.name)
        assert view.group is model.group
        assert max(view.errors + view.output_errors) < 1e-10
    assert len(view.images) == len(view.maps) == len(view.steered) == len(view.outputs) == len(model.group)
    assert view.errors == pytest.approx(
        equivariance_error(lambda x: Inspection(model, x).maps[view.layer][None], image[None], model.group)
    )


def test_maps_of_a_planar_model_do_not_turn_with_the_image() -> None:
    model = tiny("resnet29_asc").double()
    image = torch.randn(3, 8, 8, dtype=torch.float64)
    view = equivariance_view(model, image, "stages.0.0.spatial.conv")
    assert view.group.name == "p4"
    assert view.errors[0] == view.output_errors[0] == 0
    assert min(view.errors[1:]) > 0.1
    assert min(view.output_errors[1:]) > 1e-3
    assert len(equivariance_view(model, image, "stem.conv", "p4m").errors) == 8


LAYER = "stages.0.0.spatial.conv"


@pytest.mark.parametrize(
    ("layer", "pixel", "head", "message"),
    [
        ("nowhere", (0, 0), 0, rf"layer: expected one of {LAYER}, .*; got 'nowhere'"),
        (LAYER, (8, 0), 0, rf"row 0 to 7 and column 0 to 7 of the 8×8 map of {LAYER}; got \(8, 0\)"),
        (LAYER, (0, -1), 0, r"pixel: expected row 0 to 7 .*; got \(0, -1\)"),
        (LAYER, (0, 1, 2), 0, r"pixel: expected row 0 to 7 .*; got \(0, 1, 2\)"),
        (LAYER, (0.5, 1), 0, r"pixel: expected row 0 to 7 .*; got \(0.5, 1\)"),
        (LAYER, (0, 0), 2, rf"head: expected 0 to 1 for {LAYER}; got 2"),
        (LAYER, (0, 0), -1, rf"head: expected 0 to 1 for {LAYER}; got -1"),
    ],
)
def test_bad_places_are_answered_in_a_line(layer: str, pixel: Any, head: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        look(tiny("resnet29_asc"), torch.randn(3, 8, 8), layer, pixel, head)
    assert "\n" not in str(error.value)


def test_other_bad_input_is_answered_in_a_line() -> None:
    model = tiny("resnet29")
    with pytest.raises(ValueError, match=r"layer: this model has no self-convolution layer; got 'stem.conv'"):
        look(model, torch.randn(3, 8, 8), "stem.conv", (0, 0), 0)
    with pytest.raises(ValueError, match=r"layer: expected one of stem.conv, .*; got 'x'"):
        equivariance_view(model, torch.randn(3, 8, 8), "x")
    with pytest.raises(ValueError, match=r"group: expected 'p4', on which .* live; got 'p4m'"):
        equivariance_view(tiny("p4resnet29"), torch.randn(3, 8, 8), "stem.conv", "p4m")
    with pytest.raises(ValueError, match=r"image: expected one image .*; got shape \[2, 3, 8, 8\]"):
        Inspection(model, torch.randn(2, 3, 8, 8))
    with pytest.raises(TypeError, match=r"image: expected a floating-point tensor .*; got torch.uint8"):
        Inspection(model, torch.zeros(3, 8, 8, dtype=torch.uint8))
