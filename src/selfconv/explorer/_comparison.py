"""What the page is about: one or two trained models, images to show them, and what they make of an image."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from selfconv.data import DataError, Dataset, fit, load_data
from selfconv.groups import P4
from selfconv.models import list_models
from selfconv.testing import relative_error, transform
from selfconv.trained import TrainedModel, open_trained
from selfconv.visualize import Inspection

Image = NDArray[np.uint8]  # [C, size, size]
Place = tuple[float, float]  # row and column, also between pixels
SAMPLES = 12
REMEMBERED = 32  # inspections; a few MB each


@dataclass(frozen=True)
class SampleImage:
    image: Image
    label: str


class Comparison:
    """Models that take the same images and know the same classes, and samples of these images.

    Args:
        models: the one that the page is about first.
        note: what the user should know about the samples.
    """

    def __init__(
        self, models: Sequence[TrainedModel], samples: Sequence[SampleImage], note: str = ""
    ) -> None:
        self.models, self.samples, self.note = list(models), list(samples), note
        self._inspections: OrderedDict[tuple[int, bytes], Inspection] = OrderedDict()
        self._lock = Lock()  # a model is traced by hooks, so one image at a time

    @classmethod
    def open(cls, run: str | Path | None) -> Self:
        """The shipped models on digits, the planar one first; or a run's, beside a shipped counterpart."""
        shipped = [open_trained(name) for name in list_models(pretrained=True)]
        if run is None:
            models = sorted(_one_of_each_kind(shipped), key=lambda trained: len(trained.model.group))
        else:
            own = open_trained(run)
            models = [own, *(other for other in _one_of_each_kind(shipped) if _counterparts(own, other))]
        if not models:
            raise ValueError("explore: this version ships no weights; expected the folder of a run")
        return cls(models, *_samples(models[0]))

    @property
    def class_names(self) -> list[str]:
        return self.models[0].data.class_names

    def inspect(self, model: int, image: Image) -> Inspection:
        """What a model computes for an image, from memory if it was asked for lately."""
        key = model, image.tobytes()
        with self._lock:
            if key not in self._inspections:
                trained = self.models[model]
                pixels = trained.normalise(torch.from_numpy(np.ascontiguousarray(image))[None])
                self._inspections[key] = Inspection(trained.model, pixels[0])
                if len(self._inspections) > REMEMBERED:
                    self._inspections.popitem(last=False)
            self._inspections.move_to_end(key)
            return self._inspections[key]

    def probabilities(self, model: int, image: Image) -> NDArray[np.float32]:
        return self.inspect(model, image).output.float().softmax(0).numpy(force=True)

    def layers(self, model: int) -> list[str]:
        """Self-convolution layers in their order; of a network without any, all its spatial layers."""
        inspection = self.inspect(model, self.samples[0].image)
        return [info.name for info in inspection.layers] or list(inspection.maps)

    def layer(self, model: int, number: int) -> str:
        """The layer at that place in the first model; in a shallower model the last."""
        names = self.layers(model)
        return names[min(number, len(names) - 1)]

    def map_error(self, model: int, image: Image, quarters: int, layer: str) -> float | None:
        """How far a layer's map of the image turned is from its map turned, relative to its largest value.

        None if the model's group does not have that turn, so that its maps cannot be turned so.
        """
        own = self.models[model].model.group
        group = P4 if len(own) == 1 else own
        element = group.turn(quarters)
        if element is None:
            return None
        before = self.inspect(model, image).maps[layer][None]
        after = self.inspect(model, turn(image, 90 * quarters)).maps[layer][None]
        return relative_error(after, transform(before, element, group))


def _one_of_each_kind(trained: Sequence[TrainedModel]) -> list[TrainedModel]:
    """One of each group, with self convolution if there is such a one."""
    by_interest = sorted(trained, key=lambda one: one.model.config["spatial"] != "conv")
    return list({one.model.group.name: one for one in by_interest}.values())


def _counterparts(a: TrainedModel, b: TrainedModel) -> bool:
    """Whether one is planar, the other not, and both answer the same question about the same images."""
    same = all(
        getattr(a.data, name) == getattr(b.data, name) for name in ("class_names", "size", "in_channels")
    )
    return same and (len(a.model.group) == 1) != (len(b.model.group) == 1)


def _samples(trained: TrainedModel) -> tuple[list[SampleImage], str]:
    """Test images of every class, and a note if they are not of the model's own data."""
    options = trained.config.data
    try:
        data = load_data(
            options.source,
            image_size=options.image_size,
            seed=options.split_seed,
            validation=options.validation,
            download=False,  # the page makes no requests
        )
    except DataError as error:
        return _stand_ins(trained), f"These digits stand in for the run's data, which cannot be read: {error}"
    if (data.in_channels, data.size) != (trained.data.in_channels, trained.data.size):
        note = "These digits stand in for the run's data, which has changed since it was trained."
        return _stand_ins(trained), note
    return choose_samples(data), ""


def choose_samples(data: Dataset) -> list[SampleImage]:
    """The first test images of each class, class by class, as many of each as there is room for."""
    each = max(1, SAMPLES // data.num_classes)
    chosen = []
    for label, name in enumerate(data.class_names[:SAMPLES]):
        for number in (data.test.labels == label).nonzero()[:each, 0].tolist():
            chosen.append(SampleImage(data.test.images[number].contiguous().numpy(), name))
    return chosen


def _stand_ins(trained: TrainedModel) -> list[SampleImage]:
    digits = choose_samples(load_data("digits"))
    size, channels = trained.data.size, trained.data.in_channels
    larger = fit(np.stack([digit.image.transpose(1, 2, 0) for digit in digits]), size).transpose(0, 3, 1, 2)
    return [
        SampleImage(np.repeat(image, channels, 0), f"digit {digit.label}")
        for image, digit in zip(larger, digits, strict=True)
    ]


# ---- turning ----


def turn(image: Image, degrees: float) -> Image:
    """The image turned counter-clockwise: exactly by quarters, else bilinear.

    Corners that come from outside get the median colour of the border, as a larger picture would have there.
    """
    quarters = degrees / 90
    if quarters == round(quarters):
        return np.ascontiguousarray(np.rot90(image, round(quarters) % 4, (1, 2)))
    import PIL.Image

    turned = []
    for channel in image:
        border = np.concatenate([channel[[0, -1]].ravel(), channel[1:-1, [0, -1]].ravel()])
        picture = PIL.Image.fromarray(channel).rotate(
            degrees, PIL.Image.Resampling.BILINEAR, fillcolor=int(np.median(border))
        )
        turned.append(np.array(picture))
    return np.stack(turned)


def turn_place(place: Place, degrees: float, size: int) -> Place:
    """Where a place of an image goes when the image is turned counter-clockwise about its centre."""
    centre = (size - 1) / 2
    row, column = place[0] - centre, place[1] - centre
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return row * cos - column * sin + centre, column * cos + row * sin + centre


def nearest_pixel(place: Place, size: int) -> tuple[int, int]:
    row, column = (min(max(round(x), 0), size - 1) for x in place)
    return row, column


def wrap(degrees: float) -> float:
    """The same turn as an angle above −180° up to 180°."""
    return 180 - (180 - degrees) % 360


# ---- in words ----


def kind(trained: TrainedModel) -> str:
    """The name of its group, or ``planar`` for a network that knows translations alone."""
    group = trained.model.group
    return "planar" if len(group) == 1 else group.name


def layer_title(name: str) -> str:
    """``stages.0.1.spatial.conv`` as a reader counts."""
    found = re.match(r"stages\.(\d+)\.(\d+)\.", name)
    return f"stage {int(found[1]) + 1}, block {int(found[2]) + 1}" if found else name.split(".")[0]


def change_in_words(before: NDArray[np.float32], after: NDArray[np.float32], names: Sequence[str]) -> str:
    """Whether a turn changed the prediction, and by how much the probabilities."""
    difference = float(np.abs(after - before).max())
    old, new = names[int(before.argmax())], names[int(after.argmax())]
    by = f"probabilities differ by {_size(difference)}" if difference else "probabilities are identical"
    return f"same prediction, {by}" if old == new else f"prediction changed from {old} to {new}, {by}"


def follow_in_words(error: float | None) -> str:
    """Whether maps turned with the image."""
    if error is None:
        return "its group does not have this turn"
    if error < 1e-4:
        return f"the maps turn with the image: largest difference {_size(error)} of the largest value"
    return f"the maps do not follow: they differ by up to {_size(error)} of the largest value"


def _size(difference: float) -> str:
    return f"{difference:.2f}" if difference >= 0.01 else f"{difference:.0e}".replace("e-0", "e-")
