"""Trains one network from a config: the trainer, its checkpoints, and the files of a run."""

from typing import TYPE_CHECKING

from selfconv._lazy import lazy
from selfconv.train.config import (
    RECIPES,
    DataOptions,
    Hardware,
    ModelOptions,
    Recipe,
    RecipeName,
    RunConfig,
    default_recipe,
    differences,
    fast_recipe,
    paper_recipe,
    short_recipe,
)
from selfconv.train.stopping import (
    Diverged,
    Interrupted,
    OutOfMemory,
    RunBusy,
    RunError,
    RunStopped,
    StopSignals,
    is_out_of_memory,
)

if TYPE_CHECKING:
    from selfconv.train.files.checkpoints import Checkpoint, load_last
    from selfconv.train.files.record import BestEpoch, EpochMetrics, Machine, Record, initial_options
    from selfconv.train.files.runs import Run, holds_model, open_data, read_metrics
    from selfconv.train.files.state import MetricTotals
    from selfconv.train.lr_range import LearningRateRange, find_learning_rate
    from selfconv.train.progress import Progress, Watch
    from selfconv.train.runner import train
    from selfconv.train.setup import augmentation, build_model, make_accelerator
    from selfconv.train.trainer import Trainer
else:
    __getattr__, __dir__ = lazy(
        __name__,
        lr_range=["LearningRateRange", "find_learning_rate"],
        progress=["Progress", "Watch"],
        runner=["train"],
        setup=["augmentation", "build_model", "make_accelerator"],
        trainer=["Trainer"],
        **{
            "files.checkpoints": ["Checkpoint", "load_last"],
            "files.record": ["BestEpoch", "EpochMetrics", "Machine", "Record", "initial_options"],
            "files.runs": ["Run", "holds_model", "open_data", "read_metrics"],
            "files.state": ["MetricTotals"],
        },
    )

__all__ = [
    "RECIPES",
    "BestEpoch",
    "Checkpoint",
    "DataOptions",
    "Diverged",
    "EpochMetrics",
    "Hardware",
    "Interrupted",
    "LearningRateRange",
    "Machine",
    "MetricTotals",
    "ModelOptions",
    "OutOfMemory",
    "Progress",
    "Recipe",
    "RecipeName",
    "Record",
    "Run",
    "RunBusy",
    "RunConfig",
    "RunError",
    "RunStopped",
    "StopSignals",
    "Trainer",
    "Watch",
    "augmentation",
    "build_model",
    "default_recipe",
    "differences",
    "fast_recipe",
    "find_learning_rate",
    "holds_model",
    "initial_options",
    "is_out_of_memory",
    "load_last",
    "make_accelerator",
    "open_data",
    "paper_recipe",
    "read_metrics",
    "short_recipe",
    "train",
]
