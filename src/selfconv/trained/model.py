"""A trained model from a run's folder, a saved model's folder, or the package."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from selfconv._files import describe_folder, file_sha256, read_as
from selfconv._memory import machine_memory
from selfconv._text import count, format_bytes
from selfconv.data import (
    NAMES,
    AbsentDataError,
    DataInfo,
    Dataset,
    GroupError,
    PixelRange,
    Split,
    describe_channels,
    image_hashes,
    normalise,
    parse_range,
    read_image,
)
from selfconv.models import (
    WEIGHTS,
    ResNet,
    ResNetConfig,
    check_finite,
    list_models,
    mismatches,
    optimize_for_inference,
)
from selfconv.train import (
    EpochMetrics,
    Record,
    Run,
    RunConfig,
    RunError,
    build_model,
    load_last,
    open_data,
    read_metrics,
)

MAPS_AT_A_TIME = 4  # about as many feature maps are in memory at once

RECORD, WEIGHTS_FILE = "record.json", "model.safetensors"


@dataclass(frozen=True)
class TrainedModel:
    """A trained model with its data set, options and results; ``open_trained`` opens one.

    Attributes:
        model: in evaluation mode.
        record: the run's result; None if the run has not finished, or a saved model came without one.
        metrics: of each epoch, the training curves.
        run_folder: where results about the model are saved; None if the model was not opened from a run.
    """

    name: str
    model: ResNet
    record: Record | None
    metrics: list[EpochMetrics]
    run_folder: Path | None
    _training: tuple[DataInfo, RunConfig] | None  # unknown for a model that was saved without its record

    @cached_property
    def optimized(self) -> nn.Module:
        """A copy of the model, optimised for inference: the same answers to rounding."""
        return optimize_for_inference(self.model)

    @property
    def data(self) -> DataInfo:
        """The data set that the model was trained on: classes, size, range of values, mean, deviation."""
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

    def open_data(
        self, source: str | os.PathLike[str] | None = None, pixel_range: str | None = None
    ) -> Dataset:
        """Loads the data set that the model was trained on, or another one with the same classes.

        Args:
            source: of the other data set, as ``load_data`` takes it; its images get the model's size.
            pixel_range: of the other data set; by default that of the training images. Data sets that are
                found by name have bytes, whose range is 0 to 255, and take none.
        """
        if source is None:
            data = open_data(self.config, folder=self.run_folder)
            if data.digest != self.data.digest:
                raise RunError(
                    f"{self.name}: the data set {data.name} has changed since this model was trained"
                    f"{_earlier_levels(self.data.pixels)}: --data tests on it as it is now"
                )
            return data
        by_training = pixel_range is None and source not in NAMES
        if pixel_range is not None:
            parse_range(pixel_range, auto=False)
        else:
            pixel_range = _range_option(self.data.pixels) if by_training else "auto"
        config = self.config.replaced(
            "data",
            source=os.fspath(source),
            image_size=self.data.size,
            pixel_range=pixel_range,
            subset=None,
        )
        # grey files in colour and the reverse, as predict reads them; other channels are as they are
        channels = self.data.in_channels if self.data.in_channels in (1, 3) else None
        try:
            data = open_data(config, channels=channels)  # with group_by: a moved folder has its digest
        except GroupError:
            data = open_data(config.replaced("data", group_by=None), channels=channels)
        if not {*self.data.class_names} & {*data.class_names}:
            ours, theirs = _classes(self.data.class_names), _classes(data.class_names)
            raise RunError(f"{self.name}: expected images of {ours}; {os.fspath(source)} has {theirs}")
        if self.data.in_channels != data.in_channels:
            ours, theirs = map(describe_channels, (self.data.in_channels, data.in_channels))
            raise RunError(
                f"{self.name}: expected images in {ours}; {os.fspath(source)} has images in {theirs}"
            )
        data = _with_classes(data, self.data.class_names)
        if by_training and not data.pixels.by_type and data.pixels.dtype != self.data.pixels.dtype:
            raise RunError(
                f"{self.name}: expected {self.data.pixels.dtype} values, as the training images have; "
                f"{os.fspath(source)} has {data.pixels.dtype}: give their range with --range"
            )
        return data

    def test_images(self, data: Dataset) -> Split:
        """The images of a data set that count in a test: none that the model was trained or validated on.

        Of its own data set the test part. Of others the test part, or all images if there is none, without
        those whose pixels equal those of an image that the run has seen; a warning tells how many these are.

        Raises:
            RunError: no image is left.
        """
        if data.digest == self.data.digest:
            return data.test
        split = data.test if data.has_test_part else data.everything
        if self.run_folder is None:
            return split
        seen = Run(self.run_folder).seen_images
        if seen is None:
            warnings.warn(
                f"{self.name}: an earlier version made this run, without hashes of its images: training "
                f"images in {data.name} cannot be told from test images",
                stacklevel=3,
            )
            return split
        new = torch.from_numpy(~np.isin(image_hashes(split), seen))
        left = int(new.sum())
        if left == 0:
            raise RunError(
                f"{self.name}: expected images to test on; all {len(split)} of {data.name} are among those "
                "that the model was trained or validated on"
            )
        if left < len(split):
            warnings.warn(
                f"{data.name}: {len(split) - left} of {len(split)} images are left out: the model was "
                "trained or validated on them",
                stacklevel=3,
            )
            return split.take(new.nonzero()[:, 0])
        return split

    def data_error_in_words(self, error: ValueError) -> str:
        """Why ``open_data`` failed, for somebody who only wants to see an image."""
        said = (
            "are not on this machine" if isinstance(error, AbsentDataError) else f"cannot be used ({error})"
        )
        return f"the images of {Path(self.data.name).name} {said}"

    def read_image(self, path: str | os.PathLike[str]) -> Tensor:
        """Reads an image file as integers ``[C, size, size]``, preprocessed as in a training folder."""
        info = self.data
        return read_image(Path(path), info.size, info.in_channels, pixels=info.pixels)

    def normalise(self, images: Tensor) -> Tensor:
        """Normalises images ``[N, C, h, w]``, integers as ``read_image`` returns, for the model."""
        return normalise(images, self.data.mean, self.data.std, self.data.pixels.levels)


def open_trained(source: str | os.PathLike[str]) -> TrainedModel:
    """Opens a trained model.

    Args:
        source: the folder of a run (for an unfinished run, the weights are those of its last checkpoint), a
            folder written by ``save_pretrained``, or one of ``selfconv.list_models(pretrained=True)``.

    Raises:
        RunError: there is no such model, its files are damaged or contradict each other, or this machine has
            too little memory for its images.
    """
    name, folder = os.fspath(source), Path(source)
    names = ", ".join(list_models(pretrained=True))
    expected = f"expected the folder of a run or of a saved model, or one of {names}"
    if not name:  # Path("") is the working directory
        raise RunError(f"{expected}; got an empty name")
    try:
        if (folder / WEIGHTS_FILE).exists():
            return _open_saved(folder.resolve().name, folder)
        if Run(folder).exists:
            return _open_run(Run(folder))
        if name in list_models(pretrained=True):
            return _open_saved(name, WEIGHTS / name)
    except RunError:
        raise
    except ValueError as error:
        raise RunError(str(error)) from None
    found = describe_folder(folder, f"config.json or {WEIGHTS_FILE}")
    found = found if folder.exists() else "no such folder or name"
    raise RunError(f"{source}: {expected}; got {found}")


def _open_run(run: Run) -> TrainedModel:
    info, config = run.data, run.config
    record = run.record if run.finished else None
    if record is not None:
        model = _saved_model(run.folder / "model", record)
    else:
        model = _model_from_checkpoint(run, config, info)
    _check_images(model, info, run.folder)
    return TrainedModel(
        name=run.folder.resolve().name,
        model=model,
        record=record,
        metrics=run.metrics,
        run_folder=run.folder,
        _training=(info, config),
    )


def _open_saved(name: str, folder: Path) -> TrainedModel:
    record = read_as(Record, folder / RECORD) if (folder / RECORD).exists() else None
    metrics = folder / "metrics.jsonl"
    model = _saved_model(folder, record)
    if record is not None:
        _check_images(model, record.data, folder)
    return TrainedModel(
        name=name,
        model=model,
        record=record,
        metrics=read_metrics(metrics) if metrics.exists() else [],
        run_folder=None,
        _training=None if record is None else (record.data, record.config),
    )


def _saved_model(folder: Path, record: Record | None) -> ResNet:
    """What ``save_pretrained`` wrote to a folder; the record, if there is one, must be of that model."""
    model = ResNet.from_pretrained(folder)
    if model.stem.conv.weight.dtype != torch.float32:
        raise ValueError(f"{folder}: expected weights of torch.float32; got {model.stem.conv.weight.dtype}")
    if record is None:
        return model
    try:
        same = ResNetConfig.of(**record.model_config) == ResNetConfig.of(**model.config)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(f"{folder}: expected the network of its {RECORD}; got another")
    if record.weights_sha256 not in (None, file_sha256(folder / WEIGHTS_FILE)):
        raise ValueError(f"{folder / WEIGHTS_FILE}: damaged, or of another run: {RECORD} has another digest")
    return model


def _model_from_checkpoint(run: Run, config: RunConfig, info: DataInfo) -> ResNet:
    checkpoint = load_last(run.checkpoints, run.digest)
    if checkpoint is None:
        raise RunError(f"{run.folder}: this run has no weights yet")
    with torch.device("meta"):  # the checkpoint brings the weights, and with them what memory they take
        model = build_model(config, info)
    weights = checkpoint.final_weights()
    if problems := mismatches(model.state_dict(), weights):
        raise RunError(f"{run.folder}: the last checkpoint holds the weights of another network: {problems}")
    try:
        check_finite(weights)
    except ValueError as error:
        raise RunError(f"{run.folder}: the last checkpoint: {error}") from None
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    return model.eval()


def _check_images(model: ResNet, info: DataInfo, folder: Path) -> None:
    """Raises RunError if the network does not match the data set, or its maps do not fit in memory."""
    if (model.in_channels, model.num_classes) != (info.in_channels, len(info.class_names)):
        raise RunError(
            f"{folder}: expected a network for {info.in_channels} channels and {len(info.class_names)} "
            f"classes, as its data set has; got one for {model.in_channels} and {model.num_classes}"
        )
    largest = 0

    def measure(_: nn.Module, __: object, output: Tensor) -> None:
        nonlocal largest
        largest = max(largest, output.shape[1:].numel() * output.element_size())

    hooks = [module.register_forward_hook(measure) for module in model.modules()]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about inexact sizes: the first real call warns
            weights = next(model.parameters())
            model(weights.new_empty(0, info.in_channels, info.size, info.size))
    finally:
        for hook in hooks:
            hook.remove()
    needed, memory = MAPS_AT_A_TIME * largest, machine_memory()
    if needed > memory:
        raise RunError(
            f"{folder}: images of {info.size}×{info.size} need about {format_bytes(needed)} of memory; "
            f"this machine has {format_bytes(memory)}"
        )


def _classes(names: Sequence[str]) -> str:
    return f"{len(names)} classes ({_some(names)})"


def _range_option(pixels: PixelRange) -> str:
    """The ``--range`` that reads other images as the training images were read."""
    if pixels.by_type:
        return "dtype"
    return "auto" if pixels == PixelRange() else f"{pixels.low!r},{pixels.high!r}"


def _earlier_levels(pixels: PixelRange) -> str:
    """What an earlier version did to floating point images, if it may explain that a digest differs."""
    if pixels.whole_width >= pixels.levels:
        return ""
    return f", or an earlier version trained it, which read these images in {pixels.whole_width + 1} levels"


def _with_classes(data: Dataset, names: list[str]) -> Dataset:
    """The images of the classes that a model knows, with its labels; tells which classes are missing."""
    if list(data.class_names) == names:
        return data
    labels = torch.tensor([names.index(name) if name in names else -1 for name in data.class_names])
    if unknown := [name for name in data.class_names if name not in names]:
        images = sum(int((labels[part.labels] < 0).sum()) for part in data.parts)
        warnings.warn(
            f"{data.name}: left out {count(images, 'image')} of {len(unknown)} "
            f"class{'es' * (len(unknown) != 1)} that the model does not know: {_some(unknown)}",
            stacklevel=3,
        )
    if missing := [name for name in names if name not in data.class_names]:
        warnings.warn(
            f"{data.name}: no images of {len(missing)} of the model's classes: {_some(missing)}", stacklevel=3
        )
    return data.relabelled(labels, names)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", …" * (len(names) > 3)
