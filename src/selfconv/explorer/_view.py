"""Every part of the page as HTML, from what the user has chosen."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from selfconv.explorer import _pictures as pictures
from selfconv.explorer._comparison import (
    Comparison,
    Image,
    Place,
    change_in_words,
    follow_in_words,
    kind,
    layer_title,
    nearest_pixel,
    turn,
    turn_place,
)
from selfconv.explorer._curves import curves
from selfconv.explorer._uploads import read_upload


class View:
    """The parts for a comparison.

    image is upright; home is the chosen place on it, which goes along when it is turned by ``angle``; layer,
    head and channel count from 0, and a model that has fewer shows its last.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    # ---- what there is to choose ----

    def layer_choices(self) -> list[tuple[str, int]]:
        names = self.comparison.layers(0)
        found = self.comparison.inspect(0, self.comparison.samples[0].image)
        sizes = {info.name: info.size for info in found.layers}
        choices = []
        for number, name in enumerate(names):
            h, w = sizes.get(name, tuple(found.maps[name].shape[-2:]))
            choices.append((f"{layer_title(name)}: {h}×{w} map", number))
        return choices

    def head_choices(self) -> list[tuple[str, int]]:
        return _numbered(max(self._heads(model, 0) for model in range(len(self.comparison.models))))

    def channel_choices(self, layer: int) -> list[tuple[str, int]]:
        counts = [
            self._channels(model, layer) // self._heads(model, layer)
            for model in range(len(self.comparison.models))
        ]
        return _numbered(max(counts))

    def _heads(self, model: int, layer: int) -> int:
        module = self.comparison.models[model].model.get_submodule(self.comparison.layer(model, layer))
        return getattr(module, "num_heads", 1)

    def _channels(self, model: int, layer: int) -> int:
        return len(
            self.comparison.inspect(model, self.comparison.samples[0].image).maps[
                self.comparison.layer(model, layer)
            ]
        )

    def read(self, file: Path) -> Image:
        data = self.comparison.models[0].data
        return read_upload(file, data.size, data.in_channels)

    # ---- what is shown ----

    def title(self) -> str:
        models = " beside ".join(
            f"<b>{kind(trained)}</b> ({escape(trained.name)})" for trained in self.comparison.models
        )
        about = f"{models}, trained on {escape(Path(self.comparison.models[0].data.name).name)}"
        return f"<h1>One template, a different filter at every pixel</h1><p>{about}</p>"

    def note(self) -> str:
        return f'<p class="sc-note">{escape(self.comparison.note)}</p>' if self.comparison.note else ""

    def everything(
        self, image: Image, home: Place, angle: float, layer: int, head: int, channel: int
    ) -> list[str]:
        return [
            self.stage(image, home, angle, layer),
            self.predictions(image, angle),
            self.filters(image, home, angle, layer, head, channel),
            self.maps(image, angle, layer, head, channel),
        ]

    def stage(self, image: Image, home: Place, angle: float, layer: int) -> str:
        turned = turn(image, angle)
        found, name = self.comparison.inspect(0, turned), self.comparison.layer(0, layer)
        info = next((info for info in found.layers if info.name == name), None)
        cells = info.size if info is not None else image.shape[1:]
        pixel = self._pixel(image, home, angle)
        window = info.layer.kernel_size if info is not None else None
        hint = '<p class="sc-note">Click a pixel, or move with the arrow keys.</p>'
        return pictures.stage(turned, pixel, cells, window) + hint

    def _pixel(self, image: Image, home: Place, angle: float) -> tuple[int, int]:
        size = image.shape[1]
        return nearest_pixel(turn_place(home, angle, size), size)

    def predictions(self, image: Image, angle: float) -> str:
        names, panels = self.comparison.class_names, []
        for model in range(len(self.comparison.models)):
            before = self.comparison.probabilities(model, image)
            after = self.comparison.probabilities(model, turn(image, angle))
            best = escape(names[int(after.argmax())])
            words, style = f"predicts {best}", ""
            if angle:
                words = _said(change_in_words(before, after, names))
                style = "sc-same" if words.startswith("same") else "sc-changed"
            said = (
                f'<p class="{style}" role="status"><b>{kind(self.comparison.models[model])}</b>: {words}</p>'
            )
            panels.append(self._panel(model, said + pictures.bars(after, before, names)))
        short = "sc-bars-short" if max(map(len, names)) <= 2 else ""
        legend = '<p class="sc-note">Bars: as it is turned now. Marks: upright.</p>'
        return f'<h2 class="sc-heading">Prediction</h2>{legend}<div class="{short}">{_panels(panels)}</div>'

    def filters(self, image: Image, home: Place, angle: float, layer: int, head: int, channel: int) -> str:
        turned, pixel = turn(image, angle), self._pixel(image, home, angle)
        panels = []
        for model in range(len(self.comparison.models)):
            found, name = self.comparison.inspect(model, turned), self.comparison.layer(model, layer)
            if not found.layers:
                content = "<p>This network has no self convolution: its filters are the same everywhere.</p>"
                panels.append(self._panel(model, content))
                continue
            views = found.look_all(name, found.to_map(name, pixel))
            view = views[min(head, len(views) - 1)]
            own = min(channel, view.psi.shape[2] - 1)
            (i, j), (h, w) = view.pixel, view.size
            where = f"row {i}, column {j} of the {h}×{w} map, head {view.head + 1}, channel {own + 1}"
            tables = (
                f"<div>{pictures.filters(view, own)}</div><div>{pictures.all_heads(views, view.head)}</div>"
            )
            content = f'<p>{layer_title(name)}: {where}</p><div class="sc-split">{tables}</div>'
            panels.append(self._panel(model, content))
        return f'<div class="sc-stack">{"".join(panels)}</div>'

    def maps(self, image: Image, angle: float, layer: int, head: int, channel: int) -> str:
        panels = []
        for model, trained in enumerate(self.comparison.models):
            name = self.comparison.layer(model, layer)
            before = self.comparison.inspect(model, image).maps[name]
            after = self.comparison.inspect(model, turn(image, angle)).maps[name]
            heads = self._heads(model, layer)
            own = min(head, heads - 1) * (len(before) // heads) + channel
            own = min(own, len(before) - 1)
            words = f"channel {own + 1} of {len(before)}"
            if angle and angle % 90 == 0:
                error = self.comparison.map_error(model, image, int(angle) // 90, name)
                words += f"; {_said(follow_in_words(error))}"
            shown = pictures.maps(
                before[own],
                after[own] if angle else None,
                trained.model.group,
                f"turned {angle:g}°".replace("-", "−"),
            )
            panels.append(self._panel(model, f"<p>{layer_title(name)}, {words}</p>{shown}"))
        return f'<h2 class="sc-heading">Feature maps</h2><div class="sc-flex">{"".join(panels)}</div>'

    def curves(self) -> str:
        return "".join(
            f"<h3>{kind(trained)} <small>{escape(trained.name)}</small></h3>{curves(trained.metrics)}"
            for trained in self.comparison.models
        )

    def _panel(self, model: int, content: str) -> str:
        trained = self.comparison.models[model]
        title = f"<h3>{kind(trained)} <small>{escape(trained.name)}</small></h3>"
        return f'<section class="sc-panel" data-model="{kind(trained)}">{title}{content}</section>'


def _panels(panels: list[str]) -> str:
    return f'<div class="sc-panels">{"".join(panels)}</div>'


def _said(words: str) -> str:
    """Words as HTML, with numbers like 3e-7 on one line."""
    return re.sub(r"\de-\d+", r'<span class="sc-nobr">\g<0></span>', escape(words))


def _numbered(count: int) -> list[tuple[str, int]]:
    return [(str(number + 1), number) for number in range(count)]
