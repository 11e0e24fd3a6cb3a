"""Runs that take seconds: a small network on a few of the digits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from selfconv import cli
from selfconv.data import load_data
from selfconv.train import DataOptions, ModelOptions, Recipe, RunConfig

PATIENCE = 600  # seconds that tests wait for processes: on a busy machine they take minutes, a hang forever
OPTIONS = ["--depth", "11", "--widths", "8", "8", "8", "--batch-size", "16", "--epochs", "3"]


def tiny_data(folder: Path) -> Path:
    """An .npz file of 100 digits to train on and 40 to test."""
    data = load_data("digits", validation=0.0)
    path = folder / "tiny.npz"
    arrays: dict[str, Any] = {}
    for part, split, count in (("train", data.train, 100), ("test", data.test, 40)):
        arrays[f"x_{part}"] = split.images[:count].permute(0, 2, 3, 1).numpy()
        arrays[f"y_{part}"] = split.labels[:count].numpy()
    np.savez(path, **arrays)
    return path


def tiny_config(data: Path, model: str = "resnet29", seed: int = 0, **recipe: Any) -> RunConfig:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 16, "schedule": "cosine", "flip": False, "pad": 1}
    return RunConfig(
        model=ModelOptions(name=model, depth=11, widths=(8, 8, 8)),
        data=DataOptions(source=str(data)),
        recipe=Recipe(**options | recipe),
        seed=seed,
    )


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "selfconv.cli", *map(str, args)]


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", **extra}


def run_cli(*args: str | Path) -> int:
    """The exit code of a command, in this process."""
    try:
        cli.main([str(arg) for arg in args])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def selfconv(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    return subprocess.run(
        command(*args), capture_output=True, text=True, env=environment(), timeout=PATIENCE, **options
    )


def same_weights(a: Path, b: Path) -> bool:
    """Whether two finished runs ended with the same bits."""
    left, right = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    return left.keys() == right.keys() and all(
        left[name].numpy().tobytes() == right[name].numpy().tobytes() for name in left
    )
