"""scripts/publish_runs.py: what has finished goes to results/ and, with a card, to the package."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.made_runs import make_plan, make_run
from helpers.tiny_runs import same_weights, tiny_config

from selfconv._files import read_as
from selfconv.models import count_parameters, create_model
from selfconv.study.paper import TABLES
from selfconv.study.plans import FAIR_BASELINE, PlanFile
from selfconv.study.samples import Sample
from selfconv.train import Interrupted, Record, StopSignals, train
from selfconv.trained import Evaluation, evaluate, open_trained

SCRIPT = ROOT / "scripts" / "publish_runs.py"
TRIALS = [
    {"folder": f"{model}/seed-{seed}", "model": model, "label": model, "group": "cifar10"}
    for model in ("resnet29", "resnet29_asc")
    for seed in (0, 1)
]


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., list[str]]:
    """The script's function, which writes to folders of the test."""
    function: Any = runpy.run_path(str(SCRIPT))["publish"]
    (tmp_path / "weights").mkdir()
    function.__globals__.update(RESULTS=tmp_path / "results", WEIGHTS=tmp_path / "weights")
    return function


def test_finished_runs_are_published_with_their_cards(
    tmp_path: Path, publish: Callable[..., list[str]]
) -> None:
    plan = make_plan(tmp_path / "runs", TRIALS, plan="cifar10")
    for seed, accuracy in ((0, 0.91), (1, 0.92)):
        run = make_run(plan / f"resnet29/seed-{seed}", accuracy=accuracy, seed=seed, turned=(0.3, 0.25, 0.2))
        (run / "model").mkdir()
        for name in ("config.json", "model.safetensors"):
            (run / "model" / name).write_text(f"{name} of seed {seed}")
    make_run(plan / "resnet29_asc/seed-0", "resnet29_asc")  # not evaluated

    assert publish(plan, weights=True) == ["resnet29_asc/seed-0", "resnet29_asc/seed-1"]

    published = {str(p.relative_to(tmp_path / "results")) for p in (tmp_path / "results").rglob("*.*")}
    files = ("record.json", "metrics.jsonl", "evaluation.json")
    assert published == {
        "cifar10/plan.json",
        *(f"cifar10/resnet29/seed-{seed}/{name}" for seed in (0, 1) for name in files),
    }
    content = json.loads((tmp_path / "results/cifar10/plan.json").read_text())
    assert [trial["folder"] for trial in content["trials"]] == ["resnet29/seed-0", "resnet29/seed-1"]
    assert content["reduced"] == ["1 of 2 lines"]
    shipped = tmp_path / "weights" / "resnet29.cifar10"
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["resnet29.cifar10"]
    assert (shipped / "model.safetensors").read_text() == "model.safetensors of seed 0"
    card = (shipped / "README.md").read_text()
    for fact in ("# resnet29.cifar10", "313,114 parameters", "| upright (4 images) | 50.00% |", "(n = 1)"):
        assert fact in card
    assert "| rotated by 90°, 180°, 270° (mean) | 25.00% |" in card
    assert "0123456789abcdef0123456789abcdef01234567" in card


def test_results_only(tmp_path: Path, publish: Callable[..., list[str]]) -> None:
    plan = make_plan(tmp_path / "runs", TRIALS[:1], plan="cifar10")
    make_run(plan / TRIALS[0]["folder"], turned=(0.3, 0.25, 0.2))
    assert publish(plan, weights=False) == []
    assert (tmp_path / "results/cifar10/resnet29/seed-0/evaluation.json").exists()
    assert not list((tmp_path / "weights").iterdir())


def test_lines_that_were_trained_one_at_a_time_are_one_plan(
    tmp_path: Path, publish: Callable[..., list[str]]
) -> None:
    reduced = ["1 of 10 lines", "15 epochs"]
    for trial in (TRIALS[0], TRIALS[2]):
        plan = make_plan(tmp_path / trial["model"], [trial], plan="cifar10", reduced=reduced)
        make_run(plan / trial["folder"], turned=(0.3, 0.25, 0.2))
        assert publish(plan, weights=False) == publish(plan, weights=False) == []
    content = json.loads((tmp_path / "results/cifar10/plan.json").read_text())
    assert [trial["folder"] for trial in content["trials"]] == ["resnet29/seed-0", "resnet29_asc/seed-0"]
    assert content["reduced"] == ["2 of 10 lines", "15 epochs"]


def test_unfinished_runs_are_kept_until_they_have_finished(
    tmp_path: Path, publish: Callable[..., list[str]], data: Path
) -> None:
    """What was kept of a run that was stopped continues in another folder and ends with the same bits."""
    folder = TRIALS[0]["folder"]
    plan = make_plan(tmp_path / "runs", TRIALS[:1], plan="cifar10")
    config = tiny_config(data)
    train(config, tmp_path / "whole", quiet=True)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)  # the run stops after its first step
        with pytest.raises(Interrupted):
            train(config, plan / folder, quiet=True, stop=stop)
    assert publish(plan, weights=False) == [folder]
    assert not (tmp_path / "results" / "unfinished").exists()
    assert publish(plan, weights=False, unfinished=True) == [folder]
    assert not (tmp_path / "results" / "cifar10").exists()  # nothing to report on

    kept = tmp_path / "results" / "unfinished" / "cifar10" / folder
    elsewhere = make_plan(tmp_path / "elsewhere", TRIALS[:1], plan="cifar10") / folder
    shutil.copytree(kept, elsewhere)
    train(config, elsewhere, resume=True, quiet=True)
    assert same_weights(elsewhere, tmp_path / "whole")
    evaluate(open_trained(elsewhere), pictures=False)
    assert publish(tmp_path / "elsewhere", weights=False) == []
    assert not kept.exists()


DIGITS = {  # the networks of the first table, by their names there
    "convolution": "resnet29",
    "convolution, squeeze and excite": "resnet29_se",
    "stand-alone self-attention": "resnet29_sasa",
    "simple ASC": "resnet29_simple_asc",
    "ASC": "resnet29_asc",
    "p4 convolution": "p4resnet29",
    "p4 convolution, squeeze and excite": "p4resnet29_se",
    "p4 convolution, pooling instead of stride": "p4resnet29_pool",
    "p4 simple ASC": "p4resnet29_simple_asc",
    "p4 ASC": "p4resnet29_asc",
}


def test_the_readme_shows_what_is_published_of_the_digits() -> None:
    """Means and deviations over the runs of a network, and the largest of their equivariance errors."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition("**Digits.**")[2].partition("Caveat")[0]
    rows = {
        name.strip(): [cell.strip() for cell in cells.split("|")]
        for name, cells in re.findall(r"^\| ([a-zA-Z][^|]*)\|(.*)\|$", section, re.MULTILINE)
    }
    study = ROOT / "results" / "demo"
    runs: dict[str, list[Path]] = {}
    for trial in read_as(PlanFile, study / "plan.json").trials:
        runs.setdefault(trial.model, []).append(study / trial.folder)
    expected = {}
    for name, model in DIGITS.items():
        folders = runs.pop(model)
        assert len(folders) == 3
        evaluations = [read_as(Evaluation, folder / "evaluation.json") for folder in folders]
        largest = max(evaluation.equivariance_error for evaluation in evaluations)
        expected[name] = [
            f"{read_as(Record, folders[0] / 'record.json').parameters:,}",
            str(Sample.of([100 * evaluation.accuracy for evaluation in evaluations])),
            str(Sample.of([100 * evaluation.turned_accuracy for evaluation in evaluations])),
            f"{largest:.2g}" if largest > 0.01 else f"{largest:.0e}".replace("e-0", "e-"),
        ]
    assert not runs
    assert rows == expected


def test_the_readme_shows_what_is_published_of_cifar10() -> None:
    """All lines of the plan, our accuracies if there is a record of them, beside the paper's."""
    rows = re.findall(
        r"^\| `(\w*resnet29\w*)` \|(.*)\|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    paper = TABLES["cifar10"].rows
    assert {name for name, _ in rows} == {*paper, FAIR_BASELINE}
    for name, cells in rows:
        run, ours, theirs = ROOT / "results" / "cifar10" / name / "seed-0", [""] * 3, ""
        if run.exists():
            record = read_as(Record, run / "record.json")
            assert record.val_accuracy is not None
            evaluation = read_as(Evaluation, run / "evaluation.json")
            accuracies = (record.val_accuracy, evaluation.accuracy, evaluation.turned_accuracy)
            ours = [f"{100 * accuracy:.2f}" for accuracy in accuracies]
        if name in paper:
            theirs = f"{paper[name].accuracy.mean:.2f} ± {paper[name].accuracy.deviation:.2f}"
        parameters = f"{count_parameters(create_model(name)):,}"
        assert [cell.strip() for cell in cells.split("|")] == [parameters, *ours, theirs]


def test_the_readme_shows_what_is_published_of_the_rotation_study() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| ((?:p4|c8)?ResNet29[^|]*) \|(.*)\|$", text, re.MULTILINE)
    study = ROOT / "results" / "rotation"
    expected = {}
    for trial in read_as(PlanFile, study / "plan.json").trials:
        record = read_as(Record, study / trial.folder / "record.json")
        evaluation = read_as(Evaluation, study / trial.folder / "evaluation.json")
        assert evaluation.rotation is not None
        accuracies = evaluation.accuracy, evaluation.turned_accuracy, evaluation.rotation.mean
        expected[trial.label] = [f"{record.parameters:,}", *(f"{100 * a:.2f}" for a in accuracies)]
    assert {label: [cell.strip() for cell in cells.split("|")] for label, cells in rows} == expected
