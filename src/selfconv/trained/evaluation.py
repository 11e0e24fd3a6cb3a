"""Evaluation of a trained model: accuracy in total, per class, and on rotated images; and its files."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv._files import check_writable, write_atomically, write_figure, write_json
from selfconv._text import escape_for_terminal
from selfconv.data import DataInfo, Split
from selfconv.groups import P4
from selfconv.testing import relative_error
from selfconv.train import Watch
from selfconv.trained.attention import attention_entropy
from selfconv.trained.metrics import Quality, measure_quality
from selfconv.trained.model import TrainedModel
from selfconv.trained.outputs import logits
from selfconv.trained.prediction_table import PredictionTable
from selfconv.trained.rotation import (
    ANGLES,
    MOST_IMAGES,
    STEP,
    RotationCurve,
    rotation_curve,
    rotation_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UPRIGHT, *TURNS = P4.element_names
FILES = ("evaluation.json", "predictions.csv")
PICTURES = ("confusion.png", "rotation.png", "mistakes.png")
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: partial(P4.act_planar, s=s) for s, name in enumerate(P4.element_names)},
    "mirrored": lambda x: x.flip(-1),
}


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on the test images."""

    data: str
    images: int
    loss: float
    accuracy: float
    accuracy_under: dict[str, float]  # each view of the images
    class_accuracy: dict[str, float | None]  # None: no such image in the test
    confusion: list[list[int]]  # [true class][predicted class]
    equivariance_error: float  # of the logits under quarter turns, relative to the largest
    rotation: RotationCurve  # accuracy at every angle
    quality: Quality | None = None  # None: made by an older version
    attention_entropy: dict[str, float] | None = None  # of α in each layer; None: made by an older version

    def __post_init__(self) -> None:
        """Checks that the counts in a file are consistent."""
        classes, counts = len(self.class_accuracy), self.confusion
        if not (1 <= classes == len(counts) and all(len(row) == classes for row in counts)):
            raise ValueError(f"confusion: expected {classes}×{classes} counts, as class_accuracy has classes")
        if min(map(min, counts)) < 0 or sum(map(sum, counts)) != self.images or self.images < 1:
            raise ValueError(f"confusion: expected counts of {self.images} images")
        right = [row[i] for i, row in enumerate(counts)]
        found = [r / sum(row) if sum(row) else None for r, row in zip(right, counts, strict=True)]
        if [*self.class_accuracy.values()] != found or self.accuracy != sum(right) / self.images:
            raise ValueError("accuracy, class_accuracy: expected those of the confusion matrix; got others")
        if {*self.accuracy_under} != {*VIEWS} or self.accuracy_under["0°"] != self.accuracy:
            raise ValueError(f"accuracy_under: expected {', '.join(VIEWS)}; got {self.accuracy_under!r}")
        if not all(0 <= value <= 1 for value in self.accuracy_under.values()):
            raise ValueError(f"accuracy_under: expected numbers from 0 to 1; got {self.accuracy_under!r}")
        if min(self.loss, self.equivariance_error) < 0:
            raise ValueError("loss, equivariance_error: expected numbers of 0 or more; got less")
        if self.quality is not None and [*self.quality.classes] != [*self.class_accuracy]:
            raise ValueError("quality: expected the classes of class_accuracy; got others")
        entropy = self.attention_entropy or {}
        if not all(0 <= value < 1.001 for value in entropy.values()):  # 1, and rounding
            raise ValueError(f"attention_entropy: expected numbers from 0 to 1; got {entropy!r}")

    @property
    def turned_accuracy(self) -> float:
        """The mean accuracy over the rotations by 90°, 180° and 270°."""
        return fmean(self.accuracy_under[view] for view in TURNS)

    @property
    def mean_entropy(self) -> float | None:
        """The mean of ``attention_entropy`` over layers; None if there are none."""
        return fmean(self.attention_entropy.values()) if self.attention_entropy else None

    def table(self) -> Any:
        """The results as tables for ``rich``."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = Text(f"{escape_for_terminal(self.data)}: {self.accuracy:.2%} of {self.images} test images")
        quality = self.quality
        views = Table("images")
        views.add_column("accuracy", justify="right")
        for name, value in self.accuracy_under.items():
            views.add_row(name, f"{value:.2%}")
        views.add_row("change of the logits under quarter turns", f"{self.equivariance_error:.1e}")
        every = f"every {STEP}°, in a round mask"
        views.add_row(f"{every}: mean", f"{self.rotation.mean:.2%}")
        where = f", at {self.rotation.worst_angle}°" if self.rotation.worst < self.rotation.mean else ""
        views.add_row(f"{every}: lowest{where}", f"{self.rotation.worst:.2%}")
        if self.attention_entropy:
            lowest = min(self.attention_entropy, key=self.attention_entropy.__getitem__)
            views.add_row("entropy of attention, mean of layers (1: uniform)", f"{self.mean_entropy:.3f}")
            views.add_row(f"its lowest, in {lowest}", f"{self.attention_entropy[lowest]:.3f}")
        if quality is not None:
            views.add_row("95% interval of the accuracy", _interval(quality.accuracy_interval))
            views.add_row("balanced accuracy (mean over classes)", f"{quality.balanced_accuracy:.2%}")
            views.add_row(
                "95% interval of the balanced accuracy", _interval(quality.balanced_accuracy_interval)
            )
            views.add_row("area under the ROC curve (mean)", _percent(quality.roc_auc))
            views.add_row("expected calibration error", f"{quality.calibration_error:.2%}")
        classes = Table("class")
        headings = ("accuracy",) if quality is None else ("images", "accuracy", "precision", "F1", "ROC AUC")
        for heading in headings:
            classes.add_column(heading, justify="right")
        classes.add_column("most often taken for")
        names = list(self.class_accuracy)
        for row, (name, accuracy) in enumerate(self.class_accuracy.items()):
            wrong = [0 if i == row else n for i, n in enumerate(self.confusion[row])]
            worst = (
                f"{escape_for_terminal(names[wrong.index(max(wrong))])} ({max(wrong)})" if max(wrong) else ""
            )
            cells = [_percent(accuracy)]
            if quality is not None:
                of = quality.classes[name]
                cells = [f"{of.images}", *cells, *map(_percent, (of.precision, of.f1, of.roc_auc))]
            # as they are: a string would be read as markup
            classes.add_row(Text(escape_for_terminal(name)), *cells, Text(worst))
        return Group(title, views, classes)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2%} to {ends[1]:.2%}"


def images_evaluated(test_images: int) -> int:
    """How many images an evaluation runs through the network: in every view, and some at every angle."""
    return len(VIEWS) * test_images + len(ANGLES) * min(test_images, MOST_IMAGES)


def evaluate_model(model: nn.Module, split: Split, info: DataInfo, watch: Watch | None = None) -> Evaluation:
    """Accuracy on a split, of each class, under quarter turns and a flip, and at every angle.

    Args:
        watch: called with the completed fraction and a status line.
    """
    return _evaluate_model(model, split, info, watch)[0]


def _evaluate_model(
    model: nn.Module, split: Split, info: DataInfo, watch: Watch | None
) -> tuple[Evaluation, Tensor]:
    """The evaluation, and the probabilities ``[N, classes]`` of the upright images."""
    labels = split.labels
    outputs = {}
    for number, (name, view) in enumerate(VIEWS.items()):
        if watch is not None:
            watch(number / (2 * len(VIEWS)), f"evaluating, {name}")
        outputs[name] = logits(model, split, info, view)
    curve = rotation_curve(
        model, split, info, None if watch is None else lambda share, line: watch((1 + share) / 2, line)
    )
    upright = outputs[UPRIGHT]
    classes = len(info.class_names)
    counts = torch.bincount(labels * classes + upright.argmax(1), minlength=classes**2).view(classes, classes)
    total = counts.sum(1).tolist()
    right = counts.diagonal().tolist()
    probabilities = upright.softmax(1)
    evaluation = Evaluation(
        data=info.name,
        images=len(split),
        loss=F.cross_entropy(upright, labels).item(),
        accuracy=_accuracy(upright, labels),
        accuracy_under={name: _accuracy(output, labels) for name, output in outputs.items()},
        class_accuracy={
            name: r / n if n else None for name, r, n in zip(info.class_names, right, total, strict=True)
        },
        confusion=counts.tolist(),
        equivariance_error=max(relative_error(outputs[view], upright) for view in TURNS),
        rotation=curve,
        quality=measure_quality(
            info.class_names, labels.numpy(force=True), probabilities.double().numpy(force=True)
        ),
    )
    return evaluation, probabilities.cpu()


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return (outputs.argmax(1) == labels).sum().item() / len(labels)


def evaluate(
    trained: TrainedModel,
    data: str | os.PathLike[str] | None = None,
    *,
    pixel_range: str | None = None,
    out: str | os.PathLike[str] | None = None,
    pictures: bool = True,
    watch: Watch | None = None,
) -> Evaluation:
    """Evaluates a model on test images, and saves the result in its run's folder.

    Writes ``evaluation.json`` and ``predictions.csv`` there, and ``confusion.png``, ``rotation.png`` and
    ``mistakes.png`` if matplotlib is installed and ``pictures`` is true. For a model without a run's folder,
    or for other data than its own, they are written only if ``out`` is given.

    Args:
        data: a data set as ``load_data`` takes it; by default the one that the model was trained on. Its test
            images count, or all of its images if it has no test part; images that the run was trained or
            validated on are left out, with a warning.
        pixel_range: of those images; by default that of the training images.
        out: folder for the files; by default that of the run.
        watch: called with the completed fraction and a status line.

    Raises:
        OSError: ``out`` is given and cannot be written to; nothing has been computed.
        EvaluationNotSaved: the files cannot be written; the error has the results.
    """
    if out is not None:
        check_writable(Path(out), *_files_to_write(pictures))
    dataset = trained.open_data(data, pixel_range)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu") if device is None else device
    own = dataset.digest == trained.data.digest
    split = trained.test_images(dataset)
    model = trained.optimized
    if device.type != "cpu":
        model = copy.deepcopy(model).to(device)  # others use the one on the CPU
    evaluation, probabilities = _evaluate_model(model, split.to(device), trained.data, watch)
    entropy = attention_entropy(trained.model, split, trained.data)
    evaluation = replace(evaluation, data=dataset.name, attention_entropy=entropy)
    folder = (trained.run_folder if own else None) if out is None else Path(out)
    if folder is None:
        return evaluation
    try:
        _save(
            trained,
            evaluation,
            PredictionTable(split, probabilities, trained.data.class_names),
            folder,
            pictures,
        )
    except OSError as error:
        raise EvaluationNotSaved(folder, error, evaluation) from error
    return evaluation


class EvaluationNotSaved(OSError):
    """The files of an evaluation could not be written; ``evaluation`` has the results."""

    def __init__(self, folder: Path, error: OSError, evaluation: Evaluation) -> None:
        why = error.strerror or error
        super().__init__(f"{folder}: the results cannot be saved ({why}): give another folder with --out")
        self.evaluation = evaluation


def _files_to_write(pictures: bool) -> tuple[str, ...]:
    """Without matplotlib no pictures: the numbers are in the other files."""
    return (*FILES, *PICTURES) if pictures and find_spec("matplotlib") is not None else FILES


def _save(
    trained: TrainedModel, evaluation: Evaluation, table: PredictionTable, folder: Path, pictures: bool
) -> None:
    names = _files_to_write(pictures)
    check_writable(folder, *names)  # all, before one of an earlier evaluation is replaced
    folder.mkdir(parents=True, exist_ok=True)
    evaluation_file, predictions_file = (folder / name for name in FILES)
    write_json(evaluation_file, asdict(evaluation))
    write_atomically(predictions_file, table.to_csv().encode())
    if names == FILES:
        return
    curve = rotation_figure({trained.name: evaluation.rotation}, evaluation.data)
    figures = confusion_figure(evaluation), curve, table.mistakes_figure(evaluation.data)
    for name, figure in zip(PICTURES, figures, strict=True):
        write_figure(folder / name, figure, dpi=120)


def confusion_figure(evaluation: Evaluation) -> Figure:
    """Plots the confusion matrix: rows are the true classes, each divided by its number of images."""
    from matplotlib.figure import Figure

    names = [escape_for_terminal(name) for name in evaluation.class_accuracy]
    counts = torch.tensor(evaluation.confusion)
    share = counts / counts.sum(1, keepdim=True).clamp(min=1)
    side = max(4.0, 0.4 * len(names) + 1.5)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(names))
    axes.set_xticks(ticks, names, rotation=90 if max(map(len, names)) > 2 else 0, parse_math=False)
    axes.set_yticks(ticks, names, parse_math=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    title = f"{escape_for_terminal(evaluation.data)}: {evaluation.accuracy:.2%} of {evaluation.images}"
    axes.set_title(title, parse_math=False)
    if len(names) <= 20:
        for row in ticks:
            for column in ticks:
                if counts[row, column]:
                    colour = "white" if share[row, column] > 0.5 else "black"
                    axes.text(
                        column,
                        row,
                        str(int(counts[row, column])),
                        ha="center",
                        va="center",
                        color=colour,
                        fontsize=8,
                    )
    return figure
