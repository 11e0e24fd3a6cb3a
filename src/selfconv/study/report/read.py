"""From folders to trials: every run under them that has finished, what its plan says of it, and what is wrong
with the others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfconv._files import read_as
from selfconv.models import ModelFacts, model_facts
from selfconv.study import paper
from selfconv.study.plans import FAILED, PLAN, Failure, PlanFile
from selfconv.train import Machine, Record, RunConfig, read_metrics
from selfconv.trained import Evaluation, RotationCurve

# options that have no effect on the result, but for rounding
WITHOUT_EFFECT = ("source", "device", "checkpoint_minutes", "memory")


@dataclass(frozen=True)
class Entry:
    """Where a trial stands in a report: its study, the table within it, and the row there."""

    study: str  # the plan's name, or the data set
    title: str
    data: str
    table: str
    label: str
    order: tuple[int, ...] = ()  # in the plan; without one it follows from the model
    planned: bool = True


@dataclass(frozen=True)
class Epoch:
    number: int
    train: float  # accuracies in percent
    val: float | None


@dataclass(frozen=True)
class FinishedTrial:
    """A run that has finished. Accuracies are percentages."""

    name: str  # of its folder, from the folder that was given on
    entry: Entry
    config: RunConfig
    options: tuple[
        tuple[str, str], ...
    ]  # in what it differs from the run that its data and model have by default
    parameters: int
    accuracy: float
    turned: float | None  # the mean over quarter turns of the test images, upright ones left out
    equivariance_error: float | None
    rotation: RotationCurve | None  # accuracy at every angle
    attention_entropy: float | None  # mean over attention layers
    images_per_second: float
    seconds: float
    images: dict[str, int]  # in each part of the data
    digest: str  # of the data
    epochs: tuple[Epoch, ...]
    machine: str
    versions: str
    commit: str | None

    @property
    def model(self) -> str:
        return self.config.model.name

    @property
    def facts(self) -> ModelFacts | None:
        """What the network is, whatever it is called; None if its name is not known."""
        return model_facts(self.model, group=self.config.model.group)


@dataclass
class Found:
    trials: list[FinishedTrial] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)  # folder, reason
    reduced: dict[str, list[str]] = field(default_factory=dict)  # study → what its plan says was made smaller


def read(folders: Sequence[Path]) -> Found:
    """Every run under the folders, once, in an order that does not depend on theirs.

    Raises:
        ValueError: a folder is not there, or none of them holds a run that has finished.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise ValueError(f"{folder}: expected the folder of a run, or one that holds some; got no folder")
    roots = {Path(folder).resolve() for folder in folders}
    found = Found()
    for root in sorted(root for root in roots if not roots & {*root.parents}):
        _collect(root, found)
    found.trials.sort(key=lambda trial: trial.name)
    _tell_data_apart(found)
    _keep_distinct(found)
    found.problems.sort()
    if not found.trials:
        given, [first, *more] = ", ".join(map(str, folders)), found.problems or [("", "")]
        why = f"; {first[0]}: {first[1]}" if first[0] else ""
        also = f", and {len(more)} more" if more else ""
        raise ValueError(f"expected at least one run that has finished in {given or 'no folder'}{why}{also}")
    return found


def _collect(root: Path, found: Found) -> None:
    entries: dict[Path, Entry] = {}
    for folder in _walk(root):
        name = "/".join((root.name, *folder.relative_to(root).parts))
        try:
            if (folder / PLAN).exists():
                plan = read_as(PlanFile, folder / PLAN)
                planned = _entries(plan, folder)
                entries |= planned
                lines = found.reduced.setdefault(_study(plan), [])
                lines += [line for line in plan.reduced if line not in lines]
                for path in (path for path in planned if not _is_run(path)):
                    shown = "/".join((name, *Path(os.path.relpath(path, folder)).parts))
                    reason = _failure(path) or "planned, but not begun"
                    found.problems.append((shown, _without_places(reason, path)))
            if _is_run(folder):
                found.trials.append(_trial(folder, name, entries.get(folder)))
        except (ValueError, OSError) as error:
            system = error.strerror if isinstance(error, OSError) else None
            found.problems.append((name, _without_places(system or str(error), folder)))


def _walk(root: Path) -> Iterator[Path]:
    """The folder and those in it, plans before their runs; a run's own folders are not looked into."""
    for place, names, _ in os.walk(root):
        folder = Path(place)
        names[:] = [] if _is_run(folder) else sorted(n for n in names if not n.startswith("."))
        yield folder


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / "record.json").exists()


def _tell_data_apart(found: Found) -> None:
    """Runs that no plan knows, on different data of the same name, are not averaged."""
    digests: dict[str, set[str]] = {}
    for trial in found.trials:
        if not trial.entry.planned:
            digests.setdefault(trial.entry.table, set()).add(trial.digest)
    for i, trial in enumerate(found.trials):
        if not trial.entry.planned and len(digests[trial.entry.table]) > 1:
            table = f"{trial.entry.table}, data {trial.digest[:8] or 'unknown'}"
            found.trials[i] = replace(trial, entry=replace(trial.entry, table=table))


def _keep_distinct(found: Found) -> None:
    """One trial of each seed: the same run again is no new evidence."""
    kept: dict[tuple[Any, ...], FinishedTrial] = {}
    for trial in found.trials:
        entry, config = trial.entry, trial.config
        key = (entry.study, entry.table, entry.label, config.model.name, trial.options, config.seed)
        first = kept.setdefault(key, trial)
        if first is not trial:
            found.problems.append((trial.name, f"the same options and seed as {first.name}; counted once"))
    found.trials = list(kept.values())


# ---- one file ----


def _entries(plan: PlanFile, folder: Path) -> dict[Path, Entry]:
    return {
        (folder / trial.folder).resolve(): Entry(
            study=_study(plan),
            title=plan.title,
            data=plan.data,
            table=trial.table,
            label=trial.label,
            order=(order,),
        )
        for order, trial in enumerate(plan.trials)
    }


def _study(plan: PlanFile) -> str:
    return f"plan {plan.plan}"


def _trial(folder: Path, name: str, entry: Entry | None) -> FinishedTrial:
    if not (folder / "record.json").exists():
        raise ValueError(_unfinished(folder))
    record = read_as(Record, folder / "record.json")
    evaluation = None
    if (folder / "evaluation.json").exists():
        evaluation = read_as(Evaluation, folder / "evaluation.json")
    config, data = record.config, record.data
    own = _options(config, data.name)
    return FinishedTrial(
        name=name,
        entry=_bare(config, own, data.name) if entry is None else entry,
        config=config,
        options=own,
        parameters=record.parameters,
        accuracy=100 * record.test_accuracy,
        turned=None if evaluation is None else 100 * evaluation.turned_accuracy,
        equivariance_error=None if evaluation is None else evaluation.equivariance_error,
        rotation=None if evaluation is None else evaluation.rotation,
        attention_entropy=None if evaluation is None else evaluation.mean_entropy,
        images_per_second=record.images_per_second,
        seconds=record.train_seconds,
        images=data.images,
        digest=data.digest,
        epochs=_epochs(folder / "metrics.jsonl"),
        machine=_machine(record.machine),
        versions=", ".join(f"{package} {number}" for package, number in record.versions.items()),
        commit=record.commit,
    )


def _unfinished(folder: Path) -> str:
    try:
        done = len(_epochs(folder / "metrics.jsonl"))
        progress = f"not finished: {done} of {RunConfig.load(folder).recipe.epochs} epochs"
    except (ValueError, OSError):
        progress = "not finished"
    failure = _failure(folder)
    return progress if failure is None else f"{progress}; {failure}"


def _failure(folder: Path) -> str | None:
    """What a plan noted when a run failed."""
    path = folder / FAILED
    return f"failed: {read_as(Failure, path).error}" if path.exists() else None


def _bare(config: RunConfig, options: tuple[tuple[str, str], ...], data: str) -> Entry:
    """The entry of a run without a plan: its table groups runs with the same data and training options."""
    table = paper.table_of(data, config.model.name)
    title = paper.TABLES[table].title if table is not None else data
    recipe = ", ".join(f"{key} {value}" for key, value in options if key not in vars(config.model))
    own = f"{title}, {recipe}" if recipe else title
    return Entry(study=table or data, title=title, data=data, table=own, label="", planned=False)


def _options(config: RunConfig, data: str) -> tuple[tuple[str, str], ...]:
    base = RunConfig.of(data, config.model.name)
    found = []
    for part in ("model", "data", "recipe", "hardware"):
        ours, theirs = vars(getattr(config, part)), vars(getattr(base, part))
        found += [(k, _value(v)) for k, v in ours.items() if v != theirs[k] and k not in WITHOUT_EFFECT]
    return tuple(found)


def _value(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _epochs(path: Path) -> tuple[Epoch, ...]:
    if not path.exists():
        return ()
    return tuple(
        Epoch(m.epoch, 100 * m.train_accuracy, None if m.val_accuracy is None else 100 * m.val_accuracy)
        for m in read_metrics(path)
    )


def _machine(found: Machine) -> str:
    parts = [found.cpu, f"cores: {found.cores}", f"threads: {found.threads}", found.system]
    return ", ".join(parts if found.device == "cpu" else [found.device, *parts])


def _without_places(text: str, folder: Path) -> str:
    """A message in one line, which keeps only the last part of each path."""
    text = re.sub(r"(?<![\w.])/(?:[^\s/;,:]+/)+", "…/", text.replace(f"{folder}{os.sep}", ""))
    return " ".join(text.split())
