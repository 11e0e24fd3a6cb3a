"""Shifts of features that are flattened to tokens, or have their channels last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from selfconv.testing import audit

REASON = "its input does not shift with the image: code between the layers depends on absolute position"


class Tokens(nn.Module):
    """A convolution, positions, and layers on tokens ``[N, h·w, C]``."""

    def __init__(
        self, *layers: nn.Module, side: int = 8, positions: bool = True, extra: bool = False
    ) -> None:
        super().__init__()
        self.c, self.side, self.extra = nn.Conv2d(3, 8, 3, padding=1), side, extra
        shape = side * side + extra, 8
        self.pos = nn.Parameter(torch.randn(shape) if positions else torch.zeros(shape))
        self.h = nn.Sequential(*layers, nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        t = self.c(x).flatten(2).transpose(1, 2)
        if self.extra:  # a class token
            t = torch.cat([torch.ones_like(t[:, :1]), t], 1)
        y: Tensor = self.h(t + self.pos)
        return y[:, int(self.extra) :].transpose(1, 2).reshape(len(x), 2, self.side, self.side)


class ChannelsLast(nn.Module):
    def __init__(self, *layers: nn.Module, positions: bool = True, width: int = 6, side: int = 8) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, width, 3, padding=1)
        shape = side, side, width
        self.pos = nn.Parameter(torch.randn(shape) if positions else torch.zeros(shape))
        self.h = nn.Sequential(*layers, nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.c(x).movedim(1, -1) + self.pos).movedim(-1, 1)


class ChannelsFirst(Tokens):
    """Tokens ``[N, C, h·w]``."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Sequential(nn.Conv1d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.c(x).flatten(2) + self.pos.T).reshape(len(x), 2, self.side, self.side)


CASES: dict[str, Callable[..., nn.Module]] = {
    "tokens": Tokens,
    "normalised": lambda **options: Tokens(nn.LayerNorm(8), nn.GELU(), **options),
    "class token": lambda **options: Tokens(extra=True, **options),
    "channels last": ChannelsLast,
    "as many channels as cells": lambda **options: ChannelsLast(width=8, **options),
    "channels last, normalised": lambda **options: ChannelsLast(nn.LayerNorm(6), **options),
}


@pytest.mark.parametrize("name", CASES)
def test_positions_are_not_blamed_on_the_layer_after_them(name: str) -> None:
    torch.manual_seed(0)
    found = audit(CASES[name](), 8)
    assert (found.culprit, found.reason) == ("h.0", REASON), str(found)
    assert all((layer.shift or 0) < 1e-12 for layer in found.layers), str(found)


@pytest.mark.parametrize("name", CASES)
def test_without_positions_they_pass(name: str) -> None:
    torch.manual_seed(0)
    found = audit(CASES[name](positions=False), 8)
    assert found.passed, str(found)


def test_tokens_with_channels_first() -> None:
    torch.manual_seed(0)
    found = audit(ChannelsFirst(), 8)
    assert (found.culprit, found.reason) == ("h.0", REASON), str(found)


class Mixes(nn.Module):
    """A layer of tokens that depends on places."""

    def forward(self, t: Tensor) -> Tensor:
        return t * torch.linspace(0, 1, 64, dtype=t.dtype)[:, None]


def test_a_layer_of_tokens_that_depends_on_places_is_found() -> None:
    torch.manual_seed(0)
    found = audit(Tokens(Mixes(), positions=False), 8)
    assert found.culprit == "h.0", str(found)
    assert found.reason != REASON
