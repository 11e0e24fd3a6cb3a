"""Runs a plan: keeps finished runs, starts missing ones, and reports failed ones without stopping the others.

PLAN/plan.json                 what the runs are, for the report
PLAN/MODEL[-option=…]/seed-S   a run's folder for each trial, with its evaluation.json
…/failed.json                  why a trial did not finish
PLAN/report                    report.html, report.md and figures
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Protocol

from selfconv._extras import require
from selfconv._files import read_as, remove_partial_files, write_json
from selfconv._text import count, format_duration, one_line
from selfconv.data import DataInfo
from selfconv.study.board import Board, evaluated, read_result, results_table
from selfconv.study.plans import FAILED, PLAN, Failure, Plan, PlanFile, Trial
from selfconv.train import (
    Interrupted,
    Record,
    Run,
    RunBusy,
    RunConfig,
    RunError,
    RunStopped,
    StopSignals,
    Watch,
    differences,
    open_data,
)

if TYPE_CHECKING:
    from selfconv.data import Dataset

REPORT = "report"


class PlanFailed(RunStopped):
    """Some runs of a plan failed; the others are done."""


class Engine(Protocol):
    """Runs trials in this process, in workers or on a cluster; a context manager, entered before ``run``."""

    @property
    def jobs(self) -> int:
        """Concurrent trials, for the time estimate."""

    @property
    def threads(self) -> int:
        """Threads per trial, for the time estimate."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *error: object) -> None: ...

    def run(self, trials: Sequence[Trial], out: Path, board: Board, stop: StopSignals) -> None:
        """Runs the trials and reports to the board. After a signal it returns once the running trials are
        saved."""


class InProcessEngine:
    """Runs trials sequentially in this process, for a debugger or after a script has modified the package."""

    jobs = 1

    @property
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def __enter__(self) -> InProcessEngine:
        return self

    def __exit__(self, *error: object) -> None: ...

    def run(self, trials: Sequence[Trial], out: Path, board: Board, stop: StopSignals) -> None:
        for trial in trials:
            board.begin(trial)
            watch = partial(board.step, trial)
            board.end(trial, run_trial_or_reason(trial.config, out / trial.folder, watch, stop))


def reproduce(plan: Plan, out: Path, engine: Engine, *, command: str, dry_run: bool = False) -> list[Path]:
    """Runs the missing trials of a plan and writes its report; returns the report's files.

    Args:
        command: the command that continues the plan, printed if it is stopped.
        dry_run: only print the plan with a time estimate.

    Raises:
        ValueError: the data, a model or the folder cannot be used; nothing has been written.
        Interrupted: SIGINT or SIGTERM was received; the trials in progress are saved.
        PlanFailed: some trials failed; the report is on the others.
    """
    from rich.console import Console

    if not dry_run:
        require("reproduce", "accelerate", "tensorboard", "matplotlib")  # before the runs, not after them
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    config = plan.trials[0].config.replaced("data", subset=None)
    data, lacking = load_or_random_data(config) if dry_run else (open_data(config), [])
    plan = plan.on(data.name, len(data.train), len(data.test))
    data = data if plan.data.subset is None else data.subset(plan.data.subset, plan.data.split_seed)
    check_plan(plan, out, data)
    pending = [trial for trial in plan.trials if not evaluated(out / trial.folder)]
    heading = (
        f"{plan.title}: {count(len(plan.trials), 'run')}, {len(plan.trials) - len(pending)} of them done"
    )
    lines = [heading, str(data), *lacking, *(f"  reduced: {line}" for line in plan.reduced)]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if dry_run:
        from selfconv.study.estimate import plan_table

        console.print(plan_table(plan, pending, data, engine.jobs, engine.threads))
        return []

    content = plan.to_json(data.name)
    del data  # each trial reads its own
    began, failures = time.monotonic(), {}
    try:
        with engine if pending else nullcontext():
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / PLAN, content)
            if pending:
                with StopSignals() as stop, Board(plan, out, pending, console) as board:
                    engine.run(pending, out, board, stop)
                if stop.number:
                    raise Interrupted("stopped", stop.number)
                failures = board.failures
    except (Interrupted, KeyboardInterrupt) as stopped:
        done = sum(evaluated(out / trial.folder) for trial in plan.trials)
        saved, number = "stopped at once; runs continue from their last checkpoints", int(SIGINT)
        if isinstance(stopped, Interrupted):  # a second signal would have left no time to save
            saved, number = "stopped and saved", stopped.code - 128
        raise Interrupted(
            f"{saved}; {done} of {len(plan.trials)} runs are done; continue with: {command}", number
        ) from None
    console.print(results_table(plan, out))
    if pending:
        console.print(
            f"{count(len(pending), 'run')} in {format_duration(time.monotonic() - began)}, in {out}"
        )
    report = _report(plan, out)
    if report:
        console.print(f"Report: {report[0]} and {report[1].name}", soft_wrap=True)
    if failures:
        listed = "; ".join(f"{folder}: {reason}" for folder, reason in failures.items())
        raise PlanFailed(f"{len(failures)} of {len(plan.trials)} runs failed: {listed}")
    return report


def _report(plan: Plan, out: Path) -> list[Path]:
    if not any(evaluated(out / trial.folder) for trial in plan.trials):
        return []
    from selfconv.study.report import write_report

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of failed runs: PlanFailed names them
        return write_report([out], out / REPORT)


def load_or_random_data(config: RunConfig) -> tuple[Dataset, list[str]]:
    """The data set of a run; if it would have to be downloaded, random images, and a line that says so."""
    from selfconv.data import MissingDataError, imitation

    try:
        data = open_data(config, download=False)
    except MissingDataError as missing:
        options = config.data
        data = imitation(
            options.source,
            image_size=options.image_size,
            seed=options.split_seed,
            validation=options.validation,
        )
        return data, [f"  not downloaded yet: {missing.source}; the estimate uses random images"]
    return data, []


def check_plan(plan: Plan, out: Path, data: Dataset) -> None:
    """Raises ValueError if a network cannot take the images, or the folder has another plan, runs with other
    options or data, or damaged files."""
    from selfconv.train import build_model

    info = DataInfo.of(data)
    with _without_size_warnings():
        for trials in plan.lines.values():
            build_model(trials[0].config, info)
    if out.exists() and not out.is_dir():
        raise RunError(f"{out}: expected a folder to write to; got a file")
    if (out / PLAN).exists():
        other = read_as(PlanFile, out / PLAN).plan
        if other != plan.name:
            raise RunError(f"{out}: holds the plan {other!r}; give another --out")
    for trial in plan.trials:
        run = Run(out / trial.folder)
        if not run.exists:
            continue
        if changed := differences(trial.config, run.config):
            raise RunError(
                f"{run.folder}: was run with other options: {changed[0]}; give them again, or another --out"
            )
        if info.digest and (run.folder / "data.json").exists() and run.data.digest != info.digest:
            raise RunError(f"{run.folder}: the data set {info.name} has changed since; give another --out")
        read_result(run.folder)


# ---- one trial ----


def run_trial_or_reason(
    config: RunConfig, folder: Path, watch: Watch | None, stop: StopSignals, *, wait_seconds: float = 0.0
) -> str | None:
    """Trains and evaluates, or resumes the run in the folder. Returns None, or in one line why it failed.

    Args:
        wait_seconds: how long to wait for another process that is writing to the run.

    Raises:
        Interrupted, KeyboardInterrupt: a signal was received.
    """
    until = time.monotonic() + wait_seconds
    while True:
        try:
            run_trial(config, folder, watch, stop)
        except RunBusy as busy:
            if time.monotonic() > until:
                return one_line(busy)  # no failed.json: the other process owns the folder
            with stop.at_once():
                time.sleep(0.2)
        except (Interrupted, KeyboardInterrupt):
            raise
        except Exception as error:  # of any kind: the other trials continue
            known = isinstance(error, ValueError | OSError | RunStopped)
            reason = one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"
            return _write_failure(folder, reason)
        else:
            return None


def outcome_of_dead_worker(folder: Path, reason: str) -> str | None:
    """The outcome of a trial whose process died: None if it had finished, else the reason, stored."""
    return None if evaluated(folder) else _write_failure(folder, reason)


def _write_failure(folder: Path, reason: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FAILED, asdict(Failure(reason)))
    return reason


def run_trial(config: RunConfig, folder: Path, watch: Watch | None, stop: StopSignals) -> Record:
    """Trains and evaluates, each unless it is done; returns the record."""
    from selfconv.train import train
    from selfconv.trained import evaluate, open_trained

    (folder / FAILED).unlink(missing_ok=True)
    with _without_size_warnings():
        record = train(config, folder, resume=True, quiet=True, watch=watch, stop=stop)
        remove_partial_files(folder, FAILED)
        if not (folder / "evaluation.json").exists():
            with stop.at_once():
                watch_evaluation = None if watch is None else lambda _, line: watch(1.0, line)
                evaluate(open_trained(folder), pictures=False, watch=watch_evaluation)
    return record


@contextmanager
def _without_size_warnings() -> Iterator[None]:
    """Strided p4 models warn in every run that they are equivariant only approximately; plans measure it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* only approximately")
        yield
