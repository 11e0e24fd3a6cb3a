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
    Position,
    change_in_words,
    exact_turns_in_words,
    follow_in_words,
    load_own_data,
    nearest_pixel,
    network_kind,
    network_title,
    rotate_image,
    rotate_position,
    symmetry_in_words,
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
    layer counts those of the comparison's lead. Each model has a head, and a channel of it: they count from
    0, and what one model has another may not.
    """

    image: Image
    angle: float
    home: Position
    layer: int
    heads: tuple[int, ...]
    channels: tuple[int, ...]


class Answers:
    """What the page asks for, about the models of a comparison."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.data = comparison.models[0].data
        layers, models = range(len(comparison.layers(comparison.lead))), range(len(comparison.models))
        self.heads = [[self._heads(model, number) for number in layers] for model in models]
        self.channels = [[self._channels(model, number) for number in layers] for model in models]

    @property
    def largest_call(self) -> int:
        """Bytes of a request that carries an image."""
        return 4 * math.ceil(self.data.in_channels * self.data.size**2 / 3) + 2**12

    def _heads(self, model: int, number: int) -> int:
        layer = self.comparison.models[model].model.get_submodule(self.comparison.layer(model, number))
        return getattr(layer, "num_heads", 1)

    def _channels(self, model: int, number: int) -> int:
        """Channels of a head."""
        maps = self.comparison.inspect(model, self.comparison.samples[0].image).maps
        return len(maps[self.comparison.layer(model, number)]) // self._heads(model, number)

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
            "exact": exact_turns_in_words([trained.model.group for trained in comparison.models]),
            "maxUpload": MAX_UPLOAD,
            "samples": [
                {"name": sample.name, "label": sample.label, "image": encode_image(sample.image)}
                for sample in comparison.samples
            ],
            "attention": any(comparison.attends),
            "layers": [layer["title"] for layer in self._layers(comparison.lead)],
            "lead": comparison.lead,
            "first": {"sample": first, **self._first_view(comparison.samples[first].image)},
        }

    def _about(self, model: int) -> Json:
        trained = self.comparison.models[model]
        right = None if trained.record is None else trained.record.test_accuracy
        facts = [f"{sum(p.numel() for p in trained.model.parameters()):,} parameters"]
        facts += [f"{right:.1%} of test images right"] if right is not None else []
        return {
            "name": trained.name,
            "kind": network_kind(trained),
            "title": network_title(trained),
            "meaning": symmetry_in_words(trained.model.group),
            "facts": ", ".join(facts),
            "planes": plane_names(trained.model.group),
            "attention": self.comparison.attends[model],
            "layers": self._layers(model),
        }

    def _layers(self, model: int) -> list[Json]:
        """What a model shows for each layer of the lead, and how many heads and channels it has there."""
        comparison = self.comparison
        inspection = comparison.inspect(model, comparison.samples[0].image)
        infos = {info.name: info for info in inspection.layers}
        own, layers = comparison.layers(model), []
        for number in range(len(comparison.layers(comparison.lead))):
            name = comparison.layer(model, number)
            passed = tuple(inspection.maps[name].shape[-2:])
            h, w = infos[name].size if name in infos else passed
            pooled = "" if passed == (h, w) else f", pooled to {passed[0]}×{passed[1]} after attention"
            place = f"{own.index(name) + 1} of {len(own)}"
            layers.append(
                {
                    "title": f"{place}: {h}×{w} map{pooled} ({name})",
                    "size": [h, w],
                    "window": 2 * max(infos[name].layer.window.reach) + 1 if name in infos else 0,
                    "heads": self.heads[model][number],
                    "channels": self.channels[model][number],
                }
            )
        return layers

    def _first_view(self, image: Image) -> Json:
        """The layer and pixel where the attention of the models is most selective; of each model, a head
        that is selective there, and the channel with the strongest filter."""
        size, lead, models = image.shape[1], self.comparison.lead, range(len(self.comparison.models))
        start: Json = {"layer": 0, "pixel": [size // 2, size // 2]}
        inspections = [self.comparison.inspect(model, image) for model in models]
        best = -1.0
        for number, info in enumerate(inspections[lead].layers):
            scores = selectivity(inspections[lead], info.name)  # [heads, h, w]
            for model in models:
                name = self.comparison.layer(model, number)
                if model != lead and self.comparison.attends[model]:
                    more = selectivity(inspections[model], name)
                    scores = scores * more if more.shape == scores.shape else scores
            place, (h, w) = int(scores.argmax()), info.size
            if h == size and float(scores.max()) > best:  # of layers that see the image at full resolution
                best = float(scores.max())
                start |= {"layer": number, "pixel": [place % (h * w) // w, place % w]}
        row, column = start["pixel"]
        views = []
        for model, inspection in enumerate(inspections):
            if not self.comparison.attends[model]:
                views.append((0, 0))
                continue
            name = self.comparison.layer(model, start["layer"])
            i, j = inspection.to_map(name, (row, column))
            head = int(selectivity(inspection, name)[:, i, j].argmax())
            strength = inspection.look(name, (i, j), head).effective.abs()
            views.append((head, int(strength.transpose(0, 2).flatten(1).sum(1).argmax())))
        heads, channels = zip(*views, strict=True)
        return start | {"heads": list(heads), "channels": list(channels)}

    # ---- an interaction each ----

    def look(self, choice: Choice) -> Json:
        """Everything: after another image, a turn, or another layer, head or channel."""
        turned = rotate_image(choice.image, choice.angle)
        models = range(len(self.comparison.models))
        return {
            "image": encode_image(turned),
            "pixel": self._pixel(choice),
            "models": [
                self._decision(model, choice, turned)
                | {"filters": self._filters(model, choice, turned), "maps": self._maps(model, choice, turned)}
                for model in models
            ],
        }

    def pixel(self, choice: Choice) -> Json:
        """The filters at another pixel."""
        turned = rotate_image(choice.image, choice.angle)
        models = range(len(self.comparison.models))
        return {
            "pixel": self._pixel(choice),
            "models": [{"filters": self._filters(model, choice, turned)} for model in models],
        }

    def answer(self, choice: Choice) -> Json:
        """The probabilities alone, for the curve over the angles."""
        turned = rotate_image(choice.image, choice.angle)[None]
        models = range(len(self.comparison.models))
        return {"models": [self.comparison.answers(model, turned)[0].tolist() for model in models]}

    def occlusion(self, choice: Choice) -> Json:
        turned = rotate_image(choice.image, choice.angle)
        models = range(len(self.comparison.models))
        return {"models": [numbers(self.comparison.occlusion(model, turned)) for model in models]}

    def training(self) -> Json:
        """What the models have seen: images as training batches have them, and the course of training."""
        return {"models": [_training(trained) for trained in self.comparison.models]}

    def _pixel(self, choice: Choice) -> list[int]:
        size = choice.image.shape[1]
        return list(nearest_pixel(rotate_position(choice.home, choice.angle, size), size))

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
        if not self.comparison.attends[model]:
            return None
        inspection = self.comparison.inspect(model, turned)
        name = self.comparison.layer(model, choice.layer)
        row, column = self._pixel(choice)
        i, j = inspection.to_map(name, (row, column))
        view = inspection.look(name, (i, j), choice.heads[model])
        channel, (h, w) = choice.channels[model], view.size
        return {
            "where": f"{self._place(model, choice.layer)}, row {i}, column {j} of the {h}×{w} map, "
            f"head {view.head}, channel {channel}",
            "head": view.head,
            "output": view.output[:, channel].tolist(),
            "heads": numbers(inspection.alpha(name)[..., i, j]),  # [heads, P, k, k]
            **_parts(view, channel),
        }

    def _place(self, model: int, number: int) -> str:
        """A layer in words, and that it is another than the one that was chosen, if it is."""
        name, chosen = (self.comparison.layer(m, number) for m in (model, self.comparison.lead))
        other = "" if name == chosen else f", shown for {chosen}, which this network does not have"
        return f"{name}{other}"

    def _maps(self, model: int, choice: Choice, turned: Image) -> Json:
        name = self.comparison.layer(model, choice.layer)
        before = self.comparison.inspect(model, choice.image).maps[name]
        after = self.comparison.inspect(model, turned).maps[name]
        channel = choice.heads[model] * self.channels[model][choice.layer] + choice.channels[model]
        said = ""
        if choice.angle and choice.angle % 90 == 0:
            error = self.comparison.map_error(model, choice.image, int(choice.angle) // 90, name)
            said = follow_in_words(error)
        planes = len(self.comparison.models[model].model.group)
        return {
            "where": f"{self._place(model, choice.layer)}, {before.shape[-2]}×{before.shape[-1]} map, "
            f"channel {channel} of 0 to {len(before) - 1}",
            "said": said,
            "upright": numbers(before[channel].reshape(planes, *before.shape[-2:])),
            "turned": numbers(after[channel].reshape(planes, *after.shape[-2:])),
        }

    # ---- what a request says ----

    def choice(self, content: Any) -> Choice:
        """Parses a request.

        Raises:
            ValueError: a field is missing or invalid.
        """
        expected = {"image", "angle", "home", "layer", "heads", "channels"}
        if not isinstance(content, dict) or content.keys() != expected:
            raise ValueError(f"expected {', '.join(sorted(expected))}")
        home = content["home"]
        if not isinstance(home, list) or len(home) != 2 or not all(_is_number(x, 1e5) for x in home):
            raise ValueError("home: expected a row and a column")
        if not _is_number(content["angle"], 180):
            raise ValueError("angle: expected −180 to 180")
        layer = _count("layer", content["layer"], len(self.comparison.layers(self.comparison.lead)))
        heads = self._of_each_model("heads", content["heads"], layer, self.heads)
        channels = self._of_each_model("channels", content["channels"], layer, self.channels)
        return Choice(
            self._image(content["image"]), content["angle"], (home[0], home[1]), layer, heads, channels
        )

    def _of_each_model(self, name: str, given: Any, layer: int, counts: list[list[int]]) -> tuple[int, ...]:
        models = self.comparison.models
        if not isinstance(given, list) or len(given) != len(models):
            raise ValueError(f"{name}: expected a list of {len(models)}, one for each network")
        return tuple(
            _count(f"{name}, {model.name}", number, of_model[layer])
            for model, number, of_model in zip(models, given, counts, strict=True)
        )

    def _image(self, content: Any) -> Image:
        """A sample by its number, or pixels as ``encode_image`` has written them."""
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


def _count(name: str, given: Any, count: int) -> int:
    if type(given) is not int or not 0 <= given < count:
        shown = given if type(given) is int and abs(given) < 2**63 else "something else"
        raise ValueError(f"{name}: expected 0 to {count - 1}; got {shown}")
    return given


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
    return {"said": said, "images": [encode_image(image) for image in bytes_], "metrics": metrics}


# ---- arrays in JSON ----


def numbers(values: Tensor) -> Json:
    """An array: its shape, and its values as little-endian float32 in base64."""
    array = values.detach().numpy(force=True).astype("<f4")
    return {"shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def encode_image(image: Image) -> str:
    """The bytes of an image in base64."""
    return base64.b64encode(np.ascontiguousarray(image).tobytes()).decode()


def plane_names(group: Group) -> list[str]:
    """What the planes of features on a group are called: by their turn, ``m`` if mirrored first."""
    return [name.replace(" mirrored", " m") for name in group.element_names]
