"""A trained model, from wherever it is: a run's folder, a saved model's folder, or the package itself."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from selfconv._files import read_json, read_text
from selfconv.data import DataInfo, Dataset, normalise, read_image
from selfconv.models import WEIGHTS, ResNet, list_pretrained
from selfconv.train import Run, RunConfig, RunError, build_model, load_last, open_data

RECORD, WEIGHTS_FILE = "record.json", "model.safetensors"


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained on and how that went; ``open_trained`` opens one.

    Attributes:
        model: in evaluation mode.
        record: the run's result; None if the run has not finished, or a saved model came without one.
        metrics: one dict per epoch, the training curves.
        run_folder: where results about the model are kept; None if it is not the folder of a run.
    """

    name: str
    model: ResNet
    record: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    run_folder: Path | None
    _training: tuple[DataInfo, RunConfig] | None  # unknown for a model that was saved without its record

    @property
    def data(self) -> DataInfo:
        """The data set that the model was trained on: classes, image size, mean and deviation."""
        return self._known()[0]

    @property
    def config(self) -> RunConfig:
        """The options of the run that trained the model."""
        return self._known()[1]

    def _known(self) -> tuple[DataInfo, RunConfig]:
        if self._training is None:
            raise RunError(
                f"{self.name}: a saved model without {RECORD}: its classes and the mean of its images are "
                "not known; expected the folder of a run, or a model folder that a run has written"
            )
        return self._training

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


def open_trained(place: str | os.PathLike[str]) -> TrainedModel:
    """Opens a trained model.

    Args:
        place: the folder of a run (of one that has not finished, the weights of its last checkpoint), a
            folder that ``save_pretrained`` wrote, or one of ``selfconv.models.list_pretrained()``.

    Raises:
        RunError: there is no such model, or its files are damaged.
    """
    folder = Path(place)
    if (folder / WEIGHTS_FILE).is_file():
        return _open_saved(folder.resolve().name, folder)
    if Run(folder).exists:
        return _open_run(Run(folder))
    if os.fspath(place) in list_pretrained():
        return _open_saved(os.fspath(place), WEIGHTS / place)
    found = "no such folder or name"
    if folder.is_dir():
        found = "other things" if any(folder.iterdir()) else "an empty folder"
    elif folder.exists():
        found = "a file"
    names = ", ".join(list_pretrained())
    raise RunError(
        f"{place}: expected the folder of a run or of a saved model, or one of {names}; got {found}"
    )


def _open_run(run: Run) -> TrainedModel:
    return TrainedModel(
        name=run.folder.resolve().name,
        model=_run_model(run),
        record=run.record if run.finished else None,
        metrics=_read_metrics(run.folder),
        run_folder=run.folder,
        _training=(run.data, run.config),
    )


def _run_model(run: Run) -> ResNet:
    if (run.folder / "model").is_dir():
        return ResNet.from_pretrained(run.folder / "model")
    checkpoint = load_last(run.checkpoints)
    if checkpoint is None:
        raise RunError(f"{run.folder}: this run has no weights yet")
    model = build_model(run.config, run.data)
    model.load_state_dict(checkpoint.tensors("ema") or checkpoint.tensors("model"))
    return model.eval()


def _open_saved(name: str, folder: Path) -> TrainedModel:
    path = folder / RECORD
    record, training = None, None
    if path.is_file():
        try:
            record = read_json(path)
            training = DataInfo(**record["data"]), RunConfig.from_json(record["config"])
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{path}: expected the record of a run; got something else ({error})") from None
    model = ResNet.from_pretrained(folder)
    return TrainedModel(name, model, record, _read_metrics(folder), None, training)


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in read_text(path).splitlines()]
    except ValueError as error:
        raise RunError(
            f"{path}: expected a line of JSON for each epoch; got something else ({error})"
        ) from None
