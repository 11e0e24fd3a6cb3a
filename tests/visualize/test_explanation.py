"""Activation maps are exact and turn with the image; occlusion agrees; the first view is telling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_models import tiny
from helpers.tiny_runs import run_cli
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from selfconv.models import list_models
from selfconv.trained import open_trained
from selfconv.visualize import (
    Inspection,
    _write,
    choose_pixel,
    class_activation_maps,
    occlusion_maps,
    selectivity,
)
from selfconv.visualize._choice import choose_view

LAYER = "stages.0.0.spatial.conv"
DIGITS = list_models("digits_*", pretrained=True)


@pytest.mark.parametrize("name", list_models(pretrained=True))
def test_the_maps_of_shipped_networks_add_up_to_the_logits(name: str) -> None:
    """On their test images, or on noise where those do not come with the package."""
    trained = open_trained(name)
    noise = torch.randint(256, (10, trained.data.in_channels, trained.data.size, trained.data.size))
    for pixels in trained.open_data().test.images[:10] if name in DIGITS else noise.to(torch.uint8):
        image = trained.normalise(pixels[None])
        with torch.no_grad():
            logits = trained.model(image)[0]
        maps = class_activation_maps(trained.model, image)
        assert (maps.sum((1, 2)) - logits).abs().max() < 1e-5
        assert torch.equal(maps, Inspection(trained.model, image).class_activation_maps())


@given(
    st.sampled_from(["resnet29_asc", "p4resnet29_asc", "p4mresnet29_asc", "p4resnet29_pool"]),
    st.sampled_from(["mean", "max", "group_max"]),
    st.integers(0, 2**31),
)
def test_every_pooling_adds_up_and_turns(name: str, pool: str, seed: int) -> None:
    model = tiny(name, pool=pool).double().train()
    image = torch.randn(3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    maps = class_activation_maps(model, image)
    assert model.training  # as it was
    with torch.no_grad():
        logits = model.eval()(image[None])[0]
    torch.testing.assert_close(maps.sum((1, 2)), logits, rtol=0, atol=1e-10)
    if len(model.group) > 1:
        for s in model.group:
            turned = class_activation_maps(model, model.group.act_planar(image, s))
            torch.testing.assert_close(turned, model.group.act_planar(maps, s), rtol=0, atol=1e-9)


def test_a_turned_digit_has_the_turned_maps() -> None:
    trained = open_trained("digits_p4_asc")
    for pixels in trained.open_data().test.images[:5]:
        image = trained.normalise(pixels[None])
        activation, occlusion = (
            class_activation_maps(trained.model, image),
            occlusion_maps(trained.model, image),
        )
        for quarters in (1, 2, 3):
            turned = image.rot90(quarters, (-2, -1))
            difference = class_activation_maps(trained.model, turned) - activation.rot90(quarters, (-2, -1))
            assert difference.abs().max() < 1e-5
            difference = occlusion_maps(trained.model, turned) - occlusion.rot90(quarters, (-2, -1))
            assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("name", DIGITS)
def test_occlusion_agrees_in_sign_on_digits(name: str) -> None:
    """Covering a part lowers the logit where the map says that the part speaks for the class."""
    trained = open_trained(name)
    agree, images = 0, trained.open_data().test.images[:20]
    for pixels in images:
        image = trained.normalise(pixels[None])
        activation, occlusion = (
            class_activation_maps(trained.model, image),
            occlusion_maps(trained.model, image),
        )
        best = int(activation.sum((1, 2)).argmax())
        falls = F.adaptive_avg_pool2d(occlusion[best][None].double(), activation.shape[-1])[0]
        agree += bool((falls * activation[best]).sum() > 0)
    assert agree >= 0.85 * len(images)


def test_occlusion_measures_what_is_covered() -> None:
    """Of a network that counts bright pixels, covering takes away as many as there were."""

    class Count(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3))], 1)

    image = torch.zeros(1, 16, 16)
    image[0, 4:6, 8:10] = 1  # one cell of 8×8
    maps = occlusion_maps(Count(), image)
    expected = torch.zeros(8, 8)
    expected[1:4, 3:6] = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]])  # of 4 windows that hold a cell
    torch.testing.assert_close(maps[0], expected)
    torch.testing.assert_close(maps[1], -expected)
    with pytest.raises(
        ValueError, match="expected an image and a grid of 2×2 cells or more; got 16×16 and 1"
    ):
        occlusion_maps(Count(), image, cells=1)


@pytest.mark.parametrize(
    ("model", "value", "message"),
    [
        (nn.Flatten(), float("nan"), "expected outputs that are numbers; the model's are infinite or nan"),
        (nn.Identity(), 0.0, r"expected a classifier, with outputs \[1, classes\]; got \[1, 1, 8, 8\]"),
    ],
)
def test_occlusion_refuses(model: nn.Module, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        occlusion_maps(model, torch.full((1, 8, 8), value))


def test_activation_map_needs_pooling_and_a_linear_head() -> None:
    model = tiny("resnet29_asc")
    model.reset_classifier(0)
    with pytest.raises(
        ValueError, match=r"ends with \.pool \(GlobalPool\) and \.fc \(Linear\); got GlobalPool and Id"
    ):
        class_activation_maps(model, torch.randn(3, 8, 8))


# ---- the first view ----


@pytest.mark.parametrize("name", ["digits_asc", "digits_p4_asc"])
def test_the_first_view_is_where_attention_chooses(name: str) -> None:
    trained = open_trained(name)
    inspection = Inspection(trained.model, trained.normalise(trained.open_data().test.images[:1]))
    scores = selectivity(inspection, LAYER)
    heads, k = scores.shape[0], 5
    assert scores.shape == (heads, 16, 16)
    assert 0 <= scores.min() <= scores.max() <= 1
    (row, column), head = choose_pixel(inspection, LAYER)
    assert scores[head, row, column] == scores.max() > 0
    assert k // 2 <= min(row, column) <= max(row, column) < 16 - k // 2  # the window is inside the image
    entropy = inspection.entropy(LAYER).mean(1)
    assert abs(entropy[head, row, column] - 0.5) < (entropy - 0.5).abs().median()
    assert choose_pixel(inspection, LAYER, head=1)[1] == 1
    view = choose_view(inspection, LAYER, None, None)
    assert (view.pixel, view.head) == ((row, column), head)


# ---- the command ----


def test_predict_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digit = open_trained("digits_asc").open_data().test.images[0, 0].numpy()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.fromarray(digit).save(tmp_path / folder / "three.png")
    files = [tmp_path / folder / "three.png" for folder in ("a", "b")]
    out = tmp_path / "why"
    assert run_cli("predict", "digits_asc", *files, "--explain", out) == 0
    said = capsys.readouterr()
    lines = [line.split("\t") for line in said.out.splitlines()]
    pictures = [out / "three.png.explained.png", out / "three.png-2.explained.png"]
    assert [line[0] for line in lines] == [str(file) for file in files]
    assert said.err.splitlines() == [
        f"selfconv: {file}: explained in {picture}" for file, picture in zip(files, pictures, strict=True)
    ]
    assert sorted(out.iterdir()) == sorted(pictures)
    with Image.open(pictures[0]) as picture:
        assert min(picture.size) > 500
    before = pictures[0].read_bytes()
    assert run_cli("predict", "digits_asc", files[1], "--json", "--explain", out) == 0  # keeps its name
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert found[0]["label"] == lines[1][1]
    assert sorted(out.iterdir()) == sorted(pictures)
    assert pictures[0].read_bytes() == before


def test_predict_explains_stacks(tmp_path: Path) -> None:
    digit = open_trained("digits_asc").open_data().test.images[0, 0].numpy()
    np.save(tmp_path / "stack.npy", np.stack([digit, digit.T])[..., None].astype(np.uint16) * 16)
    stack = (tmp_path / "stack.npy", "--range", "0,4080")
    assert run_cli("predict", "digits_asc", *stack, "--explain", tmp_path / "deep") == 0
    names = {path.name for path in (tmp_path / "deep").iterdir()}
    assert names == {"stack.npy[0].explained.png", "stack.npy[1].explained.png"}


def test_a_picture_that_cannot_be_written_loses_no_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("L", (16, 16)).save(tmp_path / "black.png")
    (tmp_path / "file").write_text("")
    assert run_cli("predict", "digits_asc", tmp_path / "black.png", "--explain", tmp_path / "file") == 2
    said = f"selfconv: {tmp_path / 'file'}: expected a folder to write to; got a file\n"
    assert capsys.readouterr().err == said
    why = tmp_path / "why"
    assert run_cli("predict", "digits_asc", tmp_path / "missing.png", "--explain", why) == 2
    assert not why.exists()  # no empty folder
    (why / "black.png.explained.png").mkdir(parents=True)
    assert run_cli("predict", "digits_asc", tmp_path / "black.png", "--explain", why) == 0
    assert (why / "black.png-2.explained.png").is_file()
    capsys.readouterr()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_write, "write_figure", full)
    assert run_cli("predict", "digits_asc", tmp_path / "black.png", "--explain", why) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'black.png'}\t")
    assert (
        err
        == f"selfconv: {tmp_path / 'black.png'}: cannot be explained: [Errno 28] No space left on device\n"
    )
