"""A new group is one line: registered, it goes through layers, networks, training, report and pictures."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_options, with_active_norms
from helpers.tiny_runs import OPTIONS, run_cli, tiny_data

from selfconv import convert, create_model
from selfconv.examples import Autoencoder, UNet
from selfconv.explorer._answers import plane_names
from selfconv.explorer._comparison import Comparison
from selfconv.groups import GROUPS, IDENTITY, MIRROR, Group, get_group
from selfconv.models import ResNet, export_program, optimize_for_inference
from selfconv.nn import (
    AffineSelfConv2d,
    GroupConv2d,
    LiftingConv2d,
    LocalAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from selfconv.ops import BACKENDS, affine_self_conv
from selfconv.study import write_report
from selfconv.testing import assert_equivariant, audit
from selfconv.trained import evaluate, open_trained
from selfconv.visualize import class_activation_maps, equivariance_view, look, write_figures

HALF_TURN = ((-1, 0), (0, -1))
NEW = {  # a group: what its elements are called
    Group("c2", (IDENTITY, HALF_TURN)): ("0°", "180°"),
    Group("mirror", (IDENTITY, MIRROR)): ("0°", "0° mirrored"),
    GROUPS["c8"]: tuple(f"{angle}°" for angle in range(0, 360, 45)),
}


@pytest.fixture(params=NEW, ids=str)
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setitem(GROUPS, request.param.name, request.param)
    return request.param


def test_layers_and_operation(group: Group) -> None:
    assert group.element_names == NEW[group]
    attention: list[type[LocalAttention2d]] = [AffineSelfConv2d, SimpleAffineSelfConv2d]
    attention += [] if group.band_limited else [StandAloneSelfAttention2d]
    layers = [layer(4, 4, 3, 1, num_heads=2, group=group.name) for layer in attention]  # type: ignore[call-arg]
    for layer in [*layers, GroupConv2d(4, 4, 3, padding=1, group=group.name)]:
        assert_equivariant(layer, torch.randn(1, 4, len(group), 6, 6), group)
    assert_equivariant(LiftingConv2d(3, 4, 3, padding=1, group=group.name), torch.randn(1, 3, 6, 6), group)


@pytest.mark.parametrize("group", [*NEW, GROUPS["c12"]], ids=str, indirect=True)
def test_every_backend_agrees(group: Group) -> None:
    q, k, v = torch.randn(3, 1, 4, len(group), 5, 5).unbind()
    psi, beta = torch.randn(2, 4, len(group), 3, 3), torch.randn(2, 4, 3, 3)
    filters = (psi[0], beta[0], psi[1], beta[1])
    expected = affine_self_conv(q, k, v, *filters, num_heads=2, group=group, backend="reference")
    for backend in {*BACKENDS} - {"reference"}:
        if backend == "triton" and len(group) & (len(group) - 1):  # as rotations by 60° would be
            with pytest.raises(ValueError, match="serves 1, 2, 4, 8, … planes"):
                affine_self_conv(q, k, v, *filters, num_heads=2, group=group, backend=backend)
            continue
        found = affine_self_conv(q, k, v, *filters, num_heads=2, group=group, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet29_asc", "resnet29"])
def test_networks(group: Group, name: str) -> None:
    model = with_active_norms(create_model(name, group=group.name, depth=11, downsample="pool")).eval()
    result = audit(model, 16)
    assert result.passed
    assert result.group == group


def test_training_report_and_pictures(group: Group, tmp_path: Path) -> None:
    options = ["--model", "resnet29_asc", "--group", group.name, "--num-heads", "2", *OPTIONS]
    assert run_cli("train", "--data", tiny_data(tmp_path), "--out", tmp_path / "run", *options) == 0
    trained = open_trained(tmp_path / "run")
    assert trained.model.group == group
    evaluate(trained, pictures=False)

    html, markdown, *_ = write_report([tmp_path / "run"], tmp_path / "report")
    label = f"{group.name}ResNet29+ASC"
    for page in (html, markdown):
        text = page.read_text("utf-8").replace("\\", "")
        assert label in text
        assert not re.search(r"(?<!\w)ResNet29\+ASC", text)

    assert len(write_figures(trained, tmp_path / "figures")) == 12
    svg = (tmp_path / "figures" / "pixel.svg").read_text("utf-8")
    assert all(f"P = {name}" in svg for name in NEW[group])
    assert group.turn(1) is not None or not any(f"{angle}°" in svg for angle in (90, 270))

    short = [name.replace(" mirrored", " m") for name in NEW[group]]
    assert plane_names(group) == short
    comparison = Comparison.open(tmp_path / "run")
    image, layer = comparison.samples[0].image, comparison.layer(0, 0)
    for quarters in range(4):
        error = comparison.map_error(0, image, quarters, layer)
        if group.turn(quarters) is None:  # nothing that the maps could follow
            assert error is None
        else:
            assert error is not None
            assert error < 1e-4


@pytest.mark.parametrize(
    "group", [Group("p2", (IDENTITY, HALF_TURN)), Group("pm", (IDENTITY, MIRROR))], ids=str
)
def test_an_object_needs_no_registration(group: Group, tmp_path: Path) -> None:
    """A group that has no name in the table: from the network to its export and pictures."""
    assert group.name not in GROUPS
    torch.manual_seed(0)
    small: dict[str, Any] = {"depth": 11, "widths": (4, 4, 4), "num_heads": 2, "downsample": "pool"}
    model = with_active_norms(create_model("resnet29_asc", **small, group=group)).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    assert model.group == group
    assert create_model("resnet29_asc", group=get_group("p4")).config["group"] == "p4"
    for name in ("resnet29", "resnet29_se", "resnet29_simple_asc", "resnet29_sasa", "p4resnet29_asc_se"):
        options = tiny_options(name, widths=(8, 8, 8), kernel_size=None, downsample="pool", group=group)
        other = with_active_norms(create_model(name, **options))
        assert audit(other, 8).passed, name

    model.save_pretrained(tmp_path / "saved")
    again = ResNet.from_pretrained(tmp_path / "saved").eval()
    assert again.group == open_trained(tmp_path / "saved").model.group == group
    forms: dict[str, Any] = {
        "saved": again,
        "copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
        "optimised": optimize_for_inference(model),
    }
    if group.turn(2) is not None:  # graphs know nothing of a group but its filters: one group is enough
        forms |= {
            "exported": export_program(model, input_shape=(3, 8, 8)).module(),
            "compiled": torch.compile(model, backend="aot_eager"),
        }
    with torch.no_grad():  # the graph of the backward pass takes as long to trace as all else together
        for name, form in forms.items():
            assert (form(x) - expected).abs().max() < 1e-5, name
    convolutions = create_model("resnet29", **tiny_options("resnet29", downsample="pool", group=group))
    convert(convolutions, num_heads=2)
    assert audit(convolutions, 8).passed

    layer = next(name for name, part in model.named_modules() if isinstance(part, AffineSelfConv2d))
    assert look(model, x[0], layer, (1, 2), 1).output.shape == (2, 2)
    assert equivariance_view(model, x[0], layer).errors
    assert class_activation_maps(model, x[0]).shape[0] == 10
    for example in (UNet(3, 2, (4, 8), group=group), Autoencoder(3, 2, 4, group=group)):
        assert audit(example, 8, outputs="planar").passed


def test_audit_command_with_a_new_group(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # a planar network
        assert run_cli("audit", "resnet29_asc", "--group", group.name, "--size", "16") == 1
    assert run_cli("audit", "resnet29_asc", "--group", "c3") == 2
    assert f"unknown group 'c3'; expected one of {', '.join(map(repr, GROUPS))}" in capsys.readouterr().err
