"""What the page is about: trained models side by side, samples, and what the models compute for them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfconv.data import DataError, Dataset, as_bytes, fit, load_data, normalise
from selfconv.groups import P4, Group
from selfconv.models import SPATIAL_KINDS, list_models
from selfconv.testing import relative_error, transform
from selfconv.train import open_data
from selfconv.trained import TrainedModel, open_trained
from selfconv.visualize import Inspection, border_colour, occlusion_maps

Image = NDArray[np.uint8]  # [C, size, size]
Position = tuple[float, float]  # row and column, also between pixels
T = TypeVar("T")
SAMPLES = 12
REMEMBERED = 32  # images and models; a few MB each
COVERED = 12  # images of an occlusion map at a time: a click waits for no more


@dataclass(frozen=True)
class SampleImage:
    image: Image
    name: str  # of its class, or of what it shows
    label: str | None  # the true class; None for an image of no class that the models know


@dataclass
class Seen:
    """What a model computed for an image."""

    inspection: Inspection
    activation: Tensor  # [num_classes, h, w]


class Remembered(OrderedDict[tuple[int, bytes], T]):
    """What was computed lately, by model and image (an LRU cache)."""

    def of(self, model: int, image: Image, compute: Callable[[], T]) -> T:
        key = model, image.tobytes()
        if key not in self:
            self[key] = compute()
            if len(self) > REMEMBERED:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


class Comparison:
    """Models that take the same images and know the same classes, and samples of these images.

    What follows a click is computed from the models; ``occlusion`` and ``answers`` from their optimised
    copies, so that another thread may call these: an inspection registers hooks on its model, so calls from
    another thread would be recorded too.

    Args:
        models: the one that the page is about first.
        note: what the user should know about the samples.

    Attributes:
        attends: of each model, whether it has self convolution.
        pause: called by ``occlusion`` between its parts; may wait for what is more urgent.
        lead: the model whose layers are chosen from: of those with self convolution, the one with most.
    """

    def __init__(
        self, models: Sequence[TrainedModel], samples: Sequence[SampleImage], note: str = ""
    ) -> None:
        self.models, self.samples, self.note = list(models), list(samples), note
        self.pause: Callable[[], None] = lambda: None
        self._seen: Remembered[Seen] = Remembered()
        self._occlusion: Remembered[Tensor] = Remembered()
        seen = [self.inspect(model, self.samples[0].image) for model in range(len(self.models))]
        self._layers = [[info.name for info in one.layers] or list(one.maps) for one in seen]
        self.attends = [bool(one.layers) for one in seen]
        depths = [(attends, len(names)) for attends, names in zip(self.attends, self._layers, strict=True)]
        self.lead = depths.index(max(depths))

    @classmethod
    def open(cls, *places: str | Path) -> Self:
        """Opens the given models: one beside a shipped counterpart; none given, the shipped ones.

        Raises:
            ValueError: a model cannot be opened, or they do not take the same images and know the same
                classes.
        """
        own = [open_trained(place) for place in places]
        for other in own[1:]:
            if not _same_inputs_and_classes(own[0], other):
                raise ValueError(
                    f"explore: expected models for the same classes and images; {own[0].name} is for "
                    f"{_describe_inputs(own[0])}, {other.name} for {_describe_inputs(other)}"
                )
        if len(own) < 2:
            shipped = [open_trained(name) for name in list_models(pretrained=True)]
            if own:
                own += _one_of_each_group([other for other in shipped if _counterparts(own[0], other)])[:1]
            elif shipped:
                own = max((_comparable(one, shipped) for one in shipped), key=len)
        if not own:
            raise ValueError("explore: this version ships no weights; expected the folder of a run")
        return cls(own, *_samples(own[0]))

    @property
    def class_names(self) -> list[str]:
        return self.models[0].data.class_names

    def see(self, model: int, image: Image) -> Seen:
        """What a model computes for an image, from memory if it was asked for lately."""

        def compute() -> Seen:
            inspection = Inspection(self.models[model].model, self._normalised(model, image[None]))
            return Seen(inspection, inspection.class_activation_maps())

        return self._seen.of(model, image, compute)

    def inspect(self, model: int, image: Image) -> Inspection:
        return self.see(model, image).inspection

    def probabilities(self, model: int, image: Image) -> NDArray[np.float32]:
        return self.inspect(model, image).output.float().softmax(0).numpy(force=True)

    def occlusion(self, model: int, image: Image) -> Tensor:
        """By how much each logit falls if a part of the image is covered, ``[num_classes, 8, 8]``."""
        normalised = self._normalised(model, image[None])
        network = self.models[model].optimized

        def compute() -> Tensor:
            return occlusion_maps(network, normalised, at_once=COVERED, pause=self.pause)

        return self._occlusion.of(model, image, compute)

    def answers(self, model: int, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The probabilities ``[N, num_classes]`` of images ``[N, C, size, size]``, not to be remembered."""
        with torch.no_grad():
            outputs = self.models[model].optimized(self._normalised(model, images))
        return outputs.float().softmax(1).numpy(force=True)

    def first_sample(self) -> int:
        """The first sample: all models classify it rightly, and most of them wrongly when it is turned."""

        def score_of(sample: SampleImage) -> tuple[int, int]:
            turned = np.stack([np.rot90(sample.image, quarters, (1, 2)) for quarters in range(4)])
            found = [self.answers(model, turned).argmax(1) for model in range(len(self.models))]
            right = [[self.class_names[n] == sample.label for n in of_model] for of_model in found]
            return sum(of_model[0] for of_model in right), sum(
                not ok for of_model in right for ok in of_model
            )

        scores = [score_of(sample) for sample in self.samples]
        return scores.index(max(scores))

    def _normalised(self, model: int, images: NDArray[np.uint8]) -> Tensor:
        data = self.models[model].data
        return normalise(torch.from_numpy(np.ascontiguousarray(images)), data.mean, data.std)

    def layers(self, model: int) -> list[str]:
        """Self-convolution layers in their order; of a network without any, all its spatial layers."""
        return self._layers[model]

    def layer(self, model: int, number: int) -> str:
        """The layer for one of the lead: of the same name, or else in the same place, in a shallower model
        the last."""
        name, names = self._layers[self.lead][number], self._layers[model]
        return name if name in names else names[min(number, len(names) - 1)]

    def map_error(self, model: int, image: Image, quarters: int, layer: str) -> float | None:
        """The error of a layer's map of the turned image, relative to the largest value of its turned map.

        None if the model's group does not have that turn, so that its maps cannot be turned so.
        """
        own = self.models[model].model.group
        group = P4 if len(own) == 1 else own
        element = group.turn(quarters)
        if element is None:
            return None
        before = self.inspect(model, image).maps[layer][None]
        after = self.inspect(model, rotate_image(image, 90 * quarters)).maps[layer][None]
        return relative_error(after, transform(before, element, group))


def _comparable(one: TrainedModel, others: Sequence[TrainedModel]) -> list[TrainedModel]:
    """A planar model and one on a group that take the images of ``one`` and know its classes."""
    return _one_of_each_group([other for other in others if _same_inputs_and_classes(one, other)])[:2]


def _one_of_each_group(trained: Sequence[TrainedModel]) -> list[TrainedModel]:
    """One model per group, smallest group first; one with attention rather than one of convolution."""
    by_interest = sorted(trained, key=lambda one: one.model.config["spatial"] != "conv")
    found = {one.model.group.name: one for one in by_interest}.values()
    return sorted(found, key=lambda one: len(one.model.group))


def _counterparts(a: TrainedModel, b: TrainedModel) -> bool:
    """Whether one is planar, the other not, and both take the same images and know the same classes."""
    return _same_inputs_and_classes(a, b) and (len(a.model.group) == 1) != (len(b.model.group) == 1)


def _same_inputs_and_classes(a: TrainedModel, b: TrainedModel) -> bool:
    names = ("class_names", "size", "in_channels")
    return all(getattr(a.data, name) == getattr(b.data, name) for name in names)


def _describe_inputs(trained: TrainedModel) -> str:
    data = trained.data
    channels = f"{data.in_channels} channel{'s' * (data.in_channels != 1)}"
    return f"{len(data.class_names)} classes, {channels}, {data.size}×{data.size} pixels"


def load_own_data(trained: TrainedModel) -> Dataset:
    """The data set that a model was trained on, if it is on this machine: the page makes no requests.

    Raises:
        DataError: it cannot be read, or has changed since the model was trained.
    """
    data = open_data(trained.config, folder=trained.run_folder, download=False)
    if data.digest != trained.data.digest:
        raise DataError(f"{data.name} has changed since the model was trained")
    return data


def _samples(trained: TrainedModel) -> tuple[list[SampleImage], str]:
    """Test images of every class, and a note if they are not of the model's own data."""
    try:
        return choose_samples(load_own_data(trained)), ""
    except DataError as error:
        said = trained.data_error_in_words(error)
        note = f"{said[0].upper()}{said[1:]}; choose an image of your own. These digits stand in for them."
        return _digits_as_samples(trained), note


def choose_samples(data: Dataset) -> list[SampleImage]:
    """The first test images of each class, class by class, as many of each as there is room for."""
    each = max(1, SAMPLES // data.num_classes)
    chosen = []
    for label, name in enumerate(data.class_names[:SAMPLES]):
        for number in (data.test.labels == label).nonzero()[:each, 0].tolist():
            image = data.test.read(torch.tensor([number]))[0].contiguous().numpy()
            chosen.append(SampleImage(as_bytes(image, data.test.levels), name, name))
    return chosen


def _digits_as_samples(trained: TrainedModel) -> list[SampleImage]:
    digits = choose_samples(load_data("digits"))
    size, channels = trained.data.size, trained.data.in_channels
    larger = fit(np.stack([digit.image.transpose(1, 2, 0) for digit in digits]), size).transpose(0, 3, 1, 2)
    return [
        SampleImage(np.repeat(image, channels, 0), f"digit {digit.name}", None)
        for image, digit in zip(larger, digits, strict=True)
    ]


# ---- turning ----


def rotate_image(image: Image, degrees: float) -> Image:
    """The image turned counter-clockwise: exactly by quarters, else bilinear.

    Corners that come from outside get the median colour of the border, as a larger picture would have there.
    """
    quarters = degrees / 90
    if quarters == round(quarters):
        return np.ascontiguousarray(np.rot90(image, round(quarters) % 4, (1, 2)))
    import PIL.Image

    colours = border_colour(torch.from_numpy(np.ascontiguousarray(image))).tolist()
    bilinear = PIL.Image.Resampling.BILINEAR
    pictures = [PIL.Image.fromarray(channel) for channel in image]
    turned = [p.rotate(degrees, bilinear, fillcolor=c) for p, c in zip(pictures, colours, strict=True)]
    return np.stack([np.array(picture) for picture in turned])


def rotate_position(position: Position, degrees: float, size: int) -> Position:
    """Where a position in an image goes when the image is turned counter-clockwise about its centre."""
    centre = (size - 1) / 2
    row, column = position[0] - centre, position[1] - centre
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return row * cos - column * sin + centre, column * cos + row * sin + centre


def nearest_pixel(position: Position, size: int) -> tuple[int, int]:
    row, column = (min(max(round(x), 0), size - 1) for x in position)
    return row, column


# ---- in words ----


def network_kind(trained: TrainedModel) -> str:
    """The name of its group, or ``planar`` for a network that knows translations alone."""
    group = trained.model.group
    return "planar" if len(group) == 1 else group.name


def network_title(trained: TrainedModel) -> str:
    """What kind of network it is: ``p4 affine self convolution``."""
    return f"{network_kind(trained)} network, {SPATIAL_KINDS[trained.model.config['spatial']].title}"


def symmetry_in_words(group: Group) -> str:
    """For which changes of the image a network on this group is built."""
    if len(group) == 1:
        return "Equivariant to shifts only: rotating the image may change its answer."
    turns = sum(a * d - b * c > 0 for (a, b), (c, d) in group.matrices)
    parts = ["shifts"] + [f"turns by {360 / turns:g}°"] * (turns > 1) + ["mirroring"] * (turns < len(group))
    return f"Equivariant to {', '.join(parts[:-1])} and {parts[-1]}."


def exact_turns_in_words(groups: Sequence[Group]) -> str:
    """At which angles networks on these groups give the same answer, and where they may not."""
    named: dict[str, list[str]] = {}  # what is said of groups that have the same turns
    for group in dict.fromkeys(groups):
        named.setdefault(_exact_turns(group), []).append("planar" if len(group) == 1 else group.name)
    return " ".join(words.format(" and ".join(names)) for words, names in named.items())


def _exact_turns(group: Group) -> str:
    turns = [s for s, ((a, b), (c, d)) in enumerate(group.matrices) if a * d - b * c > 0]
    step, exact = 360 / len(turns), 360 / sum(group.exact[s] for s in turns)
    if len(turns) == 1:
        return "No turn is exact for {} networks."
    others = "" if exact == step else f", other multiples of {step:g}° are approximate"
    return (
        f"Only multiples of {exact:g}° are exact for {{}}{others}: in between, as at {step / 2:g}°, answers "
        "may change."
    )


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
