"""Draws docs/figures from the weights that come with the package. From the checkout:

python scripts/make_figures.py
"""

from __future__ import annotations

from pathlib import Path

from selfconv.trained import open_trained
from selfconv.visualize import equivariance_view
from selfconv.visualize._write import model_figures, predictions, save_png
from selfconv.visualize.figures import equivariance_figure

OUT = Path(__file__).parents[1] / "docs" / "figures"
IMAGE, LAYER = 0, "stages.0.0.spatial.conv"


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
    for path in sorted(OUT.glob("*.png")):
        print(f"{path.relative_to(OUT.parents[1])}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
