"""From trials to what a report says: rows with means and differences, what was reduced, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from selfconv._text import count
from selfconv.models import MODELS, ModelFacts, ResNetConfig, at_depth, model_facts, paper_label
from selfconv.study import paper
from selfconv.study.claims import TITLES, Claim, Finding, Outcome
from selfconv.study.report.read import FinishedTrial, Found
from selfconv.study.samples import Difference, Sample, difference
from selfconv.train import RunConfig, paper_recipe

Options = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ResultRow:
    """A line of a table: a model's runs beside the paper's, either of which may be missing."""

    label: str
    model: str
    trials: tuple[FinishedTrial, ...]
    paper_table: str | None  # of the paper's tables, if this is one of its networks on its data

    @property
    def facts(self) -> ModelFacts | None:
        return self.trials[0].facts if self.trials else model_facts(self.model)

    @property
    def paper(self) -> Outcome | None:
        return None if self.paper_table is None else paper.TABLES[self.paper_table].rows.get(self.model)

    @property
    def accuracy(self) -> Sample | None:
        return _sample(t.accuracy for t in self.trials)

    @property
    def turned(self) -> Sample | None:
        return _sample(t.turned for t in self.trials)

    @property
    def at_angles(self) -> dict[int, Sample]:
        """The accuracy at each angle; empty if it was not measured."""
        curves = [trial.rotation for trial in self.trials if trial.rotation is not None]
        if not curves:
            return {}
        values = [[100 * accuracy for accuracy in curve.accuracy] for curve in curves]
        return {angle: Sample.of(each) for angle, *each in zip(curves[0].angles, *values, strict=True)}

    @property
    def every_angle(self) -> Sample | None:
        """The mean over all angles."""
        return _sample(100 * t.rotation.mean for t in self.trials if t.rotation is not None)

    @property
    def attention_entropy(self) -> Sample | None:
        return _sample(t.attention_entropy for t in self.trials)

    @property
    def images_per_second(self) -> Sample | None:
        return _sample(t.images_per_second for t in self.trials)

    @property
    def equivariance_error(self) -> float | None:
        """The largest of all runs."""
        return max((e for t in self.trials if (e := t.equivariance_error) is not None), default=None)

    @property
    def parameters(self) -> int | None:
        return self.trials[0].parameters if self.trials else None

    @property
    def difference(self) -> Difference | None:
        """Ours minus the paper's."""
        if self.accuracy is None or self.paper is None:
            return None
        return difference([self.accuracy], [self.paper.accuracy])

    @property
    def outcome(self) -> Outcome | None:
        if self.accuracy is None or self.parameters is None:
            return None
        return Outcome(self.accuracy, self.parameters, self.label)


def _sample(values: Iterable[float | None]) -> Sample | None:
    known = [value for value in values if value is not None]
    return Sample.of(known) if known else None


@dataclass(frozen=True)
class Judged:
    claim: Claim
    ours: Finding
    papers: Finding  # the same rule on the paper's own numbers


@dataclass(frozen=True)
class ResultTable:
    """Rows that are meant to be compared."""

    title: str
    rows: tuple[ResultRow, ...]
    shared: Options  # what all of its runs have and no run has by default
    paper_table: str | None  # of the paper's tables, if all rows are its networks on its data
    judged: tuple[Judged, ...] = ()

    @property
    def trials(self) -> list[FinishedTrial]:
        return [trial for row in self.rows for trial in row.trials]

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """By model, without those that occur in several rows."""
        models = [row.model for row in self.rows if row.trials]
        found = {row.model: row.outcome for row in self.rows if models.count(row.model) == 1}
        return {model: outcome for model, outcome in found.items() if outcome is not None}

    @property
    def line_up(self) -> bool:
        """Whether its rows are different models, to which claims about models apply."""
        return len(self.outcomes) == sum(bool(row.trials) for row in self.rows) > 1


def advice(table: ResultTable) -> str | None:
    """Which network to take, in a sentence for images at any angle and one for upright images.

    Each names the network with the fewest parameters among those within one standard error of the best.
    """
    rows = [row for row in table.rows if row.every_angle is not None]
    if len(rows) < 2:
        return None
    turned, upright = _best(rows, lambda row: row.every_angle), _best(rows, lambda row: row.accuracy)
    images = max(t.rotation.images for t in turned.trials if t.rotation is not None)
    worst = min(turned.at_angles.items(), key=lambda item: item[1].mean)
    assert turned.every_angle is not None
    assert upright.accuracy is not None
    text = (
        f"For images at any angle: {turned.label}, {turned.every_angle.mean:.1f}% on average over all angles "
        f"and {worst[1].mean:.1f}% at the worst, {worst[0]}° ({images:,} test images)."
    )
    if upright is turned:
        return f"{text} It is the best for upright images too, with {upright.accuracy.mean:.1f}%."
    assert upright.every_angle is not None
    return (
        f"{text} For upright images: {upright.label}, {upright.accuracy.mean:.1f}%, which has "
        f"{upright.every_angle.mean:.1f}% on average over all angles."
    )


def _best(rows: Sequence[ResultRow], measure: Callable[[ResultRow], Sample | None]) -> ResultRow:
    values = {row.label: sample.mean for row in rows if (sample := measure(row)) is not None}
    images = min(t.rotation.images for row in rows for t in row.trials if t.rotation is not None)
    top = max(values.values()) / 100
    error = 100 * (top * (1 - top) / images) ** 0.5
    close = [row for row in rows if values.get(row.label, 0.0) >= 100 * top - error]
    return min(close, key=lambda row: (row.parameters or 0, -values[row.label]))


@dataclass(frozen=True)
class Study:
    """The runs of a plan, or those on one data set that no plan knows."""

    title: str
    data: str
    tables: tuple[ResultTable, ...]
    reduced: tuple[str, ...]

    @property
    def trials(self) -> list[FinishedTrial]:
        return [trial for table in self.tables for trial in table.trials]


def summarise(found: Found) -> list[Study]:
    """The studies, the paper's tables first and in its order."""
    studies = []
    for name, trials in _parts(sorted(found.trials, key=_order), lambda t: t.entry.study).items():
        tables = tuple(
            _result_table(title, part) for title, part in _parts(trials, lambda t: t.entry.table).items()
        )
        reduced = found.reduced.get(name) or _reduced(tables)
        studies.append(Study(trials[0].entry.title, trials[0].entry.data, tables, tuple(reduced)))
    studies.sort(key=_rank)
    everything = [table for study in studies for table in study.tables]
    return [
        replace(study, tables=tuple(replace(t, judged=_judge(t, everything)) for t in study.tables))
        for study in studies
    ]


def _parts(
    trials: Iterable[FinishedTrial], key: Callable[[FinishedTrial], str]
) -> dict[str, list[FinishedTrial]]:
    found: dict[str, list[FinishedTrial]] = {}
    for trial in trials:
        found.setdefault(key(trial), []).append(trial)
    return found


def _rank(study: Study) -> tuple[int, str, list[str]]:
    tables = list(paper.TABLES)
    known = [tables.index(table.paper_table) for table in study.tables if table.paper_table is not None]
    return min(known, default=len(tables)), study.title, [trial.name for trial in study.trials]


def _order(trial: FinishedTrial) -> tuple[object, ...]:
    """As the plan has it; without one, tables by name and models in the paper's order."""
    models = list(paper.TABLES["cifar10"].rows)
    depth29 = at_depth(trial.model, 29)
    rank = models.index(depth29) if depth29 in models else len(models)
    own = (trial.entry.table, rank, trial.model, trial.options)
    return (trial.entry.study, trial.entry.order, *own, trial.config.seed, trial.name)


def _result_table(title: str, trials: Sequence[FinishedTrial]) -> ResultTable:
    given = [trial.options for trial in trials]
    shared = tuple(option for option in given[0] if all(option in each for each in given))
    rows = tuple(
        ResultRow(name, part[0].model, tuple(part), _paper_table(part[0]))
        for name, part in _parts(trials, lambda t: _label(t, shared)).items()
    )
    tables = {row.paper_table for row in rows}
    paper_table = tables.pop() if len(tables) == 1 else None
    if paper_table is not None:
        rows = _beside_the_papers(rows, paper_table)
    return ResultTable(TITLES.get(title, title), rows, shared, paper_table)


def _label(trial: FinishedTrial, shared: Options) -> str:
    if trial.entry.planned:
        return trial.entry.label
    own = [
        f"{key} {value}"
        for key, value in trial.options
        if (key, value) not in shared and key != "group"  # which the label says
    ]
    return paper_label(trial.model, group=trial.config.model.group) + (f" ({', '.join(own)})" if own else "")


def _paper_table(trial: FinishedTrial) -> str | None:
    """The paper's table that a trial belongs to, if it is one of its networks on its data."""
    return paper.table_of(trial.entry.data, trial.model) if _unchanged(trial.config) else None


def _unchanged(config: RunConfig) -> bool:
    named, given = MODELS.get(config.model.name), config.model.overrides()
    if named is None or all(value is None for value in given.values()):
        return True
    given = {key: value for key, value in given.items() if value is not None}
    try:
        return ResNetConfig.of(**named | given) == ResNetConfig.of(**named)
    except ValueError:  # no such network can be made any more: a record of another version
        return False


def _beside_the_papers(rows: tuple[ResultRow, ...], table: str) -> tuple[ResultRow, ...]:
    """In the paper's order, with its rows that have no runs here, and what it has no row for at the end."""
    models = paper.TABLES[table].rows
    missing = [
        ResultRow(paper_label(m), m, (), table) for m in models if m not in {row.model for row in rows}
    ]
    names = list(models)
    return tuple(
        sorted(
            [*rows, *missing], key=lambda row: names.index(row.model) if row.model in names else len(names)
        )
    )


def _reduced(tables: Sequence[ResultTable]) -> list[str]:
    """In what the runs fall short of the paper's: from the records, where no plan says it."""
    lines = []
    for table in tables:
        if table.paper_table is None:
            continue
        for trial in table.trials:
            ours, theirs = trial.config.recipe.epochs, paper_recipe(trial.model).epochs
            if ours < theirs:
                lines.append(f"{count(ours, 'epoch')} instead of {theirs}")
            images = trial.images.get("train", paper.TRAINING_IMAGES)
            if images < paper.TRAINING_IMAGES:
                lines.append(f"{images:,} training images instead of {paper.TRAINING_IMAGES:,}")
        fewest = min(len(row.trials) for row in table.rows if row.trials)
        if paper.TABLES[table.paper_table].rows and fewest < paper.RUNS:
            lines.append(f"as few as {count(fewest, 'run')} of a model instead of {paper.RUNS}")
    return list(dict.fromkeys(lines))


def _judge(table: ResultTable, everything: Sequence[ResultTable]) -> tuple[Judged, ...]:
    """The paper's claims for this table; elsewhere those for CIFAR-10, as far as the models are there."""
    if not table.line_up:
        return ()
    results = {table.paper_table or "cifar10": table.outcomes}
    for name in paper.TABLES:  # claims that compare tables find the other one if there is only one
        others = [other.outcomes for other in everything if other.paper_table == name and other.line_up]
        if table.paper_table is not None and name not in results and len(others) == 1:
            results[name] = others[0]
    printed = {name: each.rows for name, each in paper.TABLES.items()}
    claims = [claim for claim in paper.CLAIMS if claim.table == (table.paper_table or "cifar10")]
    judged = (Judged(claim, claim.check(results), claim.check(printed)) for claim in claims)
    return tuple(each for each in judged if table.paper_table is not None or not each.ours.absent)
