"""Trains a network: single steps and epochs, and its complete state in checkpoints.

Hugging Face accelerate handles devices, processes, mixed precision and gradient accumulation. The images are
in memory, and a batch is a function of (seed, epoch, step), so there is no data loader.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv._files import parse
from selfconv.data import Batches, DataInfo, Dataset
from selfconv.models import ResNet, load_initial, mismatches
from selfconv.train import checkpoints
from selfconv.train.checkpoints import Checkpoint, MetricTotals, SavedState, State
from selfconv.train.config import RunConfig
from selfconv.train.distributed import sync_batch_norm
from selfconv.train.progress import Journal, Progress
from selfconv.train.record import EpochMetrics
from selfconv.train.runs import Run
from selfconv.train.setup import (
    augmentation,
    build_model,
    learning_rate,
    make_loss,
    make_optimizer,
)
from selfconv.train.stopping import (
    RunError,
    StopSignals,
    check_finite,
    interruption,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

EVALUATION_BATCH = 256


class Trainer:
    """A network in training: its weights, optimizer, moving average of the weights, and batches.

    ``step`` trains on one batch, ``fit`` on all remaining epochs; ``checkpoint`` and ``restore`` save and
    load the complete state in between.
    """

    def __init__(self, config: RunConfig, data: Dataset, accelerator: Accelerator) -> None:
        recipe, hardware = config.recipe, config.hardware
        self.config, self.recipe, self.accelerator = config, recipe, accelerator
        self.state, self.image_size = State(), data.size
        torch.manual_seed(config.seed)
        network = build_model(config, DataInfo.of(data))
        if config.model.init is not None:
            network.start_from(load_initial(config.model.init))
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if accelerator.num_processes > 1 and hardware.sync_batch_norm:
            sync_batch_norm(self.network)
        self.model, self.optimizer = accelerator.prepare(self.network, make_optimizer(self.network, recipe))
        self.mean_weights = self._weights(copied=True) if recipe.ema is not None else {}
        self.batches = self._batches(
            data, "train", recipe.batch_size, shuffle=True, seed=config.seed, augment=augmentation(recipe)
        )
        self.val, self.test = (self._batches(data, part, EVALUATION_BATCH) for part in ("val", "test"))
        share = self.batches.batch_size // accelerator.num_processes
        if share % hardware.accumulate:
            raise ValueError(
                f"batch_size: expected a multiple of accumulate × processes = "
                f"{hardware.accumulate * accelerator.num_processes}; got {self.batches.batch_size}"
            )
        self.part = share // hardware.accumulate
        self.loss = make_loss(recipe, data).to(accelerator.device)
        self.best_weights: dict[str, Tensor] = {}
        if (recipe.keep == "best" or recipe.patience is not None) and not len(data.val):
            raise ValueError("--keep best and --patience need validation images; got none")

    def _batches(self, data: Dataset, part: str, size: int, **options: Any) -> Batches:
        world = self.accelerator.num_processes
        size = size if part == "train" else -(-size // world) * world  # a multiple, without a say in results
        split = getattr(data, part).to(self.accelerator.device)
        place = {"rank": self.accelerator.process_index, "world_size": world}
        return Batches(split, size, mean=data.mean, std=data.std, **place, **options)

    # ---- one step ----

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Trains on one batch; returns its total loss and its numbers of correct answers and images."""
        self.model.train()
        sums = torch.zeros(3, device=images.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.state.epoch, self.state.step, len(self.batches))
        for x, y in zip(images.split(self.part), labels.split(self.part), strict=True):
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast():
                    output = self.model(x)
                loss = self.loss(output.float(), y)
                self.accelerator.backward(loss)
                if self.recipe.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            sums += _totals(loss.detach() * len(y), output, y)
        self._move_mean()
        self.state.step += 1
        return sums

    def _weights(self, *, copied: bool = False) -> dict[str, Tensor]:
        weights = {name: value.detach() for name, value in self.network.state_dict().items()}
        return {name: value.clone() for name, value in weights.items()} if copied else weights

    def _move_mean(self) -> None:
        if self.recipe.ema is None:
            return
        for name, value in self._weights().items():
            mean = self.mean_weights[name]
            if value.is_floating_point():
                mean.lerp_(value, 1 - self.recipe.ema)
            else:
                mean.copy_(value)

    # ---- all epochs ----

    def fit(self, run: Run, stop: StopSignals, progress: Progress) -> None:
        """Trains from the current state to the last epoch, and saves checkpoints.

        Raises:
            Interrupted: one of the processes received a signal; a checkpoint is saved.
            Diverged: the loss is infinite or NaN.
        """
        state, main = self.state, self.accelerator.is_main_process
        journal = Journal(run.folder, state.history) if main else None
        while state.epoch < self.recipe.epochs and not state.stalled(self.recipe.patience):
            self._train_epoch(run, stop, progress)
            metrics = self._epoch_metrics(run)
            state.history.append(metrics)
            if self.recipe.keep == "best" and state.best_epoch == metrics.epoch:
                weights = self._weights() if self.recipe.ema is None else self.mean_weights
                self.best_weights = {name: value.clone() for name, value in weights.items()}
            state.epoch, state.step, state.sums, state.seconds = state.epoch + 1, 0, MetricTotals(), 0.0
            if journal is not None:
                journal.epoch(metrics)
            self._save(run)
            progress.epoch(metrics, self.recipe.epochs)
        if journal is not None:
            journal.close()

    def _train_epoch(self, run: Run, stop: StopSignals, progress: Progress) -> None:
        """The steps that are left of an epoch."""
        state, steps, device = self.state, len(self.batches), self.accelerator.device
        # on a GPU, looking at a result waits for it; all processes must look at the same steps
        every = 1 if device.type == "cpu" else 10
        began, seconds_before, saved = time.monotonic(), state.seconds, time.monotonic()
        pending = torch.zeros(3, device=device)  # totals of the steps that nobody has looked at yet
        size = self.recipe.size_in(state.epoch, self.image_size)
        for images, labels in self.batches.epoch(state.epoch, state.step, size=size):
            pending += self.step(images, labels)
            if state.step % every and state.step < steps:
                continue
            signals = torch.tensor([float(stop.number)], device=device)
            *totals, signal = self.accelerator.reduce(torch.cat([pending, signals]), "sum").tolist()
            pending.zero_()
            state.sums.add(totals)
            elapsed = max(time.monotonic() - began, 1e-9)  # of a clock that ticks seldom
            state.seconds = seconds_before + elapsed
            check_finite(state.sums.means[0], state.epoch, state.step, run.checkpoints)
            progress.step(state.epoch * steps + state.step, self._line())
            if signal:
                self._save(run)
                raise interruption(state.epoch, state.step, run.folder, stop.number or int(signal))
            due = time.monotonic() - saved > 60 * self.config.hardware.checkpoint_minutes
            if due and state.step < steps:
                self._save(run)
                saved = time.monotonic()

    def _line(self) -> str:
        """How it goes, for a progress bar."""
        state, (loss, accuracy) = self.state, self.state.sums.means
        return (
            f"epoch {state.epoch + 1}/{self.recipe.epochs}  loss {loss:.3f}  accuracy {accuracy:.1%}  "
            f"{state.sums.images / state.seconds:.0f} images/s"
        )

    def _epoch_metrics(self, run: Run) -> EpochMetrics:
        """What ``metrics.jsonl`` says about the epoch whose steps are done."""
        state = self.state
        val = self.evaluate(self.val) if len(self.val.split) else None
        check_finite(val.loss if val is not None else 0.0, state.epoch, state.step, run.checkpoints)
        loss, accuracy = state.sums.means
        return EpochMetrics(
            epoch=state.epoch + 1,
            lr=self.optimizer.param_groups[0]["lr"],
            train_loss=loss,
            train_accuracy=accuracy,
            val_loss=val.means[0] if val is not None else None,
            val_accuracy=val.means[1] if val is not None else None,
            seconds=state.seconds,
            images_per_second=state.sums.images / state.seconds,
        )

    def _save(self, run: Run) -> None:
        if self.accelerator.is_main_process:
            checkpoints.write(run.checkpoints, self.checkpoint(run.digest))

    # ---- evaluation ----

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> MetricTotals:
        """Evaluates the weights that the run would end with now, over all processes."""
        with self._final_weights():
            self.network.eval()
            sums = torch.zeros(3, device=self.accelerator.device)
            for images, labels in batches:
                if len(labels):  # of the last batch a process may get none
                    with self.accelerator.autocast():
                        output = self.network(images)
                    loss = F.cross_entropy(output.float(), labels, reduction="sum")
                    sums += _totals(loss, output, labels)
        total = MetricTotals()
        total.add(self.accelerator.reduce(sums, "sum").tolist())
        return total

    @contextmanager
    def _final_weights(self) -> Iterator[None]:
        """The network with the weights that count: their running mean, if there is one."""
        if self.accelerator.num_processes > 1:  # each process has moved its own running statistics
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, 0)
        if not self.mean_weights:
            yield
            return
        own = self._weights(copied=True)
        self.network.load_state_dict(self.mean_weights)
        yield
        self.network.load_state_dict(own)

    def finish(self) -> ResNet:
        """The network with its final weights."""
        if self.best_weights:
            self.mean_weights = self.best_weights  # which the evaluation uses too
        if self.mean_weights:
            self.network.load_state_dict(self.mean_weights)
        return self.network

    # ---- saving ----

    def checkpoint(self, run: str) -> Checkpoint:
        """The complete state of the run as a checkpoint; ``run`` is the digest of the run."""
        parts = {
            "model": self._weights(),
            "ema": self.mean_weights,
            "best": self.best_weights,
            "optimizer": {
                str(index): buffer
                for index, parameter in enumerate(self._parameters())
                if (buffer := self.optimizer.state.get(parameter, {}).get("momentum_buffer")) is not None
            },
            "random": checkpoints.random_states(),
        }
        scaler = self.accelerator.scaler
        rest = {
            "scaler": scaler.state_dict() if scaler is not None else None,
            "threads": torch.get_num_threads(),
        }
        return Checkpoint(_named(parts), asdict(self.state) | rest, run)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores a checkpoint; raises RunError, without changing anything, if it does not fit."""
        try:
            saved = self._fitting(checkpoint)
        except ValueError as error:
            raise RunError(f"the checkpoint does not fit this run: {error}") from None
        if saved.threads != torch.get_num_threads():
            warnings.warn(
                f"this run began with {saved.threads} threads and continues with {torch.get_num_threads()}: "
                "it will not end with the same bits, since sums are rounded in another order",
                stacklevel=2,
            )
        self.state = State(saved.epoch, saved.step, saved.sums, saved.seconds, saved.history)
        self.network.load_state_dict(checkpoint.tensors("model"))
        for name, value in checkpoint.tensors("ema").items():
            self.mean_weights[name].copy_(value)
        self.best_weights = {name: value.clone() for name, value in checkpoint.tensors("best").items()}
        buffers = checkpoint.tensors("optimizer")
        for index, parameter in enumerate(self._parameters()):
            if str(index) in buffers:  # in the weight's memory format, so that sums round as they did
                buffer = torch.empty_like(parameter).copy_(buffers[str(index)])
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
        if saved.scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(asdict(saved.scaler))
        checkpoints.set_random_states(checkpoint.tensors("random"))

    def _fitting(self, checkpoint: Checkpoint) -> SavedState:
        """The state in a checkpoint, once it and every tensor are such as this trainer would save."""
        saved = parse(SavedState, checkpoint.state, "state")
        saved.check(self.recipe.epochs, len(self.batches), self.batches.batch_size)
        scaler = self.accelerator.scaler
        if (saved.scaler is None) != (scaler is None):
            raise ValueError(f"scaler: expected that of this precision; got {saved.scaler}")
        random = checkpoint.tensors("random")
        buffers = {str(index): parameter for index, parameter in enumerate(self._parameters())}
        begun = (saved.epoch, saved.step) != (0, 0)
        if not begun or (scaler is not None and not checkpoint.tensors("optimizer")):
            buffers = {}  # before the first step, or all steps were skipped for their overflow
        expected: dict[str, Mapping[str, Tensor]] = {
            "model": self._weights(),
            "ema": self.mean_weights,
            "best": self._weights() if self.recipe.keep == "best" and saved.history else {},
            "optimizer": buffers,
            "random": checkpoints.expected_random_states(random),
        }
        if problems := mismatches(_named(expected), checkpoint.all_tensors):
            raise ValueError(problems)
        checkpoints.check_random_states(random)
        return saved


def _named(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for part, values in parts.items() for name, tensor in values.items()}


def _totals(loss: Tensor, output: Tensor, labels: Tensor) -> Tensor:
    correct = (output.argmax(1) == labels).sum()
    return torch.stack([loss.float(), correct.float(), torch.full_like(loss, len(labels))])
