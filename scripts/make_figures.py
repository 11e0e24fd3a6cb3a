"""Draws docs/figures from the weights that come with the package. From the checkout:

python scripts/make_figures.py
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from selfconv import _harmonics
from selfconv.groups import GROUPS
from selfconv.trained import open_trained
from selfconv.visualize import equivariance_view
from selfconv.visualize._write import model_figures, predictions, save_png
from selfconv.visualize.figures import equivariance_figure

OUT = Path(__file__).parents[1] / "docs" / "figures"
IMAGE, LAYER = 0, "stages.0.0.spatial.conv"


def steering_figure(k: int = 5, fine: int = 61, columns: int = 8) -> Figure:
    """One filter of c16 turned through 360°: the function that it is, and below its values at the pixels."""
    group = GROUPS["c16"]
    coefficients = np.random.default_rng(8).normal(size=group.parameter_shape(k))
    grid = np.meshgrid(*[np.linspace(-k / 2, k / 2, fine)] * 2, indexing="ij")
    points = np.stack(grid, -1).reshape(-1, 2)
    limit = 1.1 * np.abs(coefficients @ _harmonics.at(k, points)).max()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots(2 * len(group) // columns, columns)
    for s in group:
        row, column = 2 * (s // columns), s % columns
        smooth = coefficients @ _harmonics.at(k, points @ np.array(group.matrices[s]))
        pixels = coefficients @ _harmonics.basis(k, group.matrices[s])
        for axis, values in zip(axes[row : row + 2, column], (smooth, pixels), strict=True):
            side = math.isqrt(values.size)
            axis.imshow(values.reshape(side, side), cmap="RdBu_r", vmin=-limit, vmax=limit)
            axis.set(xticks=[], yticks=[])
        weight = "bold" if group.exact[s] else None
        axes[row, column].set_title(group.element_names[s], fontsize=10, fontweight=weight)
    for axis, label in zip(axes[:, 0], ("function", f"{k}×{k} pixels") * 2, strict=True):
        axis.set_ylabel(label, fontsize=9)
    return figure


def main() -> None:
    names = ("digits_asc", "digits_p4_asc")
    trained = {name: open_trained(name) for name in names}
    pixels = trained["digits_asc"].open_data().test.images[IMAGE]
    for name, model in trained.items():
        for kind, figure in model_figures(model, pixels, layer=LAYER, pixel=None, head=None):
            if kind != "equivariance":  # of both together, below
                save_png(figure, OUT / f"{name}_{kind}.png")
    views = {
        name: equivariance_view(model.model, model.normalise(pixels[None]), LAYER)
        for name, model in trained.items()
    }
    group = views["digits_asc"].group
    images = [group.act_planar(pixels.float() / 255, s) for s in group]
    labels = {name: predictions(model, views[name]) for name, model in trained.items()}
    save_png(equivariance_figure(images, views, labels), OUT / "equivariance.png")
    save_png(steering_figure(), OUT / "steering.png")
    for path in sorted(OUT.glob("*.png")):
        print(f"{path.relative_to(OUT.parents[1])}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
