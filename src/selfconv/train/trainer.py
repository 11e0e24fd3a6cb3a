"""Trains a network: single steps, epochs, and a complete run, new or resumed.

Hugging Face accelerate handles devices, processes, mixed precision and gradient accumulation. The images are
in memory, and a batch is a function of (seed, epoch, step), so there is no data loader.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv._files import parse, write_json
from selfconv._memory import keep_memory
from selfconv._text import escape_for_terminal, format_duration
from selfconv.data import Batches, DataInfo, Dataset
from selfconv.models import ResNet, count_parameters, load_initial, mismatches
from selfconv.train import checkpoints
from selfconv.train.checkpoints import Checkpoint
from selfconv.train.config import RunConfig
from selfconv.train.distributed import broadcast_object, sync_batch_norm
from selfconv.train.environment import environment
from selfconv.train.errors import Diverged, Interrupted, OutOfMemory, RunError, RunStopped, is_out_of_memory
from selfconv.train.progress import Journal, Progress, Watch
from selfconv.train.record import BestEpoch, EpochMetrics, Record
from selfconv.train.runs import Run, open_data, open_or_resume, save_model
from selfconv.train.setup import augmentation, build_model, learning_rate, make_accelerator, make_optimizer
from selfconv.train.signals import StopSignals
from selfconv.train.state import MetricTotals, SavedState, State

if TYPE_CHECKING:
    from accelerate import Accelerator

EVALUATION_BATCH = 256


def train(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    watch: Watch | None = None,
    stop: StopSignals | None = None,
) -> dict[str, Any]:
    """Trains a network and returns the record of the run, whose folder is ``out``.

    Args:
        resume: continue the run in that folder from its last checkpoint; start it if there is none.
        quiet: print nothing.
        watch: called after each step with the completed fraction of the run and a status line.
        stop: a signal handler that is already active; by default one is installed for the duration of the
            call.

    Raises:
        ValueError: the model, the data or the folder cannot be used; nothing has been written.
        Interrupted: SIGINT or SIGTERM was received; a checkpoint is saved.
        Diverged: the loss is infinite or NaN; the last checkpoint has the last finite weights.
    """
    keep_memory()
    accelerator = make_accelerator(config.engine)
    config = broadcast_object(config)
    data = open_data(config)
    trainer = Trainer(config, data, accelerator)
    total = config.recipe.epochs * len(trainer.batches)
    visible = accelerator.is_main_process and not quiet
    with open_or_resume(accelerator, Path(out), config, data, resume) as (run, record, checkpoint):
        if record is not None:
            if visible:
                folder, accuracy = escape_for_terminal(run.folder), record["test_accuracy"]
                print(f"{folder}: has finished already, with test accuracy {accuracy:.2%}")
            return record
        if checkpoint is not None:
            try:
                trainer.restore(checkpoint)
            except RunError as error:
                raise error if accelerator.is_main_process else SystemExit(2) from None
        noted = StopSignals() if stop is None else nullcontext(stop)
        with noted as stop, Progress(total, visible=visible, watch=watch) as progress:
            changed = [
                f"{key} {value}" for key, value in config.model.overrides().items() if value is not None
            ]
            network = ", ".join([config.model.name, *changed])
            progress.say(f"{network}, {count_parameters(trainer.network):,} parameters; {data}")
            place = "" if checkpoint is None else f"from epoch {trainer.state.epoch + 1} on, "
            progress.say(f"{place}into {run.folder}")
            try:
                trainer.fit(run, stop, progress)
                record = finish(trainer, run, data, progress)
            except RunStopped as stopped:
                raise stopped if accelerator.is_main_process else SystemExit(stopped.code) from None
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise _out_of_memory(trainer, run) from error
    if accelerator.num_processes > 1:
        accelerator.end_training()
    return record


class Trainer:
    """A network in training: its weights, optimizer, moving average of the weights, and batches.

    ``step`` trains on one batch, ``fit`` on all remaining epochs; ``checkpoint`` and ``restore`` save and
    load the complete state in between.
    """

    def __init__(self, config: RunConfig, data: Dataset, accelerator: Accelerator) -> None:
        recipe, engine = config.recipe, config.engine
        self.config, self.recipe, self.accelerator = config, recipe, accelerator
        self.state, self.image_size = State(), data.size
        torch.manual_seed(config.seed)
        network = build_model(config, DataInfo.of(data))
        if config.model.init is not None:
            network.start_from(load_initial(config.model.init))
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if accelerator.num_processes > 1 and engine.sync_batch_norm:
            sync_batch_norm(self.network)
        self.model, self.optimizer = accelerator.prepare(self.network, make_optimizer(self.network, recipe))
        self.mean_weights = self._weights(copied=True) if recipe.ema is not None else {}
        self.batches = self._batches(
            data, "train", recipe.batch_size, shuffle=True, seed=config.seed, augment=augmentation(recipe)
        )
        self.val, self.test = (self._batches(data, part, EVALUATION_BATCH) for part in ("val", "test"))
        share = self.batches.batch_size // accelerator.num_processes
        if share % engine.accumulate:
            raise ValueError(
                f"batch_size: expected a multiple of accumulate × processes = "
                f"{engine.accumulate * accelerator.num_processes}; got {self.batches.batch_size}"
            )
        self.part = share // engine.accumulate

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
                loss = F.cross_entropy(output.float(), y, label_smoothing=self.recipe.label_smoothing)
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
        while state.epoch < self.recipe.epochs:
            self._train_epoch(run, stop, progress)
            metrics = self._epoch_metrics(run)
            state.history.append(metrics)
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
            _check_finite(state.sums.means[0], state, run)
            progress.step(state.epoch * steps + state.step, self._line())
            if signal:
                self._save(run)
                raise _interruption(state, run, stop.number or int(signal))
            due = time.monotonic() - saved > 60 * self.config.engine.checkpoint_minutes
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
        _check_finite(val.loss if val is not None else 0.0, state, run)
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
        if self.recipe.ema is None:
            yield
            return
        own = self._weights(copied=True)
        self.network.load_state_dict(self.mean_weights)
        yield
        self.network.load_state_dict(own)

    def finish(self) -> ResNet:
        """The network with its final weights."""
        if self.recipe.ema is not None:
            self.network.load_state_dict(self.mean_weights)
        return self.network

    # ---- saving ----

    def checkpoint(self, run: str) -> Checkpoint:
        """The complete state of the run as a checkpoint; ``run`` is the digest of the run."""
        parts = {
            "model": self._weights(),
            "ema": self.mean_weights,
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
                f"this run began with {saved.threads} threads and goes on with {torch.get_num_threads()}: it "
                "will not end with the same bits, since sums are rounded in another order",
                stacklevel=2,
            )
        self.state = State(saved.epoch, saved.step, saved.sums, saved.seconds, saved.history)
        self.network.load_state_dict(checkpoint.tensors("model"))
        for name, value in checkpoint.tensors("ema").items():
            self.mean_weights[name].copy_(value)
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


def finish(trainer: Trainer, run: Run, data: Dataset, progress: Progress) -> dict[str, Any]:
    """Evaluates the network on the test set, writes the model and the record, and returns the record."""
    config = trainer.config
    test, history = trainer.evaluate(trainer.test), trainer.state.history
    model, accelerator = trainer.finish(), trainer.accelerator
    _check_finite(test.loss, trainer.state, run)
    last = history[-1]
    validated = [BestEpoch(h.epoch, h.val_accuracy) for h in history if h.val_accuracy is not None]
    seconds = sum(h.seconds for h in history)
    record = Record(
        model=config.model.name,
        parameters=count_parameters(model),
        model_config=model.config,
        data=DataInfo.of(data),
        config=config,
        seed=config.seed,
        processes=accelerator.num_processes,
        epochs=len(history),
        train_loss=last.train_loss,
        train_accuracy=last.train_accuracy,
        val_accuracy=last.val_accuracy,
        best_val_accuracy=max(validated, key=lambda best: best.accuracy, default=None),
        test_loss=test.means[0],
        test_accuracy=test.means[1],
        train_seconds=seconds,
        images_per_second=sum(h.seconds * h.images_per_second for h in history) / seconds,
        **environment(accelerator.device),
    )
    if accelerator.is_main_process:
        record = save_model(run, model, replace(record, data=run.data))
        write_json(run.folder / "record.json", record.to_json())
    progress.say(
        f"test accuracy {record.test_accuracy:.2%} after {len(history)} epoch{'s' * (len(history) != 1)}, "
        f"{format_duration(seconds)} of training; in {run.folder}"
    )
    return record.to_json()


def _check_finite(loss: float, state: State, run: Run) -> None:
    if not math.isfinite(loss):
        raise Diverged(
            f"the loss is {loss} in epoch {state.epoch + 1}, step {state.step}; the last good weights are in "
            f"{run.checkpoints}; a lower --lr or --clip 1 may help"
        )


def _out_of_memory(trainer: Trainer, run: Run) -> OutOfMemory:
    state, parts = trainer.state, 2 * trainer.batches.batch_size // trainer.part
    return OutOfMemory(
        f"out of memory in epoch {state.epoch + 1}, step {state.step + 1}, with {trainer.part} images at a "
        f"time; --accumulate {parts} takes half as many and learns the same but for batch norm, and a lower "
        f"--batch-size or --image-size needs less too; the checkpoints in {run.checkpoints} are kept"
    )


def _interruption(state: State, run: Run, number: int) -> Interrupted:
    return Interrupted(
        f"stopped and saved after epoch {state.epoch}, step {state.step}; "
        f"go on with: selfconv train --out {run.folder} --resume",
        number,
    )
