"""The content of a run's ``metrics.jsonl`` and ``record.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from selfconv._files import parse_json, read_as
from selfconv.data import DataInfo
from selfconv.models import WEIGHTS, list_models
from selfconv.train.config import ModelOptions, RunConfig


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """A line of ``metrics.jsonl``: the metrics of one epoch. Losses are means over images."""

    epoch: int  # from 1 on
    lr: float
    train_loss: float
    train_accuracy: float
    val_loss: float | None
    val_accuracy: float | None
    seconds: float
    images_per_second: float

    def __post_init__(self) -> None:
        _check_range(self, 1, None, "epoch")
        _check_range(self, 0, None, "lr", "seconds", "images_per_second")
        _check_range(self, 0, 1, "train_accuracy", "val_accuracy")
        if (self.val_loss is None) != (self.val_accuracy is None):
            raise ValueError("expected both val_loss and val_accuracy, or null for both; got one of them")


@dataclass(frozen=True)
class BestEpoch:
    """The epoch with the highest accuracy on the validation images."""

    epoch: int
    accuracy: float

    def __post_init__(self) -> None:
        _check_range(self, 1, None, "epoch")
        _check_range(self, 0, 1, "accuracy")


@dataclass(frozen=True, kw_only=True)
class Record:
    """``record.json``: the result of a run, with everything needed to judge and repeat it."""

    model: str
    parameters: int
    model_config: dict[str, Any]
    data: DataInfo
    config: RunConfig
    seed: int
    processes: int
    epochs: int
    train_loss: float
    train_accuracy: float
    val_accuracy: float | None
    best_val_accuracy: BestEpoch | None
    test_loss: float
    test_accuracy: float
    train_seconds: float
    images_per_second: float
    versions: dict[str, str]
    commit: str | None
    machine: Machine
    weights_sha256: str | None = None  # of model/model.safetensors; None: not noted when the record was made

    def to_json(self) -> dict[str, Any]:
        return parse_json(json.dumps(asdict(self)))

    def __post_init__(self) -> None:
        _check_range(self, 1, None, "parameters", "processes", "epochs")
        _check_range(self, 0, None, "train_seconds", "images_per_second")
        _check_range(self, 0, 1, "train_accuracy", "val_accuracy", "test_accuracy")
        if (self.model, self.seed, self.epochs) != (
            self.config.model.name,
            self.config.seed,
            self.config.recipe.epochs,
        ):
            raise ValueError(
                "expected the model, seed and epochs of its config; got "
                f"{self.model!r}, {self.seed} and {self.epochs}"
            )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a run was executed on."""

    system: str
    cpu: str
    cores: int | None
    threads: int
    device: str


def _check_range(holder: object, least: float, most: float | None, *names: str) -> None:
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    for name in names:
        value = getattr(holder, name)
        if value is not None and not (least <= value and (most is None or value <= most)):
            raise ValueError(f"{name}: expected a number, {limits}; got {value!r}")


def initial_options(place: str) -> ModelOptions:
    """The options of the trained network that ``--init`` names.

    Raises:
        ValueError: it has no record, so ``--model`` has to name the network.
    """
    file = (WEIGHTS / place if place in list_models(pretrained=True) else Path(place)) / "record.json"
    if not file.is_file():
        found = "no such folder"
        if file.parent.is_dir():
            found = f"a folder without {file.name}; give --model for a saved model without one"
        raise ValueError(
            f"init: expected the folder of a finished run or of a saved model, or one of "
            f"{', '.join(list_models(pretrained=True))}; got {place!r}, {found}"
        )
    record = read_as(Record, file)
    known = ModelOptions().overrides()  # all of them: a default may have been another when it was trained
    given = {name: value for name, value in record.model_config.items() if name in known}
    given["widths"] = tuple(given["widths"])
    return replace(record.config.model, init=place, **given)
