"""How the figures draw: one place for colours, scales and panels."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selfconv._extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIGNED, POSITIVE = "PuOr", "viridis"  # told apart by colour-blind people, too
GREY = 200  # of 255, outside of the image
FRAME, OUTSIDE = "#0090ff", "#" + 3 * f"{GREY:02x}"  # what is chosen is framed in no colour of the maps
SMALL, MEDIUM, LARGE = 8, 9, 11
SAME = 0.02  # of the largest value: what differs by less looks the same


def new_figure(width: float, height: float) -> Figure:
    require("drawing pictures", "matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def headline(figure: Figure, *lines: str) -> None:
    """The title of a figure, in as many lines as its width asks for."""
    width = int(10 * figure.get_figwidth())  # letters
    figure.suptitle("\n".join(part for line in lines for part in textwrap.wrap(line, width)), fontsize=LARGE)


def conclude(figure: Figure, text: str) -> None:
    """What to conclude from a figure, below it."""
    figure.supxlabel(textwrap.fill(text, int(11.5 * figure.get_figwidth())), fontsize=MEDIUM)


def bare(axes: Axes, title: str = "") -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    if title:
        axes.set_title(title, fontsize=MEDIUM)


def top_aligned(axes: Iterable[Axes]) -> None:
    """Panels with and without a scale below them begin at the same height."""
    for one in axes:
        one.set_anchor("N")


def draw_image(axes: Axes, image: Tensor, title: str = "") -> None:
    """An image [1 or 3 or more, h, w] with values from 0 to 1; of more channels than 3, their mean."""
    pixels = image.detach().cpu().float()
    pixels = pixels if len(pixels) == 3 else pixels.mean(0, keepdim=True)
    shown = pixels.clamp(0, 1).permute(1, 2, 0).squeeze(-1)
    axes.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=1)
    bare(axes, title)


def draw_values(
    axes: Axes, values: Tensor, colours: str, limit: float, title: str = "", *, least: float = 0.0
) -> Any:
    """Numbers as colours: signed ones from −limit to limit, others from ``least``; NaN in grey."""
    import matplotlib

    shades = matplotlib.colormaps[colours].with_extremes(bad=OUTSIDE)
    low = -limit if colours == SIGNED else least
    shown = axes.imshow(
        np.ma.masked_invalid(values.detach().cpu().double().numpy()), cmap=shades, vmin=low, vmax=limit
    )
    bare(axes, title)
    return shown


def draw_window(axes: Axes, values: Tensor, colours: str, limit: float, title: str = "") -> Any:
    """What a window around a pixel holds, [rows, columns], with its centre marked."""
    shown = draw_values(axes, values, colours, limit, title)
    rows, columns = values.shape
    mark_centre(axes, rows, columns)
    return shown


def limit_of(*values: Tensor) -> float:
    """The largest magnitude, the end of a colour scale; 1 if all is zero."""
    largest = max(float(v.abs().nan_to_num().max()) for v in values)
    return largest if largest > 0 else 1.0


def mark_window(axes: Axes, window: tuple[int, int, int, int]) -> None:
    """A frame around rows top..bottom and columns left..right."""
    from matplotlib.patches import Rectangle

    top, left, bottom, right = window
    frame = Rectangle(
        (left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=FRAME, linewidth=2
    )
    frame.set_path_effects(_halo(3.4))
    axes.add_patch(frame)  # the part of it outside of the image is not drawn


def mark_centre(axes: Axes, rows: int, columns: int) -> None:
    from matplotlib.patches import Rectangle

    corner = (columns // 2 - 0.5, rows // 2 - 0.5)
    frame = Rectangle(corner, 1, 1, fill=False, edgecolor=FRAME, linewidth=1.4)
    frame.set_path_effects(_halo(2.6))
    axes.add_patch(frame)


def _halo(width: float) -> list[Any]:
    """White on both sides of a line, so that it stands out from colours as dark as itself."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=width, foreground="white"), Normal()]


def operator(axes: Axes, sign: str) -> None:
    """A sign of an equation to the left of a panel."""
    axes.text(-0.03, 0.5, sign, fontsize=LARGE, transform=axes.transAxes, ha="right", va="center")


def mosaic(tiles: Tensor) -> Tensor:
    """Tiles [rows, columns, k, k] side by side, a line of NaN between them."""
    rows, columns, k, _ = tiles.shape
    framed = torch.full((rows, columns, k + 1, k + 1), torch.nan, dtype=tiles.dtype)
    framed[..., :k, :k] = tiles.detach().cpu()
    return framed.permute(0, 2, 1, 3).reshape(rows * (k + 1), columns * (k + 1))[:-1, :-1]


def colour_bar(
    figure: Figure, shown: Any, axes: Axes | Sequence[Axes], label: str = "", *, inside: bool = False
) -> None:
    """A scale to the right of some axes, or inside of one."""
    place = {"cax": axes} if inside else {"ax": axes, "shrink": 0.85, "aspect": 25}
    bar = figure.colorbar(shown, **place)
    bar.ax.tick_params(labelsize=SMALL)
    bar.ax.locator_params(nbins=4)
    if label:
        bar.set_label(label, fontsize=SMALL)


def below_bar(figure: Figure, shown: Any, axes: Axes) -> None:
    bar = figure.colorbar(shown, ax=axes, orientation="horizontal", shrink=0.9, pad=0.04, aspect=16)
    bar.ax.tick_params(labelsize=SMALL)
    bar.ax.locator_params(nbins=3)
