"""Why a network decides for a class: exact class activation maps, and occlusion, which assumes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from selfconv.nn import GlobalPool
from selfconv.visualize._trace import batch_for, evaluating, trace

CELLS = 8  # rows and columns of an occlusion map
PIXELS = 2**19  # of covered images in one call of the network


def class_activation_maps(model: nn.Module, image: Tensor) -> Tensor:
    """What each place of the last feature map contributes to each logit: float64 ``[num_classes, h, w]``.

        logit_c = b_c + Σ_k W_ck pool_k = Σ_x map_c(x)
        map_c(x) = b_c / (h·w) + Σ_k W_ck Σ_R share_k(R, x) · f_k(R, x)

    The head is a pooling and a linear map, so this is exact: **the sum over the map is the logit**. The
    bias is spread evenly. The share is 1 / (\\|H\\|·h·w) for a mean; for ``pool="max"`` it is 1 at the
    maximum of a channel, and for ``"group_max"`` 1 / (h·w) on the plane with the largest mean. The sum over R
    makes the map planar: it turns with the image. The difference of two maps explains why one class rather
    than another.

    Args:
        model: a network that ends with ``GlobalPool`` and ``nn.Linear``, as those of ``create_model`` do.
        image: ``[C, h, w]`` or ``[1, C, h, w]``, normalised as for the model.
    """
    return activation_of(model, trace(model, image).features)


@torch.no_grad()
def activation_of(model: nn.Module, features: Tensor | None) -> Tensor:
    """The maps from what the pooling of the head received, ``[1, K, h, w]`` or ``[1, K, |H|, h, w]``."""
    pool, linear = _head(model)
    if features is None:
        raise ValueError(
            "activation maps: expected a network that pools with its .pool; got one that does not"
        )
    features = features[0].double()
    features = features.reshape(len(features), -1, *features.shape[-2:])  # [K, R, h, w]
    parts = (features * _shares(features, pool.mode)).sum(1)  # [K, h, w]
    maps = torch.einsum("ck,khw->chw", linear.weight.double(), parts)
    if linear.bias is not None:
        maps += linear.bias.double()[:, None, None] / maps[0].numel()
    return maps


@torch.no_grad()
def occlusion_maps(
    model: nn.Module,
    image: Tensor,
    cells: int = CELLS,
    *,
    at_once: int | None = None,
    pause: Callable[[], None] | None = None,
) -> Tensor:
    """By how much each logit falls when a part of the image is covered: ``[num_classes, cells, cells]``.

    The image is divided into ``cells``² cells. Windows of 2×2 cells are covered one after another with the
    median colour of the image's border; a cell gets the mean over the windows that contain it. Positive: the
    network needs that part for the class. Negative: the part speaks against it. The map turns with the image
    if its sides are multiples of ``cells``.

    Args:
        at_once: covered images in one call of the network; by default as many as memory allows.
        pause: called before each of these calls, and may wait for more urgent work.

    Raises:
        ValueError: the model is no classifier, or its output is infinite or not a number.
    """
    batch = batch_for(model, image)
    _, _, h, w = batch.shape
    cells = min(cells, h, w)
    if cells < 2:
        raise ValueError(f"expected an image and a grid of 2×2 cells or more; got {h}×{w} and {cells}")
    rows, columns = ([math.floor(n * side / cells + 0.5) for n in range(cells + 1)] for side in (h, w))
    colour = border_colour(batch[0])[:, None, None]
    places = [(i, j) for i in range(cells - 1) for j in range(cells - 1)]
    covered = batch.repeat(len(places), 1, 1, 1)
    for n, (i, j) in enumerate(places):
        covered[n, :, rows[i] : rows[i + 2], columns[j] : columns[j + 2]] = colour
    with evaluating(model):
        before = model(batch)
        if not isinstance(before, Tensor) or before.dim() != 2 or len(before) != 1:
            found = list(before.shape) if isinstance(before, Tensor) else type(before).__name__
            raise ValueError(f"occlusion maps: expected a classifier, with outputs [1, classes]; got {found}")
        if not before.isfinite().all():
            raise ValueError(
                "expected outputs that are numbers; the model's are infinite or nan for this image"
            )
        outputs = []
        for part in covered.split(at_once or max(1, PIXELS // (h * w))):
            if pause is not None:
                pause()
            outputs.append(model(part))
        after = torch.cat(outputs)
    falls = (before - after).T.reshape(-1, cells - 1, cells - 1)  # [num_classes, windows]
    sums, counts = (_windows_to_cells(values) for values in (falls, torch.ones_like(falls)))
    return sums / counts


def _head(model: nn.Module) -> tuple[GlobalPool, nn.Linear]:
    pool, linear = getattr(model, "pool", None), getattr(model, "fc", None)
    if isinstance(pool, GlobalPool) and isinstance(linear, nn.Linear):
        return pool, linear
    found = " and ".join(type(part).__name__ for part in (pool, linear))
    raise ValueError(
        f"activation maps: expected a network that ends with .pool (GlobalPool) and .fc (Linear); got {found}"
    )


def _shares(features: Tensor, mode: str) -> Tensor:
    """The weights with which a pooling adds up features [K, R, h, w]; they sum to 1 for each channel."""
    if mode == "mean":
        best = torch.ones_like(features)
    elif mode == "max":
        best = (features == features.amax((1, 2, 3), keepdim=True)).to(features)
    else:
        means = features.mean((2, 3), keepdim=True)
        best = (means == means.amax(1, keepdim=True)).to(features).expand_as(features)
    return best / best.sum((1, 2, 3), keepdim=True)  # where several are the largest, evenly


def border_colour(image: Tensor) -> Tensor:
    """The median colour ``[C]`` of the outermost pixels of an image ``[C, h, w]``."""
    border = torch.cat([image[:, [0, -1]].flatten(1), image[:, 1:-1, [0, -1]].flatten(1)], 1)  # [C, n]
    return border.median(1).values


def _windows_to_cells(values: Tensor) -> Tensor:
    """Sums over the windows of 2×2 cells that contain each cell: [..., n, n] -> [..., n + 1, n + 1]."""
    n = values.shape[-1]
    sums = values.new_zeros(*values.shape[:-2], n + 1, n + 1)
    for i in (0, 1):
        for j in (0, 1):
            sums[..., i : i + n, j : j + n] += values
    return sums
