"""Networks small enough to test with, and in a state in which every part of them matters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv.models import ResNet, create_model, model_facts

TINY: dict[str, Any] = {"depth": 11, "widths": (4, 4, 8), "num_heads": 2, "kernel_size": 3}


def tiny_options(name: str, **overrides: Any) -> dict[str, Any]:
    """For a small model of that kind; without heads where it has none."""
    facts = model_facts(name)
    return {
        k: v for k, v in (TINY | overrides).items() if k != "num_heads" or facts is None or facts.attention
    }


@torch.no_grad()
def with_active_norms(model: ResNet, size: int = 8) -> ResNet:
    """In evaluation, with γ ≠ 0 in every batch norm: attention blocks start with γ = 0, which hides them."""
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)
        norm.momentum = 1.0  # the statistics become those of one batch
    dtype = next(model.parameters()).dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a size that is not exact: nobody turns this image
        model.train()(torch.randn(8, model.in_channels, size, size, dtype=dtype))
    for norm in norms:
        norm.momentum = 0.1
    return model.eval()


def tiny(name: str, **overrides: Any) -> ResNet:
    """A small model of that kind, with active norms."""
    return with_active_norms(create_model(name, **tiny_options(name, **overrides)))


def channels_last(model: ResNet) -> ResNet:
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def after_sgd_steps(model: ResNet, steps: int = 2, batch: int = 4, size: int = 32) -> ResNet:
    """After a few steps of gradient descent on noise, in evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model.train()
    for _ in range(steps):
        images = torch.randn(batch, model.in_channels, size, size)
        labels = torch.randint(model.num_classes, (batch,))
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval()


def error_over_spread(measured: Tensor, expected: Tensor) -> float:
    """The largest difference, divided by the standard deviation of what is expected."""
    return ((measured - expected).abs().max() / expected.std()).item()
