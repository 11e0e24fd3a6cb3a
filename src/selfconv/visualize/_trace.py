"""One run of a model on one image, and what went into and came out of its spatial layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfconv.nn import GlobalPool, GroupConv2d, LiftingConv2d, LocalAttention2d
from selfconv.testing import run_observed


@dataclass(frozen=True)
class Trace:
    """In the order in which the layers ran; one that runs twice is kept as it first ran."""

    image: Tensor  # [1, C, h, w]
    output: Tensor  # of the model
    inputs: dict[str, Tensor]  # of every spatial layer: [1, C, h, w] or [1, C, |H|, h, w]
    maps: dict[str, Tensor]  # what came out of it
    features: Tensor | None  # what the global pooling of the head received


def is_spatial(module: nn.Module) -> bool:
    """Whether a layer sees more than one position."""
    if not isinstance(module, LocalAttention2d | GroupConv2d | LiftingConv2d | nn.Conv2d):
        return False
    size = module.kernel_size
    return isinstance(module, LocalAttention2d) or (max(size) if isinstance(size, tuple) else size) > 1


def _is_traced(module: nn.Module) -> bool:
    return isinstance(module, GlobalPool) or is_spatial(module)


@torch.no_grad()
def trace(model: nn.Module, image: Tensor) -> Trace:
    """Runs the model in evaluation mode on an image ``[C, h, w]`` or ``[1, C, h, w]``, as it takes them.

    Raises:
        ValueError: its output is infinite or not a number.
    """
    image = batch_for(model, image)
    inputs: dict[str, Tensor] = {}
    maps: dict[str, Tensor] = {}
    features: Tensor | None = None

    def observe(key: tuple[str, int], module: nn.Module, stage: str, leaves: list[Any], _: object) -> None:
        nonlocal features
        name, calls_before = key
        if isinstance(module, GlobalPool):
            features = leaves[0].clone() if stage == "input" else features
        elif not calls_before:  # copies: a later layer may work in place
            (inputs if stage == "input" else maps)[name] = leaves[0].clone()

    with evaluating(model):
        output = run_observed(model, image, observe, only=_is_traced)[0]
    if not output.isfinite().all():
        raise ValueError("expected outputs that are numbers; the model's are infinite or nan for this image")
    return Trace(image, output, inputs, maps, features)


def batch_for(model: nn.Module, image: Tensor) -> Tensor:
    """``as_batch`` on the device and in the dtype of the model."""
    batch = as_batch(image)
    like = next(model.parameters(), batch)
    return batch.to(like.device, like.dtype)


def as_batch(image: Tensor) -> Tensor:
    if not isinstance(image, Tensor) or not image.is_floating_point():
        found = image.dtype if isinstance(image, Tensor) else type(image).__name__
        raise TypeError(f"image: expected a floating-point tensor [C, h, w]; got {found}")
    if image.dim() == 3:
        image = image[None]
    if image.dim() != 4 or len(image) != 1:
        raise ValueError(
            f"image: expected one image [C, h, w] or [1, C, h, w]; got shape {list(image.shape)}"
        )
    return image


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
