"""Draws docs/figures from the weights that come with the package, and from results/. From the checkout:

python scripts/make_figures.py                                   # all of them
python scripts/make_figures.py template                          # the README's first figure alone
python scripts/make_figures.py rotation                          # its second one, from results/rotation
python scripts/make_figures.py template --model MODEL --image IMAGE --out FILE

MODEL is the name of a shipped network or the folder of a run; by default, of the shipped planar networks with
affine self convolution, the one for the largest images. Without IMAGE the picture is drawn by this script and
has the project's licence: a boat for colour images, a digit for grey ones.
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torch import Tensor

from selfconv import _harmonics
from selfconv.groups import GROUPS
from selfconv.models import list_models
from selfconv.study.report import write_report
from selfconv.trained import TrainedModel, open_trained
from selfconv.visualize import Inspection, equivariance_view
from selfconv.visualize._choice import choose_pixels
from selfconv.visualize._write import model_figures, predictions, save_png
from selfconv.visualize.figures import equivariance_figure, template_figure

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "figures"
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


def best_weights() -> TrainedModel:
    """Of the shipped planar networks with affine self convolution, the one for the largest images, and of
    several such one whose scores are divided by the channels of a head: others attend nearly uniformly."""
    shipped = [open_trained(name) for name in list_models(pretrained=True)]
    planar = [one for one in shipped if len(one.model.group) == 1 and one.model.config["spatial"] == "asc"]
    return max(planar, key=lambda one: (one.data.size, one.model.config["scale"] == "head"))


def drawing(size: int, channels: int) -> Tensor:
    """Our own picture, uint8 ``[channels, size, size]``: a boat in colour, in grey the stroke of a digit."""
    fine = 32 * size  # drawn large, then averaged, so that edges are smooth
    unit = fine / 16
    picture = Image.new("RGB", (fine, fine), (0, 0, 0) if channels == 1 else (150, 196, 232))
    pen = ImageDraw.Draw(picture)

    def scaled(*points: tuple[float, float]) -> list[tuple[float, float]]:
        return [(x * unit, y * unit) for x, y in points]

    if channels == 1:
        angles = np.linspace(-2.6, 1.2, 60)
        arc = [(8 + 3.9 * math.cos(a), 5.2 + 3.4 * math.sin(a)) for a in angles]
        stroke = scaled(*arc, (5.2, 13.6), (12.4, 13.4))
        pen.line(stroke, fill=(255, 255, 255), width=round(2.3 * unit), joint="curve")
        for x, y in (stroke[0], stroke[-2], stroke[-1]):
            pen.ellipse(
                [x - 1.15 * unit, y - 1.15 * unit, x + 1.15 * unit, y + 1.15 * unit], fill=(255, 255, 255)
            )
    else:
        pen.rectangle(scaled((0, 11), (16, 16)), fill=(38, 92, 140))
        pen.polygon(scaled((2, 10.4), (14, 10.4), (12, 13), (4, 13)), fill=(120, 46, 30))
        pen.polygon(scaled((7.6, 1.5), (7.6, 9.6), (2.8, 9.6)), fill=(245, 240, 225))
        pen.polygon(scaled((8.4, 2.8), (8.4, 9.6), (12.6, 9.6)), fill=(214, 62, 48))
        pen.line(scaled((8, 1), (8, 10.4)), fill=(70, 50, 40), width=round(0.4 * unit))
        pen.ellipse(scaled((12.2, 1.4), (14.6, 3.8)), fill=(250, 214, 92))
    pixels = np.array(
        picture.resize((size, size), Image.Resampling.BOX).convert("L" if channels == 1 else "RGB")
    )
    return torch.from_numpy(pixels.reshape(size, size, channels)).permute(2, 0, 1).contiguous()


def first_figure(model: str | None = None, image: Path | None = None) -> Figure:
    """One template, five pixels, five filters: for the README."""
    trained = best_weights() if model is None else open_trained(model)
    if image is None:
        pixels = drawing(trained.data.size, trained.data.in_channels)
    else:
        pixels = trained.read_image(image)
    inspection = Inspection(trained.model, trained.normalise(pixels[None]))
    layer = inspection.layers[0].name
    places, head = choose_pixels(inspection, layer, 5)
    views = [inspection.look(layer, place, head) for place in places]
    return template_figure(pixels.float() / 255, views)


def draw_rotation_curve() -> Path:
    """Accuracy against the angle of the images, as in the report on the rotation study."""
    with TemporaryDirectory() as folder:
        files = write_report([ROOT / "results" / "rotation"], Path(folder))
        [curve] = [file for file in files if file.name.startswith("rotation") and file.suffix == ".svg"]
        return Path(shutil.copy(curve, OUT / "rotation.svg"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("which", nargs="?", choices=("all", "template", "rotation"), default="all")
    parser.add_argument("--model", help="of the template figure")
    parser.add_argument("--image", type=Path, help="of the template figure: a picture of ours")
    parser.add_argument("--out", type=Path, default=OUT / "template.png", help="of the template figure")
    options = parser.parse_args()
    drawn = []
    if options.which in ("all", "rotation"):
        drawn.append(draw_rotation_curve())
    if options.which in ("all", "template"):
        save_png(first_figure(options.model, options.image), options.out)
        drawn.append(options.out)
    if options.which == "all":
        all_others()
        drawn += sorted({*OUT.glob("*.png")} - {*drawn})
    for path in drawn:
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def all_others() -> None:
    page = (OUT.parent / "visualize.md").read_text()  # has some of the figures of each network
    names = ("digits_asc", "digits_p4_asc")
    trained = {name: open_trained(name) for name in names}
    pixels = trained["digits_asc"].open_data().test.images[IMAGE]
    for name, model in trained.items():
        for kind, figure in model_figures(model, pixels, layer=LAYER, pixel=None, head=None):
            if f"figures/{name}_{kind}.png" in page:
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


if __name__ == "__main__":
    main()
