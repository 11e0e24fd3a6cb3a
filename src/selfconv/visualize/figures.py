"""The figures: functions of arrays that return matplotlib figures.

Images to be shown are ``[C, h, w]`` with pixels from 0 to 1. Colours are the same everywhere: viridis for
weights, purple and orange for signed values, with white at zero.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from selfconv.visualize._draw import (
    LARGE,
    MEDIUM,
    POSITIVE,
    SAME,
    SIGNED,
    SMALL,
    below_bar,
    colour_bar,
    conclude,
    draw_image,
    draw_values,
    draw_window,
    headline,
    limit_of,
    mark_window,
    mosaic,
    new_figure,
    operator,
    top_aligned,
)
from selfconv.visualize._equivariance import EquivarianceView
from selfconv.visualize._explanation_figure import explanation_figure
from selfconv.visualize._inspection import LayerFilters, PixelView, strengths
from selfconv.visualize._template_figure import template_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "entropy_figure",
    "equivariance_figure",
    "explanation_figure",
    "filters_figure",
    "pixel_figure",
    "schematic_figure",
    "template_figure",
]


COLUMNS = 8  # elements of a group side by side
NEARLY_EVEN = 1.5  # times the score of uniform attention; less is no choice

# ---- one pixel ----


def strongest_channel(view: PixelView) -> int:
    """The channel of the head whose effective filter is largest: the one that a picture shows."""
    return int(strengths(view).argmax())


def pixel_figure(image: Tensor, view: PixelView, channel: int | None = None) -> Figure:
    """Eq. 10 and 11 (on a group 19 and 20) at one pixel: the input of a head and its effective filter.

    On z2 a row: the neighbourhood V, the template ψ, the scores α, the filter α·ψ, the positions α·β. On a
    group one row for each plane P, whose filter α·ψ is applied to every plane R of the neighbourhood above
    it.

    Args:
        image: to be shown.
        channel: of the head; by default the one with the strongest filter. A dense ψ reads all channels, of
            which the picture shows this one.
    """
    channel = _check_channel(view, channel)
    return (_planar_pixel if len(view.group) == 1 else _group_pixel)(image, view, channel)


def _check_channel(view: PixelView, channel: int | None) -> int:
    count = view.output.shape[1]
    if channel is None:
        return strongest_channel(view)
    if not 0 <= channel < count:
        raise ValueError(f"channel: expected 0 to {count - 1} of the head; got {channel!r}")
    return channel


def _seen_channel(view: PixelView, channel: int) -> int:
    """Which channel of the neighbourhood the picture shows: for dense ψ the head's own, among all."""
    return view.head * view.output.shape[1] + channel if view.dense else channel


def _filter_of(filters: Tensor, view: PixelView, channel: int) -> Tensor:
    """[P, R, k, k] of one channel, from ψ or α·ψ."""
    return filters[:, :, channel, _seen_channel(view, channel)] if view.dense else filters[:, :, channel]


def _where(view: PixelView, channel: int) -> str:
    seen = ", of all channels that the dense ψ reads the same one" if view.dense else ""
    return f"{view.layer}, head {view.head}, channel {channel}{seen}"


def _equation(view: PixelView, p: int, channel: int) -> str:
    """The number that the layer computed, as the sum that the panels show."""
    positional = float(view.positional[p, channel].sum())
    filtered = float(view.output[p, channel]) - positional
    sign = "+" if positional >= 0 else "−"
    return f"{_number(filtered)} {sign} {abs(positional):.3f} = {_number(float(view.output[p, channel]))}"


def _number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _draw_place(axes: Axes, image: Tensor, view: PixelView) -> None:
    draw_image(axes, image, f"image, pixel x = {view.pixel}\nof the {view.size[0]}×{view.size[1]} map")
    mark_window(axes, view.window)


def _planar_pixel(image: Tensor, view: PixelView, channel: int) -> Figure:
    figure = new_figure(12.4, 3.5)
    axes = figure.subplots(1, 6)
    _draw_place(axes[0], image, view)
    panels = [
        (view.neighbourhood[0, _seen_channel(view, channel)], SIGNED, "neighbourhood V(·)\nzero outside"),
        (_filter_of(view.psi, view, channel)[0, 0], SIGNED, "template ψ(· − x)\nfixed"),
        (view.alpha[0], POSITIVE, "scores α(x, ·), Eq. 10\nfrom the data, sum 1"),
        (
            _filter_of(view.effective, view, channel)[0, 0],
            SIGNED,
            "effective filter α·ψ\nmade for this pixel",
        ),
        (view.positional[0, channel], SIGNED, "positional term α·β"),
    ]
    signs = ["Σ", "× (", "×", "=", ") + Σ"]
    for place, sign, (values, colours, title) in zip(axes[1:], signs, panels, strict=True):
        shown = draw_window(place, values, colours, limit_of(values), title)
        operator(place, sign)
        below_bar(figure, shown, place)
    top_aligned(axes)
    headline(
        figure,
        f"Affine self convolution at one pixel, Eq. 11: Σ α·ψ·V + Σ α·β = {_equation(view, 0, channel)}",
        _where(view, channel),
    )
    positional = float(view.positional[0, channel].sum())
    filtered = float(view.output[0, channel]) - positional
    shares = f"Of the output, the filter makes {_number(filtered)} and the positions {_number(positional)}."
    conclude(figure, f"{_attention_in_words(view.alpha[0])} {shares}")
    return figure


def _attention_in_words(alpha: Tensor) -> str:
    """How selective scores [k, k] are, and what that means for the filter."""
    flat, even = alpha.flatten(), 1 / alpha.numel()
    few = int((flat.sort(descending=True).values.cumsum(0) < 0.5).sum()) + 1
    places = f"{few} of {len(flat)} places get" if few > 1 else f"One of {len(flat)} places gets"
    largest = float(flat.max()) / even
    said = (
        f"{places} half of the attention; the largest score is {largest:.1f} times that of uniform attention."
    )
    if largest < NEARLY_EVEN:
        return f"{said} The scores are nearly even: the filter has the shape of the template."
    return f"{said} The filter is the template where the scores are large, and small where they are small."


def _group_pixel(image: Tensor, view: PixelView, channel: int) -> Figure:
    order, names = len(view.group), view.group.element_names
    values = view.neighbourhood[:, _seen_channel(view, channel)]  # [R, k, k]
    effective, positional = _filter_of(view.effective, view, channel), view.positional[:, channel]
    figure = new_figure(1.5 * (order + 2) + 2.2, 1.42 * (order + 1) + 1.3)
    grid = figure.subplots(order + 1, order + 4, width_ratios=[1] * (order + 2) + [0.08, 0.08])
    _draw_place(grid[0, 0], image, view)
    for r, place in enumerate(grid[0, 1 : order + 1]):
        shown = draw_window(place, values[r], SIGNED, limit_of(values), f"V(R, ·)\nR = {names[r]}")
    for place in grid[0, order + 1 : -1]:
        place.axis("off")
    colour_bar(figure, shown, grid[0, -1], "V", inside=True)
    for p, row in enumerate(grid[1:]):
        limit = limit_of(effective[p], positional[p])  # a scale for each row: planes differ a lot
        shown_alpha = draw_window(row[0], view.alpha[p], POSITIVE, limit_of(view.alpha[p]))
        for place, filters in zip(row[1 : order + 2], [*effective[p], positional[p]], strict=True):
            shown = draw_window(place, filters, SIGNED, limit)
        colour_bar(figure, shown_alpha, row[-2], "α", inside=True)
        colour_bar(figure, shown, row[-1], "α·ψ, α·β", inside=True)
        row[0].set_ylabel(f"P = {names[p]}", fontsize=MEDIUM)
        row[order + 1].set_xlabel(_equation(view, p, channel), fontsize=SMALL)
    for place, title in zip(grid[1], ["α, Eq. 19", *["α·ψ"] * order, "α·β"], strict=False):
        place.set_title(title, fontsize=MEDIUM)
    headline(
        figure,
        f"Affine self convolution on {view.group}, Eq. 20: a row for each plane P; Σ α·ψ·V + Σ α·β = output",
        _where(view, channel),
    )
    conclude(
        figure,
        "Each plane applies the template, turned to its orientation, to the same neighbourhood V, and "
        f"attends to places of its own. {_direction_in_words(view)}",
    )
    return figure


def _direction_in_words(view: PixelView) -> str:
    """Whether the scores of the planes are those of the first, turned: so they are without a direction."""
    group, alpha = view.group, view.alpha.double()
    turned = [(alpha[p], group.act_planar(alpha[:1], p)[0]) for p in group if group.exact[p]]
    apart = max(float((own - first).abs().max()) for own, first in turned) / float(alpha.max())
    if apart < SAME:
        return "The rows are the first one, turned: the image has no direction here."
    return (
        f"The scores differ by up to {apart:.0%} of the largest from those of the first row, turned: the "
        "image has a direction here."
    )


def schematic_figure(image: Tensor, view: PixelView, channel: int | None = None) -> Figure:
    """Convolution, self-attention and affine self convolution at one pixel, step by step (Eq. 1, 5, 11).

    All three use the numbers of one layer on z2: the last row is its computation, the others are the same
    without α, and without ψ and β.
    """
    if len(view.group) > 1 or view.dense:
        kind = "a dense ψ" if view.dense else f"group {view.group.name!r}"
        raise ValueError(f"the schematic figure is of a planar layer with ψ per channel; got one with {kind}")
    channel = _check_channel(view, channel)
    v, psi, beta = view.neighbourhood[0, channel], view.psi[0, 0, channel], view.beta[0, channel]
    alpha, a = view.alpha[0], psi * v + beta
    columns = ["V(·)", "ψ(· − x)", "β(· − x)", "A = ψ·V + β", "α(x, ·)"]
    signs = ["", "×", "+", "=", "×", "="]
    rows: list[tuple[str, list[Tensor | None], str, Tensor]] = [
        ("Convolution, Eq. 1", [v, psi, None, None, None], "ψ·V", psi * v),
        ("Self-attention, Eq. 5", [v, None, None, None, alpha], "α·V", alpha * v),
        ("Affine self\nconvolution, Eq. 11", [v, psi, beta, a, alpha], "α·A = α·ψ·V + α·β", alpha * a),
    ]
    figure = new_figure(12.4, 6.6)
    grid = figure.subplots(len(rows), len(columns) + 2)
    for (name, parts, product_title, product), row in zip(rows, grid, strict=True):
        draw_image(row[0], image)
        mark_window(row[0], view.window)
        row[0].set_ylabel(name, fontsize=LARGE)
        titles = [*columns, product_title]
        for place, sign, title, values in zip(row[1:], signs, titles, [*parts, product], strict=True):
            if values is None:
                place.axis("off")
                continue
            operator(place, sign)
            colours = POSITIVE if values is alpha else SIGNED
            below_bar(figure, draw_window(place, values, colours, limit_of(values), title), place)
        row[-1].set_xlabel(f"Σ = {_number(float(product.sum()))}", fontsize=MEDIUM)
    headline(
        figure, f"Three ways to read the neighbourhood of a pixel x = {view.pixel}", _where(view, channel)
    )
    conclude(
        figure,
        "Convolution weighs every place by its template, whatever the image shows; attention by scores, "
        "which come from the image. Affine self convolution does both. "
        f"{_sums_in_words([product for *_, product in rows])}",
    )
    return figure


def _sums_in_words(products: Sequence[Tensor]) -> str:
    sums = [float(product.sum()) for product in products]
    size = max(float(product.abs().sum()) for product in products)
    differ = max(sums) - min(sums) > SAME * size
    return "So the three sums differ." if differ else "Here the three sums are nearly the same."


# ---- a whole map ----


def entropy_figure(image: Tensor, entropy: Tensor, layer: str, planes: Sequence[str]) -> Figure:
    """The entropy of attention at every pixel: one column per head, one row per plane.

    Args:
        image: to be shown.
        entropy: ``[heads, P, h, w]`` from 0 to 1, of ``Inspection.entropy``.
        planes: their names.
    """
    heads, order = entropy.shape[:2]
    low, high = float(entropy.min()), float(entropy.max())
    if high - low < 1e-3:  # a scale needs a range
        low, high = max(0.0, low - 0.05), min(1.0, high + 0.05)
    figure = new_figure(1.35 * (heads + 1) + 1.4, 1.45 * order + 1.6)
    grid = figure.subplots(order, heads + 1, squeeze=False)
    for p in range(order):
        draw_image(grid[p, 0], image, "image" if p == 0 else "")
        if order > 1:
            grid[p, 0].set_ylabel(f"P = {planes[p]}", fontsize=MEDIUM)
        for head in range(heads):
            place, title = grid[p, head + 1], f"head {head}" if p == 0 else ""
            shown = draw_values(place, entropy[head, p], POSITIVE, high, title, least=low)
    colour_bar(figure, shown, list(grid.flat), "entropy / log k²")
    headline(figure, "How widely attention looks: entropy, 0 for one neighbour, 1 for all alike", layer)
    each = entropy.flatten(1)
    means, chooser = each.mean(1), int(each.min(1).values.argmin())
    most = (
        "Attention is uniform here: no head chooses"
        if float(each.min()) > 1 - 1e-3
        else f"Head {chooser} chooses most, down to {float(each.min()):.2f}"
    )
    conclude(
        figure,
        f"Dark: a head chooses few neighbours. Bright: it looks at all of them alike. {most}; the means of "
        f"the heads go from {float(means.min()):.2f} to {float(means.max()):.2f}.",
    )
    return figure


def equivariance_figure(
    images: Sequence[Tensor],
    views: Mapping[str, EquivarianceView],
    labels: Mapping[str, Sequence[str]] | None = None,
) -> Figure:
    """The transformed images, and for each model its map of each, with the error against the transformed map.

    A map is shown as the mean over channels and planes, which transforms like an image. The errors are over
    all channels and planes, and all elements, of which the figure shows up to eight.

    Args:
        images: to be shown, one for each element of the group.
        views: by model; all of one group.
        labels: by model, its prediction for each image.
    """
    groups = {view.group.name for view in views.values()}
    if len(groups) != 1:
        raise ValueError(f"expected views of one group; got {', '.join(sorted(groups)) or 'no views'}")
    view = next(iter(views.values()))
    names = view.group.element_names
    chosen = range(0, len(view.group), math.ceil(len(view.group) / COLUMNS))
    count = len(chosen)
    figure = new_figure(1.6 * (count + 1) + 2.4, 1.9 * (1 + len(views)) + 1.5)
    grid = figure.subplots(1 + len(views), count + 3, width_ratios=[1] * count + [0.06, 1, 0.06])
    for place, s in zip(grid[0], chosen, strict=False):
        draw_image(place, images[s], names[s])
    grid[0, 0].set_ylabel("image", fontsize=MEDIUM)
    for place in grid[0, count:]:
        place.axis("off")
    for row, (model, view) in zip(grid[1:], views.items(), strict=True):
        features = [_as_picture(m) for m in view.maps]
        limit = limit_of(*features)
        for place, s in zip(row, chosen, strict=False):
            shown = draw_values(place, features[s], SIGNED, limit)
            if labels is not None:
                place.set_title(labels[model][s], fontsize=MEDIUM)
        row[0].set_ylabel("\n".join([*textwrap.wrap(model, 18), "map"]), fontsize=MEDIUM)
        colour_bar(figure, shown, row[count], inside=True)
        shown = draw_values(row[-2], view.error_map().clamp(min=1e-8).log10(), POSITIVE, 0.0, least=-8.0)
        row[-2].set_xlabel(_error_in_words(view), fontsize=MEDIUM)
        bar = figure.colorbar(shown, cax=row[-1], ticks=[-8, -4, 0])
        bar.ax.set_yticklabels(["1e-8", "1e-4", "1"], fontsize=SMALL)
    grid[1, -2].set_title("error, log scale", fontsize=MEDIUM)
    layers = ", ".join(dict.fromkeys(view.layer for view in views.values()))
    headline(figure, "Does the map turn with the image? f(L_S[x]) against L_S[f(x)]", layers)
    verdicts = [f"{model}: {_verdict(view)}" for model, view in views.items()]
    conclude(figure, f"Is the map of the transformed image the transformed map? {'; '.join(verdicts)}.")
    return figure


def _error_in_words(view: EquivarianceView) -> str:
    error = max(view.errors)
    if not view.group.band_limited:
        return f"largest error {error:.0e}"
    name = view.group.element_names[view.errors.index(error)]
    return f"rms error {error:.2g}\nat {name}"


def _verdict(view: EquivarianceView) -> str:
    exact = [error for error, is_exact in zip(view.errors, view.group.exact, strict=True) if is_exact]
    between = [error for error, is_exact in zip(view.errors, view.group.exact, strict=True) if not is_exact]
    said = "yes, up to rounding" if max(exact) < 1e-4 else "no"
    return (
        f"{said} at multiples of 90°; between, off by {max(between):.0%} of its deviation"
        if between
        else said
    )


def _as_picture(features: Tensor) -> Tensor:
    return features.flatten(0, -3).mean(0)


# ---- parameters ----


def filters_figure(filters: LayerFilters, num_heads: int, layer: str) -> Figure:
    """ψ^K, β^K, ψ^V and β^V of a layer: one row per head with its channels, and for ψ on a group their
    planes. A dense ψ has one row per output channel, with all its input channels."""
    parts = {
        r"$\psi^K$": filters.psi_k, r"$\beta^K$": filters.beta_k,
        r"$\psi^V$": filters.psi_v, r"$\beta^V$": filters.beta_v,
    }  # fmt: skip
    pictures = [mosaic(_tiles(part, num_heads)) for part in parts.values()]
    widths = [max(p.shape[1] for p in pictures[n::2]) for n in (0, 1)]
    heights = [max(p.shape[0] for p in pictures[n : n + 2]) for n in (0, 2)]
    inches = min(0.09, 12 / sum(widths))  # a cell
    figure = new_figure(inches * sum(widths) + 3.4, inches * sum(heights) + 2.4)
    grid = figure.subplots(2, 2, width_ratios=widths, height_ratios=heights)
    for place, (name, part), picture in zip(grid.flat, parts.items(), pictures, strict=True):
        shown = draw_values(place, picture, SIGNED, limit_of(part), name + _content(part))
        rows = len(part) if part.dim() == 5 else num_heads
        if rows <= 16:
            step = part.shape[-1] + 1
            place.set_yticks(
                [step * (row + 0.5) - 1 for row in range(rows)], [str(row) for row in range(rows)]
            )
            place.tick_params(labelsize=SMALL, length=0)
        place.set_ylabel("channel" if part.dim() == 5 else "head", fontsize=SMALL)
        colour_bar(figure, shown, place)
    headline(figure, f"The affine parameters of {layer}")
    conclude(
        figure,
        "Learned, and the same at every pixel: ψ multiplies keys (K, which make the scores) and values (V), "
        "and β is added to them. What differs from pixel to pixel are the scores alone.",
    )
    return figure


def _tiles(part: Tensor, num_heads: int) -> Tensor:
    """ψ or β as rows and columns of windows: [rows, columns, k, k]."""
    rows = len(part) if part.dim() == 5 else num_heads
    return part.reshape(rows, -1, *part.shape[-2:])


def _content(part: Tensor) -> str:
    """How many windows a channel has, if more than one."""
    return "" if part.dim() == 3 or part.shape[-3] == 1 else f", {part.shape[-3]} planes for each channel"
