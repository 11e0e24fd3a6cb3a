"""The state of a run besides its weights: progress, totals, gradient scaler, random generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfconv.train.files.record import BestEpoch, EpochMetrics


@dataclass
class MetricTotals:
    """Sums of losses and correct answers over images."""

    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0

    def add(self, values: list[float]) -> None:
        loss, correct, images = values
        self.loss, self.correct, self.images = self.loss + loss, self.correct + correct, self.images + images

    @property
    def means(self) -> tuple[float, float]:
        """Loss and accuracy."""
        return self.loss / self.images, self.correct / self.images


@dataclass
class State:
    """The progress of a run. With the tensors of a checkpoint, this is all that is needed to resume."""

    epoch: int = 0  # completed epochs
    step: int = 0  # completed steps of the current epoch
    sums: MetricTotals = field(default_factory=MetricTotals)  # over these steps
    seconds: float = 0.0  # over these steps
    history: list[EpochMetrics] = field(default_factory=list)

    def best(self) -> BestEpoch | None:
        """The first epoch with the highest validation accuracy; None without validation images."""
        validated = [BestEpoch(h.epoch, h.val_accuracy) for h in self.history if h.val_accuracy is not None]
        return max(validated, key=lambda best: best.accuracy, default=None)

    def stalled(self, patience: int | None) -> bool:
        """Whether validation accuracy has not improved for ``patience`` epochs."""
        best = self.best()
        return patience is not None and best is not None and len(self.history) - best.epoch >= patience

    def check(self, epochs: int, steps: int, batch_size: int) -> None:
        """Raises ValueError unless a run of ``epochs`` × ``steps`` steps can have this state."""
        most = steps if self.epoch < epochs else 0
        if not (0 <= self.epoch <= epochs and 0 <= self.step <= most):
            raise ValueError(
                f"expected up to {epochs} epochs of {steps} steps; got epoch {self.epoch}, step {self.step}"
            )
        if [metrics.epoch for metrics in self.history] != [*range(1, self.epoch + 1)]:
            raise ValueError(f"history: expected epochs 1 to {self.epoch}; got {len(self.history)} others")
        sums, images = self.sums, self.step * batch_size
        if sums.images != images or not 0 <= sums.correct <= images or (self.seconds > 0) != (self.step > 0):
            raise ValueError(f"sums: expected those of {images} images; got {sums} in {self.seconds} s")


@dataclass(kw_only=True)
class SavedState(State):
    """The JSON part of a checkpoint."""

    scaler: ScalerState | None  # None without fp16
    threads: int  # of torch


@dataclass(frozen=True)
class ScalerState:
    """The state of torch's GradScaler."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int

    def __post_init__(self) -> None:
        if not (
            self.scale > 0
            and 0 < self.backoff_factor < 1 < self.growth_factor
            and 0 <= self._growth_tracker < self.growth_interval
        ):
            raise ValueError(f"scaler: expected the state of a gradient scaler; got {self}")


# ---- random generators ----


def random_states() -> dict[str, Tensor]:
    """The states of the random generators of Python, NumPy and torch, as tensors."""
    _, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, position, has_gauss, cached = numpy
    assert kind == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def expected_random_states(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with the shapes and dtypes that saved random states must have.

    Two parts are optional: the state of a GPU, and Python's cached Gaussian value.
    """
    states = random_states()
    pending = "python_gauss" in found and found["python_gauss"].numel() > 0
    states["python_gauss"] = torch.zeros(int(pending), dtype=torch.float64)
    if "cuda" not in found:
        states.pop("cuda", None)
    elif "cuda" not in states:  # no GPU here: the state is not used
        states["cuda"] = found["cuda"]
    return states


def check_random_states(states: Mapping[str, Tensor]) -> None:
    """Raises ValueError if a generator refuses its state; shapes and dtypes were checked before."""
    try:
        for name in ("python_gauss", "numpy_gauss"):
            if not states[name].isfinite().all():
                raise ValueError(f"{name} is not a finite number")
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(_python_state(states))
        np.random.RandomState().set_state(_numpy_state(states))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"random states: expected states that the generators accept ({error})") from None


def _python_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    gauss = states["python_gauss"].tolist()
    return 3, tuple(states["python"].tolist()), gauss[0] if gauss else None


def _numpy_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    *keys, position, has_gauss = states["numpy"].tolist()
    if not 0 <= position <= len(keys):  # NumPy does not check this
        raise ValueError(f"expected a position of 0 to {len(keys)}; got {position}")
    return "MT19937", np.array(keys, np.uint32), position, has_gauss, states["numpy_gauss"].item()


def set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
