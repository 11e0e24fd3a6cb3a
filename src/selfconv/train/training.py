"""Training a network: the loop over steps and epochs, from wherever a run stands to its record.

On Hugging Face accelerate, which knows of devices, processes, mixed precision and gradient accumulation. The
images lie in memory, and what a batch holds follows from (seed, epoch, step), so the loop has no data loader.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from selfconv._extras import require
from selfconv._files import write_json
from selfconv._memory import keep_memory
from selfconv._text import escape_for_terminal, format_duration
from selfconv.data import DataInfo, Dataset
from selfconv.models import count_parameters
from selfconv.train import checkpoints
from selfconv.train.checkpoints import Checkpoint
from selfconv.train.config import Engine, RunConfig
from selfconv.train.environment import environment
from selfconv.train.errors import Diverged, Interrupted, OutOfMemory, RunStopped, is_out_of_memory
from selfconv.train.progress import Journal, Progress, Watch
from selfconv.train.runs import Run, begin, claim, open_data, save_model
from selfconv.train.signals import StopSignals
from selfconv.train.trainer import MetricTotals, State, Trainer

if TYPE_CHECKING:
    from accelerate import Accelerator


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
        resume: go on with the run in that folder, from its last checkpoint; begin it if there is none.
        quiet: print nothing.
        watch: called after each step with the share of the run that is done and a line on how it goes.
        stop: signals that are being noted already; by default they are for as long as this takes.

    Raises:
        ValueError: the model, the data or the folder cannot be used; nothing has been written then.
        Interrupted: SIGINT or SIGTERM came; everything is saved.
        Diverged: the loss is not a number; the last good weights are in the last checkpoint.
    """
    keep_memory()
    accelerator = make_accelerator(config.engine)
    [config] = _shared([config])
    data = open_data(config)
    trainer = Trainer(config, data, accelerator)
    total = config.recipe.epochs * len(trainer.batches)
    visible = accelerator.is_main_process and not quiet
    with _begun(accelerator, Path(out), config, data, resume) as (run, record, checkpoint):
        if record is not None:
            if visible:
                accuracy = record["test_accuracy"]
                print(
                    f"{escape_for_terminal(run.folder)}: has finished already, with test accuracy {accuracy:.2%}"
                )
            return record
        if checkpoint is not None:
            trainer.restore(checkpoint)
        noted = StopSignals() if stop is None else nullcontext(stop)
        with noted as stop, Progress(total, visible=visible, watch=watch) as progress:
            progress.say(f"{config.model.name}, {count_parameters(trainer.network):,} parameters; {data}")
            place = "" if checkpoint is None else f"from epoch {trainer.state.epoch + 1} on, "
            progress.say(f"{place}into {run.folder}")
            try:
                _loop(trainer, run, config, stop, progress)
                record = _finish(trainer, run, config, data, progress)
            except RunStopped as stopped:
                raise stopped if accelerator.is_main_process else SystemExit(stopped.code) from None
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise _out_of_memory(trainer, run) from error
    if accelerator.num_processes > 1:
        accelerator.end_training()
    return record


def _loop(trainer: Trainer, run: Run, config: RunConfig, stop: StopSignals, progress: Progress) -> None:
    """All epochs from where the trainer stands."""
    accelerator, state, epochs = trainer.accelerator, trainer.state, config.recipe.epochs
    main, steps = accelerator.is_main_process, len(trainer.batches)
    # on a GPU, looking at a result waits for it; all processes must look at the same steps
    every = 1 if accelerator.device.type == "cpu" else 10
    journal = Journal(run.folder, state.history) if main else None
    saved = time.monotonic()

    def save() -> None:
        if main:
            checkpoints.write(run.checkpoints, trainer.checkpoint())

    while state.epoch < epochs:
        began, seconds = time.monotonic(), state.seconds
        pending = torch.zeros(3, device=accelerator.device)
        size = config.recipe.size_in(state.epoch)
        for images, labels in trainer.batches.epoch(state.epoch, state.step, size=size):
            pending += trainer.step(images, labels)
            if state.step % every and state.step < steps:
                continue
            wishes = torch.tensor([float(stop.number)], device=accelerator.device)
            *sums, wish = accelerator.reduce(torch.cat([pending, wishes]), "sum").tolist()
            pending.zero_()
            state.sums.add(sums)
            state.seconds = seconds + max(time.monotonic() - began, 1e-9)  # of a clock that ticks seldom
            loss, accuracy = state.sums.means
            _check_finite(loss, state, run)
            speed = state.sums.images / state.seconds
            progress.step(
                state.epoch * steps + state.step,
                f"epoch {state.epoch + 1}/{epochs}  loss {loss:.3f}  accuracy {accuracy:.1%}  "
                f"{speed:.0f} images/s",
            )
            if wish:
                save()
                raise _interruption(state, run, stop.number or int(wish))
            if time.monotonic() - saved > 60 * config.engine.checkpoint_minutes and state.step < steps:
                save()
                saved = time.monotonic()
        val = trainer.evaluate(trainer.val) if len(trainer.val.split) else None
        _check_finite(val.loss if val is not None else 0.0, state, run)
        loss, accuracy = state.sums.means
        metrics = {
            "epoch": state.epoch + 1,
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "train_loss": loss,
            "train_accuracy": accuracy,
            "val_loss": val.means[0] if val is not None else None,
            "val_accuracy": val.means[1] if val is not None else None,
            "seconds": state.seconds,
            "images_per_second": state.sums.images / state.seconds,
        }
        state.history.append(metrics)
        state.epoch, state.step, state.sums, state.seconds = state.epoch + 1, 0, MetricTotals(), 0.0
        if journal is not None:
            journal.epoch(metrics)
        save()
        saved = time.monotonic()
        progress.epoch(metrics, epochs)
    if journal is not None:
        journal.close()


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


def _finish(
    trainer: Trainer, run: Run, config: RunConfig, data: Dataset, progress: Progress
) -> dict[str, Any]:
    """The test, the model's files, and the record."""
    test, history = trainer.evaluate(trainer.test), trainer.state.history
    model, accelerator = trainer.finish(), trainer.accelerator
    _check_finite(test.loss, trainer.state, run)
    last = history[-1]
    best = max(
        (h for h in history if h["val_accuracy"] is not None), key=lambda h: h["val_accuracy"], default=None
    )
    seconds = sum(h["seconds"] for h in history)
    record = {
        "model": config.model.name,
        "parameters": count_parameters(model),
        "model_config": model.config,
        "data": asdict(DataInfo.of(data)),
        "config": config.to_json(),
        "seed": config.seed,
        "processes": accelerator.num_processes,
        "epochs": len(history),
        "train_loss": last["train_loss"],
        "train_accuracy": last["train_accuracy"],
        "val_accuracy": last["val_accuracy"],
        "best_val_accuracy": best and {"epoch": best["epoch"], "accuracy": best["val_accuracy"]},
        "test_loss": test.means[0],
        "test_accuracy": test.means[1],
        "train_seconds": seconds,
        "images_per_second": sum(h["seconds"] * h["images_per_second"] for h in history) / seconds,
        **environment(accelerator.device),
    }
    if accelerator.is_main_process:
        save_model(run, model, record)
        write_json(run.folder / "record.json", record)
    progress.say(
        f"test accuracy {record['test_accuracy']:.2%} after {len(history)} epochs, {format_duration(seconds)} of "
        f"training; in {run.folder}"
    )
    return record


# ---- accelerate ----


def make_accelerator(engine: Engine) -> Accelerator:
    require("training", "accelerate", "tensorboard")  # before anything is written
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    cpu = engine.device == "cpu" or not torch.accelerator.is_available()
    if cpu and engine.precision == "fp16":  # accelerate would train in full precision, and say nothing
        raise ValueError("precision: fp16 needs a GPU; on a CPU expected no or bf16")
    AcceleratorState._reset_state()  # another run in this process may have had another precision
    return Accelerator(
        cpu=cpu,
        mixed_precision=engine.precision,
        gradient_accumulation_steps=engine.accumulate,
    )


def _shared(values: list[Any]) -> list[Any]:
    """The first process' values, in all of them."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list(values)


@contextmanager
def _begun(
    accelerator: Accelerator, out: Path, config: RunConfig, data: Dataset, resume: bool
) -> Iterator[tuple[Run, dict[str, Any] | None, Checkpoint | None]]:
    """The run's folder, its record if it has finished, and its last checkpoint.

    Only the first process touches the folder, which the others need not see, and all fail if it does.
    """
    run = Run(out)
    error: Exception | None = None
    record, checkpoint = None, None
    with ExitStack() as stack:
        if accelerator.is_main_process:
            try:
                stack.enter_context(claim(out, config, resume=resume))
                begin(run, data)
                if run.finished:
                    record = run.record
                else:
                    checkpoint = checkpoints.load_last(run.checkpoints)
            except (ValueError, OSError) as problem:
                error = problem
        error, record, checkpoint = _shared([error, record, checkpoint])
        if error is not None:
            raise error if accelerator.is_main_process else SystemExit(2)  # one of them says it
        yield run, record, checkpoint
