"""The progress of a run: what a checkpoint holds beside tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfconv.train.record import EpochMetrics


@dataclass
class MetricTotals:
    """Of losses and correct answers over images."""

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

    epoch: int = 0  # complete ones
    step: int = 0  # complete ones of the next epoch
    sums: MetricTotals = field(default_factory=MetricTotals)  # of those steps
    seconds: float = 0.0  # of those steps
    history: list[EpochMetrics] = field(default_factory=list)

    def check(self, epochs: int, steps: int, batch_size: int) -> None:
        """Raises ValueError unless a run of so many epochs and steps can have come so far."""
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
    """What a checkpoint holds beside tensors."""

    scaler: ScalerState | None  # of mixed precision
    threads: int


@dataclass(frozen=True)
class ScalerState:
    """That of torch's GradScaler."""

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
