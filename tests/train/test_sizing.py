"""Time and memory: the measurement before a run, and the advice when memory runs out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers.tiny_runs import tiny_config

from selfconv.train import Hardware, Run, RunConfig, Trainer, make_accelerator, open_data
from selfconv.train import trainer as trainer_module
from selfconv.train.sizing import Sizing, measure_step


def trainer_of(config: RunConfig) -> Trainer:
    return Trainer(config, open_data(config), make_accelerator(config.hardware))


def test_the_measurement_before_a_run_changes_nothing(data: Path) -> None:
    config = tiny_config(data, "resnet29_asc", ema=0.9)
    trainers = [trainer_of(config) for _ in range(2)]
    found = measure_step(trainers[0])
    assert found.epoch_seconds > 0
    for trainer in trainers:
        trainer.step(*next(trainer.batches.epoch(0)))
    a, b = (trainer.network.state_dict() for trainer in trainers)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert found.advice(trainers[0]) is None
    assert Sizing(7200, 1e9).advice(trainers[0]) == (
        "about 2.0 h an epoch on this machine, 4.0 h in all, and 1.0 GB of memory for a step"
    )
    advice = Sizing(1, 1e15).advice(trainers[0])
    assert advice is not None
    assert "--accumulate 16, or a smaller --image-size or --batch-size needs less" in advice


def test_the_memory_of_a_step_grows_with_its_images(data: Path) -> None:
    config = tiny_config(data, batch_size=4)
    needs = []
    for size in (4, 16):
        config = config.replaced("recipe", batch_size=size)
        trainer = trainer_of(config)
        needs.append(measure_step(trainer).step_bytes)
    assert 3 < needs[1] / needs[0] < 4.1


def test_the_advice_after_out_of_memory_can_be_followed_in_several_processes(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes have 8 images each of a batch of 16; in halves of 4 that is ``--accumulate 2``."""
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(trainer_module, "sync_batch_norm", lambda _: None)
    for accumulate, advice in ((1, 2), (2, 4)):
        trainer = trainer_of(replace(tiny_config(data), hardware=Hardware(accumulate=accumulate)))
        message = str(trainer.out_of_memory(Run(Path("run"))))
        assert f"{8 // accumulate} images at a time; --accumulate {advice} takes half as many" in message
        trainer_of(replace(tiny_config(data), hardware=Hardware(accumulate=advice)))
