"""The outputs of a model for many images, computed in batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from selfconv.data import Batches, DataInfo, Split

BATCH_SIZE = 256
BATCH_PIXELS = BATCH_SIZE * 64 * 64  # limits the batch size for images above 64×64


@torch.inference_mode()
def logits(model: nn.Module, split: Split, info: DataInfo, view: Callable[[Tensor], Tensor]) -> Tensor:
    """The model's outputs ``[N, classes]`` for all images of a split, seen in some way.

    Raises:
        ValueError: some outputs are infinite or NaN.
    """
    size = max(1, min(BATCH_SIZE, BATCH_PIXELS // info.size**2))
    batches = Batches(split, size, mean=info.mean, std=info.std)
    model.eval()
    parts = [model(view(images).contiguous(memory_format=torch.channels_last)) for images, _ in batches]
    outputs = torch.cat(parts).float()
    if not outputs.isfinite().all():
        raise ValueError("expected outputs that are numbers; the model's are infinite or nan for some images")
    return outputs
