"""A trained model ready for use, from a run's folder or from the weights that the package brings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from selfconv._files import read_json
from selfconv.data import DataInfo, Dataset, normalise, read_image
from selfconv.models import WEIGHTS, ResNet, create_model, list_pretrained
from selfconv.train import Run, RunConfig, RunError, build_model, load_last, open_data


@dataclass(frozen=True)
class Trained:
    """A model with what it was trained on and how that went."""

    name: str
    model: ResNet  # in evaluation mode
    data: DataInfo
    config: RunConfig
    record: dict[str, Any] | None  # None as long as the run has not finished
    metrics: list[dict[str, Any]]  # of each epoch: its curves

    @classmethod
    def open(cls, place: str | os.PathLike[str]) -> Trained:
        """From the folder of a run, or one of ``selfconv.models.list_pretrained()``."""
        if Path(place).is_dir():
            run = Run.open(place)
            return cls(
                name=run.folder.resolve().name,
                model=load_model(run),
                data=run.data,
                config=run.config,
                record=run.record if run.finished else None,
                metrics=_read_metrics(run.folder),
            )
        name = os.fspath(place)
        if name not in list_pretrained():
            expected = ", ".join(["the folder of a run", *list_pretrained()])
            raise RunError(f"{name}: expected one of {expected}; got no such folder or name")
        record = read_json(WEIGHTS / name / "record.json")
        return cls(
            name=name,
            model=create_model(name, pretrained=True).eval(),
            data=DataInfo(**record["data"]),
            config=RunConfig.from_json(record["config"]),
            record=record,
            metrics=_read_metrics(WEIGHTS / name),
        )

    def open_data(self) -> Dataset:
        """The data set that the model was trained on, if it is still there."""
        data = open_data(self.config)
        if data.digest != self.data.digest:
            raise RunError(f"{self.name}: the data set {data.name} has changed since this model was trained")
        return data

    def read_image(self, path: str | os.PathLike[str]) -> Tensor:
        """An image file as uint8 ``[C, size, size]``, prepared as those of a training folder are."""
        return read_image(Path(path), self.data.size, self.data.in_channels)

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 ``[N, C, h, w]`` as the model takes them."""
        return normalise(images, self.data.mean, self.data.std)


def load_model(run: Run) -> ResNet:
    """The trained model, in evaluation mode; of a run that has not finished, from its last checkpoint."""
    if (run.folder / "model").is_dir():
        return ResNet.from_pretrained(run.folder / "model")
    checkpoint = load_last(run.checkpoints)
    if checkpoint is None:
        raise RunError(f"{run.folder}: this run has no weights yet")
    model = build_model(run.config, run.data)
    weights = checkpoint.tensors("ema") or checkpoint.tensors("model")
    model.load_state_dict(weights)
    return model.eval()


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except ValueError as error:
        raise RunError(
            f"{path}: expected a line of JSON for each epoch; got something else ({error})"
        ) from None
