"""The answer to each interaction: numbers, which the page draws."""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfconv.data import Batches, DataError
from selfconv.explorer._comparison import (
    Comparison,
    Image,
    Place,
    change_in_words,
    follow_in_words,
    kind,
    load_own_data,
    nearest_pixel,
    network_title,
    symmetry_in_words,
    turn,
    turn_place,
)
from selfconv.groups import Group
from selfconv.train import augmentation
from selfconv.trained import TrainedModel
from selfconv.visualize import PixelView, selectivity

Json = dict[str, Any]
TRAINING_IMAGES = 24
MAX_UPLOAD = 16 * 2**20  # bytes


@dataclass(frozen=True)
class Choice:
    """What the user has chosen.

    image is upright; home: the chosen pixel on the upright image; it is rotated with the image by ``angle``.
    layer, head and channel count from 0, and a model that has fewer shows its last.
    """

    image: Image
    angle: float
    home: Place
    layer: int
    head: int
    channel: int


class Answers:
    """What the page asks for, about the models of a comparison."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.data = comparison.models[0].data

    @property
    def largest_call(self) -> int:
        """Bytes of a request that carries an image."""
        return 4 * math.ceil(self.data.in_channels * self.data.size**2 / 3) + 2**12

    # ---- once ----

    def start(self) -> Json:
        comparison = self.comparison
        first = comparison.first_sample()
        return {
            "models": [self._about(model) for model in range(len(comparison.models))],
            "data": Path(self.data.name).name,
            "size": self.data.size,
            "channels": self.data.in_channels,
            "classes": comparison.class_names,
            "note": comparison.note,
            "maxUpload": MAX_UPLOAD,
            "samples": [
                {"name": sample.name, "label": sample.label, "image": pixels(sample.image)}
                for sample in comparison.samples
            ],
            "attention": any(self._sees(model) for model in range(len(comparison.models))),
            "layers": self._layers(),
            "first": {"sample": first, **self._first_view(comparison.samples[first].image)},
        }

    def _about(self, model: int) -> Json:
        trained = self.comparison.models[model]
        right = None if trained.record is None else trained.record.test_accuracy
        facts = [f"{sum(p.numel() for p in trained.model.parameters()):,} parameters"]
        facts += [f"{right:.1%} of test images right"] if right is not None else []
        return {
            "name": trained.name,
            "kind": kind(trained),
            "title": network_title(trained),
            "meaning": symmetry_in_words(trained.model.group),
            "facts": ", ".join(facts),
            "planes": plane_names(trained.model.group),
        }

    def _layers(self) -> list[Json]:
        """The layers to choose from are those of the first model."""
        inspection = self.comparison.inspect(0, self.comparison.samples[0].image)
        sizes = {info.name: info.size for info in inspection.layers}
        windows = {info.name: 2 * max(info.layer.window.reach) + 1 for info in inspection.layers}
        layers = []
        for number, name in enumerate(self.comparison.layers(0)):
            passed = tuple(inspection.maps[name].shape[-2:])
            h, w = sizes.get(name, passed)
            pooled = "" if passed == (h, w) else f", pooled to {passed[0]}×{passed[1]} after attention"
            models = range(len(self.comparison.models))
            layers.append(
                {
                    "title": f"{name}: {h}×{w} map{pooled}",
                    "size": [h, w],
                    "window": windows.get(name, 0),
                    "heads": max(self._heads(model, number) for model in models),
                    "channels": max(self._channels(model, number) for model in models),
                }
            )
        return layers

    def _sees(self, model: int) -> bool:
        """Whether a model has self convolution."""
        return bool(self.comparison.inspect(model, self.comparison.samples[0].image).layers)

    def _layer(self, model: int, number: int) -> torch.nn.Module:
        return self.comparison.models[model].model.get_submodule(self.comparison.layer(model, number))

    def _heads(self, model: int, number: int) -> int:
        return getattr(self._layer(model, number), "num_heads", 1)

    def _channels(self, model: int, number: int) -> int:
        """Channels of a head."""
        maps = self.comparison.inspect(model, self.comparison.samples[0].image).maps
        return len(maps[self.comparison.layer(model, number)]) // self._heads(model, number)

    def _first_view(self, image: Image) -> Json:
        """The layer, head and pixel where the attention of the models is most selective."""
        size = image.shape[1]
        start: Json = {"layer": 0, "head": 0, "channel": 0, "pixel": [size // 2, size // 2]}
        inspections = [self.comparison.inspect(m, image) for m in range(len(self.comparison.models))]
        best = -1.0
        for number, info in enumerate(inspections[0].layers):
            scores = selectivity(inspections[0], info.name)  # [heads, h, w]
            for model, other in enumerate(inspections[1:], 1):
                name = self.comparison.layer(model, number)
                if other.layers and (more := selectivity(other, name)).shape == scores.shape:
                    scores = scores * more
            place, (h, w) = int(scores.argmax()), info.size
            if h == size and float(scores.max()) > best:  # of layers that see the image at full resolution
                best, (head, pixel) = float(scores.max()), divmod(place, h * w)
                start |= {"layer": number, "head": head, "pixel": [pixel // w, pixel % w]}
        if inspections[0].layers:
            name = self.comparison.layer(0, start["layer"])
            i, j = start["pixel"]
            view = inspections[0].look(name, (i, j), start["head"])
            start["channel"] = int(view.effective.abs().transpose(0, 2).flatten(1).sum(1).argmax())
        return start

    # ---- an interaction each ----

    def look(self, choice: Choice) -> Json:
        """Everything: after another image, a turn, or another layer, head or channel."""
        turned = turn(choice.image, choice.angle)
        models = range(len(self.comparison.models))
        return {
            "image": pixels(turned),
            "pixel": self._pixel(choice),
            "models": [
                self._decision(model, choice, turned)
                | {"filters": self._filters(model, choice, turned), "maps": self._maps(model, choice, turned)}
                for model in models
            ],
        }

    def pixel(self, choice: Choice) -> Json:
        """The filters at another pixel."""
        turned = turn(choice.image, choice.angle)
        models = range(len(self.comparison.models))
        return {
            "pixel": self._pixel(choice),
            "models": [{"filters": self._filters(model, choice, turned)} for model in models],
        }

    def answer(self, choice: Choice) -> Json:
        """The probabilities alone, for the curve over the angles."""
        turned = turn(choice.image, choice.angle)[None]
        models = range(len(self.comparison.models))
        return {"models": [self.comparison.answers(model, turned)[0].tolist() for model in models]}

    def occlusion(self, choice: Choice) -> Json:
        turned = turn(choice.image, choice.angle)
        models = range(len(self.comparison.models))
        return {"models": [numbers(self.comparison.occlusion(model, turned)) for model in models]}

    def training(self) -> Json:
        """What the models have seen: images as training batches have them, and the course of training."""
        return {"models": [_training(trained) for trained in self.comparison.models]}

    def _pixel(self, choice: Choice) -> list[int]:
        size = choice.image.shape[1]
        return list(nearest_pixel(turn_place(choice.home, choice.angle, size), size))

    def _decision(self, model: int, choice: Choice, turned: Image) -> Json:
        before = self.comparison.probabilities(model, choice.image)
        after = self.comparison.probabilities(model, turned)
        said = change_in_words(before, after, self.comparison.class_names) if choice.angle else ""
        return {
            "probabilities": after.tolist(),
            "upright": before.tolist(),
            "said": said,
            "logits": self.comparison.inspect(model, turned).output.tolist(),
            "activation": numbers(self.comparison.see(model, turned).activation),
        }

    def _filters(self, model: int, choice: Choice, turned: Image) -> Json | None:
        """How one channel of a head computes its output at the pixel: None without self convolution."""
        inspection = self.comparison.inspect(model, turned)
        if not inspection.layers:
            return None
        name = self.comparison.layer(model, choice.layer)
        row, column = self._pixel(choice)
        views = inspection.look_all(name, inspection.to_map(name, (row, column)))
        view = views[min(choice.head, len(views) - 1)]
        channel = min(choice.channel, view.psi.shape[2] - 1)
        i, j = view.pixel
        h, w = view.size
        return {
            "where": f"{name}, row {i}, column {j} of the {h}×{w} map, head {view.head}, channel {channel}",
            "head": view.head,
            "output": view.output[:, channel].tolist(),
            "heads": numbers(torch.stack([v.alpha for v in views])),  # [heads, P, k, k]
            **_parts(view, channel),
        }

    def _maps(self, model: int, choice: Choice, turned: Image) -> Json:
        name = self.comparison.layer(model, choice.layer)
        before = self.comparison.inspect(model, choice.image).maps[name]
        after = self.comparison.inspect(model, turned).maps[name]
        heads = self._heads(model, choice.layer)
        per_head = len(before) // heads
        channel = min(choice.head, heads - 1) * per_head + min(choice.channel, per_head - 1)
        said = ""
        if choice.angle and choice.angle % 90 == 0:
            error = self.comparison.map_error(model, choice.image, int(choice.angle) // 90, name)
            said = follow_in_words(error)
        planes = len(self.comparison.models[model].model.group)
        return {
            "where": f"{name}, {before.shape[-2]}×{before.shape[-1]} map, channel {channel} of 0 to "
            f"{len(before) - 1}",
            "said": said,
            "upright": numbers(before[channel].reshape(planes, *before.shape[-2:])),
            "turned": numbers(after[channel].reshape(planes, *after.shape[-2:])),
        }

    # ---- what a request says ----

    def choice(self, content: Any) -> Choice:
        """A request as a choice.

        Raises:
            ValueError: it is none.
        """
        expected = {"image", "angle", "home", "layer", "head", "channel"}
        if not isinstance(content, dict) or content.keys() != expected:
            raise ValueError(f"expected {', '.join(sorted(expected))}")
        home = content["home"]
        if not isinstance(home, list) or len(home) != 2 or not all(_is_number(x, 1e5) for x in home):
            raise ValueError("home: expected a row and a column")
        if not _is_number(content["angle"], 180):
            raise ValueError("angle: expected −180 to 180")
        counts = [content[name] for name in ("layer", "head", "channel")]
        if not all(type(n) is int and 0 <= n < 2**31 for n in counts):
            raise ValueError("layer, head, channel: expected numbers from 0 on")
        return Choice(self._image(content["image"]), content["angle"], (home[0], home[1]), *counts)

    def _image(self, content: Any) -> Image:
        """A sample by its number, or pixels as ``pixels`` has written them."""
        if type(content) is int and 0 <= content < len(self.comparison.samples):
            return self.comparison.samples[content].image
        shape = self.data.in_channels, self.data.size, self.data.size
        try:
            raw = base64.b64decode(content, validate=True) if isinstance(content, str) else b""
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != math.prod(shape):
            raise ValueError(f"image: expected the number of a sample, or {math.prod(shape)} bytes in base64")
        return np.frombuffer(bytearray(raw), np.uint8).reshape(shape)  # writable, as torch expects arrays


def _is_number(value: Any, largest: float) -> bool:
    return type(value) in (int, float) and abs(value) <= largest


def _parts(view: PixelView, channel: int) -> Json:
    """The terms of the layer's equation, of one channel."""
    own = view.head * view.psi.shape[2] + channel if view.dense else channel
    psi, effective = (
        x[:, :, channel, own] if view.dense else x[:, :, channel] for x in (view.psi, view.effective)
    )
    return {
        "value": numbers(view.neighbourhood[:, own]),  # [R, k, k]
        "psi": numbers(psi),  # [P, R, k, k]
        "alpha": numbers(view.alpha),  # [P, k, k]
        "effective": numbers(effective),  # [P, R, k, k]
        "positional": numbers(view.positional[:, channel]),  # [P, k, k]
    }


def _training(trained: TrainedModel) -> Json:
    recipe = trained.config.recipe
    moved = f"moved by up to {recipe.pad} pixel{'s' * (recipe.pad > 1)}" if recipe.pad else "not moved"
    flipped = "flipped or not" if recipe.flip else "never flipped"
    turned = {"none": "never turned", "quarter": "turned by multiples of 90°", "any": "turned by any angle"}
    changes = [moved, flipped, turned[recipe.rotate]]
    varied = [name for name in ("brightness", "contrast", "colour") if getattr(recipe, name)]
    changes += [f"changed in {name}" for name in varied]
    changes += ["partly erased or not"] if recipe.erase else []
    sizes = sorted({*recipe.all_sizes(trained.data.size)})
    smaller = f" Early epochs used smaller images, from {sizes[0]} pixels on." if len(sizes) > 1 else ""
    said = f"Each image was {', '.join(changes)}, anew in each of {recipe.epochs} epochs.{smaller}"
    metrics = [asdict(epoch) for epoch in trained.metrics]
    try:
        data = load_own_data(trained)
    except DataError as error:
        return {
            "said": f"{said} Now {trained.data_error_in_words(error)}.",
            "images": [],
            "metrics": metrics,
        }
    mean, std = trained.data.mean, trained.data.std
    batches = Batches(
        data.train,
        TRAINING_IMAGES,
        mean=mean,
        std=std,
        augment=augmentation(recipe),
        shuffle=True,
        seed=trained.config.seed,
    )
    images, _ = next(iter(batches))
    shape = (1, len(mean), 1, 1)
    shown = images * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    bytes_ = (shown * 255).round().clamp(0, 255).to(torch.uint8).numpy()
    return {"said": said, "images": [pixels(image) for image in bytes_], "metrics": metrics}


# ---- arrays in JSON ----


def numbers(values: Tensor) -> Json:
    """An array: its shape, and its values as little-endian float32 in base64."""
    array = values.detach().numpy(force=True).astype("<f4")
    return {"shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def pixels(image: Image) -> str:
    """The bytes of an image in base64."""
    return base64.b64encode(np.ascontiguousarray(image).tobytes()).decode()


def plane_names(group: Group) -> list[str]:
    """What the planes of features on a group are called: by their turn, ``m`` if mirrored first."""
    return [name.replace(" mirrored", " m") for name in group.element_names]
