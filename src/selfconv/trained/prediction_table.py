"""What a model answered for each image: a table in CSV, and the most confident mistakes as pictures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfconv._text import escape_for_terminal, in_utf8
from selfconv.data import Split, visible_channels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 24  # mistakes on the contact sheet
COLUMNS = 6


def probability_columns(class_names: Sequence[str]) -> list[str]:
    """Names of the columns with each class's probability, none of which is the name of another column."""
    return [f"p({name})" for name in class_names]


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """The probabilities ``[N, classes]`` that a model gives the images of a split."""

    split: Split
    probabilities: Tensor
    class_names: list[str]

    def to_csv(self) -> str:
        """A line for each image: its name, its class, the answer, and the probability of every class."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["image", "class", "answer", "probability", *probability_columns(self.class_names)])
        names = map(in_utf8, self.split.names or map(str, range(len(self.split))))
        rows = zip(names, self.split.labels.tolist(), self.probabilities.tolist(), strict=True)
        for name, label, row in rows:
            answer = row.index(max(row))
            table.writerow([name, self.class_names[label], self.class_names[answer], row[answer], *row])
        return text.getvalue()

    def mistakes(self) -> Tensor:
        """The numbers of the images that were answered wrongly, the most confident first."""
        confidence, answer = self.probabilities.max(1)
        wrong = (answer != self.split.labels.cpu()).nonzero()[:, 0]
        return wrong[confidence[wrong].argsort(descending=True, stable=True)]

    def mistakes_figure(self, data: str) -> Figure:
        """The most confident mistakes: each image, its class, and the answer with its probability."""
        from matplotlib.figure import Figure

        wrong = self.mistakes()
        shown = wrong[:SHOWN]
        rows = max(1, math.ceil(len(shown) / COLUMNS))
        width, height = 1.1, 1.4  # the size of a cell: an image of side 1 below two lines of text
        figure = Figure(figsize=(1.6 * COLUMNS * width, 1.6 * rows * height + 0.5))
        title = f"{escape_for_terminal(data)}: {len(wrong)} of {len(self.split)} images answered wrongly"
        if len(wrong) > SHOWN:
            title += f"; the {SHOWN} most confident"
        figure.suptitle(title, parse_math=False)
        axes = figure.add_axes(
            (0, 0, 1, 1 - 0.5 / figure.get_figheight())
        )  # one for all images: each axes takes 50 ms
        axes.axis("off")
        for place, index in enumerate(shown.tolist()):
            left, top = width * (place % COLUMNS) + 0.05, height * (place // COLUMNS) + 0.35
            image = self.split.read(torch.tensor([index], device=self.split.device))[0].cpu()
            picture = image[: visible_channels(len(image))].float() / self.split.levels
            extent = (left, left + 1, top + 1, top)
            axes.imshow(picture.permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1, extent=extent)
            probability, answer = self.probabilities[index].max(0)
            names = [self._short(int(c)) for c in (self.split.labels[index], answer)]
            text = f"{names[0]}\ntaken for {names[1]}, {float(probability):.0%}"
            axes.text(left + 0.5, top - 0.04, text, ha="center", va="bottom", fontsize=8, parse_math=False)
        axes.set(xlim=(0, width * COLUMNS), ylim=(height * rows, 0))
        return figure

    def _short(self, label: int) -> str:
        name = escape_for_terminal(self.class_names[label])
        return name if len(name) <= 18 else f"{name[:17]}…"
