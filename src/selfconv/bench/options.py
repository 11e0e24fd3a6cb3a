"""The options of ``selfconv bench``, in a separate module so that ``--help`` does not import torch."""

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

INFERENCE = ("resnet29", "resnet29_asc", "p4resnet29", "p4resnet29_asc")  # whose forms are compared

Section = Literal["ops", "growth", "models", "inference", "windows"]


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and for how long."""

    sections: tuple[Section, ...] = ("ops", "growth", "models")
    """inference: trained networks as torch, optimised, exported with torch.export, compiled and in ONNX
    Runtime. windows: rectangles, dilation and borders beside square windows, as time per tap."""
    device: str = "cpu"
    """cpu, or cuda, which uses the Triton kernels."""
    threads: int | None = None
    """CPU threads; by default torch's setting."""
    batch: tuple[int, ...] = (1, 64)
    """Batch sizes for the operation."""
    model_batch: int = 128
    """Batch size for the networks."""
    models: tuple[str, ...] = tuple(PAIRS)
    """Networks to time, each compared with its convolutional counterpart."""
    seconds: float = 3.0
    """Seconds per comparison of the operation; networks get sixteen times as long."""
    quick: bool = False
    """Measure only the stage shapes and two networks, briefly, to check that everything works."""
    out: Path | None = field(default=None)
    """Folder for bench.json, performance.md and the plots. Earlier results in it are kept if they are not
    measured again."""
