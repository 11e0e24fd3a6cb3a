"""A plan on a Ray cluster: two nodes on this machine, one of which is killed in the middle."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import PATIENCE, same_weights, tiny_config
from rich.console import Console

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (15 by default: other tests would starve its workers)

import ray
from ray.cluster_utils import Cluster

from selfconv.study import InProcessEngine, Plan, PlanFailed, RayEngine, Trial, reproduce, sweep
from selfconv.study.board import read_result, results_table
from selfconv.train import Interrupted


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that runs nothing itself, and a node with a processor."""
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False},
    )
    add_node(made)
    ray.init(made.address, log_to_driver=False, logging_level=logging.ERROR)
    yield made
    ray.shutdown()
    made.shutdown()


def add_node(cluster: Cluster) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_report", lambda plan, out: [])


def plan(data: Path, epochs: int = 2, seeds: int = 1, **recipe: Any) -> Plan:
    trials = [
        Trial(tiny_config(data, model, seed, epochs=epochs, **recipe), model, "tiny")
        for seed in range(seeds)
        for model in ("resnet29", "resnet29_se")
    ]
    return Plan("tiny", "Tiny networks", "tiny", tuple(trials))


def table(made: Plan, out: Path) -> list[tuple[object, ...]]:
    """All that does not depend on the time that runs took."""
    rows: list[tuple[object, ...]] = []
    for trial in made.trials:
        result = read_result(out / trial.folder)
        assert result is not None
        rows.append(
            (trial.folder, result.parameters, result.accuracy, result.turned, result.equivariance_error)
        )
    return rows


def begun(out: Path, trials: tuple[Trial, ...], epochs: int) -> None:
    """Waits until all of them have done so many epochs."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        journals = [out / trial.folder / "metrics.jsonl" for trial in trials]
        if all(path.is_file() and len(path.read_text().splitlines()) >= epochs for path in journals):
            return
        time.sleep(0.02)
    raise TimeoutError(f"expected {epochs} epochs of every run in {out}")


def starts(out: Path, trial: Trial) -> int:
    """How often a trial was begun or gone on with: each time writes a file for TensorBoard."""
    return len(list((out / trial.folder).glob("events.out.tfevents.*")))


def test_killed_node_gives_the_same_results(
    cluster: Cluster, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.get_num_threads() == 1  # as many as a trial's cpus: then the bits are the same, too
    made = plan(data, epochs=60)  # seconds more than a node takes to die on a busy machine
    reproduce(made, tmp_path / "local", InProcessEngine(), command="again")
    second = add_node(cluster)
    cluster.wait_for_nodes()
    out, shares = tmp_path / "ray", {trial.folder: [0.0] for trial in made.trials}

    def kill() -> None:
        begun(out, made.trials, 3)
        cluster.remove_node(second, allow_graceful=False)

    def note(board: object, trial: Trial, share: float, text: str) -> None:
        shares[trial.folder].append(share)

    monkeypatch.setattr("selfconv.study.board.Board.step", note)
    killer = threading.Thread(target=kill)
    killer.start()
    reproduce(made, out, RayEngine(), command="again")
    killer.join()
    assert sorted(starts(out, trial) for trial in made.trials) == [1, 2]
    for seen in shares.values():  # killed before it saves an epoch that it has told of, a run goes back by it
        assert max(before - after for before, after in pairwise(seen)) < 1.5 / 60
    assert table(made, out) == table(made, tmp_path / "local")
    for trial in made.trials:
        assert same_weights(out / trial.folder, tmp_path / "local" / trial.folder)
    stream = io.StringIO()
    Console(file=stream, width=120).print(results_table(made, out))
    assert stream.getvalue().count("1/1") == 2


def test_interrupted_runs_are_saved_and_continue(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """There is room for one trial at a time: the others have not begun when the signal comes. One fails."""
    made = plan(data, epochs=25)
    wild = Trial(tiny_config(data, "p4resnet29", lr=1e30), "wild", "tiny")
    made = Plan(made.name, made.title, made.source, (*made.trials, wild))

    def press() -> None:
        begun(tmp_path, made.trials[:1], 2)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(Interrupted, match="0 of 3 runs are done; continue with: again"):
        reproduce(made, tmp_path, RayEngine(), command="again")
    presser.join()
    first, second = (tmp_path / trial.folder for trial in made.trials[:2])
    assert list((first / "checkpoints").glob("*.safetensors"))
    assert not (second / "config.json").exists()
    with pytest.raises(PlanFailed, match=r"1 of 3 runs failed: .*: the loss is nan"):
        reproduce(made, tmp_path, RayEngine(), command="again")
    assert sweep.evaluated(first)
    assert sweep.evaluated(second)
    assert starts(tmp_path, made.trials[0]) == 2
    assert (tmp_path / wild.folder / "failed.json").is_file()


def test_unreachable_ray_address(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise ConnectionError("no Ray there")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        ValueError, match=r"address: cannot connect to Ray at '10.0.0.1:6379' \(no Ray there\)"
    ):
        reproduce(plan(data), tmp_path / "out", RayEngine("10.0.0.1:6379"), command="again")
    assert not (tmp_path / "out").exists()
