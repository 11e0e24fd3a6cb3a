"""Draw the filters that data makes of a template: python scripts/filters_figure.py (needs matplotlib).

Writes docs/figures/filters.png: a digit, and at three of its pixels what one head attends to and the filter
that this makes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from selfconv.lab.data import load_data
from selfconv.nn import AffineSelfConv2d, LiftingConv2d, LocalAttention2d


def filters_figure() -> Figure:
    digit = load_data("digits").test.images[3:4].float() / 255  # [1, 1, 16, 16]
    lift = LiftingConv2d(1, 8, 3, padding=1, bias=False)
    layer = AffineSelfConv2d(8, 8, 5, num_heads=4)
    with torch.no_grad():
        alpha = layer.attention_weights(lift(digit))[0, 0]  # [k, k, h, w], of the first head
    psi = _template(layer)
    pixels = _contrasting_pixels(digit[0, 0])

    figure = Figure(figsize=(8.4, 7.2), layout="constrained")
    grid = figure.subplots(len(pixels), 4)
    for line, (i, j) in zip(grid, pixels, strict=True):
        weights = alpha[:, :, i, j]
        line[0].imshow(digit[0, 0], cmap="gray_r")
        line[0].add_patch(_frame(i, j, layer.kernel_size))
        line[0].set_title(f"pixel ({i}, {j}) and its window", fontsize=9)
        panels = ((psi, "template ψ, fixed", "PuOr"), (weights, "scores α, from the data", "viridis"),
                  (weights * psi, "effective filter α·ψ", "PuOr"))  # fmt: skip
        for axes, (values, title, colours) in zip(line[1:], panels, strict=True):
            limit = values.abs().max().item()
            low = 0 if colours == "viridis" else -limit
            shown = axes.imshow(values, cmap=colours, vmin=low, vmax=limit)
            axes.set_title(title, fontsize=9)
            figure.colorbar(shown, ax=axes, shrink=0.8)
        for axes in line:
            axes.set_xticks([])
            axes.set_yticks([])
    figure.suptitle("One template, a different filter at every pixel", fontsize=12)
    return figure


def _template(layer: LocalAttention2d) -> Tensor:
    psi_v = layer.affine_parameters()[2]
    assert psi_v is not None
    return psi_v[0].detach()


def _contrasting_pixels(image: Tensor) -> list[tuple[int, int]]:
    """The darkest, the brightest, and the pixel with the steepest edge, away from the border."""
    inner = image[3:-3, 3:-3]
    steep = (image[3:-3, 4:-2] - image[3:-3, 2:-4]).abs() + (image[4:-2, 3:-3] - image[2:-4, 3:-3]).abs()
    found = []
    for values in (inner, -inner, steep):
        place = int(values.argmax())
        found.append((place // inner.shape[1] + 3, place % inner.shape[1] + 3))
    return found


def _frame(i: int, j: int, k: int) -> Rectangle:
    return Rectangle((j - k / 2, i - k / 2), k, k, fill=False, edgecolor="#D55E00", linewidth=2)


torch.manual_seed(0)
out = Path(__file__).parents[1] / "docs" / "figures" / "filters.png"
filters_figure().savefig(out, dpi=130)
print(out)
