"""A learning-rate range test: the loss while the rate rises from step to step, and a rate to begin with."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from selfconv._files import write_atomically, write_figure
from selfconv._text import HalfMinute
from selfconv.train.config import RunConfig
from selfconv.train.files.runs import open_data
from selfconv.train.setup import make_accelerator
from selfconv.train.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOWEST, HIGHEST, STEPS = 1e-5, 10.0, 200
SMOOTHING = 0.9  # decay per step of the running mean of the loss
RUNAWAY = 4.0  # the test ends when the smoothed loss is this many times its minimum


@dataclass(frozen=True)
class LearningRateRange:
    """The learning rate and the loss of each step."""

    rates: list[float]
    losses: list[float]

    @property
    def smoothed(self) -> list[float]:
        return smooth(self.losses)

    @property
    def suggestion(self) -> float:
        """The rate at which the smoothed loss falls most steeply, against the logarithm of the rate."""
        loss, every = self.smoothed, max(1, len(self.rates) // 20)
        slopes = [loss[i + every] - loss[i] for i in range(len(loss) - every)]
        steepest = slopes.index(min(slopes)) + every // 2 if slopes else 0
        return self.rates[steepest]

    def to_csv(self) -> str:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["lr", "loss", "smoothed"])
        table.writerows(zip(self.rates, self.losses, self.smoothed, strict=True))
        return text.getvalue()

    def figure(self, title: str) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, color="0.8", linewidth=1, label="loss of a step")
        axes.plot(self.rates, self.smoothed, color="C0", label="running mean")
        axes.axvline(self.suggestion, color="C1", linestyle="--", label=f"steepest at {self.suggestion:.2g}")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.5 * self.losses[0])
        axes.set_xlabel("learning rate")
        axes.set_ylabel("training loss")
        axes.set_title(title, parse_math=False)
        axes.legend()
        return figure


def smooth(losses: Sequence[float]) -> list[float]:
    """The exponential moving average, corrected for its bias to zero at the start."""
    mean, means = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        means.append(mean / (1 - SMOOTHING**number))
    return means


def find_learning_rate(config: RunConfig, out: str | Path) -> LearningRateRange:
    """Trains a new network for up to 200 steps while the rate rises from 1e-5 to 10, then discards it.

    Writes ``lr_range.csv`` to the folder ``out``, and ``lr_range.png`` if matplotlib is installed. The test
    ends when the loss diverges.
    """
    trainer = Trainer(config, open_data(config), make_accelerator(config.hardware))
    batches = chain.from_iterable(trainer.batches.epoch(epoch) for epoch in count())
    rates: list[float] = []
    losses: list[float] = []
    say = HalfMinute()
    for step, (images, labels) in zip(range(STEPS), batches, strict=False):
        rate = LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1))
        trainer.recipe = replace(config.recipe, lr=rate, schedule="step", warmup=0.0)
        total, _, seen = trainer.step(images, labels).tolist()
        if not math.isfinite(total):
            break
        rates.append(rate)
        losses.append(total / seen)
        say(f"learning rates: step {step + 1} of {STEPS}, {rate:.2g}")
        if smooth(losses)[-1] > RUNAWAY * min(smooth(losses)):
            break
    found = LearningRateRange(rates, losses)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "lr_range.csv", found.to_csv().encode())
    if find_spec("matplotlib") is not None:
        figure = found.figure(f"{config.model.name} on {Path(config.data.source).name}")
        write_figure(folder / "lr_range.png", figure, dpi=120)
    return found
