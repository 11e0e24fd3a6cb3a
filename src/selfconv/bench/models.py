"""Whole networks: a training step and inference of the paper's models beside the convolutional ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from selfconv.bench.measure import Work, interleaved, peak_memory
from selfconv.bench.options import PAIRS
from selfconv.models import create_model


@dataclass(frozen=True)
class ModelRow:
    model: str
    counterpart: str
    batch: int
    direction: str  # "training step" or "inference"
    memory_format: str  # the better of the two for this model
    milliseconds: float
    images_per_second: float
    megabytes: float
    ratio: float  # time over the counterpart's, each in its better memory format


def steps(name: str, batch: int, memory_format: str, device: torch.device) -> dict[str, Work]:
    """A training step (forward, backward, SGD with Nesterov momentum) and a pass of inference."""
    torch.manual_seed(0)
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    # the p4 networks of the paper stride; at 32x32 they say that this is only nearly equivariant
    model = create_model(name).to(device).to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=layout)
    y = torch.randint(10, (batch,), device=device)

    def train() -> object:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def infer() -> object:
        model.eval()
        with torch.no_grad():
            return model(x)

    return {"training step": train, "inference": infer}


def measure_models(
    names: tuple[str, ...], batch: int, seconds: float, device: torch.device
) -> Iterator[ModelRow]:
    """All models in both memory formats, interleaved; a model counts in its better format."""
    formats = ("channels_last", "contiguous")
    wanted = {*names, *(PAIRS[name] for name in names)}
    works = {(name, f): steps(name, batch, f, device) for name in PAIRS if name in wanted for f in formats}
    for direction in ("training step", "inference"):
        times = interleaved({key: work[direction] for key, work in works.items()}, seconds, device)
        best = {name: min((times[name, f], f) for f in formats) for name in wanted}
        for name in names:
            time, f = best[name]
            yield ModelRow(
                name, PAIRS[name], batch, direction, f, 1e3 * time, batch / time,
                peak_memory(works[name, f][direction], device) / 1e6, time / best[PAIRS[name]][0],
            )  # fmt: skip
