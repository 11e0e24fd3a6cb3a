"""Trials as Ray tasks, on one machine or on several that share a file system.

Each trial is a task with its processors. When its worker or node dies, Ray restarts it elsewhere, and it
resumes from the trial's last checkpoint. The driver reads the progress from the trials' folders.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from selfconv._extras import require
from selfconv._text import one_line
from selfconv.study.board import Board
from selfconv.study.plans import Trial
from selfconv.study.sweep import outcome_of_dead_worker, run_trial_or_reason
from selfconv.train import Interrupted, RunConfig, StopSignals, read_metrics

RETRIES = 5  # of a trial whose worker or node died
PATIENCE = 120.0  # seconds to wait for the lock of a dead node's process, or for running trials to save
POLL = 0.5


class RayEngine:
    """Runs trials on the Ray cluster at an address, or on this machine if no address is given.

    Args:
        cpus: processors per trial, which is also its number of threads.
        gpus: GPUs per trial; a fraction shares one.
    """

    def __init__(self, address: str | None = None, cpus: int = 1, gpus: float = 0.0) -> None:
        if cpus < 1:
            raise ValueError(f"cpus: expected an integer ≥ 1; got {cpus}")
        if not 0 <= gpus < float("inf"):
            raise ValueError(f"gpus: expected a number ≥ 0; got {gpus}")
        self.address, self.threads, self.gpus = address, cpus, gpus
        self.jobs = 1  # a lower bound: the cluster is known only after connecting
        self._connection = ExitStack()

    def __enter__(self) -> RayEngine:
        self._ray = self._connection.enter_context(_connected(self.address))
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def run(self, trials: Sequence[Trial], out: Path, board: Board, stop: StopSignals) -> None:
        ray = self._ray
        task = ray.remote(
            num_cpus=self.threads, num_gpus=self.gpus, max_retries=RETRIES, retry_exceptions=[Interrupted]
        )(_task)
        where = out.resolve()
        waiting = {
            task.options(name=trial.folder).remote(
                trial.config.to_json(), str(where / trial.folder), os.getcwd(), self.threads
            ): trial
            for trial in trials
        }
        followed = {trial.folder: _FollowedTrial(trial, where / trial.folder) for trial in trials}
        while waiting and not stop.number:
            done, _ = ray.wait(list(waiting), timeout=POLL)
            for reference in done:
                trial = waiting.pop(reference)
                board.end(trial, _outcome(ray, reference, where / trial.folder))
            for trial in waiting.values():
                followed[trial.folder].report(board)
        _cancel(ray, list(waiting))


def _task(config: dict[str, Any], folder: str, cwd: str, threads: int) -> str | None:
    """Runs a trial in a worker. With as many threads it ends with the same bits as in another engine."""
    import torch

    if Path(cwd).is_dir():  # relative paths of data refer to it
        os.chdir(cwd)
    torch.set_num_threads(threads)
    with StopSignals() as stop:
        return run_trial_or_reason(
            RunConfig.from_json(config), Path(folder), None, stop, wait_seconds=PATIENCE
        )


def _outcome(ray: Any, reference: Any, folder: Path) -> str | None:
    """None, or why a trial failed: its own reason, or that its workers died too often."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        return outcome_of_dead_worker(folder, f"{type(error).__name__}: {one_line(cause)}")


def _cancel(ray: Any, references: list[Any]) -> None:
    """Makes running trials save a checkpoint, and cancels the others."""
    if not references:
        return
    for reference in references:
        ray.cancel(reference, recursive=False)
    ray.wait(references, num_returns=len(references), timeout=PATIENCE)


class _FollowedTrial:
    """The state of a trial, read from its folder: it is running once ``metrics.jsonl`` has changed."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self._trial, self._path = trial, folder / "metrics.jsonl"
        self._first = self._modified()

    def _modified(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None

    def report(self, board: Board) -> None:
        if self._modified() in (None, self._first):
            return
        epochs = self._trial.config.recipe.epochs
        try:
            done = read_metrics(self._path)
        except (OSError, ValueError):  # it is being written
            return
        text = f"epoch 1/{epochs}"
        if done:
            last = done[-1]
            text = (
                f"epoch {min(last.epoch + 1, epochs)}/{epochs}  loss {last.train_loss:.3f}  "
                f"accuracy {last.train_accuracy:.1%}  {last.images_per_second:.0f} images/s"
            )
        board.step(self._trial, len(done) / epochs, text)


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    require("--engine ray", "ray")
    import ray

    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(
            address,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ValueError(f"address: cannot connect to Ray at {address!r} ({one_line(error)})") from None
    try:
        yield ray
    finally:
        ray.shutdown()
