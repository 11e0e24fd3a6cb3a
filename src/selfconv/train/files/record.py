"""The content of a run's ``metrics.jsonl`` and ``record.json``: results, versions, commit and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from selfconv import _version
from selfconv._files import describe_folder, parse_json, read_as
from selfconv.data import DataInfo
from selfconv.models import WEIGHTS, list_models
from selfconv.train.config import ModelOptions, RunConfig


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """A line of ``metrics.jsonl``: the metrics of one epoch. Losses are means over images."""

    epoch: int  # the first is 1
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
    kept_epoch: int | None = None  # the epoch whose weights the model has; None: the last
    weights_sha256: str | None = None  # of model/model.safetensors; None in records of older versions

    def to_json(self) -> dict[str, Any]:
        return parse_json(json.dumps(asdict(self)))

    def __post_init__(self) -> None:
        _check_range(self, 1, None, "parameters", "processes", "epochs")
        _check_range(self, 0, None, "train_seconds", "images_per_second")
        _check_range(self, 0, 1, "train_accuracy", "val_accuracy", "test_accuracy")
        epochs, stops = self.config.recipe.epochs, self.config.recipe.patience is not None
        if (self.model, self.seed) != (self.config.model.name, self.config.seed) or not (
            self.epochs == epochs or (stops and self.epochs < epochs)
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


def initial_options(source: str) -> ModelOptions:
    """The options of the trained network that ``--init`` names.

    Raises:
        ValueError: it has no record, so ``--model`` has to name the network.
    """
    file = (WEIGHTS / source if source in list_models(pretrained=True) else Path(source)) / "record.json"
    if not file.is_file():
        found = describe_folder(file.parent, file.name)
        if file.parent.is_dir():
            found += "; give --model for a saved model without one"
        raise ValueError(
            f"init: expected the folder of a finished run or of a saved model, or one of "
            f"{', '.join(list_models(pretrained=True))}; got {source!r}, {found}"
        )
    record = read_as(Record, file)
    known = ModelOptions().overrides()  # all of them: defaults may have changed since it was trained
    given = {name: value for name, value in record.model_config.items() if name in known}
    given["widths"] = tuple(given["widths"])
    return replace(record.config.model, init=source, **given)


PACKAGES = ("numpy", "numba", "triton", "accelerate", "safetensors")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit and machine."""
    return {"versions": versions(), "commit": commit(), "machine": Machine(**machine(device))}


def versions() -> dict[str, str]:
    found = {
        "selfconv": _version.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build (+cpu), which a wheel's metadata may omit
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout that the package runs from, with ``+`` if files were changed, or None."""
    root = Path(_version.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(
                ["git", *args], cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
            for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def machine(device: torch.device) -> dict[str, Any]:
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": accelerator or str(device),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
