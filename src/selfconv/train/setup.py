"""From a config to objects: accelerator, network, optimizer, learning rate, augmentation."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from selfconv._extras import require
from selfconv._memory import machine_memory
from selfconv.data import Augment, DataInfo, Dataset
from selfconv.models import ResNet, create_model
from selfconv.train.config import Hardware, Recipe, RunConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # the first: batch and instance norms


def make_accelerator(hardware: Hardware) -> Accelerator:
    """accelerate's ``Accelerator``, which handles devices, processes, mixed precision and accumulation."""
    require("training", "accelerate", "tensorboard")  # before anything is written
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    cpu = hardware.device == "cpu" or not torch.accelerator.is_available()
    if cpu and hardware.precision == "fp16":  # accelerate would train in full precision, and say nothing
        raise ValueError("precision: fp16 needs a GPU; on a CPU expected no or bf16")
    AcceleratorState._reset_state()  # another run in this process may have had another precision
    return Accelerator(
        cpu=cpu,
        mixed_precision=hardware.precision,
        gradient_accumulation_steps=hardware.accumulate,
    )


def build_model(config: RunConfig, info: DataInfo) -> ResNet:
    """The network of a run, from the current random state; raises ValueError if it cannot take the images."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # allocates nothing, however large
        on_meta = _create(config, info).eval()
    needed, memory = sum(p.numel() * p.element_size() for p in on_meta.parameters()), machine_memory()
    if needed > memory / 2:
        raise ValueError(
            f"{config.model.name}: weights of {needed / 1e9:.1f} GB; this machine has {memory / 1e9:.1f} GB"
        )
    with torch.no_grad():
        for size in {info.size, *config.recipe.all_sizes(info.size)}:
            on_meta(torch.empty(1, info.in_channels, size, size, device="meta"))
    return _create(config, info)


def _create(config: RunConfig, info: DataInfo) -> ResNet:
    return create_model(
        config.model.name, len(info.class_names), info.in_channels, **config.model.overrides()
    )


def make_optimizer(network: nn.Module, recipe: Recipe) -> torch.optim.SGD:
    groups = parameter_groups(network, recipe)
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=True)


def parameter_groups(network: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: parameters with weight decay first, then the others, if any.

    With ``decay="all"`` every parameter decays. With ``"maps"`` only weights of convolutions and linear maps
    do: parameters called ``weight``, or ``w_in`` and ``w_out`` in attention layers, of modules that are not
    norms. ψ, β, biases and the scale of a norm do not.
    """
    decays: list[nn.Parameter] = []
    rests: list[nn.Parameter] = []
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_map = name in ("weight", "w_in", "w_out") and not isinstance(module, NORMS)
            (decays if recipe.decay == "all" or is_map else rests).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decays, "weight_decay": recipe.weight_decay}]
    if rests:
        groups.append({"params": rests, "weight_decay": 0.0})
    return groups


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """A weight for each class, N / (classes · images of the class): the mean over images is 1."""
    counts = torch.bincount(labels, minlength=classes)
    return len(labels) / (classes * counts)


def make_loss(recipe: Recipe, data: Dataset) -> nn.CrossEntropyLoss:
    weights = None
    if recipe.class_weights == "balanced":
        weights = balanced_weights(data.train.labels, data.num_classes)
    return nn.CrossEntropyLoss(weights, label_smoothing=recipe.label_smoothing)


def learning_rate(recipe: Recipe, epoch: int, step: int, steps: int) -> float:
    """The learning rate of a step. It depends on the step alone, so a checkpoint does not store it.

    ``"step"`` changes it once an epoch, as the paper does, ``"cosine"`` at every step.
    """
    if recipe.schedule == "step":
        warmup = round(recipe.warmup * recipe.epochs)
        rise = min(1.0, (epoch + 1) / warmup) if warmup else 1.0
        return recipe.lr * rise * 0.1 ** sum(epoch >= share * recipe.epochs for share in (0.5, 0.75))
    done = (epoch * steps + step + 0.5) / (recipe.epochs * steps)  # its middle: no step has a rate of 0
    if done < recipe.warmup:
        return recipe.lr * done / recipe.warmup
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (done - recipe.warmup) / (1 - recipe.warmup)))


def augmentation(recipe: Recipe) -> Augment:
    """The random changes of the training images, which a recipe names as ``Augment`` does."""
    return Augment(**{change.name: getattr(recipe, change.name) for change in fields(Augment)})
