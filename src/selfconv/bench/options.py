"""What ``selfconv bench`` may be asked for, apart from it, so that ``--help`` need not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PAIRS = {  # model: its convolutional counterpart
    "resnet29": "resnet29",
    "resnet29_se": "resnet29",
    "resnet29_sasa": "resnet29",
    "resnet29_simple_asc": "resnet29",
    "resnet29_asc": "resnet29",
    "resnet29_asc_se": "resnet29",
    "p4resnet29": "p4resnet29",
    "p4resnet29_se": "p4resnet29",
    "p4resnet29_asc": "p4resnet29",
}


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how long."""

    sections: tuple[Literal["ops", "growth", "models"], ...] = ("ops", "growth", "models")
    device: str = "cpu"
    """cpu, or cuda, where the Triton kernels run."""
    threads: int | None = None
    """CPU threads; by default torch's own number."""
    batch: tuple[int, ...] = (1, 64)
    """Batch sizes for the operation."""
    model_batch: int = 128
    """Batch size for the networks."""
    models: tuple[str, ...] = tuple(PAIRS)
    """Networks to time, each beside its convolutional counterpart."""
    seconds: float = 3.0
    """Seconds per comparison of the operation; networks get sixteen times as long."""
    quick: bool = False
    """Only the stage shapes and two networks, briefly: a check that everything works."""
    out: Path | None = field(default=None)
    """A folder for bench.json, performance.md and the plots. What an earlier run left there stays, operation
    or networks, if it is not measured again."""
