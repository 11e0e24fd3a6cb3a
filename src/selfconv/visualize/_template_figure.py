"""The figure of the idea: one template, several pixels, as many filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from selfconv.visualize._draw import (
    FRAME,
    GREY,
    MEDIUM,
    POSITIVE,
    SAME,
    SIGNED,
    below_bar,
    colour_bar,
    conclude,
    draw_image,
    draw_window,
    headline,
    limit_of,
    mark_window,
    new_figure,
)
from selfconv.visualize._inspection import PixelView, crop, strengths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def template_figure(image: Tensor, views: Sequence[PixelView], channel: int | None = None) -> Figure:
    """One template ψ, and at each of several pixels the scores α and the filter α·ψ that it becomes there.

    On a group: the plane P = R = 1, as the others are this one turned.

    Args:
        image: to be shown.
        views: of one layer and head, up to nine pixels.
        channel: of the head; by default the one with the strongest filters. A dense ψ is shown for the same
            input channel.
    """
    if not 1 <= len(views) <= len(NUMBERS) or len({(v.layer, v.head) for v in views}) != 1:
        raise ValueError(f"expected 1 to 9 views of one layer and head; got {len(views)}")
    if channel is None:
        channel = int(sum(map(strengths, views)).argmax())  # type: ignore[union-attr]
    view, count = views[0], len(views)
    seen = view.head * view.psi.shape[2] + channel if view.dense else None
    psi, *filters = (
        f[0, 0, channel] if seen is None else f[0, 0, channel, seen]
        for f in (view.psi, *(v.effective for v in views))
    )  # [k, k]
    figure = new_figure(1.62 * count + 4.1, 5.5)
    halves: Any = figure.subfigures(1, 2, width_ratios=[3.0, 1.62 * count + 0.6])
    left, right = halves
    picture, template = left.subplots(2, 1, height_ratios=[1.35, 1])
    draw_image(picture, image, "image")
    shown = draw_window(
        template, psi, SIGNED, limit_of(psi), "one template ψ, learned,\nthe same at every pixel"
    )
    below_bar(figure, shown, template)
    grid = right.subplots(3, count + 1, width_ratios=[1] * count + [0.07], squeeze=False)
    alpha, limit = limit_of(*(v.alpha[0] for v in views)), limit_of(*filters)
    for n, (one, effective) in enumerate(zip(views, filters, strict=True)):
        mark_window(picture, one.window)
        top, first, bottom, last = one.window
        middle = (first + last) / 2 - 0.5, (top + bottom) / 2 - 0.5
        picture.text(
            *middle,
            str(n + 1),
            color="white",
            fontsize=MEDIUM,
            weight="bold",
            ha="center",
            va="center",
            bbox={"boxstyle": "circle,pad=0.15", "facecolor": FRAME, "edgecolor": "white"},
        )
        draw_image(grid[0, n], crop(image, one.window, GREY / 255), f"pixel {n + 1}")
        shown_alpha = draw_window(grid[1, n], one.alpha[0], POSITIVE, alpha)
        shown = draw_window(grid[2, n], effective, SIGNED, limit)
    for place, name in zip(
        grid[:, 0], ("its window", "scores α,\nfrom the image", "filter α·ψ,\nused there"), strict=True
    ):
        place.set_ylabel(name, fontsize=MEDIUM)
    grid[0, -1].axis("off")
    colour_bar(figure, shown_alpha, grid[1, -1], inside=True)
    colour_bar(figure, shown, grid[2, -1], inside=True)
    name = NUMBERS[count - 1]
    apart = max(float((one - other).abs().max()) for one in filters for other in filters)
    differ = apart > SAME * limit
    title = "One template, one filter"
    if count > 1:
        title = f"One template, {name} pixels, {name if differ else 'nearly equal'} filters"
    headline(figure, title)
    said = "Here the scores select which part acts"
    if count > 1:
        said += (
            ": the filters differ because the image does" if differ else ", at these pixels nearly the same"
        )
    where = f"({view.layer}, head {view.head}, channel {channel})"
    conclude(figure, f"A convolution would apply ψ as it is at every pixel. {said}. {where}")
    return figure
