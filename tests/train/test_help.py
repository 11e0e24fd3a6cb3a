"""Help for practitioners: the best epoch, early stopping, photometric changes, a test of learning rates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import run_cli, same_weights, tiny_config, tiny_data
from safetensors.torch import load_file

from selfconv.data import Augment, Batches, load_data
from selfconv.train import Interrupted, Recipe, Run, StopSignals, augmentation, find_learning_rate, train
from selfconv.train.files.record import BestEpoch, EpochMetrics
from selfconv.train.files.state import State
from selfconv.train.lr_range import LearningRateRange, smooth
from selfconv.trained import evaluate, open_trained


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("help"))


def history(*accuracies: float) -> State:
    epochs = [
        EpochMetrics(
            epoch=i,
            lr=0.1,
            train_loss=1,
            train_accuracy=0.5,
            val_loss=1,
            val_accuracy=accuracy,
            seconds=1,
            images_per_second=1,
        )
        for i, accuracy in enumerate(accuracies, 1)
    ]
    return State(epoch=len(epochs), history=epochs)


def test_the_best_epoch_is_the_first_of_the_best() -> None:
    assert history().best() is None
    assert history(0.2, 0.5, 0.3, 0.5).best() == BestEpoch(2, 0.5)
    assert not history(0.2, 0.5, 0.3, 0.5).stalled(3)
    assert history(0.2, 0.5, 0.3, 0.5).stalled(2)
    assert not history(0.2, 0.5, 0.3, 0.5).stalled(None)
    assert not history().stalled(1)


@pytest.mark.parametrize("ema", [None, 0.5])
def test_keep_best(data: Path, tmp_path: Path, ema: float | None) -> None:
    options: dict[str, Any] = {"epochs": 4, "lr": 0.5, "ema": ema}  # a rate at which accuracies rise and fall
    record = train(tiny_config(data, keep="best", **options), tmp_path / "best", quiet=True)
    last = train(tiny_config(data, **options), tmp_path / "last", quiet=True)
    metrics = Run.open(tmp_path / "best").metrics
    accuracies = [m.val_accuracy or 0.0 for m in metrics]
    assert record.kept_epoch == accuracies.index(max(accuracies)) + 1
    assert [m.val_accuracy for m in Run.open(tmp_path / "last").metrics] == accuracies
    assert (record.kept_epoch == 4) == same_weights(tmp_path / "best", tmp_path / "last")
    assert last.kept_epoch is None
    found = evaluate(open_trained(tmp_path / "best"), pictures=False)
    assert found.accuracy == pytest.approx(record.test_accuracy)
    short = tiny_config(data, **options | {"epochs": record.kept_epoch})
    assert short.recipe.epochs == record.kept_epoch


class StopAfter(StopSignals):
    """A signal that arrives after some looks at it."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    @property
    def number(self) -> int:
        self.looks -= 1
        return 15 if self.looks < 0 else 0

    @number.setter
    def number(self, value: int) -> None:
        pass


def test_a_stopped_run_keeps_the_same_best(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, epochs=4, lr=0.5, keep="best")
    train(config, tmp_path / "whole", quiet=True)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", quiet=True, stop=StopAfter(18))
    checkpoint = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    assert any(name.startswith("best/") for name in load_file(checkpoint))
    assert open_trained(tmp_path / "run").record is None
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert same_weights(tmp_path / "whole", tmp_path / "run")


def test_early_stopping(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, epochs=30, lr=1e-9, patience=2)  # nothing is learned, so nothing improves
    record = train(config, tmp_path / "run", quiet=True)
    accuracies = [m.val_accuracy or 0.0 for m in Run.open(tmp_path / "run").metrics]
    assert record.epochs == len(accuracies) == accuracies.index(max(accuracies)) + 3 < 30
    assert open_trained(tmp_path / "run").record == record
    assert train(config, tmp_path / "run", resume=True, quiet=True) == record


def test_validation_images_are_needed(data: Path, tmp_path: Path) -> None:
    choices: list[dict[str, Any]] = [{"keep": "best"}, {"patience": 2}]
    for options in choices:
        config = tiny_config(data, **options).replaced("data", validation=0.0)
        with pytest.raises(ValueError, match="keep best and patience: expected validation images; got none"):
            train(config, tmp_path / "run", quiet=True)
    with pytest.raises(
        ValueError, match="colour: expected images with channels to change; got grey ones, tiny"
    ):
        train(tiny_config(data, colour=0.5), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="patience: expected an integer ≥ 1; got 0"):
        Recipe(patience=0)
    with pytest.raises(ValueError, match="erase: expected a number from 0 to 1; got 2"):
        Recipe(erase=2)


def batch(augment: Augment | None) -> torch.Tensor:
    split = load_data("digits").train
    return torch.cat(
        [x for x, _ in Batches(split, 256, mean=[0.3], std=[0.5], augment=augment, seed=1).epoch(0)]
    )


class TestLooks:
    def test_augmentations_are_off_by_default(self) -> None:
        plain = batch(Augment(flip=True, pad=1))
        assert torch.equal(plain, batch(Augment(flip=True, pad=1, erase=0.0)))
        recipe = Recipe()
        assert not any((recipe.brightness, recipe.contrast, recipe.colour, recipe.erase))

    def test_a_recipe_names_them_all(self) -> None:
        changes: dict[str, Any] = {
            "flip": False, "pad": 3, "rotate": "any",
            "brightness": 0.1, "contrast": 0.2, "colour": 0.3, "erase": 0.4,
        }  # fmt: skip
        assert augmentation(Recipe(**changes)) == Augment(**changes)

    def test_brightness(self) -> None:
        change = (batch(Augment(brightness=0.2)) - batch(None)) * 0.5
        per_image = change.flatten(1)
        assert per_image.std(1).max() < 1e-5
        assert 0.19 < per_image.abs().max() <= 0.2 + 1e-5
        assert abs(per_image.mean()) < 0.02

    def test_contrast(self) -> None:
        plain, changed = batch(None), batch(Augment(contrast=0.4))
        factor = (changed.flatten(1) * plain.flatten(1)).sum(1) / plain.flatten(1).square().sum(1)
        torch.testing.assert_close(changed, plain * factor.view(-1, 1, 1, 1))
        assert 0.6 <= factor.min() < 0.65
        assert 1.35 < factor.max() <= 1.4 + 1e-5

    def test_erase(self) -> None:
        plain, changed = batch(None), batch(Augment(erase=0.3))
        erased = (changed != plain).flatten(1)
        assert (changed[changed != plain] == 0).all()
        assert 0.3 < (erased.any(1)).float().mean() < 0.55
        assert 0.1 < erased.float().mean(1).max() < 0.4

    def test_colour_leaves_grey_images_alone(self) -> None:
        torch.testing.assert_close(batch(Augment(colour=0.5)), batch(None))

    @pytest.mark.parametrize("name", ["brightness", "contrast", "colour", "erase"])
    def test_limits(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name}: expected a number from 0 to 1; got -0.1"):
            replace(Augment(), **{name: -0.1})  # type: ignore[arg-type]


class TestLearningRates:
    def test_the_steepest_descent(self) -> None:
        rates = [1e-5 * 10 ** (i / 33) for i in range(200)]
        losses = [2.3 - 1.5 / (1 + math.exp(-8 * (math.log10(rate) + 2))) for rate in rates]  # falls at 0.01
        assert 0.005 < LearningRateRange(rates, losses).suggestion < 0.05
        assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3, 3, 3])

    def test_a_run(self, data: Path, tmp_path: Path) -> None:
        found = find_learning_rate(tiny_config(data), tmp_path / "x")
        assert 1e-5 < found.suggestion < 10
        assert found.rates == sorted(found.rates)
        assert {path.name for path in (tmp_path / "x").iterdir()} == {"lr_range.csv", "lr_range.png"}
        assert len((tmp_path / "x" / "lr_range.csv").read_text().splitlines()) == len(found.rates) + 1

    def test_the_lr_range_command(
        self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ["--depth", "11", "--widths", "8", "8", "8", "--model", "resnet29", "--batch-size", "16"]
        assert run_cli("train", "--data", data, *options, "--out", tmp_path / "run", "--lr-range") == 0
        assert "the loss falls most steeply at a learning rate of" in capsys.readouterr().out
        assert (tmp_path / "run-lr" / "lr_range.png").exists()
        assert not (tmp_path / "run").exists()
