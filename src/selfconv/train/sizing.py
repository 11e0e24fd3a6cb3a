"""A short measurement before a run: how long an epoch takes, and how much memory a step."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfconv._memory import machine_memory
from selfconv._text import format_duration

if TYPE_CHECKING:
    from selfconv.train.trainer import Trainer

ANNOUNCED_SECONDS = 60.0  # epochs that take longer are announced
PIXELS = 4 * 64 * 64  # of the images in the measured step, about


@dataclass(frozen=True)
class Sizing:
    """Time per epoch and memory per step, extrapolated from a step of a few images."""

    epoch_seconds: float
    step_bytes: float

    def advice(self, trainer: Trainer) -> str | None:
        """A line for the user; None if epochs are short and a step fits in memory."""
        memory = machine_memory()
        fits = self.step_bytes < 0.8 * memory
        if fits and self.epoch_seconds < ANNOUNCED_SECONDS:
            return None
        line = (
            f"about {format_duration(self.epoch_seconds)} an epoch on this machine, "
            f"{format_duration(self.epoch_seconds * trainer.recipe.epochs)} in all, and "
            f"{self.step_bytes / 1e9:.1f} GB of memory for a step"
        )
        if fits:
            return line
        size = trainer.batches.batch_size
        least = trainer.config.hardware.accumulate * math.ceil(self.step_bytes / (0.8 * memory))
        parts = next((n for n in range(least, size) if size % n == 0), size)
        large = trainer.network.config["stem"] == "conv" and trainer.image_size >= 64
        stem = ", --stem pool4" if large else ""
        return (
            f"{line}, of {memory / 1e9:.1f} GB: --accumulate {parts}{stem}, or a smaller --image-size or "
            "--batch-size needs less"
        )


def measure_step(trainer: Trainer) -> Sizing:
    """Trains a copy of the network for two steps of a few images; nothing of the trainer changes."""
    count = max(1, min(trainer.micro_batch_size, PIXELS // trainer.image_size**2))
    images, labels = (batch[:count] for batch in next(iter(trainer.batches.epoch(0))))
    network = copy.deepcopy(trainer.network).train()
    saved: dict[int, int] = {}  # address → bytes of what autograd saves for the backward pass

    def note_storage(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(2):  # the first step compiles the kernels
        saved.clear()
        began = time.monotonic()
        with torch.autograd.graph.saved_tensors_hooks(note_storage, lambda tensor: tensor):
            loss = trainer.loss(network(images).float(), labels)
        loss.backward()
        seconds = time.monotonic() - began
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    activations = sum(size for address, size in saved.items() if address not in weights)
    per_epoch = len(trainer.batches) * trainer.batches.batch_size / trainer.accelerator.num_processes
    own = 4 * sum(p.numel() * p.element_size() for p in network.parameters())  # and gradients, momentum, EMA
    return Sizing(seconds / count * per_epoch, activations / count * trainer.micro_batch_size + own)
