"""The figure of a decision: where the evidence for the two most probable classes lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selfconv._text import escape_for_terminal
from selfconv.visualize._draw import (
    MEDIUM,
    SIGNED,
    SMALL,
    bare,
    colour_bar,
    conclude,
    draw_image,
    headline,
    limit_of,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_GRID = 8  # up to so many rows the values are printed into their cells
NOTHING = 1e-4  # of the largest logit: what is smaller is rounding, which no colour scale should enlarge


def explanation_figure(
    image: Tensor,
    activation: Tensor,
    occlusion: Tensor,
    class_names: Sequence[str],
    truth: str | None = None,
    source: str | None = None,
) -> Figure:
    """Why a network decided as it did: evidence for its answer, for the runner-up, and their difference.

    Args:
        image: to be shown.
        activation: ``[num_classes, h, w]`` of ``class_activation_maps``.
        occlusion: ``[num_classes, cells, cells]`` of ``occlusion_maps``.
        truth: the true class, if it is known.
        source: the name of the image's file, for the title.
    """
    logits = activation.sum((1, 2))
    probabilities = logits.softmax(0)
    scale = float(logits.abs().max())
    best = logits.argsort(descending=True)[:2].tolist()
    names = [shorten(class_names[n]) for n in best]
    rows = [(f"for “{name}”", activation[n], occlusion[n]) for n, name in zip(best, names, strict=True)]
    sums = [f"sum {_signed(logits[n])} = its logit" for n in best]
    if len(best) == 2:
        against = [x[best[0]] - x[best[1]] for x in (activation, occlusion)]
        rows.append((f"“{names[0]}” rather\nthan “{names[1]}”", against[0], against[1]))
        sums.append(f"sum {_signed(logits[best[0]] - logits[best[1]])}")
    figure = new_figure(7.9, 2.55 * len(rows) + 1.6)
    grid = figure.subplots(len(rows), 5, squeeze=False, width_ratios=[1, 1, 0.05, 1, 0.05])
    for row, (name, evidence, falls), total in zip(grid, rows, sums, strict=True):
        draw_image(row[0], image)
        row[0].set_ylabel(name, fontsize=MEDIUM)
        for place, bar, values in ((row[1], row[2], evidence), (row[3], row[4], falls)):
            shown = draw_overlay(place, image, values, max(limit_of(values), NOTHING * scale))
            colour_bar(figure, shown, bar, inside=True)
        row[1].set_xlabel(total, fontsize=MEDIUM)
    row = grid[0]
    row[0].set_title("image", fontsize=MEDIUM)
    row[1].set_title("class activation map:\nwhat each place adds to the logit", fontsize=MEDIUM)
    row[3].set_title("occlusion: by how much the logit\nfalls if that part is covered", fontsize=MEDIUM)
    said = "" if truth is None else f"; the true class is “{shorten(truth)}”"
    headline(
        figure,
        *([] if source is None else [escape_for_terminal(source).replace("$", r"\$")]),
        f"The network answers “{names[0]}” with {float(probabilities[best[0]]):.1%}{said}",
        "Purple speaks for the class, orange against it",
    )
    conclude(figure, _conclusion(rows[-1][1], rows[-1][2], names, scale))
    return figure


def _conclusion(evidence: Tensor, falls: Tensor, names: Sequence[str], scale: float) -> str:
    """Which places speak most for and against the answer, and what covering these very places does.

    Args:
        evidence: the map of the answer (minus that of the runner-up), ``[h, w]``.
        falls: the same of occlusion, in cells of another size.
        scale: the size of the logits; changes below ``NOTHING`` of it are rounding.
    """
    question = f"“{names[0]}”" + (f" rather than “{names[1]}”" if len(names) == 2 else "")
    number = "the difference of the logits" if len(names) == 2 else "the logit"
    covered = F.adaptive_avg_pool2d(falls[None].double(), (evidence.shape[0], evidence.shape[1]))[0]
    least, largest = NOTHING * scale, float(evidence.abs().max())
    vain = float(falls.abs().max()) <= least

    def said(place: int, sign: int) -> str:
        """``bottom left (1.20): covering it lowers the logit by 0.90``, with “but” if signs differ."""
        fall = float(covered.flatten()[place])
        if vain or abs(fall) <= least:
            effect = "" if vain else ", but covering it changes nothing"
        else:
            effect = ":" if fall * sign > 0 else ", but"
            effect += f" covering it {'lowers' if fall > 0 else 'raises'} {number} by {_signed(abs(fall))}"
        return f"at the {_place(place, evidence)}{effect}."

    high, low = int(evidence.argmax()), int(evidence.argmin())
    speaks = float(evidence.flatten()[high]) > least
    parts = [f"What speaks most for {question} is {said(high, 1)}"]
    if not speaks:
        parts = [f"No place speaks for {question}."]
    if float(evidence.flatten()[low]) < -max(0.1 * largest, least):
        parts.append(f"What speaks most against it is {said(low, -1)}")
    parts.append(f"All places together make {_signed(evidence.sum())}.")
    parts.append("Covering any part changes nothing." if vain else _correlation(evidence, covered))
    return " ".join(part for part in parts if part)


def _correlation(evidence: Tensor, covered: Tensor) -> str:
    """A sentence on the correlation of the two maps; empty if one of them is the same everywhere."""
    pair = torch.stack([evidence.double().flatten(), covered.flatten()])
    deviations = pair - pair.mean(1, keepdim=True)
    if bool((deviations.norm(dim=1) <= 1e-6 * pair.norm(dim=1)).any()):
        return ""
    correlation = F.cosine_similarity(deviations[0], deviations[1], dim=0)
    return f"The correlation of the two maps is {_signed(correlation)}."


def _place(n: int, evidence: Tensor) -> str:
    """Cell n of a map in words, with its value: ``bottom left (1.20)``."""
    (rows, columns), words = evidence.shape, (("top", "middle", "bottom"), ("left", "centre", "right"))
    thirds = [
        int(3 * (place + 0.5) / count)
        for place, count in zip(divmod(n, columns), (rows, columns), strict=True)
    ]
    return f"{words[0][thirds[0]]} {words[1][thirds[1]]} ({_signed(evidence.flatten()[n])})"


def draw_overlay(axes: Axes, image: Tensor, values: Tensor, limit: float) -> Any:
    """Signed values over an image, the stronger the less of it shows through; small grids as numbers too."""
    import matplotlib

    grey = image.float().mean(0, keepdim=True)
    draw_image(axes, 0.45 + 0.55 * grey)
    h, w = image.shape[-2:]
    numbers = values.detach().cpu().double().numpy()
    colours = matplotlib.colormaps[SIGNED]((numbers / limit + 1) / 2)
    colours[..., 3] = 0.9 * np.abs(numbers) / limit
    extent = (-0.5, w - 0.5, h - 0.5, -0.5)
    axes.imshow(colours, extent=extent, interpolation="nearest")
    if len(numbers) <= LARGEST_GRID:
        rows, columns = numbers.shape
        digits = (1 if rows > 4 else 2) + (limit < 0.5)  # small numbers would all be 0.0
        for i, j in np.ndindex(rows, columns):
            place = (j + 0.5) * w / columns - 0.5, (i + 0.5) * h / rows - 0.5
            strong = abs(numbers[i, j]) > 0.55 * limit
            axes.text(
                *place,
                _signed(numbers[i, j], digits),
                ha="center",
                va="center",
                fontsize=SMALL - 3 if rows > 4 else SMALL - 1,
                color="white" if strong else "black",
            )
    bare(axes)
    return matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(-limit, limit), SIGNED)


def shorten(name: str, length: int = 14) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _signed(value: Any, digits: int = 2) -> str:
    return f"{round(float(value), digits) + 0.0:.{digits}f}".replace("-", "−")  # never −0
