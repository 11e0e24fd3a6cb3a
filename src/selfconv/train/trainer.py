"""Trains a network: single steps and epochs, and its complete state in checkpoints.

Hugging Face accelerate handles devices, processes, mixed precision and gradient accumulation. Images are in
memory or memory-mapped; a batch is a function of (seed, epoch, step), so there is no data loader.
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
from selfconv.train.config import RunConfig
from selfconv.train.distributed import largest, sync_batch_norm
from selfconv.train.files import checkpoints
from selfconv.train.files.checkpoints import Checkpoint, final_weights
from selfconv.train.files.record import EpochMetrics
from selfconv.train.files.runs import Run
from selfconv.train.files.state import (
    MetricTotals,
    SavedState,
    State,
    check_random_states,
    expected_random_states,
    random_states,
    set_random_states,
)
from selfconv.train.progress import Journal, Progress
from selfconv.train.setup import (
    augmentation,
    build_model,
    learning_rate,
    make_loss,
    make_optimizer,
)
from selfconv.train.stopping import (
    OutOfMemory,
    RunError,
    StopSignals,
    check_finite,
    diverged,
    interruption,
    out_of_memory,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

EVALUATION_BATCH = 256


class Trainer:
    """A network in training: weights, their exponential moving average (EMA), optimizer, and batches.

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
        self.ema_weights = _copied(self._weights()) if recipe.ema is not None else {}
        self.batches = self._batches(
            data, "train", recipe.batch_size, shuffle=True, seed=config.seed, augment=augmentation(recipe)
        )
        self.val, self.test = (self._batches(data, part, EVALUATION_BATCH) for part in ("val", "test"))
        self.images_per_process = self.batches.batch_size // accelerator.num_processes
        if self.images_per_process % hardware.accumulate:
            limit = " (all training images)" if self.batches.batch_size < recipe.batch_size else ""
            raise ValueError(
                f"batch_size: expected a multiple of accumulate × processes = "
                f"{hardware.accumulate * accelerator.num_processes}; got {self.batches.batch_size}{limit}"
            )
        self.micro_batch_size = self.images_per_process // hardware.accumulate
        self.loss = make_loss(recipe, data).to(accelerator.device)
        self.best_weights: dict[str, Tensor] = {}
        if (recipe.keep == "best" or recipe.patience is not None) and not len(data.val):
            raise ValueError("keep best and patience: expected validation images; got none")
        if recipe.colour and data.in_channels == 1:
            raise ValueError(f"colour: expected images with channels to change; got grey ones, {data.name}")

    def _batches(self, data: Dataset, part: str, size: int, **options: Any) -> Batches:
        world = self.accelerator.num_processes
        if part != "train":  # rounded up to a multiple of the processes; results do not depend on it
            size = -(-size // world) * world
        split = getattr(data, part).to(self.accelerator.device)
        process = {"rank": self.accelerator.process_index, "world_size": world}
        return Batches(split, size, mean=data.mean, std=data.std, **process, **options)

    # ---- one step ----

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Trains on one batch; returns its total loss and its numbers of correct answers and images."""
        self.model.train()
        sums = torch.zeros(3, device=images.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.state.epoch, self.state.step, len(self.batches))
        size = self.micro_batch_size
        for x, y in zip(images.split(size), labels.split(size), strict=True):
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
        self._update_ema()
        self.state.step += 1
        return sums

    def _weights(self) -> dict[str, Tensor]:
        """The current weights: not a copy."""
        return {name: value.detach() for name, value in self.network.state_dict().items()}

    def _update_ema(self) -> None:
        if self.recipe.ema is None:
            return
        for name, value in self._weights().items():
            average = self.ema_weights[name]
            if value.is_floating_point():
                average.lerp_(value, 1 - self.recipe.ema)
            else:
                average.copy_(value)

    # ---- all epochs ----

    def fit(self, run: Run, stop: StopSignals, progress: Progress) -> None:
        """Trains from the current state to the last epoch, and saves checkpoints.

        Raises:
            Interrupted: one of the processes received a signal; a checkpoint is saved.
            Diverged: the loss or a weight is infinite or NaN.
        """
        state, main = self.state, self.accelerator.is_main_process
        journal = Journal(run.folder, state.history) if main else None
        while state.epoch < self.recipe.epochs and not state.stalled(self.recipe.patience):
            self._train_epoch(run, stop, progress)
            metrics = self._validate_epoch(run)
            self._check_weights(run)
            state.history.append(metrics)
            best = state.best()
            if self.recipe.keep == "best" and best is not None and best.epoch == metrics.epoch:
                self.best_weights = _copied(self._validated_weights())
            state.epoch, state.step, state.sums, state.seconds = state.epoch + 1, 0, MetricTotals(), 0.0
            if journal is not None:
                journal.epoch(metrics)
            self._save(run)
            progress.epoch(metrics, self.recipe.epochs)
        if journal is not None:
            journal.close()

    def _train_epoch(self, run: Run, stop: StopSignals, progress: Progress) -> None:
        """Trains the remaining steps of the current epoch."""
        state, steps, device = self.state, len(self.batches), self.accelerator.device
        # reading a result waits for the GPU; all processes must read it at the same steps
        every = 1 if device.type == "cpu" else 10
        began, seconds_before, saved = time.monotonic(), state.seconds, time.monotonic()
        pending = torch.zeros(3, device=device)  # totals since the last reduction
        size = self.recipe.size_in(state.epoch, self.image_size)
        for images, labels in self.batches.epoch(state.epoch, state.step, size=size):
            pending += self.step(images, labels)
            if state.step % every and state.step < steps:
                continue
            number = largest(stop.number, device)
            state.sums.add(self.accelerator.reduce(pending, "sum").tolist())
            pending.zero_()
            elapsed = max(time.monotonic() - began, 1e-9)  # a coarse clock may not have advanced
            state.seconds = seconds_before + elapsed
            check_finite(state.sums.means[0], state.epoch, state.step, run.checkpoints)
            progress.step(state.epoch * steps + state.step, self._status())
            if number:
                self._check_weights(run)
                self._save(run)
                raise interruption(state.epoch, state.step, run.folder, number)
            due = time.monotonic() - saved > 60 * self.config.hardware.checkpoint_minutes
            # ``due`` may differ between processes. If a weight is not finite, none raises here: the next loss
            # is NaN in all of them, and all stop together.
            if due and state.step < steps and self._has_finite_weights():
                self._save(run)
                saved = time.monotonic()

    def out_of_memory(self, run: Run) -> OutOfMemory:
        """The error for the current step, if it ran out of memory."""
        sizes = self.images_per_process, self.micro_batch_size
        return out_of_memory(self.state.epoch, self.state.step, *sizes, run.checkpoints)

    def _status(self) -> str:
        """Epoch, loss, accuracy and speed, for the progress bar."""
        state, (loss, accuracy) = self.state, self.state.sums.means
        return (
            f"epoch {state.epoch + 1}/{self.recipe.epochs}  loss {loss:.3f}  accuracy {accuracy:.1%}  "
            f"{state.sums.images / state.seconds:.0f} images/s"
        )

    def _validate_epoch(self, run: Run) -> EpochMetrics:
        """Validates, and returns the metrics of the epoch."""
        state = self.state
        val = self.evaluate(self.val, self._validated_weights()) if len(self.val.split) else None
        check_finite(val.loss if val is not None else 0.0, state.epoch, state.step, run.checkpoints)
        loss, accuracy = state.sums.means
        return EpochMetrics(
            epoch=state.epoch + 1,
            # of the last step, which may have been trained before a resume
            lr=learning_rate(self.recipe, state.epoch, len(self.batches) - 1, len(self.batches)),
            train_loss=loss,
            train_accuracy=accuracy,
            val_loss=val.means[0] if val is not None else None,
            val_accuracy=val.means[1] if val is not None else None,
            seconds=state.seconds,
            images_per_second=state.sums.images / state.seconds,
        )

    def _has_finite_weights(self) -> bool:
        """False if the last step, whose loss was finite, made a weight infinite or NaN."""
        weights = [*self._weights().values(), *self.ema_weights.values()]
        return all(bool(value.isfinite().all()) for value in weights)

    def _check_weights(self, run: Run) -> None:
        if not self._has_finite_weights():
            raise diverged("a weight is infinite or NaN", self.state.epoch, self.state.step, run.checkpoints)

    def _save(self, run: Run) -> None:
        if self.accelerator.is_main_process:
            checkpoints.write(run.checkpoints, self.checkpoint(run.digest))

    # ---- evaluation ----

    def _validated_weights(self) -> dict[str, Tensor]:
        """The weights that are validated after an epoch: the moving average, if there is one."""
        return final_weights({}, self.ema_weights, self._weights())

    def final_weights(self) -> dict[str, Tensor]:
        """The weights that the run would end with now."""
        return final_weights(self.best_weights, self.ema_weights, self._weights())

    @torch.no_grad()
    def evaluate(self, batches: Batches, weights: Mapping[str, Tensor]) -> MetricTotals:
        """Loss and accuracy of the network with these weights, over all processes."""
        with self._loaded(weights):
            self.network.eval()
            sums = torch.zeros(3, device=self.accelerator.device)
            for images, labels in batches:
                if len(labels):  # a process may get no image of the last batch
                    with self.accelerator.autocast():
                        output = self.network(images)
                    loss = F.cross_entropy(output.float(), labels, reduction="sum")
                    sums += _totals(loss, output, labels)
        total = MetricTotals()
        total.add(self.accelerator.reduce(sums, "sum").tolist())
        return total

    @contextmanager
    def _loaded(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the context the network has these weights."""
        if self.accelerator.num_processes > 1:  # each process has updated its own running statistics
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, 0)
        own = _copied(self._weights())
        try:
            self.network.load_state_dict(weights)
            yield
        finally:
            self.network.load_state_dict(own)

    def load_final_weights(self) -> ResNet:
        """Gives the network its final weights, and returns it."""
        self.network.load_state_dict(self.final_weights())
        return self.network

    # ---- saving ----

    def checkpoint(self, run_digest: str) -> Checkpoint:
        """The complete state of the run as a checkpoint."""
        parts = {
            "model": self._weights(),
            "ema": self.ema_weights,
            "best": self.best_weights,
            "optimizer": {
                str(index): buffer
                for index, parameter in enumerate(self._parameters())
                if (buffer := self.optimizer.state.get(parameter, {}).get("momentum_buffer")) is not None
            },
            "random": random_states(),
        }
        scaler = self.accelerator.scaler
        rest = {
            "scaler": scaler.state_dict() if scaler is not None else None,
            "threads": torch.get_num_threads(),
        }
        return Checkpoint(_named(parts), asdict(self.state) | rest, run_digest)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores a checkpoint; raises RunError, without changing anything, if it does not fit."""
        try:
            saved = self._checked_state(checkpoint)
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
            self.ema_weights[name].copy_(value)
        self.best_weights = _copied(checkpoint.tensors("best"))
        buffers = checkpoint.tensors("optimizer")
        for index, parameter in enumerate(self._parameters()):
            if str(index) in buffers:  # in the weight's memory format, so that sums round as they did
                buffer = torch.empty_like(parameter).copy_(buffers[str(index)])
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
        if saved.scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(asdict(saved.scaler))
        set_random_states(checkpoint.tensors("random"))

    def _checked_state(self, checkpoint: Checkpoint) -> SavedState:
        """The state in a checkpoint.

        Raises ValueError unless it and every tensor have the form that this trainer saves.
        """
        saved = parse(SavedState, checkpoint.state, "state")
        saved.check(self.recipe.epochs, len(self.batches), self.batches.batch_size)
        scaler = self.accelerator.scaler
        if (saved.scaler is None) != (scaler is None):
            raise ValueError(
                f"scaler: expected none without fp16, and its state with fp16; got {saved.scaler}"
            )
        random = checkpoint.tensors("random")
        buffers = {str(index): parameter for index, parameter in enumerate(self._parameters())}
        begun = (saved.epoch, saved.step) != (0, 0)
        if not begun or (scaler is not None and not checkpoint.tensors("optimizer")):
            buffers = {}  # before the first step, or the gradient scaler skipped all steps
        expected: dict[str, Mapping[str, Tensor]] = {
            "model": self._weights(),
            "ema": self.ema_weights,
            "best": self._weights() if self.recipe.keep == "best" and saved.history else {},
            "optimizer": buffers,
            "random": expected_random_states(random),
        }
        if problems := mismatches(_named(expected), checkpoint.all_tensors):
            raise ValueError(problems)
        check_random_states(random)
        return saved


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in weights.items()}


def _named(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for part, values in parts.items() for name, tensor in values.items()}


def _totals(loss: Tensor, output: Tensor, labels: Tensor) -> Tensor:
    correct = (output.argmax(1) == labels).sum()
    return torch.stack([loss.float(), correct.float(), torch.full_like(loss, len(labels))])
