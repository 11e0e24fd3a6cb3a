"""The progress display of a plan: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from selfconv._files import read_as
from selfconv._text import format_duration
from selfconv.study.plans import Plan, Trial
from selfconv.study.samples import Sample
from selfconv.train import Run
from selfconv.trained import Evaluation

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

QUIET = 30.0  # seconds between plain lines on a run in progress


@dataclass(frozen=True)
class Result:
    """What the table shows of a run that has finished."""

    parameters: int
    accuracy: float
    turned: float
    equivariance_error: float
    images_per_second: float
    seconds: float


def read_result(folder: Path) -> Result | None:
    """None if the run has not been trained and evaluated."""
    if not evaluated(folder):
        return None
    record, evaluation = Run(folder).record, read_as(Evaluation, folder / "evaluation.json")
    return Result(
        parameters=record.parameters,
        accuracy=record.test_accuracy,
        turned=evaluation.turned_accuracy,
        equivariance_error=evaluation.equivariance_error,
        images_per_second=record.images_per_second,
        seconds=record.train_seconds,
    )


def evaluated(folder: Path) -> bool:
    """Whether a run has finished, and its evaluation too."""
    return (folder / "record.json").exists() and (folder / "evaluation.json").exists()


def results_table(plan: Plan, out: Path) -> Table:
    """All lines of a plan with the results of their finished runs."""
    return _table(plan, {trial.folder: read_result(out / trial.folder) for trial in plan.trials})


def _table(plan: Plan, results: dict[str, Result | None]) -> Table:
    from rich.table import Table

    table = Table("network", title=plan.title, title_justify="left")
    headings = ("runs", "parameters", "accuracy %", "turned %", "equivariance error", "images/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    tables = {title for title, _ in plan.lines}
    above = None
    for (title, label), trials in plan.lines.items():
        found = [result for trial in trials if (result := results[trial.folder]) is not None]
        if len(tables) > 1 and title != above:
            table.add_section()
            table.add_row(f"[bold]{title}")
        above = title
        cells = [f"{len(found)}/{len(trials)}"]
        if found:
            cells += [
                f"{found[0].parameters:,}",
                str(Sample.of([100 * r.accuracy for r in found])),
                str(Sample.of([100 * r.turned for r in found])),
                f"{max(r.equivariance_error for r in found):.2g}",
                f"{median(r.images_per_second for r in found):,.0f}",  # the first may include compilation
            ]
        table.add_row(label, *cells)
    table.caption = (
        "turned: the mean over test images turned by 90°, 180° and 270°; equivariance error: the largest "
        "change of an output when an image is turned so, relative to the largest output"
    )
    table.caption_justify = "left"
    return table


@dataclass
class _Running:
    trial: Trial
    began: float
    first: float | None = None  # share that was done when it was first heard of
    share: float = 0.0
    text: str = "starting"
    told: float = field(default_factory=time.monotonic)  # when a plain line was last printed


class Board:
    """Shows the state of trials; an engine reports the start, the progress and the end of each.

    ``failures`` says why some failed, by folder.
    """

    def __init__(self, plan: Plan, out: Path, pending: Sequence[Trial], console: Console) -> None:
        self._plan, self._out, self._console = plan, out, console
        self._results = {trial.folder: read_result(out / trial.folder) for trial in plan.trials}
        self._waiting = {trial.folder: trial for trial in pending}
        self._running: dict[str, _Running] = {}
        self._took: dict[tuple[str, str], list[float]] = {}
        for trial in plan.trials:
            if (result := self._results[trial.folder]) is not None:
                self._took.setdefault(trial.line, []).append(result.seconds)
        self._ended = len(plan.trials) - len(pending)
        self.failures: dict[str, str] = {}
        self._live: Any = None

    def __enter__(self) -> Board:
        if self._console.is_terminal and self._waiting:
            from rich.live import Live

            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line, above the table."""
        self._console.print(text, soft_wrap=True, markup=False)

    def begin(self, trial: Trial) -> None:
        """A trial begins, or continues from its last checkpoint."""
        self._waiting.pop(trial.folder, None)
        self._running[trial.folder] = _Running(trial, time.monotonic())

    def step(self, trial: Trial, share: float, text: str) -> None:
        """Reports the completed fraction of a trial and a status line."""
        now = time.monotonic()
        if trial.folder not in self._running:
            self.begin(trial)
        running = self._running[trial.folder]
        if running.first is None:
            running.began, running.first = now, share
        running.share, running.text = share, text
        if self._live is None and now - running.told > QUIET:
            running.told = now
            self._console.print(f"{trial}: {text}, {self._left()}")

    def end(self, trial: Trial, failure: str | None) -> None:
        """A trial has finished, or failed for a reason."""
        self._waiting.pop(trial.folder, None)
        running = self._running.pop(trial.folder, None)
        self._ended += 1
        place = f"{self._ended}/{len(self._plan.trials)} {trial}"
        if failure is not None:
            self.failures[trial.folder] = failure
            self.say(f"{place}: failed: {failure}")
            return
        result = self._results[trial.folder] = read_result(self._out / trial.folder)
        assert result is not None
        whole = running is not None and running.first is not None and running.first <= 0.1
        took = time.monotonic() - running.began if whole and running is not None else result.seconds
        self._took.setdefault(trial.line, []).append(took)
        if self._live is None:
            self._console.print(
                f"{place}: accuracy {result.accuracy:.2%}, turned {result.turned:.2%}, "
                f"{result.images_per_second:,.0f} images/s, {format_duration(took)}; {self._left()}"
            )

    def _left(self) -> str:
        """How long the rest may take: from how long like runs took, or else from all of them."""
        known = [seconds for times in list(self._took.values()) for seconds in times]
        now, rest = time.monotonic(), 0.0
        expected, runs = [], list(self._running.values())  # the table is drawn by a thread of its own
        for running in runs:
            done = 0.0 if running.first is None else running.share - running.first
            own = self._took.get(running.trial.line)
            if done > 0.05:
                whole = (now - running.began) / done
            elif own or known:
                whole = fmean(own or known)
            else:
                return "time left not known yet"
            expected.append(whole)
            rest += whole * (1 - running.share)
        for trial in list(self._waiting.values()):
            times = self._took.get(trial.line) or known or expected
            if not times:
                return "time left not known yet"
            rest += fmean(times)
        return f"{format_duration(rest / max(1, len(runs)))} left"

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        lines = Table.grid(padding=(0, 1))
        runs = list(self._running.values())
        for running in runs:
            bar = ProgressBar(total=1, completed=running.share, width=20)
            lines.add_row(str(running.trial), bar, running.text)
        total = len(self._plan.trials)
        done = self._ended + sum(running.share for running in runs)
        lines.add_row(
            f"{self._ended} of {total} runs", ProgressBar(total=total, completed=done, width=20), self._left()
        )
        return Group(_table(self._plan, self._results), lines)
