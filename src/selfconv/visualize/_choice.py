"""Which pixel and head to show first: where attention chooses, on the object."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfconv.visualize._explanation import border_colour
from selfconv.visualize._inspection import Inspection, Pixel, PixelView, check_head


def selectivity(inspection: Inspection, layer: str) -> Tensor:
    """How much there is to see at each pixel of a layer's map, for each head: ``[heads, h, w]``, 0 to 1.

    4·e·(1 − e), with e the relative entropy of attention (mean over planes), times the contrast of the image
    within the window and how far the pixel stands out from the background: 0 where attention is uniform or
    on one neighbour only, where the image is flat, in the colour of the image's border, and where the
    window extends beyond the border.
    """
    info = inspection.layer(layer)
    reach = max(info.layer.window.reach)
    e = inspection.entropy(layer).mean(1)  # [heads, h, w]
    interest = _contrast(inspection.image, info.size, 2 * reach + 1) * _object(inspection.image, info.size)
    return 4 * e * (1 - e) * _away_from_border(interest.to(e), reach)


def choose_pixel(inspection: Inspection, layer: str, head: int | None = None) -> tuple[Pixel, int]:
    """The pixel of a layer's map and the head with the highest ``selectivity``."""
    scores = selectivity(inspection, layer)
    if head is not None:
        scores = scores[head : head + 1]
    best, (_, w) = int(scores.argmax()), scores.shape[1:]
    pixel = best % scores[0].numel()
    return (pixel // w, pixel % w), best // scores[0].numel() if head is None else head


def choose_pixels(inspection: Inspection, layer: str, count: int) -> tuple[list[Pixel], int]:
    """Pixels with high ``selectivity``, apart from each other as far as the map allows, and one head.

    No pixel twice: of a map with fewer pixels than ``count``, all of them.
    """
    info, head = inspection.layer(layer), choose_pixel(inspection, layer)[1]
    scores = selectivity(inspection, layer)[head].clone()
    h, w = info.size
    apart = max(2 * max(info.layer.window.reach) + 1, min(h, w) // 3)  # windows that do not overlap, or more
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    scores += 1e-6  # where nothing is selective, distance alone decides
    chosen: list[Pixel] = []
    for _ in range(min(count, h * w)):
        i, j = divmod(int(scores.argmax()), w)
        chosen.append((i, j))
        distance = torch.maximum((rows - i).abs(), (columns - j).abs())
        scores = scores * (distance / apart).clamp(max=1).square()
        scores[i, j] = -1
    return sorted(chosen), head


def choose_view(inspection: Inspection, layer: str, pixel: Pixel | None, head: int | None) -> PixelView:
    """The view of a pixel and head; of those that are not given, the one with the highest selectivity."""
    if pixel is None:
        if head is not None:
            check_head(inspection.layer(layer), head)
        return inspection.look(layer, *choose_pixel(inspection, layer, head))
    if head is None:
        views = inspection.look_all(layer, pixel)
        i, j = pixel
        e = inspection.entropy(layer)[:, :, i, j].mean(1)
        return views[int((e * (1 - e)).argmax())]
    return inspection.look(layer, pixel, head)


def _contrast(image: Tensor, size: tuple[int, int], k: int) -> Tensor:
    """The standard deviation of an image in the k×k window of each pixel of a map; its largest is 1."""
    small = F.adaptive_avg_pool2d(image, size)[None]
    mean, square = (F.avg_pool2d(x, k, 1, k // 2, count_include_pad=False) for x in (small, small.square()))
    contrast = (square - mean.square()).clamp(min=0).sqrt()[0].mean(0)  # [h, w]
    return contrast / contrast.max().clamp(min=1e-12)


def _object(image: Tensor, size: tuple[int, int]) -> Tensor:
    """How far each pixel of a map is from the median colour of the border: 1 from half the largest on."""
    distance = (image - border_colour(image)[:, None, None]).square().sum(0, keepdim=True).sqrt()
    distance = F.adaptive_avg_pool2d(distance, size)[0]
    return (2 * distance / distance.max().clamp(min=1e-12)).clamp(max=1)


def _away_from_border(values: Tensor, margin: int) -> Tensor:
    """Zero where a window would extend beyond the border, if some of the map remains."""
    h, w = values.shape
    if min(h, w) <= 2 * margin or margin == 0:
        return values
    kept = values.new_zeros(h, w)
    kept[margin:-margin, margin:-margin] = values[margin:-margin, margin:-margin]
    return kept
