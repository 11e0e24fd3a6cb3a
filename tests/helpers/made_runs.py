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
    evaluation: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A finished run; ``changes`` replace fields of its record, where None leaves one out."""
    config = RunConfig.of(data, model).replaced("model", **options or {}).replaced("recipe", **recipe or {})
    content = config.to_json() | {"seed": seed}
    record = {
        "model": model,
        "parameters": parameters,
        "data": {
            "name": data,
            "digest": digest,
            "images": {"train": images, "val": 5000, "test": 10_000},
        },
        "config": content,
        "seed": seed,
        "test_accuracy": accuracy,
        "train_seconds": 3600.0,
        "images_per_second": 250.0,
        "versions": VERSIONS,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "machine": MACHINE,
    } | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "record.json").write_text(json.dumps({k: v for k, v in record.items() if v is not None}))
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"epoch": epoch, "train_accuracy": train, "val_accuracy": val}) + "\n"
            for epoch, (train, val) in enumerate(curve, 1)
        )
    )
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def make_plan(folder: Path, trials: Sequence[dict[str, Any]], **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    plan = {"plan": "made", "title": "A made plan", "data": "cifar10", "reduced": [], "trials": list(trials)}
    (folder / "plan.json").write_text(json.dumps(plan | fields))
    return folder
