"""The entropy of α in each layer of a trained model: how far its attention is from uniform.

Accuracy does not show this: a network with α = 1/k² everywhere, an affine convolution, can be accurate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from selfconv.data import Batches, DataInfo, Split
from selfconv.nn import LocalAttention2d, relative_entropy
from selfconv.testing import run_observed

PIXELS = 8 * 32 * 32  # of all images together; at least one image is used


@torch.inference_mode()
def attention_entropy(model: nn.Module, split: Split, info: DataInfo) -> dict[str, float]:
    """The relative entropy of α in each attention layer of a model, by name in forward order.

    Each is the mean over heads, planes, pixels and the first images of a split.
    """
    found: dict[str, float] = {}

    def observe(key: tuple[str, int], layer: nn.Module, stage: str, leaves: list[Any], _: object) -> None:
        if isinstance(layer, LocalAttention2d) and stage == "input" and key[0] not in found:
            alpha = layer.attention_weights(leaves[0])  # [N, heads, (|H|,) k, k, h, w]
            found[key[0]] = relative_entropy(alpha.flatten(-4, -3), -3).mean().item()

    if any(isinstance(layer, LocalAttention2d) for layer in model.modules()):
        batches = Batches(split, max(1, PIXELS // info.size**2), mean=info.mean, std=info.std)
        images, _ = next(iter(batches))
        run_observed(model.eval(), images, observe)
    return found
