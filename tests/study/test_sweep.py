"""Plans and their runs: what is done is kept, what is missing is run, what fails is told."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from helpers.made_runs import make_run
from helpers.tiny_runs import PATIENCE, command, environment, run_cli, same_weights, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from selfconv._text import format_duration
from selfconv.models import MODELS, ResNetConfig
from selfconv.study import Budget, InProcessEngine, Plan, PlanFailed, Trial, make_plan, reproduce, sweep
from selfconv.study import board as _board
from selfconv.study.board import Board, results_table
from selfconv.study.estimate import side_by_side
from selfconv.study.plans import OUTLINES
from selfconv.train import (
    Interrupted,
    Record,
    Run,
    StopSignals,
    fast_recipe,
    paper_recipe,
    short_recipe,
    train,
)
from selfconv.train.files.runs import save_model

SMALL = ["--epochs", "1", "--seeds", "1", "--models", "resnet29*asc"]


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what comes before it."""
    monkeypatch.setattr(sweep, "_report", lambda plan, out: [])


def tiny_plan(data: Path, seeds: int = 2, **recipe: Any) -> Plan:
    """A convolution and an attention network."""
    trials = [
        Trial(tiny_config(data, model, seed, **recipe), label, "tiny")
        for seed in range(seeds)
        for model, label in (("resnet29", "convolution"), ("resnet29_asc", "attention"))
    ]
    return Plan("tiny", "Tiny networks", "tiny", tuple(trials))


def files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


# ---- plans ----


def test_the_papers_plans() -> None:
    sizes = {name: (len(plan.lines), len(plan.trials)) for name in OUTLINES if (plan := make_plan(name))}
    assert sizes == {
        "cifar10": (10, 80), "cifar100": (6, 48), "resnet83": (9, 9), "ablation-kernel": (6, 18),
        "ablation-heads": (6, 18), "ablation-filters": (6, 18), "ablation-psi": (4, 12),
        "ablation-pool": (6, 18), "rotation": (7, 7), "controls": (10, 30), "demo": (10, 30),
    }  # fmt: skip
    for name in ("cifar10", "cifar100", "resnet83"):
        plan = make_plan(name)
        assert plan.reduced == ()
        for trial in plan.trials:
            assert trial.config.recipe == paper_recipe(trial.config.model.name)
            assert trial.config.data.source == ("cifar100" if name == "cifar100" else "cifar10")
    assert {t.config.recipe.epochs for t in make_plan("resnet83").trials} == {200}


@pytest.mark.parametrize("name", OUTLINES)
def test_every_plan_can_be_run(name: str) -> None:
    plan = make_plan(name)
    folders = [trial.folder for trial in plan.trials]
    assert len(set(folders)) == len(folders)
    assert len({trial.config.data for trial in plan.trials}) == 1
    trained = set()  # a line that repeats the default of another would be the same run twice
    for trials in plan.lines.values():
        assert [trial.config.seed for trial in trials] == list(range(len(trials)))
        assert len({replace(trial.config, seed=0) for trial in trials}) == 1
        model, recipe = trials[0].config.model, trials[0].config.recipe
        overrides = {key: value for key, value in model.overrides().items() if value is not None}
        trained.add((ResNetConfig.of(**MODELS[model.name] | overrides), recipe))
    assert len(trained) == len(plan.lines)
    count = len(plan.lines)
    for start in range(0, len(plan.trials), count):  # a whole table before the next seed
        assert len({trial.line for trial in plan.trials[start : start + count]}) == count


def test_ablations_change_one_option() -> None:
    expected = {
        "ablation-kernel": ("kernel_size", [3, 5, 7]),
        "ablation-heads": ("num_heads", [1, 4, 8]),
        "ablation-filters": ("affine", ["psi", "beta", "both"]),
        "ablation-psi": ("psi", ["channel", "dense"]),
        "ablation-pool": ("pool", ["mean", "group_max", "max"]),
    }
    for name, (option, values) in expected.items():
        for group in {group for group, _ in make_plan(name).lines}:
            lines = [t[0].config.model for (g, _), t in make_plan(name).lines.items() if g == group]
            assert [getattr(model, option) for model in lines] == values
            rest = [{**vars(model), option: None} for model in lines]
            assert rest == [rest[0]] * len(values)


def test_folders_are_stable() -> None:
    """They are how finished runs are found again."""
    assert make_plan("cifar10").trials[0].folder == "resnet29/seed-0"
    assert make_plan("ablation-kernel").trials[-1].folder == "p4resnet29_asc-kernel_size=7/seed-2"
    assert make_plan("demo").trials[4].folder == "resnet29_asc-widths=8,16,32-depth=11-num_heads=4/seed-0"
    assert make_plan("rotation").trials[2].folder == "resnet29_asc-rotate=any/seed-0"


def test_a_recipe_for_all_networks() -> None:
    """The one that is named, with what a line changes in it, and no other change of the plan's."""
    plan = make_plan("cifar10", Budget(recipe="short", epochs=12, seeds=1))
    assert {trial.config.recipe for trial in plan.trials} == {replace(short_recipe(), epochs=12)}
    assert "the recipe 'short' instead of the paper's" in plan.reduced
    own = make_plan("rotation", Budget(data="cells", range="0,4095", group_by="slide"))
    assert {(t.config.data.pixel_range, t.config.data.group_by) for t in own.trials} == {("0,4095", "slide")}
    assert (plan.data.pixel_range, plan.data.group_by) == ("auto", None)
    assert make_plan("rotation", Budget(data="cells", image_size=32)).data.image_size == 32
    assert make_plan("demo").data.image_size == 8
    assert make_plan("demo", Budget(image_size=12)).data.image_size == 12
    rotation = make_plan("rotation", Budget(recipe="fast"))
    assert [trial.config.recipe.rotate for trial in rotation.trials] == [
        "none", "any", "any", "none", "none", "any", "none",
    ]  # fmt: skip
    assert {replace(trial.config.recipe, rotate="none") for trial in rotation.trials} == {fast_recipe()}


def test_the_default_recipe_of_a_plan_is_that_of_its_data() -> None:
    """By the name of the data set: CIFAR has the paper's, also from a file or from the Hub."""
    for data in ("cifar10", "some/cifar10.npz", "hf:uoft-cs/cifar100", "hf:cifar10:plain_text"):
        plan = make_plan("ablation-psi", Budget(data=data))
        assert all(t.config.recipe == paper_recipe(t.config.model.name) for t in plan.trials)
    for data in ("digits", "some/cells", "cells.npz"):
        plan = make_plan("cifar10", Budget(data=data))
        assert {trial.config.recipe for trial in plan.trials} == {fast_recipe()}


def test_plans_of_our_own_report_no_reduction() -> None:
    for name in ("rotation", "controls"):
        assert make_plan(name).on("plankton", 1000, 200).reduced == ()
    assert make_plan("rotation", Budget(epochs=1)).reduced == ("1 epoch instead of 12",)


def test_reductions_of_the_budget_are_listed() -> None:
    small = make_plan("cifar10", Budget(epochs=1, seeds=1, subset=5000, models="p4*"))
    assert small.on("cifar10", 45_000, 10_000).reduced == (
        "5,000 of 45,000 training images",
        "1 epoch instead of 100",
        "1 run of each network instead of 8",
        "4 of 10 lines",
    )
    assert small.on("photos", 300, 99).reduced[0] == "photos instead of cifar10"
    assert Counter(t.config.model.name for t in small.trials) == {
        "p4resnet29": 1, "p4resnet29_se": 1, "p4resnet29_asc": 1, "p4resnet29_pool": 1,
    }  # fmt: skip
    whole = make_plan("cifar10", Budget(epochs=100, seeds=8))
    assert whole.on("cifar10", 45_000, 10_000).reduced == ()
    assert whole.on("cifar10", 180, 40).reduced == (
        "data of 180 training images instead of 45,000",
        "40 test images instead of 10,000",
    )
    assert "6 epochs instead of 100" in make_plan("demo").reduced
    digits = make_plan("ablation-psi", Budget(data="digits"))
    assert not digits.trials[0].config.recipe.flip  # a mirrored digit is another, or none


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("resnet29", ["resnet29", "resnet29-rotate=any"]),
        ("resnet29-*", ["resnet29-rotate=any"]),
        ("*-rotate=any", ["resnet29-rotate=any", "resnet29_asc-rotate=any", "p4resnet29_asc-rotate=any"]),
    ],
)
def test_lines_are_chosen_by_network_or_folder(pattern: str, expected: list[str]) -> None:
    plan = make_plan("rotation", Budget(models=pattern))
    assert [trial.folder for trial in plan.trials] == [f"{name}/seed-0" for name in expected]


def test_times_are_shown_in_their_unit() -> None:
    shown = [format_duration(s) for s in (0.4, 119, 120, 7199, 7200, 172_800)]
    assert shown == ["0 s", "119 s", "2.0 min", "120.0 min", "2.0 h", "2.0 days"]


# ---- running them ----


def test_a_plan_from_nothing_to_its_report(data: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "out"
    arguments = ["reproduce", "demo", "--data", str(data), "--subset", "60", "--out", str(out), *SMALL]
    assert run_cli(*arguments) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    for text in ("60 of 90 training images", "tiny instead of digits", "ResNet11+ASC", "2/2", "images/s"):
        assert text in printed.out
    html, markdown = out / "report" / "report.html", out / "report" / "report.md"
    assert str(html) in printed.out
    assert "60 of 90 training images" in markdown.read_text()
    assert "ResNet11+Simple_ASC" in html.read_text()

    plan = json.loads((out / "plan.json").read_text())
    assert (plan["plan"], plan["data"], len(plan["trials"])) == ("demo", "tiny", 2)
    for trial in plan["trials"]:
        record = Run.open(out / trial["folder"]).record
        evaluation = json.loads((out / trial["folder"] / "evaluation.json").read_text())
        assert record.model == trial["model"]
        assert record.data.images == {"train": 60, "val": 10, "test": 40}
        assert evaluation["accuracy"] == record.test_accuracy
        assert evaluation["equivariance_error"] > 0.01  # these networks know nothing of turns

    before = files(out)
    assert run_cli(*arguments) == 0
    assert "2 runs, 2 of them done" in capfd.readouterr().out
    runs = {trial["folder"] for trial in plan["trials"]}
    kept = {name: when for name, when in files(out).items() if name.rpartition("/")[0] in runs}
    assert kept == {name: when for name, when in before.items() if name in kept}
    assert len(kept) > 8


@pytest.mark.usefixtures("no_report")
def test_more_seeds_are_added_to_what_is_there(data: Path, tmp_path: Path) -> None:
    reproduce(tiny_plan(data, 1, epochs=1), tmp_path, InProcessEngine(), command="again")
    first = (tmp_path / "resnet29-widths=8,8,8-depth=11/seed-0/record.json").stat().st_mtime_ns
    plan = tiny_plan(data, 2, epochs=1)
    reproduce(plan, tmp_path, InProcessEngine(), command="again")
    assert all(sweep.evaluated(tmp_path / trial.folder) for trial in plan.trials)
    assert (tmp_path / plan.trials[0].folder / "record.json").stat().st_mtime_ns == first


@pytest.mark.usefixtures("no_report")
def test_interrupted_and_continued_it_ends_with_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny_plan(data, 1)
    step = Board.step
    sent: list[float] = []

    def interrupting(board: Board, trial: Trial, share: float, text: str) -> None:
        step(board, trial, share, text)
        if trial.label == "attention" and share > 0.6 and not sent:
            sent.append(share)  # a second signal would stop it at once
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Board, "step", interrupting)
        with pytest.raises(
            Interrupted, match="1 of 2 runs are done; continue with: selfconv again"
        ) as stopped:
            reproduce(plan, tmp_path / "a", InProcessEngine(), command="selfconv again")
    assert stopped.value.code == 128 + signal.SIGTERM
    halfway = Run.open(tmp_path / "a" / plan.trials[1].folder)
    assert len(list(halfway.checkpoints.iterdir())) == 2
    assert not halfway.finished
    shares: list[float] = []
    monkeypatch.setattr(Board, "step", lambda board, trial, share, text: shares.append(share))
    reproduce(plan, tmp_path / "a", InProcessEngine(), command="selfconv again")
    assert min(shares) > sent[0]  # from the checkpoint
    train(plan.trials[1].config, tmp_path / "b", quiet=True)
    assert same_weights(tmp_path / "a" / plan.trials[1].folder, tmp_path / "b")


@pytest.mark.usefixtures("no_report")
def test_a_signal_while_a_run_is_being_finished(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is finished, since there is nothing to save, and no other begins."""
    plan = tiny_plan(data, 1, epochs=1)

    def saving(run: Run, model: Any, record: Record) -> Record:
        os.kill(os.getpid(), signal.SIGTERM)
        return save_model(run, model, record)

    monkeypatch.setattr("selfconv.train.runner.save_model", saving)
    with pytest.raises(Interrupted, match="0 of 2 runs are done") as stopped:
        reproduce(plan, tmp_path, InProcessEngine(), command="again")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert Run.open(tmp_path / plan.trials[0].folder).finished
    assert not (tmp_path / plan.trials[1].folder).exists()


@pytest.mark.usefixtures("no_report")
def test_failed_runs_do_not_stop_the_others(
    data: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tiny_plan(data, 2, epochs=1)
    wild = good.trials[0].config.replaced("recipe", lr=1e30)
    plan = replace(good, trials=(replace(good.trials[0], config=wild), *good.trials[1:]))

    def scarce(config: Any, *args: Any, **options: Any) -> Any:
        if config == plan.trials[2].config:
            raise MemoryError
        return train(config, *args, **options)

    monkeypatch.setattr("selfconv.train.runner.train", scarce)
    with pytest.raises(PlanFailed, match=r"2 of 4 runs failed: .*seed-0: the loss is nan.*; .*MemoryError"):
        reproduce(plan, tmp_path, InProcessEngine(), command="again")
    assert "failed: the loss is nan" in capfd.readouterr().out
    reasons = [tmp_path / trial.folder / "failed.json" for trial in plan.trials]
    assert [path.is_file() for path in reasons] == [True, False, True, False]
    assert json.loads(reasons[2].read_text()) == {"error": "MemoryError: MemoryError"}
    assert [sweep.evaluated(tmp_path / t.folder) for t in plan.trials] == [False, True, False, True]
    monkeypatch.undo()
    monkeypatch.setattr(sweep, "_report", lambda plan, out: [])
    killed = reasons[2].with_name(".failed.json.partial")  # while a reason was written
    killed.touch()
    with pytest.raises(PlanFailed, match="1 of 4 runs failed"):  # memory came back, and is used
        reproduce(plan, tmp_path, InProcessEngine(), command="again")
    assert [path.is_file() for path in reasons] == [True, False, False, False]
    assert not killed.exists()


@pytest.mark.usefixtures("no_report")
def test_a_run_that_another_process_writes_to(data: Path, tmp_path: Path) -> None:
    plan = tiny_plan(data, 1, epochs=1)
    folder = tmp_path / plan.trials[0].folder
    folder.mkdir(parents=True)
    with (
        FileLock(folder / ".lock"),
        pytest.raises(PlanFailed, match=r"1 of 2 runs failed: .* another process is writing to this run"),
    ):
        reproduce(plan, tmp_path, InProcessEngine(), command="again")
    assert sweep.evaluated(tmp_path / plan.trials[1].folder)
    assert not (folder / "failed.json").exists()  # the folder is the other's


def test_a_failed_run_in_the_command(data: Path, tmp_path: Path, capfd: Any) -> None:
    """Exit code 1, one line, and the report on the others."""
    folder = tmp_path / "resnet29_asc-widths=8,16,32-depth=11-num_heads=4" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("mine")
    assert run_cli("reproduce", "demo", "--data", data, "--out", tmp_path, *SMALL) == 1
    error = capfd.readouterr().err
    assert error.startswith("selfconv: 1 of 2 runs failed: ")
    assert "it holds thesis.tex" in error
    assert error.count("\n") == 1
    assert (tmp_path / "report" / "report.md").is_file()


def test_ctrl_c_in_the_command(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["reproduce", "demo", "--epochs", "40", "--seeds", "1", "--data", str(data)]
    arguments += ["--models", "resnet29", "--out", str(out)]
    process = subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    folder = out / "resnet29-widths=8,16,32-depth=11" / "seed-0"
    until = time.monotonic() + PATIENCE
    while not list(folder.glob("checkpoints/*.safetensors")) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, printed + error
    assert error.startswith("selfconv: stopped and saved; 0 of 1 runs are done; continue with: selfconv ")
    told = error.strip().partition("continue with: selfconv ")[2].split()
    assert not Run.open(folder).finished
    assert run_cli(*told) == 0
    assert Run.open(folder).record.epochs == 40


def test_second_ctrl_c_does_not_claim_to_have_saved(data: Path, tmp_path: Path, no_report: None) -> None:
    class Impatient(InProcessEngine):
        def run(self, trials: Any, out: Path, board: Board, stop: StopSignals) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=r"^stopped at once; .*; 0 of 2 runs are done; .*: again") as stop:
        reproduce(tiny_plan(data, seeds=1), tmp_path, Impatient(), command="again")
    assert stop.value.code == 128 + signal.SIGINT


# ---- what is refused ----


def check_one_line(capfd: pytest.CaptureFixture[str], message: str) -> None:
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("selfconv: ")
    assert message in lines[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["cifar11"], "unknown plan 'cifar11': expected one of cifar10, cifar100, "),
        (["cifar11"], "did you mean 'cifar10'?"),
        ([], "PLAN"),
        (["demo", "--epochs", "0"], "epochs: expected an integer ≥ 1; got 0"),
        (["demo", "--seeds", "-1"], "seeds: expected an integer ≥ 1; got -1"),
        (["demo", "--subset", "0"], "subset: expected an integer ≥ 1; got 0"),
        (["demo", "--subset", "5"], "subset: expected from 10 images, one for each class, to all 1294"),
        (["demo", "--epochs", "many"], "--epochs"),
        (["demo", "--seds", "1"], "Unrecognized options: --seds"),
        (["demo", "--models", "vgg*"], "no network of the plan 'demo' matches 'vgg*'; it has resnet29,"),
        (["demo", "--data", "nowhere"], "got 'nowhere': no such file or folder"),
        (["demo", "--data", "flat.npz"], "4×4 or more; got shape [1, 1, 2, 2]"),
        (["demo", "--jobs", "0"], "jobs: expected an integer ≥ 1; got 0"),
        (["demo", "--jobs", "two"], "--jobs"),
        (["demo", "--jobs", "2", "--engine", "ray"], "--jobs needs --engine local; got --engine ray"),
        (["demo", "--engine", "slurm"], "--engine"),
        (["demo", "--address", "auto"], "--address needs --engine ray"),
        (["demo", "--cpus", "2"], "--cpus needs --engine ray"),
        (["demo", "--engine", "ray", "--cpus", "0"], "cpus: expected an integer ≥ 1; got 0"),
        (["demo", "--engine", "ray", "--gpus", "-1"], "gpus: expected a number ≥ 0; got -1"),
        (["demo", "--out", "file"], "file: expected a folder to write to; got a file"),
    ],
)
def test_bad_options(
    args: list[str], message: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    flat, labels = np.arange(80, dtype=np.uint8).reshape(20, 2, 2), np.arange(20) % 2
    np.savez("flat.npz", x_train=flat, y_train=labels, x_test=255 - flat, y_test=labels)
    before = sorted(os.listdir())
    assert run_cli("reproduce", *args) == 2
    check_one_line(capfd, message)
    assert sorted(os.listdir()) == before


def test_bad_options_of_the_demo(tmp_path: Path, capfd: Any) -> None:
    assert run_cli("demo", "--epochs", "0", "--out", tmp_path / "out") == 2
    check_one_line(capfd, "epochs: expected an integer ≥ 1; got 0")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_report")
def test_other_options_data_and_plans_are_refused(data: Path, tmp_path: Path) -> None:
    plan, out = tiny_plan(data, 1, epochs=1), tmp_path / "out"
    reproduce(plan, out, InProcessEngine(), command="again")
    before = files(out)
    with pytest.raises(
        ValueError, match=r"was run with other options: recipe.epochs: 2, not 1; give them ag"
    ):
        reproduce(tiny_plan(data, 1, epochs=2), out, InProcessEngine(), command="again")
    with pytest.raises(ValueError, match="holds the plan 'tiny'; give another --out"):
        reproduce(replace(plan, name="other"), out, InProcessEngine(), command="again")
    own = tmp_path / "tiny.npz"
    own.write_bytes(data.read_bytes())
    plan = tiny_plan(own, 1, epochs=1)
    reproduce(plan, tmp_path / "own", InProcessEngine(), command="again")
    import numpy as np

    arrays = dict(np.load(own))
    np.savez(own, **arrays | {"x_test": 255 - arrays["x_test"]})
    with pytest.raises(ValueError, match="the data set tiny has changed since"):
        reproduce(plan, tmp_path / "own", InProcessEngine(), command="again")
    assert files(out) == before


def test_ray_that_is_missing_is_named(
    data: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    out = tmp_path / "out"
    assert run_cli("reproduce", "demo", "--engine", "ray", "--data", data, "--out", out, *SMALL) == 2
    check_one_line(capfd, "--engine ray needs ray: pip install 'selfconv[cluster]'")
    assert not out.exists()


# ---- what is shown ----


def test_a_dry_run_estimates_and_writes_nothing(data: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "out"
    arguments = ["reproduce", "demo", "--data", str(data), "--out", str(out), "--dry-run", *SMALL]
    for jobs, expected in ((1, "one after another on this"), (2, "2 at a time on this machine with 1")):
        assert run_cli(*arguments, "--jobs", str(jobs)) == 0
        printed = " ".join(capfd.readouterr().out.split())
        for text in ("ResNet11+Simple_ASC", "resnet29_asc-widths=8,16,32", "a run takes"):
            assert text in printed
        assert f"for 2 runs, {expected}" in printed
    assert not out.exists()


def test_a_dry_run_downloads_nothing(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs of data that are not there is known: how many images, and how large."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr("selfconv.data.sources.cifar.download", refuse)
    monkeypatch.setenv("SELFCONV_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    arguments = ["--models", "resnet29", "--subset", "5000", "--jobs", "2", "--dry-run"]
    assert run_cli("reproduce", "cifar10", *arguments) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    for text in (
        "cifar10: 5000 images to train, 5000 to validate, 10000 to test; 32×32, colour, 10 classes",
        "not downloaded yet: https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz (170 MB)",
        "for 8 runs, 2 at a time",
    ):
        assert text in printed.out
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.floats(0.1, 10), max_size=12), st.integers(1, 5))
def test_estimate_for_concurrent_runs(seconds: list[float], jobs: int) -> None:
    together = side_by_side(seconds, jobs)
    assert together >= max([sum(seconds) / jobs, *seconds]) - 1e-9
    assert together <= sum(seconds) / jobs + max([0.0, *seconds]) + 1e-9
    assert side_by_side(seconds, 1) == pytest.approx(sum(seconds))


@pytest.mark.usefixtures("no_report")
def test_the_table_shows_means_and_deviations(data: Path, tmp_path: Path) -> None:
    plan = tiny_plan(data, 2, epochs=1)
    for trial, accuracy in zip(plan.trials, (0.5, 0.9, 0.6, 0.9), strict=True):
        turned = [accuracy, accuracy - 0.1, accuracy - 0.2]
        make_run(
            tmp_path / trial.folder, accuracy=accuracy, turned=turned, equivariance_error=0.25,
            parameters=1234, images_per_second=10,
        )  # fmt: skip
    (tmp_path / plan.trials[3].folder / "evaluation.json").unlink()
    stream = io.StringIO()
    Console(file=stream, width=120).print(results_table(plan, tmp_path))
    rows = [
        " ".join(line.replace("│", " ").split()) for line in stream.getvalue().splitlines() if "/2" in line
    ]
    assert rows[0] == "convolution 2/2 1,234 55.00 ± 7.07 45.00 ± 7.07 0.25 10"
    assert rows[1] == "attention 1/2 1,234 90.00 80.00 0.25 10"


@pytest.mark.usefixtures("no_report")
def test_a_terminal_shows_runs_in_progress(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, stream = tiny_plan(data, 1, epochs=1), io.StringIO()
    console = Console(file=stream, force_terminal=True, width=140)
    with Board(plan, tmp_path, plan.trials, console) as board:
        board.step(plan.trials[0], 0.5, "epoch 1/2  loss 1.234")
        console.print(board._render())
    shown = stream.getvalue()
    for text in ("Tiny networks", "convolution, seed 0", "loss 1.234", "0 of 2 runs", "left", "0/1"):
        assert text in shown


def test_progress_lines_without_a_terminal(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(_board, "QUIET", -1.0)
    plan = tiny_plan(data, 1, epochs=1)
    with Board(plan, tmp_path, plan.trials, Console(width=100)) as board:
        board.step(plan.trials[0], 0.0, "epoch 1/2")
        board.step(plan.trials[0], 0.5, "epoch 2/2")
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "convolution, seed 0: epoch 1/2, time left not known yet"
    assert lines[1].startswith("convolution, seed 0: epoch 2/2, ")
    assert lines[1].endswith(" s left")
