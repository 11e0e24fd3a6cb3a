"""Folders of runs that nobody trained: records with chosen numbers, as ``selfconv train`` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfconv.train import RunConfig

MACHINE = {"system": "Linux-6.1", "cpu": "Example 3000", "cores": 2, "threads": 1, "device": "cpu"}
VERSIONS = {"selfconv": "0.1.0", "python": "3.11.7", "torch": "2.13.0"}


def make_run(
    folder: Path,
    model: str = "resnet29",
    accuracy: float = 0.91,
    *,
    seed: int = 0,
    data: str = "cifar10",
    parameters: int = 313_114,
    options: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    images: int = 45_000,
    digest: str = "0" * 64,
    curve: Sequence[tuple[float, float | None]] = ((0.5, 0.4), (0.8, 0.7)),
    turned: Sequence[float] | None = None,
    equivariance_error: float = 1e-6,
    entropy: dict[str, float] | None = None,
    **changes: Any,
) -> Path:
    """A finished run; ``changes`` replace fields of its record, where None leaves one out.

    Args:
        turned: accuracies at 90°, 180° and 270°, if it is evaluated.
        entropy: of attention in its layers, if it is evaluated.
    """
    config = RunConfig.of(data, model).replaced("model", **options or {}).replaced("recipe", **recipe or {})
    content = config.to_json() | {"seed": seed}
    record = {
        "model": model,
        "parameters": parameters,
        "model_config": {},
        "data": {
            "name": data,
            "digest": digest,
            "class_names": ["cat", "dog"],
            "in_channels": 3,
            "size": 32,
            "mean": [0.5, 0.5, 0.5],
            "std": [0.25, 0.25, 0.25],
            "images": {"train": images, "val": 5000, "test": 10_000},
        },
        "config": content,
        "seed": seed,
        "processes": 1,
        "epochs": config.recipe.epochs,
        "train_loss": 0.5,
        "train_accuracy": 0.8,
        "val_accuracy": 0.7,
        "best_val_accuracy": {"epoch": 1, "accuracy": 0.7},
        "test_loss": 0.5,
        "test_accuracy": accuracy,
        "train_seconds": 3600.0,
        "images_per_second": 250.0,
        "versions": VERSIONS,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "machine": MACHINE,
    } | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "data.json").write_text(json.dumps(record["data"]))
    (folder / "record.json").write_text(json.dumps({k: v for k, v in record.items() if v is not None}))
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "epoch": epoch,
                    "lr": 0.1,
                    "train_loss": 1.0,
                    "train_accuracy": train,
                    "val_loss": None if val is None else 1.0,
                    "val_accuracy": val,
                    "seconds": 36.0,
                    "images_per_second": 250.0,
                }
            )
            + "\n"
            for epoch, (train, val) in enumerate(curve, 1)
        )
    )
    if turned is not None:
        views = {"0°": 0.5, **dict(zip(("90°", "180°", "270°"), turned, strict=True)), "mirrored": 0.5}
        evaluation = {
            "data": data,
            "images": 4,
            "loss": 0.5,
            "accuracy": 0.5,
            "accuracy_under": views,
            "class_accuracy": {"cat": 0.5, "dog": 0.5},
            "confusion": [[1, 1], [1, 1]],
            "equivariance_error": equivariance_error,
            "rotation": {
                "angles": [*range(0, 360, 15)],
                "accuracy": [accuracy if angle % 90 else min(turned) for angle in range(0, 360, 15)],
                "images": 100,
            },
            "attention_entropy": entropy,
        }
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def make_plan(folder: Path, trials: Sequence[dict[str, Any]], **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    plan = {"plan": "made", "title": "A made plan", "data": "cifar10", "reduced": [], "trials": list(trials)}
    (folder / "plan.json").write_text(json.dumps(plan | fields))
    return folder
