"""From folders to trials: every run under them that has finished, what its plan says of it, and what is wrong
with the others."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfconv._files import read_json
from selfconv.models import ModelFacts, model_facts, paper_label
from selfconv.study import paper
from selfconv.train import RunConfig
from selfconv.trained import TURNS

PLAN, FAILED = "plan.json", "failed.json"
NO_MATTER = ("source", "device", "checkpoint_minutes")  # options that say where and how often, not what


@dataclass(frozen=True)
class Place:
    """Where a trial stands in a report: its study, the group within it, and the line there."""

    study: str  # the plan's name, or the data set
    title: str
    data: str
    group: str
    label: str
    order: tuple[int, ...] = ()  # in the plan; without one it follows from the model
    planned: bool = True


@dataclass(frozen=True)
class Epoch:
    number: int
    train: float  # accuracies in percent
    val: float | None


@dataclass(frozen=True)
class Trial:
    """A run that has finished. Accuracies are percentages."""

    name: str  # of its folder, from the folder that was given on
    place: Place
    config: RunConfig
    options: tuple[
        tuple[str, str], ...
    ]  # in what it differs from the run that its data and model have by default
    parameters: int
    accuracy: float
    turned: float | None  # the mean over quarter turns of the test images, upright ones left out
    equivariance_error: float | None
    images_per_second: float | None
    seconds: float | None
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
    trials: list[Trial] = field(default_factory=list)
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
    places: dict[Path, Place] = {}
    for folder in _walk(root):
        name = "/".join((root.name, *folder.relative_to(root).parts))
        try:
            if (folder / PLAN).is_file():
                plan = _object(folder / PLAN)
                planned = _places(plan, folder)
                places |= planned
                lines = found.reduced.setdefault(_study(plan), [])
                lines += [line for line in map(str, plan.get("reduced", [])) if line not in lines]
                for path in (path for path in planned if not _is_run(path)):
                    shown = "/".join((name, *Path(os.path.relpath(path, folder)).parts))
                    reason = _failure(path) or "planned, but not begun"
                    found.problems.append((shown, _without_places(reason, path)))
            if _is_run(folder):
                found.trials.append(_trial(folder, name, places.get(folder)))
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
    return (folder / "config.json").is_file() or (folder / "record.json").is_file()


def _tell_data_apart(found: Found) -> None:
    """Runs that no plan knows, on different data of the same name, are not averaged."""
    digests: dict[str, set[str]] = {}
    for trial in found.trials:
        if not trial.place.planned:
            digests.setdefault(trial.place.group, set()).add(trial.digest)
    for i, trial in enumerate(found.trials):
        if not trial.place.planned and len(digests[trial.place.group]) > 1:
            group = f"{trial.place.group}, data {trial.digest[:8] or 'unknown'}"
            found.trials[i] = replace(trial, place=replace(trial.place, group=group))


def _keep_distinct(found: Found) -> None:
    """One trial of each seed: the same run again is no new evidence."""
    kept: dict[tuple[Any, ...], Trial] = {}
    for trial in found.trials:
        place, config = trial.place, trial.config
        key = (place.study, place.group, place.label, config.model.name, trial.options, config.seed)
        first = kept.setdefault(key, trial)
        if first is not trial:
            found.problems.append((trial.name, f"the same options and seed as {first.name}; counted once"))
    found.trials = list(kept.values())


# ---- one file ----


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name}: expected an object; got {type(content).__name__}")
    return content


def _number(content: dict[str, Any], key: str, least: float = 0.0, most: float = math.inf) -> float:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limits = f"{least:g} to {most:g}" if math.isfinite(most) else f"{least:g} or more"
        raise ValueError(f"{key}: expected a number, {limits}; got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{key}: expected a number; got {value!r}")
    return value


def _optional(content: dict[str, Any], key: str) -> float | None:
    return None if content.get(key) is None else _number(content, key)


def _places(plan: dict[str, Any], folder: Path) -> dict[Path, Place]:
    trials = plan.get("trials")
    if not isinstance(plan.get("plan"), str) or not isinstance(trials, list):
        raise ValueError(f"{PLAN}: expected the name of a plan and its trials; got something else")
    if not isinstance(plan.get("reduced", []), list):
        raise ValueError(f"{PLAN}: reduced: expected a list of sentences; got {plan['reduced']!r}")
    data = str(plan.get("data", ""))
    places = {}
    for order, trial in enumerate(trials):
        if not isinstance(trial, dict) or not isinstance(trial.get("folder"), str):
            raise ValueError(f"{PLAN}: trials: expected objects that name a folder; got {trial!r}")
        model = str(trial.get("model", ""))
        places[(folder / trial["folder"]).resolve()] = Place(
            study=_study(plan),
            title=str(plan.get("title", plan["plan"])),
            data=data,
            group=str(trial.get("group", data)),
            label=str(trial.get("label", paper_label(model))),
            order=(order,),
        )
    return places


def _study(plan: dict[str, Any]) -> str:
    return f"plan {plan['plan']}"


def _trial(folder: Path, name: str, place: Place | None) -> Trial:
    if not (folder / "record.json").is_file():
        raise ValueError(_unfinished(folder))
    record = _object(folder / "record.json")
    config = RunConfig.from_json(record.get("config"))
    data = record.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(f"data: expected the description of a data set; got {data!r}")
    images, own = data.get("images"), _options(config, data["name"])
    if place is None:
        place = _bare(config, own, data["name"])
    elif not place.data:
        place = replace(place, data=data["name"])
    measured = record | (_object(path) if (path := folder / "evaluation.json").is_file() else {})
    under = measured.get("accuracy_under")
    turns = [_number(under, turn, 0, 1) for turn in TURNS] if isinstance(under, dict) else []
    return Trial(
        name=name,
        place=place,
        config=config,
        options=own,
        parameters=int(_number(record, "parameters", 1)),
        accuracy=100 * _number(record, "test_accuracy", 0, 1),
        turned=100 * sum(turns) / len(turns) if turns else None,
        equivariance_error=_optional(measured, "equivariance_error"),
        images_per_second=_optional(record, "images_per_second"),
        seconds=_optional(record, "train_seconds"),
        images={k: v for k, v in images.items() if isinstance(v, int)} if isinstance(images, dict) else {},
        digest=str(data.get("digest", "")),
        epochs=_epochs(folder / "metrics.jsonl"),
        machine=_machine(record.get("machine")),
        versions=_versions(record.get("versions")),
        commit=record["commit"] if isinstance(record.get("commit"), str) else None,
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
    if not (folder / FAILED).is_file():
        return None
    return f"failed: {_object(folder / FAILED).get('error')}"


def _bare(config: RunConfig, options: tuple[tuple[str, str], ...], data: str) -> Place:
    """Of a run that no plan knows: with those trained alike on the same data, depth 83 apart."""
    table = paper.table_of(data, config.model.name)
    title = paper.TABLES[table].title if table is not None else data
    recipe = ", ".join(f"{key} {value}" for key, value in options if key not in vars(config.model))
    group = f"{title}, {recipe}" if recipe else title
    return Place(study=table or data, title=title, data=data, group=group, label="", planned=False)


def _options(config: RunConfig, data: str) -> tuple[tuple[str, str], ...]:
    base = RunConfig.of(data, config.model.name)
    found = []
    for part in ("model", "data", "recipe", "engine"):
        ours, theirs = vars(getattr(config, part)), vars(getattr(base, part))
        found += [(k, _value(v)) for k, v in ours.items() if v != theirs[k] and k not in NO_MATTER]
    return tuple(found)


def _value(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _epochs(path: Path) -> tuple[Epoch, ...]:
    if not path.is_file():
        return ()
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            content = json.loads(line)
            val = (
                None if content.get("val_accuracy") is None else 100 * _number(content, "val_accuracy", 0, 1)
            )
            epoch = Epoch(
                int(_number(content, "epoch", 1)), 100 * _number(content, "train_accuracy", 0, 1), val
            )
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        found.append(epoch)
    return tuple(found)


def _machine(found: Any) -> str:
    if not isinstance(found, dict):
        return "machine not recorded"
    device = found.get("device")
    parts = [str(found.get("cpu", "unknown processor"))]
    parts += [f"{name}: {found[name]}" for name in ("cores", "threads") if name in found]
    parts.append(str(found.get("system", "unknown system")))
    return ", ".join(parts if device in (None, "cpu") else [str(device), *parts])


def _versions(found: Any) -> str:
    if not isinstance(found, dict):
        return "versions not recorded"
    return ", ".join(f"{package} {number}" for package, number in found.items())


def _without_places(text: str, folder: Path) -> str:
    """In a line, without places on a machine: of a path only the end is told."""
    text = re.sub(r"(?<![\w.])/(?:[^\s/;,:]+/)+", "…/", text.replace(f"{folder}{os.sep}", ""))
    return " ".join(text.split())
