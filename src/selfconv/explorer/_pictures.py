"""Numbers as pictures: one coloured pixel per number, which the browser enlarges without smoothing.

A picture of a 5×5 window is a PNG of 5×5 pixels inside the HTML, so a click costs one small answer.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from selfconv.explorer._comparison import Image, SampleImage
from selfconv.groups import Group
from selfconv.visualize import PixelView

SIGNED, POSITIVE = "PuOr", "cividis"
Numbers = NDArray[np.floating]


@cache
def _colours(name: str) -> NDArray[np.uint8]:
    """A colour map as a table ``[256, 4]``."""
    from matplotlib import colormaps

    return (colormaps[name](np.arange(256)) * 255).round().astype(np.uint8)


def paint(values: Numbers, largest: float, name: str) -> NDArray[np.uint8]:
    """Numbers ``[..., h, w]`` as colours ``[..., h, w, 4]``: from −largest (or 0) to largest.

    What is not a number is left transparent.
    """
    low = -largest if name == SIGNED else 0.0
    span = largest - low if largest > 0 else 1.0
    finite = np.isfinite(values)
    place = np.where(finite, (values - low) / span, 0.0)
    rgba = _colours(name)[np.clip(place * 255, 0, 255).round().astype(np.uint8)]
    rgba[~finite] = 0
    return rgba


def tile(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures ``[n, h, w, 4]`` in a square arrangement, row by row, one transparent pixel between them."""
    count, h, w, _ = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    whole = np.zeros((rows * (h + 1) - 1, columns * (w + 1) - 1, 4), np.uint8)
    for n, picture in enumerate(pictures):
        i, j = n // columns * (h + 1), n % columns * (w + 1)
        whole[i : i + h, j : j + w] = picture
    return whole


def png(pixels: NDArray[np.uint8]) -> str:
    """Pixels ``[h, w, 3 or 4]`` as the address of a picture that is inside the page."""
    import PIL.Image

    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def photograph(image: Image) -> str:
    """The address of an image ``[1 or 3, h, w]``."""
    return png(np.ascontiguousarray(np.broadcast_to(image.transpose(1, 2, 0), (*image.shape[1:], 3))))


def picture(address: str, alt: str) -> str:
    said = escape(alt, quote=True)
    return f'<img class="sc-px" src="{address}" alt="{said}" title="{said}">'


def number(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")


def plane_names(group: Group) -> list[str]:
    """What the planes of features on a group are called: by their turn, ``m`` if mirrored first."""
    return [name.replace(" mirrored", " m") for name in group.element_names]


# ---- the image and the samples ----


def stage(image: Image, pixel: tuple[int, int], cells: tuple[int, int], window: int | None) -> str:
    """The image to click on; its frame marks the window of a layer whose map has so many cells."""
    _, h, w = image.shape
    data = {"rows": h, "columns": w, "row": pixel[0], "column": pixel[1]}
    data |= {"down": cells[0], "across": cells[1], "window": window if window is not None else 0}
    attributes = " ".join(f'data-{name}="{value}"' for name, value in data.items())
    return (
        f'<div class="sc-stage" {attributes}>{picture(photograph(image), "the image as the models see it")}'
        f'<div class="sc-window"></div><div class="sc-pixel"></div></div>'
    )


def strip(samples: Sequence[SampleImage], chosen: int | None) -> str:
    """A button with a small picture for every sample."""
    buttons = []
    for n, sample in enumerate(samples):
        label, pressed = escape(sample.label, quote=True), str(n == chosen).lower()
        buttons.append(
            f'<button type="button" class="sc-sample" data-sample="{n}" aria-pressed="{pressed}" '
            f'aria-label="sample: {label}" title="{label}">'
            f'<img class="sc-px" src="{photograph(sample.image)}" alt=""></button>'
        )
    return f'<div class="sc-samples" role="group" aria-label="samples">{"".join(buttons)}</div>'


# ---- predictions ----


def bars(probabilities: Numbers, upright: Numbers, names: Sequence[str]) -> str:
    """A bar for each class, at most ten; a mark where it was before the image was turned."""
    shown: Iterable[int] = range(len(names))
    if len(names) > 10:
        shown = np.argsort(-np.maximum(probabilities, upright), kind="stable")[:10].tolist()
    best = int(probabilities.argmax())
    rows = []
    for n in shown:
        p, mark = float(probabilities[n]), float(upright[n])
        rows.append(
            f'<li{" class=sc-best" if n == best else ""}><span class="sc-class">{escape(names[n])}</span>'
            f'<span class="sc-track"><span class="sc-bar" style="width:{100 * p:.2f}%"></span>'
            f'<span class="sc-mark" style="left:{100 * mark:.2f}%"></span></span>'
            f'<span class="sc-value">{100 * p:.1f}%</span></li>'
        )
    return f'<ol class="sc-bars">{"".join(rows)}</ol>'


# ---- filters ----

COLUMNS = (
    ("V", "values"),
    ("ψ", "template"),
    ("α", "scores"),
    ("α·ψ", "filter"),
    ("α·β", "position"),
)


def filters(view: PixelView, channel: int) -> str:
    """How one channel of a head makes its output at a pixel: a row for every plane (rotation) it has.

    The neighbourhood V is the same for all of them.
    """
    own = view.head * view.psi.shape[2] + channel if view.dense else channel
    seen = _array(view.neighbourhood[:, own])  # [R, k, k]
    psi, effective = (
        _array(x[:, :, channel, own] if view.dense else x[:, :, channel]) for x in (view.psi, view.effective)
    )  # [P, R, k, k]
    alpha, positional = _array(view.alpha), _array(view.positional[:, channel])  # [P, k, k]
    largest = [_largest(x) for x in (seen, psi, alpha, effective, positional)]
    planes = plane_names(view.group)
    head = "".join(
        f'<th scope="col"><b>{name}</b><span class="sc-about"><br>{about}</span></th>'
        for name, about in COLUMNS
    )
    rows = []
    for p, name in enumerate(planes):
        cells = [] if p else [f'<td rowspan="{len(planes)}">{_cell("V", "", seen, largest[0])}</td>']
        shown = (psi[p], alpha[p][None], effective[p], positional[p][None])
        for (title, _), values, limit in zip(COLUMNS[1:], shown, largest[1:], strict=True):
            cells.append(f"<td>{_cell(title, f' at {name}', values, limit)}</td>")
        output = number(float(view.output[p, channel]))
        rows.append(
            f'<tr><th scope="row">{name}</th>{"".join(cells)}<td class="sc-number">{output}</td></tr>'
        )
    scale = "".join(
        f"<td>{'0…' if title == 'α' else '±'}{number(limit)}</td>"
        for (title, _), limit in zip(COLUMNS, largest, strict=True)
    )
    return (
        f'<table class="sc-filters"><thead><tr><td></td>{head}'
        f'<th scope="col"><b>=</b><br>output</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody><tfoot><tr><td></td>{scale}<td></td></tr></tfoot></table>"
    )


def _cell(title: str, where: str, values: Numbers, limit: float) -> str:
    alt = f"{title}{where}: {number(float(values.min()))} to {number(float(values.max()))}"
    return picture(png(tile(paint(values, limit, POSITIVE if title == "α" else SIGNED))), alt)


def all_heads(views: Sequence[PixelView], chosen: int) -> str:
    """α of every head: a row for every plane, a column for every head, all on one scale."""
    alpha = np.stack([_array(view.alpha) for view in views])  # [heads, P, k, k]
    largest = _largest(alpha)
    head = "".join(
        f'<th scope="col"{" class=sc-best" if n == chosen else ""}>{n + 1}</th>' for n in range(len(views))
    )
    rows = []
    for p, name in enumerate(plane_names(views[0].group)):
        cells = "".join(
            f"<td>{picture(png(paint(a[p], largest, POSITIVE)), f'α of head {n + 1} at {name}')}</td>"
            for n, a in enumerate(alpha)
        )
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        f'<table class="sc-heads"><caption>α of every head, 0 to {number(largest)}</caption>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


# ---- feature maps ----


def maps(upright: Tensor, turned: Tensor | None, group: Group, angle: str) -> str:
    """One channel of a layer's map ``[h, w]`` or ``[|H|, h, w]``, before and after the image was turned."""
    rows = {"upright": upright} | ({} if turned is None else {angle: turned})
    values = {name: _array(x if x.dim() == 3 else x[None]) for name, x in rows.items()}
    largest = max(map(_largest, values.values()))
    planes = plane_names(group)
    head = "".join(f'<th scope="col">{name}</th>' for name in planes) if len(planes) > 1 else ""
    body = "".join(
        f'<tr><th scope="row">{row}</th>'
        + "".join(
            f"<td>{picture(png(paint(x, largest, SIGNED)), f'map {name}, {row}')}</td>"
            for name, x in zip(planes, planes_of, strict=True)
        )
        + "</tr>"
        for row, planes_of in values.items()
    )
    columns = f"<thead><tr><td></td>{head}</tr></thead>" if head else ""
    return (
        f'<table class="sc-maps sc-maps-{len(planes)}">{columns}<tbody>{body}</tbody></table>'
        f'<p class="sc-scale">±{number(largest)}</p>'
    )


def _array(values: Tensor) -> Numbers:
    return values.detach().float().numpy(force=True)


def _largest(values: Numbers) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0
