"""Faults of the machine: kills, disks, clocks, caches, compilers, memory. docs/reliability.md lists them."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT, source_of
from helpers.tiny_runs import OPTIONS, command, environment, same_weights, tiny_config
from numba import types

from selfconv import _files, cli
from selfconv._text import one_line
from selfconv.ops import _backends, affine_self_conv
from selfconv.ops.cpu import native
from selfconv.train import (
    Checkpoint,
    OutOfMemory,
    Run,
    RunConfig,
    RunError,
    Trainer,
    runner,
    train,
    trainer,
)
from selfconv.train.files import checkpoints, runs


@pytest.fixture(scope="module")
def config(data: Path) -> RunConfig:
    return tiny_config(data, "resnet29", epochs=3, ema=0.9)


@pytest.fixture(scope="module")
def whole(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(config, folder, quiet=True)
    return folder


def losses(run: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["train_loss"], line["val_accuracy"]) for line in lines]


def ends_like(whole: Path, run: Path, config: RunConfig) -> None:
    train(config, run, quiet=True, resume=True)
    assert same_weights(whole, run)
    assert losses(whole) == losses(run)
    assert Run.open(run).record.test_loss == Run.open(whole).record.test_loss
    left = {p.name for p in run.rglob("*") if "partial" in p.name}
    assert not left


# ---- SIGKILL at every stage ----


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrapped(module: Any, name: str, when: Callable[..., bool], *, after: bool = False) -> None:
    """Dies in that function, before it or after, the first time that it is called so."""
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        dying = when(*args)
        if dying and not after:
            die()
        result = original(*args, **kwargs)
        if dying:
            die()
        return result

    setattr(module, name, call)


def half_a_checkpoint(name: str) -> None:
    """Half the bytes of the checkpoint whose name begins so are on the disk."""
    write = _files.write_atomically

    def half(path: Path, content: bytes) -> None:
        if path.name.startswith(name):
            path.with_name(f".{path.name}.partial").write_bytes(content[: len(content) // 2])
            die()
        write(path, content)

    checkpoints.write_atomically = half


def half_a_checkpoint_within_an_epoch() -> None:
    """The run that resumes saves after other steps, so no file that it writes has the name of this one."""
    hours = itertools.count(step=3600.0)
    trainer.time.monotonic = lambda: next(hours)  # a checkpoint is due after every step
    half_a_checkpoint("000001-00000003")


def always(*_: Any) -> bool:
    return True


STAGES: dict[str, Callable[[], None]] = {
    "before anything": lambda: wrapped(runs, "lock_run", always),
    "folder made, nothing in it": lambda: wrapped(runs, "write_json", always),
    "options written": lambda: wrapped(runs, "write_or_check_data_info", always),
    "data noted": lambda: wrapped(runs, "write_or_check_data_info", always, after=True),
    "first step": lambda: wrapped(Trainer, "step", always),
    "mid-epoch": lambda: wrapped(Trainer, "step", lambda t, *_: (t.state.epoch, t.state.step) == (1, 3)),
    "epoch done, not saved": lambda: wrapped(
        checkpoints, "write", lambda _, c: c.state["epoch"] == 2 and c.state["step"] == 0
    ),
    "half a checkpoint": lambda: half_a_checkpoint("000002"),
    "half a checkpoint within an epoch": half_a_checkpoint_within_an_epoch,
    "checkpoint whole, not in place": lambda: wrapped(
        runs.os, "replace", lambda _, to: Path(to).name.startswith("000002")
    ),
    "checkpoint in place, old ones not gone": lambda: wrapped(checkpoints, "checkpoint_files", always),
    "before the test": lambda: wrapped(runner, "test_and_save", always),
    "model written, not in place": lambda: wrapped(
        runs.os, "replace", lambda _, to: Path(to).name == "model"
    ),
    "model in place, no record": lambda: wrapped(runner, "save_model", always, after=True),
    "record written": lambda: wrapped(
        runner, "write_json", lambda path, _: path.name == "record.json", after=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_killed_at_any_stage_ends_with_the_same_bits(
    stage: str, config: RunConfig, whole: Path, tmp_path: Path
) -> None:
    child = os.fork()
    if child == 0:  # what happens here never returns to pytest
        try:
            STAGES[stage]()
            train(config, tmp_path / "run", quiet=True)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the stage was never reached"
    assert os.WTERMSIG(status) == signal.SIGKILL
    ends_like(whole, tmp_path / "run", config)


# ---- disks ----


@dataclass
class Disk:
    """A folder to write to, and how to fill the disk it is on."""

    folder: Path
    fill: Callable[[], None]
    free: Callable[[], None]


def mount(kind: str, place: Path, flags: int, options: str) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    place.mkdir(exist_ok=True)
    return libc.mount(b"none", os.fsencode(place), kind.encode(), flags, options.encode()) == 0


def unmount(place: Path) -> None:
    ctypes.CDLL(None).umount2(os.fsencode(place), 2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A small file system in memory; without the right to mount one, a limit on the size of files."""
    place = tmp_path / "disk"
    if mount("tmpfs", place, 0, "size=2m"):

        def fill() -> None:
            with open(place / "filler", "wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
            assert os.statvfs(place).f_bavail == 0

        yield Disk(place, fill, lambda: (place / "filler").unlink())
        unmount(place)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield Disk(
        place,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard)),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def filling(disk: Disk, module: Any, name: str, when: Callable[..., bool], patch: pytest.MonkeyPatch) -> None:
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            disk.fill()
        return original(*args, **kwargs)

    patch.setattr(module, name, call)


def epoch_two(_: Path, checkpoint: Checkpoint) -> bool:
    return checkpoint.state["epoch"] == 2


def first_step_of_epoch_two(trainer: Trainer, *_: Any) -> bool:
    return (trainer.state.epoch, trainer.state.step) == (1, 0)


@pytest.mark.parametrize(
    ("module", "name", "when"),
    [
        (runs, "write_json", always),
        (Trainer, "step", first_step_of_epoch_two),
        (checkpoints, "write", epoch_two),
        (runner, "save_model", always),
    ],
    ids=["at the start", "mid-epoch", "at a checkpoint", "at the end"],
)
def test_a_full_disk(
    module: Any, name: str, when: Any, config: RunConfig, whole: Path, disk: Disk, monkeypatch: Any
) -> None:
    """One line; what was saved stays; with space again, the run goes on to the same bits."""
    filling(disk, module, name, when, monkeypatch)
    out = disk.folder / "run"
    with pytest.raises((OSError, RunError)) as caught:
        train(config, out, quiet=True)
    line = one_line(caught.value)
    assert re.search(r"No space left on device|File too large", line)
    assert "\n" not in line
    monkeypatch.undo()
    disk.free()
    ends_like(whole, out, config)


def test_a_full_disk_in_a_process_of_its_own(data: Path, disk: Disk) -> None:
    disk.fill()
    arguments = command("train", "--data", data, "--out", disk.folder / "run", *OPTIONS)
    limit = None if (disk.folder / "filler").exists() else disk.fill
    run = subprocess.run(arguments, capture_output=True, text=True, env=environment(), preexec_fn=limit)
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("selfconv: ")
    assert re.search(r"No space left on device|File too large", line)


READ_ONLY = 1  # MS_RDONLY, from sys/mount.h
REMOUNT = 32


@pytest.fixture
def read_only(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a run in it that nobody can write to, not even root."""
    import shutil

    place = tmp_path / "fixed"
    mounted = mount("tmpfs", place, 0, "size=8m")
    place.mkdir(exist_ok=True)
    shutil.copytree(whole, place / "run")
    (place / "run" / "record.json").unlink()
    if mounted:
        assert mount("tmpfs", place, READ_ONLY | REMOUNT, "")
        yield place
        unmount(place)
        return
    opened, made = os.open, os.mkdir

    def refuse(path: Any) -> None:
        if str(path).startswith(str(place)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse(path)
        return opened(path, flags, *rest, **options)

    def mkdir(path: Any, *rest: Any, **options: Any) -> None:
        refuse(path)
        made(path, *rest, **options)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "mkdir", mkdir)
    yield place


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_cannot_be_written(
    resume: bool, config: RunConfig, read_only: Path, data: Path, capfd: Any
) -> None:
    before = {p: p.stat().st_size for p in read_only.rglob("*")}
    with pytest.raises((OSError, RunError)) as caught:
        train(config, read_only / ("run" if resume else "new"), quiet=True, resume=resume)
    assert "Read-only file system" in one_line(caught.value)
    assert {p: p.stat().st_size for p in read_only.rglob("*")} == before


# ---- clocks ----


def test_a_clock_that_goes_backwards(
    config: RunConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of day falls, the other clock stands still, and later checkpoints look older: nothing asks."""
    day = iter(range(2_000_000_000, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(day)))
    monkeypatch.setattr(trainer.time, "monotonic", lambda: 5.0)

    def stop(trainer: Trainer, *args: Any) -> Any:
        if (trainer.state.epoch, trainer.state.step) == (2, 1):
            raise KeyboardInterrupt
        return step(trainer, *args)

    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", quiet=True)
    monkeypatch.setattr(Trainer, "step", step)
    for age, path in enumerate(checkpoints.checkpoint_files(tmp_path / "run" / "checkpoints")):
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    ends_like(whole, tmp_path / "run", config)


# ---- memory ----


def test_out_of_memory_says_what_to_lower(
    config: RunConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def too_much(trainer: Trainer, *args: Any) -> Any:
        if (trainer.state.epoch, trainer.state.step) == (1, 2):
            torch.empty(2**58)  # what torch's own allocator says to that
        return step(trainer, *args)

    monkeypatch.setattr(Trainer, "step", too_much)
    with pytest.raises(OutOfMemory) as caught:
        train(config, tmp_path / "run", quiet=True)
    message = str(caught.value)
    assert message.startswith(
        "out of memory in epoch 2, step 3, with 16 images at a time; --accumulate 2 takes"
    )
    assert "--batch-size" in message
    assert "\n" not in message
    monkeypatch.undo()
    ends_like(whole, tmp_path / "run", config)


def test_out_of_memory_before_the_first_step_says_what_to_lower(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "measure_step", lambda _: torch.empty(2**58))
    with pytest.raises(OutOfMemory, match=r"out of memory in epoch 1, step 1, .* --accumulate 2 takes half"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[x] DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_in_any_command(error: Exception, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "fails", fails)
    with pytest.raises(SystemExit) as stop:
        cli.main(["fails"])
    assert stop.value.code == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("selfconv: out of memory (")


# ---- Numba, its cache, and compilers ----

SIGNATURE = types.void(types.CPointer(types.int64))
SOURCE = "def put_seven(args):\n    args[0] = 7\n"


def kernel(folder: Path) -> Callable[..., None]:
    path = folder / "some_kernel.py"
    if not path.exists():
        path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("some_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.put_seven


def runs_right(compiled: Any) -> bool:
    place = ctypes.c_int64(0)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)(ctypes.addressof(place))
    return place.value == 7


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage\n")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_another_version(path: Path) -> None:
    import pickle

    import numba

    old, new = pickle.dumps(numba.__version__, -1), pickle.dumps("0.1.0", -1)
    assert path.suffix != ".nbi" or old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [garbage, cut, emptied, of_another_version, Path.unlink])
def test_a_damaged_kernel_cache_is_renewed(
    damage: Callable[[Path], None], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.native(SIGNATURE, "test")(kernel(tmp_path)).cache_hits == 0
        files = [*(tmp_path / "cache").rglob(f"*{suffix}")]
        assert len(files) == 1
        damage(files[0])
        assert runs_right(native.native(SIGNATURE, "test")(kernel(tmp_path)))
        again = native.native(SIGNATURE, "test")(kernel(tmp_path))
    assert again.cache_hits == 1  # whole again
    assert runs_right(again)


def no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Code that comes from no file has no place to be kept, as if no folder could be written."""
    place: dict[str, Any] = {}
    exec(compile(SOURCE, "<nowhere>", "exec"), place)
    return place["put_seven"]


def no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    from numba.core.caching import IndexDataCacheFile

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    return kernel(tmp_path)


@pytest.mark.parametrize("trouble", [no_folder, no_space])
def test_without_a_kernel_cache_there_is_one_warning(
    trouble: Callable[..., Callable[..., None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native._warn_once.cache_clear()
    kernels = [trouble(tmp_path, monkeypatch) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="compiled kernels cannot be kept on disk") as caught:
        compiled = [native.native(SIGNATURE, "test")(function) for function in kernels]
    assert len(caught) == 1
    assert all(map(runs_right, compiled))


def test_errors_in_a_kernel_itself_are_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "some_kernel.py").write_text("def put_seven(args):\n    args[0] = nothing_of_that_name\n")
    with pytest.raises(Exception, match="nothing_of_that_name"):
        native.native(SIGNATURE, "test")(kernel(tmp_path))


def test_no_compiler_no_home_no_path() -> None:
    """Numba brings its own compiler, and the environment is next to empty."""
    code = (
        "import torch; from selfconv.ops import affine_self_conv as f; torch.manual_seed(0); "
        "a = torch.randn(4, 1, 2, 5, 5); p = torch.randn(4, 2, 3, 3); "
        "x, y = (f(*a[:3], *p, num_heads=1, backend=b) for b in ('numba', 'eager')); "
        "print((x - y).abs().max().item() < 1e-5)"
    )
    bare = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": "/proc/nobody",
        "CC": "/bin/false",
        "PATH": "/nowhere",
    }
    run = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == ("True", "")


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'numba'"),
        ImportError("Numba needs NumPy 2.2 or less"),
        OSError("libLLVM.so: cannot open shared object file"),
        AttributeError("module 'numba' has no attribute 'njit'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_numba_missing_or_broken(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise error

    monkeypatch.setattr(_backends, "_FAILURES", {})
    monkeypatch.setitem(_backends._BACKENDS, "numba", _backends.Backend(load, _backends._numba_refusal))
    _backends._warn_once.cache_clear()
    x, psi = torch.randn(1, 2, 5, 5), torch.randn(2, 3, 3)
    with pytest.warns(RuntimeWarning, match="numba backend cannot be imported .*slower one") as caught:
        found = [affine_self_conv(x, x, x, psi, None, psi, None, num_heads=1) for _ in range(3)]
    assert len(caught) == 1
    expected = affine_self_conv(x, x, x, psi, None, psi, None, num_heads=1, backend="eager")
    assert all(torch.equal(out, expected) for out in found)


def test_numba_missing_in_a_process_of_its_own() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch; from selfconv.nn import AffineSelfConv2d\n"
        "layer = AffineSelfConv2d(2, 2, 3, num_heads=1)\n"
        "for _ in range(3): layer(torch.randn(1, 2, 4, 4)).sum().backward()"
    )
    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stderr.count("Warning") == 1
    assert "the numba backend cannot be imported" in run.stderr


# ---- the table is true ----

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
    if re.match(r"\| .*`test_\w+\.", line)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_promise_has_its_test(row: list[str]) -> None:
    _, promise, named = row
    assert promise
    tests = re.findall(r"`(\w+)\.(\w+)`", named)
    assert tests
    for file, name in tests:
        assert re.search(rf"^ *def {name}\(", source_of(file), re.MULTILINE), f"no {name} in {file}"


def test_the_table_of_faults_is_there() -> None:
    assert len(ROWS) >= 20
