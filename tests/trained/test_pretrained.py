"""The weights that come with the package: small, documented by their record, and as good as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT

from selfconv import cli
from selfconv._files import read_as
from selfconv.models import WEIGHTS, ResNet, count_parameters, create_model, list_models
from selfconv.study.plans import PlanFile
from selfconv.train import RunError
from selfconv.trained import logits, open_trained

PAGE = (ROOT / "docs" / "visualize.md").read_text("utf-8")
DIGITS = ["digits_asc", "digits_conv", "digits_p4_asc", "digits_p4m_asc"]
NAMES = list_models(pretrained=True)
CIFAR = [name for name in NAMES if ".cifar10" in name]


def test_shipped_models() -> None:
    assert [*DIGITS, *CIFAR] == NAMES
    published = read_as(PlanFile, ROOT / "results" / "cifar10" / "plan.json").trials
    tagged = {name for name in CIFAR if name.endswith(".cifar10")}
    assert {f"{trial.model}.cifar10" for trial in published} == tagged
    assert all(name in cli.TRAINED_HELP for name in (*DIGITS, "resnet29_asc.cifar10"))
    for name in NAMES:
        files = {path.name: path for path in (WEIGHTS / name).iterdir()}
        card = {"evaluation.json", "README.md"} if name in CIFAR else set()
        assert set(files) == {"config.json", "model.safetensors", "record.json", "metrics.jsonl", *card}
        assert sum(path.stat().st_size for path in files.values()) < (1_500_000 if name in CIFAR else 400_000)


@pytest.mark.parametrize("name", NAMES)
def test_record_matches_the_weights(name: str) -> None:
    record = json.loads((WEIGHTS / name / "record.json").read_text("utf-8"))
    model = create_model(name, pretrained=True)
    assert count_parameters(model) == record["parameters"]
    assert ResNet.from_config(record["model_config"]).config == model.config
    assert record["test_accuracy"] >= (0.84 if name in CIFAR else 0.97)
    trained = open_trained(name)
    assert len(trained.metrics) == record["epochs"] == trained.config.recipe.epochs
    assert trained.metrics[-1].val_accuracy == record["val_accuracy"]
    told = json.dumps(record)
    assert not re.search(r"/(work|root|tmp|home|usr)\b", told)


@pytest.mark.parametrize("name", CIFAR)
def test_card_matches_the_weights(name: str) -> None:
    """The run published in ``results``, and the accuracy that its evaluation counted."""
    folder = WEIGHTS / name
    record, evaluation = (json.loads((folder / file).read_text("utf-8")) for file in CARD_SOURCES)
    runs = (ROOT / "results").glob(f"*/{name.partition('.')[0]}/seed-0")
    files = (*CARD_SOURCES, "metrics.jsonl")
    assert any(all((folder / f).read_bytes() == (run / f).read_bytes() for f in files) for run in runs)
    assert evaluation["accuracy"] == pytest.approx(record["test_accuracy"], abs=1.5 / evaluation["images"])
    card = (folder / "README.md").read_text("utf-8")
    assert f"| upright (10,000 images) | {evaluation['accuracy']:.2%} |" in card
    assert record["commit"] in card
    row = re.search(rf"^\| `{re.escape(name)}` \| ([\d,]+) \| ([\d.]+%) \|", MODELS_PAGE, re.MULTILINE)
    assert row is not None
    assert row.groups() == (f"{record['parameters']:,}", f"{evaluation['accuracy']:.2%}")


CARD_SOURCES = ("record.json", "evaluation.json")
MODELS_PAGE = (ROOT / "docs" / "models.md").read_text("utf-8")


@pytest.mark.parametrize("name", DIGITS)
def test_the_accuracy_is_the_recorded_one(name: str) -> None:
    trained = open_trained(name)
    assert trained.record is not None
    test = trained.open_data().test
    right = (logits(trained.model, test, trained.data, lambda x: x).argmax(1) == test.labels).sum().item()
    assert right / len(test) == pytest.approx(trained.record.test_accuracy, abs=1.5 / len(test))


@pytest.mark.parametrize("name", DIGITS)
def test_predictions_are_invariant_to_the_group_and_to_no_other_turn(name: str) -> None:
    trained = open_trained(name)
    data, model = trained.open_data(), trained.model
    images, labels = trained.normalise(data.test.images[:60]), data.test.labels[:60]
    with torch.inference_mode():
        outputs = [model(model.group.act_planar(images, s)) for s in range(len(model.group))]
        turned = [model(images.rot90(n, (-2, -1))).argmax(1) for n in (1, 2, 3)]
    predictions = outputs[0].argmax(1)
    assert (predictions == labels).float().mean() > 0.9
    assert max((output - outputs[0]).abs().max() for output in outputs) < 1e-3
    if len(model.group) == 1:
        assert max((p == labels).float().mean() for p in turned) < 0.7
    else:
        assert all(torch.equal(p, predictions) for p in turned)


def test_unknown_run_or_name(tmp_path: Path) -> None:
    with pytest.raises(
        RunError,
        match=r"nothing: expected the folder of a run .*, or one of digits_asc, .*; got no such folder",
    ):
        open_trained("nothing")
    with pytest.raises(RunError, match=r"expected the folder of a run .*; got an empty folder"):
        open_trained(tmp_path)


def test_the_documentation_tells_their_accuracy() -> None:
    rows = re.findall(r"^\| `(digits_\w+)` \|.*\| ([\d,]+) \| ([\d.]+%) \|$", PAGE, re.MULTILINE)
    assert sorted(row[0] for row in rows) == DIGITS
    for name, parameters, accuracy in rows:
        record = json.loads((WEIGHTS / name / "record.json").read_text("utf-8"))
        assert parameters == f"{record['parameters']:,}"
        assert accuracy == f"{record['test_accuracy']:.2%}"


def test_code_in_the_documentation_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "visualize.md", "exec"), names)
    assert (names["view"].alpha.sum((1, 2)) - 1).abs().max() < 1e-6


def test_documented_pictures_exist_and_are_small() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert len(pictures) == 8
    for picture in pictures:
        assert 10_000 < (ROOT / "docs" / picture).stat().st_size < 150_000
