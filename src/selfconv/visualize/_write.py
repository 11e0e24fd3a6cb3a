"""``selfconv figures``: writes all figures of a trained model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfconv.trained import TrainedModel
from selfconv.visualize import figures
from selfconv.visualize._equivariance import EquivarianceView, equivariance_view
from selfconv.visualize._inspection import (
    Inspection,
    LayerInfo,
    Pixel,
    PixelView,
    layer_filters,
    relative_entropy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figures(
    trained: TrainedModel,
    out: Path,
    *,
    image: str | os.PathLike[str] | None = None,
    layer: str | None = None,
    pixel: Pixel | None = None,
    head: int | None = None,
) -> list[Path]:
    """Writes all figures of a model to a folder, as PNG and SVG; returns the files.

    Args:
        image: a file; by default the first test image of the data set.
        layer: by default the first self-convolution layer.
        pixel: row and column of the layer's map; by default where the image has its steepest edge.
        head: by default one whose attention at the pixel is neither uniform nor on one neighbour only.
    """
    pixels = trained.open_data().test.images[0] if image is None else trained.read_image(image)
    made = list(model_figures(trained, pixels, layer, pixel, head))  # all of them before any is written
    out.mkdir(parents=True, exist_ok=True)
    return [path for name, figure in made for path in save(figure, out / name)]


def model_figures(
    trained: TrainedModel, pixels: Tensor, layer: str | None, pixel: Pixel | None, head: int | None
) -> Iterator[tuple[str, Figure]]:
    """The pictures by name, for an image uint8 ``[C, h, w]``; without self convolution there is but one."""
    shown = pixels.float() / 255
    inspection = Inspection(trained.model, trained.normalise(pixels[None]))
    if inspection.layers:
        info = inspection.layer(inspection.layers[0].name if layer is None else layer)
        view = choose_view(inspection, info, pixel, head)
        yield "pixel", figures.pixel_figure(shown, view)
        if len(view.group) == 1 and not view.dense:
            yield "schematic", figures.schematic_figure(shown, view)
        planes = view.group.element_names
        yield "entropy", figures.entropy_figure(shown, inspection.entropy(info.name), info.name, planes)
        yield "filters", figures.filters_figure(layer_filters(info.layer), info.layer.num_heads, info.name)
        layer = info.name
    elif pixel is not None or head is not None:
        raise ValueError(f"{trained.name} has no self-convolution layer, and so no pixel or head to look at")
    layer = list(inspection.maps)[:2][-1] if layer is None else layer  # after the stem
    turned = equivariance_view(trained.model, trained.normalise(pixels[None]), layer)
    images = [turned.group.act_planar(shown, s) for s in turned.group]
    labels = {trained.name: predictions(trained, turned)}
    yield "equivariance", figures.equivariance_figure(images, {trained.name: turned}, labels)


def choose_view(inspection: Inspection, info: LayerInfo, pixel: Pixel | None, head: int | None) -> PixelView:
    """The view of a pixel and head; of those that are not given, the most telling."""
    if pixel is None:
        pixel = inspection.to_map(info.name, steepest(inspection.image))
    if head is None:
        views = inspection.look_all(info.name, pixel)
        return min(views, key=lambda v: abs(float(relative_entropy(v.alpha.flatten(1), 1).mean()) - 0.5))
    return inspection.look(info.name, pixel, head)


def steepest(image: Tensor) -> Pixel:
    """Where an image ``[C, h, w]`` changes most, away from its border if it is large enough."""
    h, w = image.shape[-2:]
    margin = min(3, (h - 1) // 2, (w - 1) // 2)
    if margin == 0:
        return h // 2, w // 2
    rows, columns = slice(margin, h - margin), slice(margin, w - margin)
    up, down = image[:, margin - 1 : h - margin - 1, columns], image[:, margin + 1 : h - margin + 1, columns]
    left, right = image[:, rows, margin - 1 : w - margin - 1], image[:, rows, margin + 1 : w - margin + 1]
    place = int(((down - up).square() + (right - left).square()).sum(0).argmax())
    width = w - 2 * margin
    return place // width + margin, place % width + margin


def predictions(trained: TrainedModel, view: EquivarianceView) -> list[str]:
    """What a model takes each turned image for, and how sure it is."""
    probabilities = torch.stack(view.outputs).softmax(1)
    names = [name if len(name) <= 14 else f"{name[:13]}…" for name in trained.data.class_names]
    return [f"“{names[int(p.argmax())]}” {float(p.max()):.1%}" for p in probabilities]


def save(figure: Figure, stem: Path) -> list[Path]:
    """As PNG and as SVG, the same bytes for the same figure."""
    from matplotlib import rc_context

    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    save_png(figure, png)
    with rc_context({"svg.hashsalt": "selfconv"}):
        figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def save_png(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
