"""The recipe and the loop: rates, gradients, running means, precision, and what a run ends with."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_runs import same_weights, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from selfconv import _version
from selfconv._memory import keep_memory
from selfconv.data import Batches, load_data
from selfconv.models import ResNet, create_model
from selfconv.nn import GroupBatchNorm, GroupLayerNorm
from selfconv.train import (
    RECIPES,
    Diverged,
    Hardware,
    Recipe,
    RecipeName,
    Run,
    RunConfig,
    Trainer,
    make_accelerator,
    open_data,
    paper_recipe,
    train,
)
from selfconv.train.files.record import commit
from selfconv.train.setup import learning_rate, parameter_groups
from selfconv.trained import open_trained

# ---- the recipe ----


def test_the_papers_recipe() -> None:
    recipe = RunConfig.of("cifar10", "resnet29").recipe
    assert recipe == Recipe(
        epochs=100, batch_size=128, lr=0.1, schedule="step", warmup=0.0, momentum=0.9, weight_decay=1e-4,
        decay="all", label_smoothing=0.0, clip=None, ema=None, flip=True, pad=2, rotate="none", sizes=None,
    )  # fmt: skip
    rates = [learning_rate(recipe, epoch, 0, 351) for epoch in range(100)]
    assert rates == pytest.approx([0.1] * 50 + [0.01] * 25 + [0.001] * 25)


@pytest.mark.parametrize(
    ("model", "epochs"), [("resnet29_asc", 100), ("p4resnet83_asc", 200), ("resnet29_sasa", 100)]
)
def test_attention_models_warm_up_over_ten_epochs(model: str, epochs: int) -> None:
    recipe = paper_recipe(model)
    assert recipe.epochs == epochs
    rates = [learning_rate(recipe, epoch, 0, 351) for epoch in range(12)]
    assert rates == pytest.approx([0.01 * (epoch + 1) for epoch in range(10)] + [0.1, 0.1])


def test_the_papers_recipe_scales_with_the_epochs() -> None:
    recipe = replace(paper_recipe("resnet29_asc"), epochs=20)
    rates = [learning_rate(recipe, epoch, 0, 351) for epoch in range(20)]
    assert rates == pytest.approx([0.05] + [0.1] * 9 + [0.01] * 5 + [0.001] * 5)


@given(st.integers(1, 30), st.integers(1, 50), st.floats(0, 0.9))
def test_the_cosine_rises_then_falls_to_zero(epochs: int, steps: int, warmup: float) -> None:
    recipe = Recipe(epochs=epochs, schedule="cosine", warmup=warmup, lr=0.3)
    rates = [learning_rate(recipe, epoch, step, steps) for epoch in range(epochs) for step in range(steps)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert all(0 < r <= 0.3 for r in rates)
    total = epochs * steps
    if total * (1 - warmup) >= 10:
        assert rates[-1] < 0.3 * 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: expected an integer ≥ 1; got 0"),
        ({"epochs": -3}, "epochs: expected an integer ≥ 1; got -3"),
        ({"batch_size": 0}, "batch_size: expected"),
        ({"lr": 0.0}, "lr: expected a number > 0; got 0.0"),
        ({"lr": math.nan}, "lr: expected a number > 0; got nan"),
        ({"momentum": 0.0}, "momentum: expected"),
        ({"warmup": 1.0}, "warmup: expected 0 ≤ warmup < 1; got 1.0"),
        ({"ema": 1.0}, "ema: expected"),
        ({"weight_decay": -1.0}, "weight_decay: expected"),
        ({"clip": 0.0}, "clip: expected a number > 0; got 0.0"),
        ({"sizes": ()}, "sizes: expected one or more fractions, 0 < size ≤ 1; got []"),
        ({"sizes": (0.5, 0)}, "sizes: expected one or more fractions, 0 < size ≤ 1; got [0.5, 0]"),
        ({"sizes": (1, 0.5)}, "sizes: expected the last to be 1, the size of the test images; got [1, 0.5]"),
    ],
)
def test_invalid_recipes(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe(**options)


def test_every_recipe_has_a_name_for_the_command() -> None:
    assert tuple(RECIPES) == get_args(RecipeName)


# ---- the configuration as JSON ----


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_json_round_trip(recipe: str) -> None:
    config = RunConfig.of("cifar10", "p4resnet29_asc", recipe).replaced("model", widths=(8, 16, 32))
    config = config.replaced("recipe", clip=1.0, epochs=7, sizes=(0.625, 0.75, 1.0))
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"config: expected an object; got \[\]"),
        ({"modle": {}}, "unknown option 'modle'"),
        ({"recipe": {"epochs": "3"}}, "epochs: expected int; got '3'"),
        ({"recipe": {"epochs": True}}, "epochs: expected int; got True"),
        ({"recipe": {"schedule": "linear"}}, "schedule: expected one of step, cosine; got 'linear'"),
        ({"model": {"widths": [1, 2]}}, "widths: expected 3 values"),
        ({"recipe": {"epochs": 0}}, "epochs: expected an integer ≥ 1"),
        ({"hardware": {"checkpoint_minutes": float("inf")}}, "checkpoint_minutes: expected a finite number"),
        ({"seed": 10**30}, "seed: expected an integer of 64 bits; got one of 100 bits"),
    ],
)
def test_unusable_json(content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.from_json(content)


# ---- a step ----


def trainer_of(config: RunConfig) -> Trainer:
    return Trainer(config, open_data(config), make_accelerator(config.hardware))


def test_a_step_is_sgd_with_nesterov_momentum(data: Path) -> None:
    """Two steps, against the update rule written out."""
    config = tiny_config(data, lr=0.05, schedule="step", weight_decay=1e-3, epochs=8)
    trainer, other = trainer_of(config), trainer_of(config)
    network, velocity = other.network.train(), [torch.zeros_like(p) for p in other.network.parameters()]
    for images, labels in list(trainer.batches.epoch(0))[:2]:
        trainer.step(images, labels)
        loss = F.cross_entropy(network(images), labels)
        grads = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for p, g, v in zip(network.parameters(), grads, velocity, strict=True):
                g = g + 1e-3 * p
                v.mul_(0.9).add_(g)
                p.sub_(0.05 * (g + 0.9 * v))
    for p, q in zip(trainer.network.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", ["all", "maps"])
@pytest.mark.parametrize("model", ["resnet29_asc_se", "p4resnet29_simple_asc", "resnet29_sasa"])
def test_what_weight_decay_acts_on(model: str, decay: Literal["all", "maps"]) -> None:
    network = create_model(model, depth=11)
    names = {parameter: name for name, parameter in network.named_parameters()}
    recipe = Recipe(weight_decay=0.5, decay=decay)
    decays = {
        names[parameter]: group["weight_decay"]
        for group in parameter_groups(network, recipe)
        for parameter in group["params"]
    }
    assert decays.keys() == set(names.values())
    for name, value in decays.items():
        spared = re.search(r"psi|beta|b_in|norm|bias", name) is not None
        assert value == (0.0 if spared and decay == "maps" else 0.5), name


def test_no_norm_decays_with_the_maps() -> None:
    class OwnNorm(nn.LayerNorm):
        pass

    norms = [
        GroupBatchNorm(4, group="p4"), GroupLayerNorm(4, group="p4"), nn.BatchNorm1d(4),
        nn.LayerNorm([4, 8, 8]), OwnNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True),
        nn.RMSNorm([4, 8]),
    ]  # fmt: skip
    maps = [nn.Conv2d(3, 4, 3), nn.Linear(4, 2)]
    decaying, others = parameter_groups(nn.Sequential(*norms, *maps), Recipe(decay="maps"))
    assert {*decaying["params"]} == {layer.weight for layer in maps}
    assert others["weight_decay"] == 0
    assert len(parameter_groups(nn.Sequential(*norms, *maps), Recipe(decay="all"))) == 1


@given(st.integers(1, 40), st.lists(st.integers(1, 16), min_size=1, max_size=8, unique=True))
def test_sizes_share_the_epochs_evenly(epochs: int, sixteenths: list[int]) -> None:
    sizes = sorted({*sixteenths, 16})  # the full size comes last
    recipe = Recipe(epochs=epochs, sizes=tuple(size / 16 for size in sizes))
    seen = recipe.all_sizes(64)
    assert seen == sorted(seen)
    assert all(abs(seen.count(4 * size) - epochs / len(sizes)) < 1 for size in sizes)


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 300))
def test_sizes_keep_p4_exact(share: float, full: int) -> None:
    """Multiples of 4 halve twice; the full size is what it is, and none is larger."""
    size = Recipe(sizes=(share, 1.0)).size_in(0, full)
    assert 1 <= size <= full
    assert size == full or (size % 4 == 0 and (abs(size - share * full) <= 2 or size == 4))
    assert Recipe().size_in(0, full) == Recipe(sizes=(1.0,)).size_in(0, full) == full


def test_training_on_smaller_images_first(data: Path, tmp_path: Path) -> None:
    """The network trains on the sides of the recipe, and is validated and tested on full size."""
    seen: list[tuple[bool, int]] = []
    forward = ResNet.forward

    def note(self: ResNet, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:  # the check of the sizes before the run
            seen.append((self.training, x.shape[-1]))
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResNet, "forward", note)
        train(tiny_config(data, epochs=3, sizes=(0.5, 0.75, 1.0)), tmp_path / "run", quiet=True)
    full = open_data(tiny_config(data)).size
    assert list(dict.fromkeys(size for training, size in seen if training)) == [8, 12, 16]
    assert {size for training, size in seen if not training} == {full}


def test_accumulated_gradients_are_those_of_the_whole_batch(data: Path) -> None:
    """Batch norm sees the parts, so it is taken out of the comparison."""
    results = []
    for accumulate in (1, 4):
        config = replace(tiny_config(data, lr=0.01), hardware=Hardware(accumulate=accumulate))
        trainer = trainer_of(config)
        for layer in trainer.network.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.forward = lambda x: x  # type: ignore[assignment, method-assign]
        for images, labels in list(trainer.batches.epoch(0))[:3]:
            trainer.step(images, labels)
        results.append([p.detach().clone() for p in trainer.network.parameters()])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_batch_that_does_not_split_evenly(data: Path) -> None:
    config = replace(tiny_config(data), hardware=Hardware(accumulate=3))
    with pytest.raises(
        ValueError, match="batch_size: expected a multiple of accumulate × processes = 3; got 16"
    ):
        trainer_of(config)


def test_values_outside_the_range_cause_a_warning(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, epochs=1).replaced("data", pixel_range="0,100")
    with pytest.warns(
        UserWarning, match=r"tiny: \d\d% of the values are above the range 0 to 100, and are clipped"
    ):
        train(config, tmp_path / "run", quiet=True)


def test_clipping_bounds_the_step(data: Path) -> None:
    config = tiny_config(data, clip=1e-3, weight_decay=0.0, momentum=0.5, schedule="step", lr=1.0)
    trainer = trainer_of(config)
    before = [p.detach().clone() for p in trainer.network.parameters()]
    trainer.step(*next(trainer.batches.epoch(0)))
    change = sum(
        (p - q).square().sum() for p, q in zip(trainer.network.parameters(), before, strict=True)
    ).sqrt()
    assert change.item() == pytest.approx(1e-3 * 1.5, rel=1e-2)  # Nesterov's first step is (1 + momentum) g


def test_the_running_mean_of_the_weights(data: Path) -> None:
    trainer = trainer_of(tiny_config(data, ema=0.75))
    expected = {k: v.clone() for k, v in trainer.network.state_dict().items()}
    for images, labels in list(trainer.batches.epoch(0))[:3]:
        trainer.step(images, labels)
        for name, value in trainer.network.state_dict().items():
            mixed = 0.75 * expected[name] + 0.25 * value
            expected[name] = mixed if value.is_floating_point() else value.clone()
    own = {k: v.clone() for k, v in trainer.network.state_dict().items()}
    trainer.evaluate(trainer.val, trainer.final_weights())
    assert all(torch.equal(own[k], v) for k, v in trainer.network.state_dict().items())
    for name, value in trainer.load_final_weights().state_dict().items():
        torch.testing.assert_close(value, expected[name])


def test_an_error_during_evaluation_keeps_the_weights_of_the_training(data: Path) -> None:
    trainer = trainer_of(tiny_config(data, ema=0.75))
    trainer.step(*next(trainer.batches.epoch(0)))
    own = {k: v.clone() for k, v in trainer.network.state_dict().items()}
    trainer.network.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(trainer.val, trainer.final_weights())
    assert not torch.equal(own["fc.weight"], trainer.ema_weights["fc.weight"])  # the test can tell
    assert all(torch.equal(own[k], v) for k, v in trainer.network.state_dict().items())


def test_label_smoothing_changes_the_loss(data: Path) -> None:
    plain, smooth = (trainer_of(tiny_config(data, label_smoothing=s)) for s in (0.0, 0.3))
    batch = next(plain.batches.epoch(0))
    assert not math.isclose(plain.step(*batch)[0].item(), smooth.step(*batch)[0].item(), rel_tol=1e-3)


# ---- whole runs ----


@pytest.mark.parametrize("model", ["resnet29", "p4resnet29_asc"])
def test_files_of_a_finished_run(data: Path, tmp_path: Path, model: str) -> None:
    config = tiny_config(data, model)
    record = train(config, tmp_path / "run", quiet=True)
    run = Run.open(tmp_path / "run")
    assert run.finished
    assert run.config == config
    assert run.record == record
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["epoch"] for m in metrics] == [1, 2]
    assert all(0 <= m["train_accuracy"] <= 1 and m["images_per_second"] > 0 for m in metrics)
    assert list(run.folder.glob("events.out.tfevents.*"))
    assert len(list(run.checkpoints.iterdir())) == 2
    model_there = ResNet.from_pretrained(run.folder / "model")
    assert model_there.num_classes == 10
    for key in ("model", "parameters", "seed", "val_accuracy", "test_accuracy", "train_seconds", "versions"):
        assert getattr(record, key) is not None
    assert record.data.digest == load_data(data).digest
    assert record.machine.threads == torch.get_num_threads()
    assert record.versions["torch"] == torch.__version__


def test_a_record_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        user = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        return subprocess.check_output(["git", *user, *arguments], cwd=tmp_path, text=True).strip()

    package = tmp_path / Path(_version.__file__).relative_to(Path(__file__).parents[2])
    package.parent.mkdir(parents=True)
    package.write_text("")
    monkeypatch.setattr(_version, "__file__", str(package))
    assert commit() is None
    git("init", "--quiet")
    assert commit() is None  # nothing is committed yet
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    assert commit() == git("rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("not of the repository")
    assert commit() == git("rev-parse", "HEAD")
    package.write_text("changed")
    assert commit() == git("rev-parse", "HEAD") + "+"


def test_test_images_are_used_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    evaluate = Trainer.evaluate

    def counted(self: Trainer, batches: Batches, weights: dict[str, torch.Tensor]) -> object:
        seen.append("test" if batches is self.test else "val")
        return evaluate(self, batches, weights)

    monkeypatch.setattr(Trainer, "evaluate", counted)
    train(tiny_config(data, epochs=3), tmp_path / "run", quiet=True)
    assert seen == ["val", "val", "val", "test"]


def test_results_depend_on_the_seed(data: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_config(data, seed=seed, epochs=1), tmp_path / name, quiet=True)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_the_loss_falls(tmp_path: Path, data: Path) -> None:
    train(tiny_config(data, "resnet29_asc", epochs=16, lr=0.2), tmp_path / "run", quiet=True)
    losses = [
        json.loads(line)["train_loss"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < 0.7 * losses[0]


def test_a_convolutional_network_trained_upright_loses_its_accuracy_when_images_turn(tmp_path: Path) -> None:
    from selfconv.trained import evaluate

    config = RunConfig.of("digits", "resnet29").replaced("model", depth=11, widths=(8, 8, 8))
    record = train(config.replaced("recipe", epochs=4), tmp_path / "run", quiet=True)
    under = evaluate(open_trained(tmp_path / "run")).accuracy_under
    assert record.test_accuracy == under["0°"] > 0.8
    assert max(under["90°"], under["270°"]) < 0.4


def test_bf16(data: Path, tmp_path: Path) -> None:
    config = replace(tiny_config(data, "resnet29_asc", epochs=1), hardware=Hardware(precision="bf16"))
    record = train(config, tmp_path / "run", quiet=True)
    assert math.isfinite(record.test_loss)
    assert all(p.dtype == torch.float32 for p in open_trained(tmp_path / "run").model.parameters())


def test_without_validation_images(data: Path, tmp_path: Path) -> None:
    record = train(tiny_config(data, epochs=1).replaced("data", validation=0.0), tmp_path / "run", quiet=True)
    assert record.val_accuracy is None
    assert record.best_val_accuracy is None
    assert record.data.images["val"] == 0


def test_nan_stops_the_run_and_keeps_the_last_good_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_config(data, epochs=2), tmp_path / "good", quiet=True)
    step = Trainer.step

    def poisoned(self: Trainer, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.state.epoch == 1 and self.state.step == 2:
            images = images * math.nan
        return step(self, images, labels)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(Diverged, match="the loss is nan in epoch 2, step 3; the last finite weights are in"):
        train(tiny_config(data, epochs=2), tmp_path / "run", quiet=True)
    run = Run.open(tmp_path / "run")
    assert not run.finished
    assert all(torch.isfinite(value).all() for value in open_trained(run.folder).model.state_dict().values())
    monkeypatch.undo()
    train(tiny_config(data, epochs=2), tmp_path / "run", quiet=True, resume=True)
    assert same_weights(tmp_path / "good", tmp_path / "run")


@pytest.mark.parametrize("saved", ["by the clock", "by a signal", "after the epoch"])
def test_weights_that_a_step_made_infinite_are_not_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str
) -> None:
    """Its loss was still finite: the next one would be the first to show it."""
    minutes = 0.0 if saved == "by the clock" else 10.0
    config = replace(tiny_config(data), hardware=Hardware(checkpoint_minutes=minutes))
    config = config.replaced("data", validation=0.0)
    train(config, tmp_path / "good", quiet=True)
    step = Trainer.step

    def overflowing(self: Trainer, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        last = len(self.batches) - 1 if saved == "after the epoch" else 2
        poisoned = (self.state.epoch, self.state.step) == (1, last)
        totals = step(self, images, labels)
        if poisoned:
            self.network.state_dict()["fc.weight"][0, 0] = math.inf
            if saved == "by a signal":
                signal.raise_signal(signal.SIGTERM)
        return totals

    monkeypatch.setattr(Trainer, "step", overflowing)
    message = "the loss is" if saved == "by the clock" else "a weight is infinite or NaN in epoch 2, step"
    with pytest.raises(Diverged, match=f"{message} .*; the last finite weights are in"):
        train(config, tmp_path / "run", quiet=True)
    weights = open_trained(tmp_path / "run").model.state_dict().values()
    assert all(torch.isfinite(value).all() for value in weights)
    monkeypatch.undo()
    train(config, tmp_path / "run", quiet=True, resume=True)
    assert same_weights(tmp_path / "good", tmp_path / "run")


def test_caching_allocator() -> None:
    import platform

    assert keep_memory() == (platform.libc_ver()[0] == "glibc")
