"""Runs side by side, in processes of their own: they end as they do one after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from helpers.tiny_runs import PATIENCE, command, environment, run_cli, same_weights, tiny_config, tiny_data

from selfconv.study import (
    Board,
    InProcessEngine,
    Plan,
    PlanFailed,
    ProcessEngine,
    Trial,
    default_jobs,
    make_plan,
    process_engine,
    reproduce,
    sweep,
)
from selfconv.train import Interrupted, Run
from selfconv.train.files import checkpoints

EPOCHS = 12  # enough for two processes that start together to run at the same time


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    data = tiny_data(tmp_path_factory.mktemp("data"))
    models = ("resnet29", "resnet29_se", "resnet29_depthwise")  # which do not load the kernels of attention
    trials = [Trial(tiny_config(data, model, epochs=EPOCHS), model, "tiny") for model in models]
    return Plan("tiny", "Tiny networks", "tiny", tuple(trials))


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_report", lambda plan, out: [])


@pytest.fixture(scope="module")
def alone(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan's runs, one after another, on as many threads as a process has below."""
    assert torch.get_num_threads() == ProcessEngine(2).threads == 1
    out = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweep, "_report", lambda plan, out: [])
        reproduce(plan, out, InProcessEngine(), command="again")
    return out


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The processes that took a trial, by its folder."""
    found: dict[str, list[Any]] = {}
    take = process_engine._Worker.take

    def noted(worker: Any, trial: Trial, out: Path) -> None:
        found.setdefault(trial.folder, []).append(worker)
        take(worker, trial, out)

    monkeypatch.setattr(process_engine._Worker, "take", noted)
    return found


def on_step(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    """Calls it with the board, the trial and its share, after each that the board hears of."""
    step = Board.step

    def noted(board: Board, trial: Trial, share: float, text: str) -> None:
        step(board, trial, share, text)
        call(board, trial, share)

    monkeypatch.setattr(Board, "step", noted)


def results(out: Path, trial: Trial) -> list[dict[str, Any]]:
    """All that is written of a run, but for the time it took, and the state of the checkout then."""
    record, evaluation = (json.loads((out / trial.folder / f"{n}.json").read_text()) for n in FILES)
    return [{k: v for k, v in record.items() if k not in TIMES}, evaluation]


FILES, TIMES = ("record", "evaluation"), ("train_seconds", "images_per_second", "commit")


def check_same(plan: Plan, out: Path, alone: Path) -> None:
    for trial in plan.trials:
        assert results(out, trial) == results(alone, trial)
        assert same_weights(out / trial.folder, alone / trial.folder)


def test_concurrent_runs_are_bitwise_equal_to_sequential_runs(
    plan: Plan, alone: Path, places: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = []
    on_step(monkeypatch, lambda board, trial, share: at_once.append(len(board._running)))
    reproduce(plan, tmp_path, ProcessEngine(2), command="again")
    check_same(plan, tmp_path, alone)
    assert max(at_once) == 2
    workers = [worker for taken in places.values() for worker in taken]
    assert len(workers) == 3
    assert len({id(worker) for worker in workers}) == 2  # the third run had no process to start
    assert [worker._process.returncode for worker in workers] == [0, 0, 0]


def test_sigterm_and_resume(
    plan: Plan, alone: Path, places: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM both runs are saved. One then finds a damaged checkpoint, and its warning is heard."""
    came: dict[str, float] = {}

    def interrupt(board: Board, trial: Trial, share: float) -> None:
        if len(came) < 2:
            came[trial.folder] = share
            if len(came) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        on_step(patched, interrupt)
        with pytest.raises(Interrupted, match="of 3 runs are done; continue with: again") as stopped:
            reproduce(plan, tmp_path, ProcessEngine(2), command="again")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert all(worker._process.returncode is not None for taken in places.values() for worker in taken)
    begun = [tmp_path / trial.folder for trial in plan.trials[:2]]
    saved = {folder: checkpoints.checkpoint_files(folder / "checkpoints") for folder in begun}
    for trial, folder in zip(plan.trials, begun, strict=False):
        state = checkpoints.read(saved[folder][-1], Run.open(folder).digest).state
        assert (6 * state["epoch"] + state["step"]) / (6 * EPOCHS) >= came[trial.folder]  # nothing is lost
    (begun[0] / "checkpoints" / "999999-00000000.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="cannot be read .*trying the previous one"):
        reproduce(plan, tmp_path, ProcessEngine(2), command="again")
    check_same(plan, tmp_path, alone)


def test_killed_workers(
    plan: Plan, alone: Path, places: dict[str, list[Any]], tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    """Once: the run goes on from its checkpoint. Twice: it has failed, as has one that diverges."""
    once, twice, _ = plan.trials
    wild = Trial(once.config.replaced("model", name="p4resnet29").replaced("recipe", lr=1e30), "wild", "tiny")
    more = Plan(plan.name, plan.title, plan.source, (*plan.trials, wild))
    shares: list[float] = []

    def kill(board: Board, trial: Trial, share: float) -> None:
        taken = places[trial.folder]
        if trial == once:
            shares.append(share)
        if share > 0.3 and (trial == twice or (trial == once and len(taken) == 1)):
            taken[-1]._process.kill()

    with monkeypatch.context() as patched:
        on_step(patched, kill)
        with pytest.raises(PlanFailed) as failed:
            reproduce(more, tmp_path, ProcessEngine(2), command="again")
    reason = "its process was killed (SIGKILL, possibly out of memory)"
    for text in ("2 of 4 runs failed: ", f"{twice.folder}: {reason}", f"{wild.folder}: the loss is nan"):
        assert text in str(failed.value)
    assert json.loads((tmp_path / twice.folder / "failed.json").read_text()) == {"error": reason}
    printed = capfd.readouterr()
    assert printed.out.count(f"{once}: {reason}; continues from its last checkpoint") == 1
    assert printed.out.count(f"{twice}: {reason}; continues from its last checkpoint") == 1
    assert printed.err == ""
    assert [len(places[trial.folder]) for trial in more.trials] == [2, 2, 1, 1]
    killed = next(index for index, share in enumerate(shares) if share > 0.3)
    assert min(shares[killed:]) > 0.2
    with pytest.raises(PlanFailed, match="1 of 4 runs failed"):
        reproduce(more, tmp_path, InProcessEngine(), command="again")
    check_same(plan, tmp_path, alone)


# ---- from outside ----


def children(process: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == process:
            found.add(int(path.parent.name))
    return found


def wait_for(condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def last_saved(folder: Path) -> str:
    return max((path.name for path in (folder / "checkpoints").glob("*.safetensors")), default="")


def test_ctrl_c_and_killed_parent(plan: Plan, tmp_path: Path, capfd: Any) -> None:
    """Ctrl-C reaches parent and children alike; SIGKILL the parent alone. All save, and no process stays."""
    out = tmp_path / "out"
    data = plan.trials[0].config.data.source
    arguments = ["reproduce", "demo", "--epochs", "500", "--seeds", "1", "--data", data]
    arguments += ["--models", "resnet29*s[ea]*", "--out", str(out), "--jobs", "2"]
    names = ("resnet29_se-widths=8,16,32-depth=11", "resnet29_sasa-widths=8,16,32-depth=11-num_heads=4")
    folders = [out / name / "seed-0" for name in names]

    def start() -> tuple[subprocess.Popen[str], set[int]]:
        before = [last_saved(folder) for folder in folders]
        process = subprocess.Popen(
            command(*arguments),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_for(lambda: all(last_saved(f) > b for f, b in zip(folders, before, strict=True)))
        return process, children(process.pid)

    process, workers = start()
    assert len(workers) == 2
    assert run_cli(*arguments[:-1], "1") == 1
    refused = capfd.readouterr()
    assert refused.err.count("another process is writing to this run") == 2
    assert refused.err.count("\n") == 1
    assert not any((folder / "failed.json").exists() for folder in folders)
    os.killpg(process.pid, signal.SIGINT)
    printed, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, printed + error
    assert error.startswith("selfconv: stopped and saved; 0 of 2 runs are done; continue with: selfconv ")
    assert error.endswith(" --jobs 2\n")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]

    process, workers = start()
    assert len(workers) == 2
    seen = [last_saved(folder) for folder in folders]
    process.kill()
    process.communicate(timeout=PATIENCE)
    wait_for(lambda: not [pid for pid in workers if Path(f"/proc/{pid}").exists()])
    for folder, before in zip(folders, seen, strict=True):
        with FileLock(folder / ".lock", timeout=0):
            assert not Run.open(folder).finished
            assert last_saved(folder) > before
            assert checkpoints.load_last(folder / "checkpoints", Run.open(folder).digest) is not None


def test_default_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(process_engine, "machine_memory", lambda: 17e9)
    assert default_jobs(make_plan("demo")) == 15  # what memory allows
    assert default_jobs(make_plan("cifar10")) == 3
    monkeypatch.setattr(process_engine, "machine_memory", lambda: 1e12)
    assert default_jobs(make_plan("cifar10")) == 16
    assert default_jobs(make_plan("resnet83")) == 9  # as many as there are
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert [ProcessEngine(jobs).threads for jobs in (1, 3, 16, 40)] == [16, 5, 1, 1]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert default_jobs(make_plan("demo")) == 1
