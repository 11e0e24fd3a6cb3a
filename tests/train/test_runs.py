"""Runs that survive: kills, signals, damaged checkpoints, full disks, rivals."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_runs import OPTIONS, PATIENCE, command, environment, same_weights, tiny_config
from safetensors.torch import load_file

from selfconv.train import (
    Checkpoint,
    Interrupted,
    Run,
    RunBusy,
    RunConfig,
    RunError,
    Trainer,
    make_accelerator,
    open_data,
    train,
)
from selfconv.train.files import checkpoints, runs
from selfconv.train.files.runs import lock_run
from selfconv.train.files.state import random_states, set_random_states


def losses(run: Path) -> list[tuple[float, float, float]]:
    """What the metrics have of each epoch, except times: the rate, loss and accuracy."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["lr"], line["train_loss"], line["val_accuracy"]) for line in lines]


# ---- killed, and resumed ----


def start(data: Path, out: Path, *extra: str) -> subprocess.Popen[str]:
    arguments = command("train", "--data", data, "--model", "resnet29", "--out", out, *OPTIONS, *extra)
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_killed_runs_end_with_the_same_bits(data: Path, tmp_path: Path) -> None:
    options = ("--ema", "0.9", "--checkpoint-minutes", "0", "--epochs", "12")
    random.seed(0)
    config = None
    for number in range(2):
        out = tmp_path / f"killed{number}"
        process = start(data, out, *options)
        wait_for(lambda out=out: len(list((out / "checkpoints").glob("*.safetensors"))) >= 1, process)
        time.sleep(random.uniform(0, 0.5))
        process.kill()
        process.communicate()
        run = Run.open(out)
        assert not run.finished
        if config is None:
            config = run.config
            train(config, tmp_path / "whole", quiet=True)
        train(config, out, quiet=True, resume=True)
        assert same_weights(tmp_path / "whole", out)
        assert losses(tmp_path / "whole") == losses(out)


def test_sigterm_saves_and_prints_how_to_continue(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(data, out, "--epochs", "400")
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(losses(out)) >= 1, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    [line] = errors.splitlines()
    assert line.startswith("selfconv: stopped and saved in epoch ")
    assert line.endswith(f"continue with: selfconv train --out {out} --resume")
    last = checkpoints.load_last(out / "checkpoints", Run.open(out).digest)
    assert last is not None
    assert f"in epoch {last.state['epoch'] + 1}, after step {last.state['step']};" in line


class StopAt:
    """A trainer's step that is followed by a signal, as if a user had pressed Ctrl-C during it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, epoch: int, step: int) -> None:
        from selfconv.train import Trainer

        original = Trainer.step

        def stepped(trainer: Trainer, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if (trainer.state.epoch, trainer.state.step) == (epoch, step):
                signal.raise_signal(signal.SIGINT)
            return original(trainer, images, labels)

        monkeypatch.setattr(Trainer, "step", stepped)


@pytest.mark.parametrize(
    "options", [{}, {"ema": 0.9, "clip": 1.0, "rotate": "any"}], ids=["plain", "options"]
)
@pytest.mark.parametrize("place", [(0, 0), (0, 3), (1, 4)])
def test_a_stop_at_any_step_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[int, int], options: dict
) -> None:
    config = tiny_config(data, "resnet29_asc", **options)
    train(config, tmp_path / "whole", quiet=True)
    StopAt(monkeypatch, *place)
    with pytest.raises(Interrupted) as stopped:
        train(config, tmp_path / "run", quiet=True)
    assert stopped.value.code == 130
    monkeypatch.undo()
    torch.manual_seed(99)  # whatever happens in between
    train(config, tmp_path / "run", quiet=True, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "run")
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")
    assert Run.open(tmp_path / "whole").record.test_loss == Run.open(tmp_path / "run").record.test_loss


def test_a_run_killed_after_its_last_epoch_still_gets_its_record(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfconv.train import runner

    config = tiny_config(data)
    train(config, tmp_path / "whole", quiet=True)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "save_model", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", quiet=True)
    assert not Run.open(tmp_path / "run").finished
    monkeypatch.undo()
    train(config, tmp_path / "run", quiet=True, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "run")


def test_another_number_of_threads_is_warned_about(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StopAt(monkeypatch, 0, 1)
    with pytest.raises(Interrupted):
        train(tiny_config(data), tmp_path / "run", quiet=True)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.warns(UserWarning, match="began with 1 threads and continues with 7"):
        train(tiny_config(data), tmp_path / "run", quiet=True, resume=True)


# ---- checkpoints ----


def small(epoch: int, value: float = 1.0) -> Checkpoint:
    return Checkpoint({"model/w": torch.full((4, 3), value)}, {"epoch": epoch, "step": 0}, "a run")


def test_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for epoch in range(5):
        checkpoints.write(tmp_path, small(epoch))
    assert [p.name for p in checkpoints.checkpoint_files(tmp_path)] == [
        "000003-00000000.safetensors",
        "000004-00000000.safetensors",
    ]


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "zeros", "header"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    checkpoints.write(tmp_path, small(1, 1.0))
    path = checkpoints.write(tmp_path, small(2, 2.0))
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-5] ^= 1
    damaged: dict[str, bytes | bytearray] = {
        "cut": content[:-7],
        "empty": b"",
        "flipped": content,
        "zeros": bytes(len(content)),
        "header": content[:20] + b"}}}" + content[23:],
    }
    path.write_bytes(damaged[damage])
    with pytest.warns(UserWarning, match="000002-00000000.safetensors: .*; trying the previous one"):
        found = checkpoints.load_last(tmp_path, "a run")
    assert found is not None
    assert found.state["epoch"] == 1
    assert found.tensors("model")["w"].unique().tolist() == [1.0]


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, small(1)).write_bytes(b"x")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(RunError, match="none of the 1 checkpoints can be read"),
    ):
        checkpoints.load_last(tmp_path, "a run")


def test_a_run_with_a_damaged_checkpoint_ends_with_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(data, epochs=3)
    train(config, tmp_path / "whole", quiet=True)
    StopAt(monkeypatch, 2, 2)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    last = checkpoints.checkpoint_files(tmp_path / "run" / "checkpoints")[-1]
    last.write_bytes(last.read_bytes()[:5000])
    with pytest.warns(UserWarning, match="trying the previous one"):
        train(config, tmp_path / "run", quiet=True, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "run")


def test_nothing_is_pickled(data: Path, tmp_path: Path) -> None:
    """Every file of a run is JSON, safetensors, Markdown, hashes of 8 bytes, or TensorBoard's."""
    train(tiny_config(data), tmp_path / "run", quiet=True)
    for path in (p for p in (tmp_path / "run").rglob("*") if p.is_file() and p.stat().st_size):
        if path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix in (".json", ".jsonl"):
            for part in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
                json.loads(part)
        elif path.name == "seen_images.bin":
            assert path.stat().st_size == 8 * len(np.unique(np.fromfile(path, "<u8")))
        else:
            assert path.name == "README.md" or path.name.startswith("events.out.tfevents")


def test_random_states_round_trip() -> None:
    random.gauss(0, 1)
    np.random.standard_normal()  # noqa: NPY002
    states = Checkpoint(
        {f"random/{k}": v for k, v in random_states().items()}, {"epoch": 0, "step": 0}, "a run"
    )

    def draw() -> tuple[float, float, float, float, float]:
        return (
            random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random(),  # noqa: NPY002
            torch.rand(1).item(),
        )  # fmt: skip

    first = draw()
    draw()
    set_random_states(states.tensors("random"))
    assert draw() == first


# ---- full disks ----


def test_the_state_of_a_gradient_scaler_round_trips(data: Path) -> None:
    """Whole numbers stay whole: a scaler whose interval is a float fails at its next step."""
    config = tiny_config(data)
    saved, loaded = (Trainer(config, open_data(config), make_accelerator(config.hardware)) for _ in range(2))
    for trainer, scale in ((saved, 256.0), (loaded, 2.0)):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    loaded.restore(saved.checkpoint("a run"))
    scaler, weight = loaded.accelerator.scaler, torch.ones(1, requires_grad=True)
    assert scaler.state_dict() == saved.accelerator.scaler.state_dict()
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], 0.5))
    scaler.update()
    assert weight.item() == 0.5
    without = saved.checkpoint("a run")
    for broken in (None, {}, {**without.state["scaler"], "growth_interval": 0}):
        state = without.state | {"scaler": broken}
        with pytest.raises(RunError, match=r"does not fit this run: .*scaler"):
            loaded.restore(Checkpoint(without.all_tensors, state, "a run"))


def test_a_checkpoint_belongs_to_its_run_whatever_options_a_later_version_has(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(RunConfig):
        colour: str = "red"

    train(tiny_config(data, epochs=1), tmp_path / "run", quiet=True)
    run = Run.open(tmp_path / "run")
    before = run.digest
    monkeypatch.setattr(runs, "RunConfig", Later)
    assert isinstance(run.config, Later)
    assert run.digest == before


def test_a_full_disk_before_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*; there is no earlier one"):
        checkpoints.write(tmp_path, small(1, 1.0))


def test_a_full_disk_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.write(tmp_path, small(1, 1.0))
    checkpoints.write(tmp_path, small(2, 2.0))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*; the earlier checkpoints are kept"):
        checkpoints.write(tmp_path, small(3, 3.0))
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2  # nothing half-written either
    last = checkpoints.load_last(tmp_path, "a run")
    assert last is not None
    assert last.state["epoch"] == 2


def test_model_and_names_are_on_disk_before_the_folder_gets_its_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine after the rename must not leave a ``model/`` with missing files."""
    flushed: list[str] = []
    fsync, move = os.fsync, os.replace

    def noted(descriptor: int) -> None:
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def checked(source: Path, target: Path) -> None:
        if Path(target).name == "model":
            files = {path.name for path in Path(source).iterdir()}
            assert files >= {"config.json", "model.safetensors", "record.json"}
            assert files <= set(flushed)
            assert flushed[-1] == ".model.partial"
            flushed.append("checked")
        move(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", checked)
    train(tiny_config(data, epochs=1), tmp_path / "run", quiet=True)
    assert "checked" in flushed


def test_a_disk_that_fills_up_during_a_run(data: Path, tmp_path: Path) -> None:
    """A limit on the size of files, after the first epochs, stands for the disk."""
    out = tmp_path / "run"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    program = f"""
import sys
from selfconv import cli
from selfconv.train.files import checkpoints
write = checkpoints.write
def limited(folder, checkpoint):
    if checkpoint.state["epoch"] == 2:
        {limit}
    return write(folder, checkpoint)
checkpoints.write = limited
cli.main(sys.argv[1:])
"""
    arguments = ["train", "--data", str(data), "--model", "resnet29", "--out", str(out), *OPTIONS]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment()
    )
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("selfconv: ")
    assert "cannot be written (File too large); the earlier checkpoints are kept" in line
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["000001-00000000.safetensors"]
    for folder in (out, tmp_path / "whole"):
        train(Run.open(out).config, folder, quiet=True, resume=True)
    assert same_weights(tmp_path / "whole", out)


# ---- folders ----


def test_two_processes_cannot_write_one_run(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data)
    program = """
import sys
from dataclasses import dataclass
from pathlib import Path
from selfconv.train.files.runs import Run, lock_run
folder = Path(sys.argv[1])
with lock_run(folder, Run(folder).config, resume=True):
    pass
"""
    with lock_run(tmp_path / "run", config, resume=False):
        rival = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True, text=True
        )
    assert rival.returncode == 1
    assert f"RunBusy: {tmp_path / 'run'}: another process is writing to this run" in rival.stderr
    with lock_run(tmp_path / "run", config, resume=True):
        pass


@pytest.mark.parametrize("ended", [False, True])
def test_two_processes_start_one_run_at_the_same_moment(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """The other creates it between our two looks at the folder, and is still running or was killed."""
    config, folder = tiny_config(data), tmp_path / "run"
    exists = Run.exists
    rival = ExitStack()

    def raced(run: Run) -> bool:
        found = exists.fget(run)  # type: ignore[attr-defined]
        monkeypatch.setattr(Run, "exists", exists)
        rival.enter_context(lock_run(folder, config, resume=False))
        if ended:
            rival.close()
        return found

    folder.mkdir()
    monkeypatch.setattr(Run, "exists", property(raced))
    expected = (
        nullcontext() if ended else pytest.raises(RunBusy, match="another process is writing to this run")
    )
    with rival, expected, lock_run(folder, config, resume=True):
        assert Run(folder).config == config


def test_resume_starts_a_new_run(data: Path, tmp_path: Path) -> None:
    train(tiny_config(data, epochs=1), tmp_path / "run", quiet=True, resume=True)
    assert Run.open(tmp_path / "run").finished


def test_changed_data_cannot_be_resumed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.npz"
    own.write_bytes(data.read_bytes())
    StopAt(monkeypatch, 0, 1)
    with pytest.raises(Interrupted):
        train(tiny_config(own), tmp_path / "run", quiet=True)
    with np.load(own) as arrays:
        changed = dict(arrays)
    np.savez(own, **changed | {"x_train": 255 - changed["x_train"]})
    with pytest.raises(RunError, match="the data set own has changed since this run began"):
        train(tiny_config(own), tmp_path / "run", quiet=True, resume=True)


def test_damaged_files_of_a_run(data: Path, tmp_path: Path) -> None:
    train(tiny_config(data, epochs=1), tmp_path / "run", quiet=True)
    run = Run.open(tmp_path / "run")
    (run.folder / "data.json").write_text('{"name": 3}')
    with pytest.raises(RunError, match=r"data.json: expected name, digest, .*; digest is missing"):
        _ = run.data
    (run.folder / "data.json").write_text("{")
    with pytest.raises(RunError, match=r"data.json: expected JSON"):
        _ = run.data
