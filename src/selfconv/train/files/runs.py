"""The folder of a run: its lock, its files, and reading them again.

config.json           all options
place.json            the absolute path of its data, if they were given by a relative path
data.json             the data: digest, classes, size, range of values, mean and deviation
seen_images.bin       8 bytes for each image to train and validate on, equal for equal pixels: a test on
                      other data leaves these images out
metrics.jsonl         a line for each epoch; events.out.tfevents.* has the same for TensorBoard
checkpoints/          the last two
model/                once it has finished: config.json and model.safetensors, for ResNet.from_pretrained,
                      and a copy of record.json: a folder to share
record.json           the result, with everything needed to judge and repeat it
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from selfconv._files import (
    check_file,
    describe_folder,
    file_sha256,
    read_as,
    read_json,
    read_lines_as,
    sync_folder,
    write_atomically,
    write_json,
)
from selfconv.data import DataInfo, image_hashes, load_data
from selfconv.train.config import RunConfig, differences
from selfconv.train.distributed import broadcast_object
from selfconv.train.files import checkpoints
from selfconv.train.files.checkpoints import Checkpoint
from selfconv.train.files.record import EpochMetrics, Record
from selfconv.train.stopping import RunBusy, RunError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from numpy.typing import NDArray

    from selfconv.data import Dataset
    from selfconv.models import ResNet

Kind = TypeVar("Kind")
PLACE = "place.json"
SEEN, SEEN_BYTES = "seen_images.bin", 2**30  # at most


@dataclass(frozen=True)
class DataPlace:
    """The absolute path of a run's data."""

    data: str


@dataclass(frozen=True)
class Run:
    """The folder of a run, for reading."""

    folder: Path

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        run = cls(Path(folder))
        if not run.exists:
            found = describe_folder(run.folder, "config.json")
            raise RunError(f"{folder}: expected the folder of a run; got {found}")
        return run

    @property
    def exists(self) -> bool:
        return (self.folder / "config.json").is_file()

    @property
    def finished(self) -> bool:
        return (self.folder / "record.json").exists()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def config(self) -> RunConfig:
        return _read(RunConfig, self.folder / "config.json")

    @property
    def data(self) -> DataInfo:
        return _read(DataInfo, self.folder / "data.json")

    @property
    def seen_images(self) -> NDArray[np.uint64] | None:
        """``image_hashes`` of the images to train and validate on; None if an earlier version began it."""
        path = self.folder / SEEN
        if not path.exists():
            return None
        try:
            check_file(path, SEEN_BYTES)
        except ValueError as error:
            raise RunError(f"{path}: {error}") from None
        content = path.read_bytes()
        if len(content) % 8:
            raise RunError(f"{path}: expected 8 bytes for each image; got {len(content)}")
        return np.frombuffer(content, "<u8")

    @property
    def digest(self) -> str:
        """The digest of a run's options and data, which determine its result; each checkpoint stores it.

        Computed from the files, so that a version with more options gets the same digest.
        """
        content = [read_json(self.folder / name) for name in ("config.json", "data.json")]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> Record:
        """The record of a finished run; its files must agree on what was run."""
        record = _read(Record, self.folder / "record.json")
        for name, other in (("config", self.config), ("data", self.data)):
            if getattr(record, name) != other:
                raise RunError(
                    f"{self.folder}: expected record.json and {name}.json of one run; they disagree"
                )
        return record

    @property
    def metrics(self) -> list[EpochMetrics]:
        """The metrics of all completed epochs."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []


def holds_model(folder: Path) -> bool:
    """Whether it is the folder of a run or of a saved model; the path of any other may be a model's name."""
    return Run(folder).exists or (folder / "model.safetensors").exists()


def _read(kind: type[Kind], path: Path) -> Kind:
    try:
        return read_as(kind, path)
    except ValueError as error:
        raise RunError(str(error)) from None


def read_metrics(path: Path) -> list[EpochMetrics]:
    """The lines of a ``metrics.jsonl``."""
    try:
        found = read_lines_as(EpochMetrics, path)
    except ValueError as error:
        raise RunError(str(error)) from None
    for number, metrics in enumerate(found, 1):
        if metrics.epoch != number:
            raise RunError(f"{path}, line {number}: expected epoch {number}; got {metrics.epoch}")
    return found


def write_data_path(run: Run, config: RunConfig) -> None:
    """Writes the absolute path of the data to place.json; config.json, which is published, keeps the path as
    given."""
    source = Path(config.data.source).expanduser()
    if not (run.folder / PLACE).exists() and not source.is_absolute() and source.exists():
        write_json(run.folder / PLACE, asdict(DataPlace(str(source.resolve()))))


def with_data_path(config: RunConfig, folder: Path | None) -> RunConfig:
    """The options with the absolute path of the data, for a process in another working directory."""
    if folder is None or not (folder / PLACE).is_file():
        return config
    path = _read(DataPlace, folder / PLACE).data
    return config.replaced("data", source=path) if Path(path).exists() else config


def open_data(
    config: RunConfig, *, folder: Path | None = None, channels: int | None = None, download: bool = True
) -> Dataset:
    """The data set of a run.

    Args:
        channels: to convert image files to, as ``load_data`` does.
        folder: the run's folder; place.json in it has the absolute path.

    Raises:
        DataError: the data cannot be used. MissingDataError: they are not in the cache and ``download`` is
            False.
    """
    options = with_data_path(config, folder).data
    data = load_data(
        options.source,
        **options.for_loading(),
        channels=channels,
        memory=None if config.hardware.memory is None else config.hardware.memory * 1e9,
        download=download,
    )
    return data if options.subset is None else data.subset(options.subset, options.split_seed)


def _other_file(run: Run) -> str | None:
    """The name of a file in a folder that has no run, if there is one."""
    if run.exists or not run.folder.is_dir():
        return None
    names = sorted(path.name for path in run.folder.iterdir() if not path.name.startswith("."))
    # "checkpoints" alone: left by a run that was killed before config.json was written
    return None if names in ([], ["checkpoints"]) else names[0]


@contextmanager
def lock_run(folder: Path, config: RunConfig, *, resume: bool) -> Iterator[Run]:
    """Locks the folder of a run for writing within the context, and creates it if it is new.

    Raises:
        RunError: it contains a run and ``resume`` is False, a run with other options, or other files.
        RunBusy: another process is writing to it.
    """
    run = Run(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: expected a folder to write to; got a file")
    lock = FileLock(folder / ".lock")
    # a run creates its lock before its other files: without a lock they are not a run's, and none is created
    if (other := _other_file(run)) is not None and not (folder / ".lock").exists():
        raise RunError(f"{folder}: expected a new or empty folder; it holds {other}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunBusy(f"{folder}: another process is writing to this run") from None
    try:
        if (other := _other_file(run)) is not None:  # again: another process may have started the run above
            raise RunError(f"{folder}: expected a new or empty folder; it holds {other}")
        if not run.exists:
            run.checkpoints.mkdir(exist_ok=True)
            write_json(folder / "config.json", config.to_json())
        elif not resume:
            raise RunError(
                f"{folder}: already contains a run; give another --out, or --resume to continue it"
            )
        elif changed := differences(config, run.config):
            raise RunError(f"{folder}: cannot resume with other options: {changed[0]}")
        yield run
    finally:
        lock.release()


def write_or_check_data_info(run: Run, data: Dataset) -> None:
    """Writes ``data.json``; if it exists, it must describe the same data."""
    info, path = DataInfo.of(data), run.folder / "data.json"
    if not path.exists():
        write_json(path, asdict(info))
        return
    written = run.data
    if written.digest != info.digest:
        raise RunError(f"{run.folder}: the data set {info.name} has changed since this run began")
    if not written.agrees_with(info):
        expected = f"the description of {info.name} (classes, channels, size, range, …)"
        raise RunError(f"{path}: expected {expected}; got another")


def write_seen_images(run: Run, data: Dataset) -> None:
    """Writes ``seen_images.bin``, unless it exists."""
    if not (run.folder / SEEN).exists():
        hashes = np.unique(np.concatenate([image_hashes(data.train), image_hashes(data.val)]))
        write_atomically(run.folder / SEEN, hashes.tobytes())


@contextmanager
def open_or_resume(
    accelerator: Accelerator, out: Path, config: RunConfig, data: Dataset, resume: bool
) -> Iterator[tuple[Run, Record | None, Checkpoint | None]]:
    """The run's folder, its record if it has finished, and its last checkpoint.

    Only the main process reads and writes the folder. If it fails, all processes raise.
    """
    run = Run(out)
    error: Exception | None = None
    record, checkpoint = None, None
    with ExitStack() as stack:
        if accelerator.is_main_process:
            try:
                stack.enter_context(lock_run(out, config, resume=resume))
                write_or_check_data_info(run, data)
                write_data_path(run, config)
                write_seen_images(run, data)
                if run.finished:
                    record = run.record
                else:
                    checkpoint = checkpoints.load_last(run.checkpoints, run.digest)
            except (ValueError, OSError) as problem:
                error = problem
        error, record, checkpoint = broadcast_object((error, record, checkpoint))
        if error is not None:
            # only the main process prints the message
            raise error if accelerator.is_main_process else SystemExit(2)
        yield run, record, checkpoint


def save_model(run: Run, model: ResNet, record: Record) -> Record:
    """Writes ``model/``: complete, or absent after a crash; with a copy of the record, for sharing.

    Returns:
        The record with the digest of the weights.
    """
    partial, final = run.folder / ".model.partial", run.folder / "model"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        record = replace(record, weights_sha256=file_sha256(partial / "model.safetensors"))
        write_json(partial / "record.json", record.to_json())
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(run.folder)
    return record
