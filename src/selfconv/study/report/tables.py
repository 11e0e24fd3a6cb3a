"""Rows as cells of text, the same for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from selfconv._text import format_duration
from selfconv.study import paper
from selfconv.study.claims import signed
from selfconv.study.report.summary import ResultRow, ResultTable, advice
from selfconv.study.samples import Sample

NONE = "–"


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[ResultRow], str]
    of: str = ""  # what it belongs to: our runs, the paper, …


OURS, PAPERS, BOTH, MORE = "These runs", "The paper", "Difference", "More on these runs"


def columns(table: ResultTable) -> list[Column]:
    """Those that say something for at least one row: our numbers beside the paper's, then the rest."""
    found = [
        Column("Model", lambda row: row.label),
        Column("Accuracy, %", lambda row: _mean(row.accuracy), OURS),
        Column("n", lambda row: str(len(row.trials)), OURS),
        Column("Parameters", lambda row: _count(row.parameters), OURS),
    ]
    if compared(table):
        found += [
            Column("Accuracy, %", lambda row: _mean(row.paper.accuracy if row.paper else None), PAPERS),
            Column("n", lambda row: str(row.paper.accuracy.n) if row.paper else NONE, PAPERS),
            Column("Parameters", _printed, PAPERS),
            Column(
                "Ours − paper",
                lambda row: signed(row.difference.value) if row.difference else NONE,
                BOTH,
            ),
            Column("95% interval", _interval, BOTH),
        ]
    if any(row.turned for row in table.rows):
        found.append(Column("Turned images, %", lambda row: _mean(row.turned), MORE))
    if any(row.every_angle for row in table.rows):
        found.append(Column("Every angle, %", lambda row: _mean(row.every_angle), MORE))
    if any(row.equivariance_error is not None for row in table.rows):
        found.append(Column("Equivariance error", _error, MORE))
    if any(row.attention_entropy for row in table.rows):
        found.append(Column("Entropy of α", _entropy, MORE))
    if any(row.images_per_second for row in table.rows):
        found.append(Column("Images/s", _speed, MORE))
    return found


def compared(table: ResultTable) -> bool:
    """Whether the paper has numbers beside these."""
    return table.paper_table is not None and any(row.paper for row in table.rows)


def sections(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """What neighbouring columns belong to, and how many they are."""
    return [(name, len(list(part))) for name, part in groupby(columns, lambda column: column.of)]


def _printed(row: ResultRow) -> str:
    return f"{row.paper.parameters // 1000}k" if row.paper else NONE


def _mean(sample: Sample | None) -> str:
    return NONE if sample is None else str(sample)


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _interval(row: ResultRow) -> str:
    change = row.difference
    if change is None:
        return NONE
    if change.low is None or change.high is None:
        return "none: one run" if len(row.trials) == 1 else "none: no spread"
    return f"{signed(change.low)} to {signed(change.high)}"


def _error(row: ResultRow) -> str:
    error = row.equivariance_error
    return NONE if error is None else f"{error:.2f}" if error >= 0.01 else f"{error:.1e}"


def _entropy(row: ResultRow) -> str:
    return NONE if row.attention_entropy is None else f"{row.attention_entropy.mean:.3f}"


def _speed(row: ResultRow) -> str:
    return NONE if row.images_per_second is None else f"{row.images_per_second.mean:,.0f}"


def notes(table: ResultTable) -> list[str]:
    """What stands under a table: how to read it."""
    found = ["Accuracy of the final weights on the test images: mean ± sample deviation over n runs."]
    if compared(table):
        found.append(
            "The interval of the difference is Welch's, from both means, deviations and n; the paper's "
            "deviations are taken as sample deviations. A single run has no deviation, and no interval."
        )
    elif table.paper_table is None:
        found.append("The paper has no table of these runs.")
    if table.paper_table is not None and paper.TABLES[table.paper_table].note:
        found.append(paper.TABLES[table.paper_table].note)
    if any(row.turned for row in table.rows):
        found.append("Turned images: the mean accuracy on the test images turned by 90°, 180° and 270°.")
    if any(row.every_angle for row in table.rows):
        found.append(
            "Every angle: the mean accuracy on test images turned by every multiple of 15°, seen through a "
            "round mask, so that the corners do not tell the angle."
        )
    if any(row.equivariance_error is not None for row in table.rows):
        found.append(
            "Equivariance error: the largest relative change of outputs under quarter turns, over all runs."
        )
    if any(row.attention_entropy for row in table.rows):
        found.append(
            "Entropy of α: relative to that of equal weights, the mean over attention layers and runs. At 1 "
            "attention chooses nothing, and the layer is an affine convolution."
        )
    if any(row.images_per_second for row in table.rows):
        found.append("Images/s: in training, the mean over runs.")
    if table.shared:
        found.append("Other than by default, in all runs: " + _listed(table.shared) + ".")
    if (sentence := advice(table)) is not None:
        found.append(sentence)
    return found


def _listed(options: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options)


def origin(table: ResultTable) -> list[tuple[str, str]]:
    """Where the numbers come from."""
    trials = table.trials
    counts = sorted({len(row.trials) for row in table.rows if row.trials})
    each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seconds = sum(trial.seconds for trial in trials)
    commits = sorted({_commit(trial.commit) for trial in trials})
    return [
        ("Runs", f"{len(trials)} in all, {each} of each model; {format_duration(seconds)} of training"),
        ("Machine", "; ".join(sorted({trial.machine for trial in trials}))),
        ("Versions", "; ".join(sorted({trial.versions for trial in trials}))),
        ("Commit", ", ".join(commits)),
    ]


def _commit(value: str | None) -> str:
    if value is None:
        return "not recorded"
    return value[:10] + (" with changes" if value.endswith("+") else "")
