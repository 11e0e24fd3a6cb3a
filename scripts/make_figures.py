"""Draws docs/figures from the weights that come with the package. From the checkout:

python scripts/make_figures.py
"""

from __future__ import annotations

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


def steering_figure(k: int = 5, fine: int = 61) -> Figure:
    """One filter of c16 turned through 360°: the function that it is, and its values at the pixels."""
    group = GROUPS["c16"]
    coefficients = np.random.default_rng(4).normal(size=group.parameter_shape(k))
    rows, columns = np.meshgrid(*[np.linspace(-k / 2, k / 2, fine)] * 2, indexing="ij")
    points = np.stack([rows, columns], -1).reshape(-1, 2)
    figure = Figure(figsize=(12, 1.9), layout="constrained")
    axes = figure.subplots(2, len(group))
    for s in group:
        matrix = np.array(group.matrices[s])
        smooth = (coefficients @ _harmonics.at(k, points @ matrix)).reshape(fine, fine)
        pixels = (coefficients @ _harmonics.basis(k, group.matrices[s])).reshape(k, k)
        for axis, values in zip(axes[:, s], (smooth, pixels), strict=True):
            axis.imshow(values, cmap="RdBu_r", vmin=-4, vmax=4)
            axis.set_axis_off()
        axes[0, s].set_title(
            group.element_names[s], fontsize=9, fontweight="bold" if group.exact[s] else None
        )
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
