"""Fine-tuning: a run that starts from trained weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import run_cli, tiny_config, tiny_data
from hypothesis import given
from hypothesis import strategies as st

from selfconv.models import ResNet, create_model, load_initial
from selfconv.train import train

SMALL: dict[str, Any] = {"depth": 11, "widths": (8, 8, 8), "num_heads": 2}


def small(name: str) -> dict[str, Any]:
    return SMALL if "asc" in name else {key: value for key, value in SMALL.items() if key != "num_heads"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a finished run on it."""
    folder = tmp_path_factory.mktemp("work")
    train(tiny_config(tiny_data(folder), "resnet29_asc", epochs=1), folder / "run", quiet=True)
    return folder


@given(
    st.sampled_from(["resnet29", "resnet29_asc", "p4resnet29_asc"]), st.integers(2, 12), st.integers(2, 12)
)
def test_another_number_of_classes_gets_a_new_head(name: str, old: int, new: int) -> None:
    trained, model = create_model(name, old, **small(name)), create_model(name, new, **small(name))
    head = model.state_dict()["fc.weight"].clone()
    model.start_from(trained)
    kept = trained.state_dict()["fc.weight"] if old == new else head
    assert torch.equal(model.state_dict()["fc.weight"], kept)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model.forward_features(x), trained.forward_features(x))


@pytest.mark.parametrize("name", ["resnet29", "p4resnet29_asc", "p4mresnet29_simple_asc"])
def test_grey_images_for_colour_and_the_reverse(name: str) -> None:
    colour, grey = (create_model(name, in_channels=channels, **small(name)).eval() for channels in (3, 1))
    grey.start_from(colour)
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)
    back = create_model(name, in_channels=3, **small(name)).eval()
    back.start_from(grey)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(back(x), grey(x.mean(1, keepdim=True)), rtol=1e-4, atol=1e-5)


def test_a_pretrained_model_for_other_classes_and_channels() -> None:
    trained = create_model("digits_asc", pretrained=True)
    model = create_model("digits_asc", 3, 3, pretrained=True)
    assert (model.num_classes, model.in_channels) == (3, 3)
    weight = trained.state_dict()["stages.0.0.spatial.conv.psi_k"]
    assert torch.equal(model.state_dict()["stages.0.0.spatial.conv.psi_k"], weight)


@pytest.mark.parametrize(
    "other", [{"group": "p4"}, {"widths": (4, 8, 8)}, {"scale": "head"}, {"pool": "max"}]
)
def test_another_architecture_is_refused_and_nothing_is_changed(other: dict[str, Any]) -> None:
    model = create_model("resnet29_asc", **SMALL)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"expected a trained network of this architecture: .*, not"):
        model.start_from(create_model("resnet29_asc", **SMALL | other))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_run_from_a_run(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The network is the other's without a word; a rate of almost 0 leaves its weights where they were."""
    options: list[str | Path] = [
        "--data",
        work / "tiny.npz",
        "--epochs",
        "1",
        "--lr",
        "1e-12",
        "--weight-decay",
        "0",
    ]
    out = tmp_path / "tuned"
    options += ["--lr", "1e-12", "--init", work / "run", "--out", out]
    assert run_cli("train", *options) == 0, capsys.readouterr().err
    config = json.loads((out / "config.json").read_text())["model"]
    assert (config["name"], config["depth"], config["init"]) == ("resnet29_asc", 11, str(work / "run"))
    ours, theirs = (ResNet.from_pretrained(folder / "model") for folder in (out, work / "run"))
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6, msg=name)


def test_a_shipped_name(tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: list[str | Path] = ["--data", work / "tiny.npz", "--epochs", "1", "--out", tmp_path / "run"]
    assert run_cli("train", *options, "--init", "digits_asc") == 0, capsys.readouterr().err
    tuned, shipped = load_initial(tmp_path / "run"), load_initial("digits_asc")
    assert tuned.config == shipped.config  # also where a default has changed since it was trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--init", "nowhere"],
            "init: expected the folder of a finished run .* got 'nowhere', no such folder",
        ),
        (
            ["--init", "digits_asc", "--model", "resnet29"],
            "expected a trained network of this architecture: .*, not",
        ),
        (
            ["--init", "digits_asc", "--depth", "20"],
            "expected a trained network of this architecture: .*, not",
        ),
    ],
)
def test_bad_initial_models(
    options: list[str], message: str, work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run_cli("train", "--data", work / "tiny.npz", "--epochs", "1", "--out", out, *options) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not out.exists()
