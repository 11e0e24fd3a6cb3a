"""A complete run, new or resumed: from its options to the final model and the record."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from selfconv._files import parse_json, write_json
from selfconv._memory import keep_memory
from selfconv._text import escape_for_terminal, format_duration
from selfconv.data import DataInfo, Dataset, PixelRange, warn_about_classes
from selfconv.models import count_parameters
from selfconv.train.config import RunConfig
from selfconv.train.distributed import broadcast_object
from selfconv.train.files.record import Record, environment
from selfconv.train.files.runs import Run, open_data, open_or_resume, save_model
from selfconv.train.progress import Progress, Watch
from selfconv.train.setup import make_accelerator
from selfconv.train.sizing import measure_step
from selfconv.train.stopping import (
    RunError,
    RunStopped,
    StopSignals,
    check_finite,
    is_out_of_memory,
)
from selfconv.train.trainer import Trainer


def train(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    watch: Watch | None = None,
    stop: StopSignals | None = None,
) -> Record:
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
        OutOfMemory: a step needs more memory than there is; the checkpoints are kept.
    """
    keep_memory()
    accelerator = make_accelerator(config.hardware)
    config = broadcast_object(config)
    data = open_data(config, folder=Path(out) if resume else None)
    if accelerator.is_main_process:
        warn_about_classes(data)
    trainer = Trainer(config, data, accelerator)
    total = config.recipe.epochs * len(trainer.batches)
    visible = accelerator.is_main_process and not quiet
    with open_or_resume(accelerator, Path(out), config, data, resume) as (run, record, checkpoint):
        if record is not None:
            if visible:
                folder, accuracy = escape_for_terminal(run.folder), record.test_accuracy
                print(f"{folder}: already finished, with test accuracy {accuracy:.2%}")
            return record
        if checkpoint is not None:
            try:
                trainer.restore(checkpoint)
            except RunError as error:
                raise error if accelerator.is_main_process else SystemExit(2) from None
        signals = StopSignals() if stop is None else nullcontext(stop)
        with signals as stop, Progress(total, visible=visible, watch=watch) as progress:
            changed = [f"{k} {value}" for k, value in config.model.overrides().items() if value is not None]
            network = ", ".join([config.model.name, *changed])
            progress.say(f"{network}, {count_parameters(trainer.network):,} parameters; {data}")
            if data.pixels != PixelRange():
                progress.say(data.pixels.describe())
            state = trainer.state
            resumed = ""
            if checkpoint is not None:
                resumed = f"from epoch {state.epoch + 1}, step {state.step + 1} on, "
            progress.say(f"{resumed}into {run.folder}")
            alone = accelerator.num_processes == 1  # synchronised batch norm would wait for the others
            try:
                if visible and alone and (advice := measure_step(trainer).advice(trainer)) is not None:
                    progress.say(advice)
                trainer.fit(run, stop, progress)
                record = test_and_save(trainer, run, data, progress)
            except RunStopped as stopped:
                raise stopped if accelerator.is_main_process else SystemExit(stopped.code) from None
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise trainer.out_of_memory(run) from error
    if accelerator.num_processes > 1:
        accelerator.end_training()
    return record


def test_and_save(trainer: Trainer, run: Run, data: Dataset, progress: Progress) -> Record:
    """Evaluates the network on the test set, writes the model and the record, and returns the record."""
    config, accelerator, state = trainer.config, trainer.accelerator, trainer.state
    test = trainer.evaluate(trainer.test, trainer.final_weights())
    check_finite(test.loss, state.epoch, state.step, run.checkpoints)
    model = trainer.load_final_weights()
    history, best = state.history, state.best()
    last = history[-1]
    seconds = sum(h.seconds for h in history)
    record = Record(
        model=config.model.name,
        parameters=count_parameters(model),
        model_config=parse_json(json.dumps(model.config)),  # as record.json has it: no tuples
        data=DataInfo.of(data),
        config=config,
        seed=config.seed,
        processes=accelerator.num_processes,
        epochs=len(history),
        train_loss=last.train_loss,
        train_accuracy=last.train_accuracy,
        val_accuracy=last.val_accuracy,
        kept_epoch=best.epoch if best is not None and config.recipe.keep == "best" else None,
        best_val_accuracy=best,
        test_loss=test.means[0],
        test_accuracy=test.means[1],
        train_seconds=seconds,
        images_per_second=sum(h.seconds * h.images_per_second for h in history) / seconds,
        **environment(accelerator.device),
    )
    if accelerator.is_main_process:
        record = save_model(run, model, replace(record, data=run.data))
        write_json(run.folder / "record.json", record.to_json())
    ended = ""
    if len(history) < config.recipe.epochs:
        ended = f", stopped early (--patience {config.recipe.patience})"
    if record.kept_epoch is not None:
        ended += f", weights of epoch {record.kept_epoch}"
    progress.say(
        f"test accuracy {record.test_accuracy:.2%} after {len(history)} epoch{'s' * (len(history) != 1)}"
        f"{ended}, {format_duration(seconds)} of training; in {run.folder}"
    )
    return record
