"""``selfconv figures``: writes all figures of a trained model."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfconv._files import check_writable, write_figure
from selfconv.data import DataError, normalise, read_image, visible_channels
from selfconv.testing import through_mask
from selfconv.train import RunError
from selfconv.trained import Prediction, TrainedModel, given_range
from selfconv.visualize import figures
from selfconv.visualize._choice import choose_pixels, choose_view
from selfconv.visualize._equivariance import EquivarianceView, equivariance_view
from selfconv.visualize._explanation import class_activation_maps, occlusion_maps
from selfconv.visualize._explanation_figure import shorten
from selfconv.visualize._inspection import Inspection, Pixel, layer_filters

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figures(
    trained: TrainedModel,
    out: Path,
    *,
    image: str | os.PathLike[str] | None = None,
    pixel_range: str | None = None,
    layer: str | None = None,
    pixel: Pixel | None = None,
    head: int | None = None,
) -> list[Path]:
    """Writes all figures of a model to a folder, as PNG and SVG; returns the files.

    Args:
        image: a file; by default the first test image of the data set.
        pixel_range: of the values in that file, ``"dtype"`` or ``"LOW,HIGH"``; by default as in training.
        layer: by default the first self-convolution layer.
        pixel: row and column of the layer's map; by default where attention chooses (``selectivity``).
        head: by default one whose attention at the pixel is neither uniform nor on one neighbour only.

    Raises:
        OSError: they cannot be written; nothing has been.
    """
    check_writable(out)
    truth, info = None, trained.data
    given = info.pixels if pixel_range is None else given_range(pixel_range)
    if image is None:
        if pixel_range is not None:
            raise ValueError(f"--range needs --image; got --range {pixel_range} for a test image")
        try:
            test = trained.open_data().test
        except (DataError, RunError) as error:
            raise DataError(
                f"{trained.name}: {trained.data_error_in_words(error)}; give an image with --image FILE"
            ) from error
        pixels, truth = test.read(torch.tensor([0]))[0], info.class_names[int(test.labels[0])]
    else:
        pixels = read_image(Path(image), info.size, info.in_channels, pixels=given)
    # all of them before any is written
    made = list(model_figures(trained, pixels, layer, pixel, head, truth, levels=given.levels))
    check_writable(out, *(f"{name}{suffix}" for name, _ in made for suffix in (".png", ".svg")))
    out.mkdir(parents=True, exist_ok=True)
    return [path for name, figure in made for path in save(figure, out / name)]


class ExplanationWriter:
    """Writes a figure for each image of why the model decides as it does.

    ``cat.jpg`` becomes ``cat.jpg.explained.png``. If the folder has that name already, from a file of the
    same name elsewhere or as anything else, it gets a number; explained again, it keeps its picture's name.

    Raises:
        OSError: ``out`` is something other than a folder, or cannot be written to.
    """

    def __init__(self, trained: TrainedModel, out: Path) -> None:
        check_writable(out)
        self.trained, self.out = trained, out

    def write(self, prediction: Prediction, pixels: Tensor) -> Path:
        """Explains the prediction about an image, pixels in 0..1, ``[C, h, w]``; returns the file.

        Raises:
            OSError: it cannot be written.
        """
        name = Path(prediction.file).name
        figure = explain(self.trained, pixels, None, name)
        self.out.mkdir(parents=True, exist_ok=True)
        origin = hashlib.sha256(os.path.abspath(prediction.file).encode(errors="surrogateescape")).hexdigest()
        for number in itertools.count(1):
            file = self.out / f"{name}{f'-{number}' if number > 1 else ''}.explained.png"
            if not file.exists() or _origin(file) == origin:
                break
        save_png(figure, file, Origin=origin)
        return file


def _origin(picture: Path) -> str | None:
    """The digest of the path of the image that a picture explains; None if it is no such picture."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(picture, formats=("PNG",)) as opened:
            return opened.info.get("Origin")
    except (OSError, UnidentifiedImageError):
        return None


def explain(trained: TrainedModel, pixels: Tensor, truth: str | None, source: str | None = None) -> Figure:
    """Why a model decides as it does about an image: pixels in 0..1, ``[C, h, w]``."""
    image = normalise(pixels[None], trained.data.mean, trained.data.std, levels=1)
    maps = class_activation_maps(trained.model, image), occlusion_maps(trained.optimized, image)
    return figures.explanation_figure(_visible(pixels), *maps, trained.data.class_names, truth, source)


def _visible(pixels: Tensor) -> Tensor:
    return pixels[: visible_channels(len(pixels))]


def model_figures(
    trained: TrainedModel,
    pixels: Tensor,
    layer: str | None,
    pixel: Pixel | None,
    head: int | None,
    truth: str | None = None,
    *,
    levels: int | None = None,
) -> Iterator[tuple[str, Figure]]:
    """The pictures by name, for an image of integers ``[C, h, w]``; two if there is no self convolution.

    Args:
        levels: the integer that stands for the pixel 1; by default that of the training images.
    """
    fractions = pixels.float() / (trained.data.pixels.levels if levels is None else levels)
    shown = _visible(fractions)
    image = normalise(fractions[None], trained.data.mean, trained.data.std, levels=1)
    inspection = Inspection(trained.model, image)
    if inspection.layers:
        info = inspection.layer(inspection.layers[0].name if layer is None else layer)
        view = choose_view(inspection, info.name, pixel, head)
        yield "pixel", figures.pixel_figure(shown, view)
        if len(view.group) == 1 and not view.dense:
            yield "schematic", figures.schematic_figure(shown, view)
        planes = view.group.element_names
        yield "entropy", figures.entropy_figure(shown, inspection.entropy(info.name), info.name, planes)
        places, own = choose_pixels(inspection, info.name, 5)
        views = [inspection.look(info.name, place, own if head is None else head) for place in places]
        yield "template", figures.template_figure(shown, views)
        yield "filters", figures.filters_figure(layer_filters(info.layer), info.layer.num_heads, info.name)
        layer = info.name
    elif pixel is not None or head is not None:
        raise ValueError(f"{trained.name} has no self-convolution layer, and so no pixel or head to look at")
    layer = list(inspection.maps)[:2][-1] if layer is None else layer  # after the stem
    turned = equivariance_view(trained.model, image, layer)
    if turned.group.band_limited:  # the network sees the mean colour outside of the disc
        mean = torch.tensor(trained.data.mean[: len(shown)])[:, None, None]
        shown = through_mask((shown - mean)[None])[0] + mean
    images = [turned.group.act_planar(shown, s) for s in turned.group]
    labels = {trained.name: predictions(trained, turned)}
    yield "equivariance", figures.equivariance_figure(images, {trained.name: turned}, labels)
    yield "explanation", explain(trained, fractions, truth)


def predictions(trained: TrainedModel, view: EquivarianceView) -> list[str]:
    """What a model takes each turned image for, and how sure it is."""
    probabilities = torch.stack(view.outputs).softmax(1)
    names = [shorten(name) for name in trained.data.class_names]
    return [f"“{names[int(p.argmax())]}” {float(p.max()):.1%}" for p in probabilities]


def save(figure: Figure, stem: Path) -> list[Path]:
    """Saves a figure as PNG and as SVG, with the same bytes for the same figure."""
    from matplotlib import rc_context

    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    save_png(figure, png)
    with rc_context({"svg.hashsalt": "selfconv"}):
        write_figure(svg, figure, metadata={"Date": None})
    return [png, svg]


def save_png(figure: Figure, path: Path, **metadata: str) -> None:
    write_figure(path, figure, dpi=110, metadata=metadata, pil_kwargs={"optimize": True})
