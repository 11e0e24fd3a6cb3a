"""The folder of a run: its lock, its files, and reading them again.

config.json           what the run was asked to do
place.json            where its data are, if they were given by a relative path
data.json             what it was trained on: digest, classes, size, mean and deviation
metrics.jsonl         a line for each epoch; events.out.tfevents.* say the same to TensorBoard
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
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from selfconv._files import file_sha256, read_as, read_json, read_lines_as, sync_folder, write_json
from selfconv.data import DataInfo, load_data
from selfconv.train import checkpoints
from selfconv.train.checkpoints import Checkpoint
from selfconv.train.config import RunConfig, differences
from selfconv.train.distributed import broadcast_object
from selfconv.train.record import EpochMetrics, Record
from selfconv.train.stopping import RunBusy, RunError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from selfconv.data import Dataset
    from selfconv.models import ResNet

Kind = TypeVar("Kind")
PLACE = "place.json"


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
            found = "no such folder"
            if run.folder.is_dir():
                found = "other things" if any(run.folder.iterdir()) else "an empty folder"
            elif run.folder.exists():
                found = "a file"
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
    def digest(self) -> str:
        """The digest of a run's options and data, which decide its result; a checkpoint carries it.

        As they are in the files, which are written once: a later version may know more options.
        """
        content = [read_json(self.folder / name) for name in ("config.json", "data.json")]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def result(self) -> Record:
        """The record of a finished run; its files must agree on what was run."""
        record = _read(Record, self.folder / "record.json")
        for name, other in (("config", self.config), ("data", self.data)):
            if getattr(record, name) != other:
                raise RunError(
                    f"{self.folder}: expected record.json and {name}.json of one run; they disagree"
                )
        return record

    @property
    def record(self) -> dict[str, Any]:
        """The result as ``record.json`` holds it."""
        return self.result.to_json()

    @property
    def metrics(self) -> list[EpochMetrics]:
        """The metrics of all completed epochs."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []


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


def note_place(run: Run, config: RunConfig) -> None:
    """Notes where the data of a run are, beside its options, which are shared with its model."""
    source = Path(config.data.source).expanduser()
    if not (run.folder / PLACE).exists() and not source.is_absolute() and source.exists():
        write_json(run.folder / PLACE, asdict(DataPlace(str(source.resolve()))))


def at_place(config: RunConfig, folder: Path | None) -> RunConfig:
    """The options with the absolute path of the data, for a run that is read from another folder."""
    if folder is None or not (folder / PLACE).is_file():
        return config
    place = _read(DataPlace, folder / PLACE).data
    return config.replaced("data", source=place) if Path(place).exists() else config


def open_data(config: RunConfig, *, folder: Path | None = None, download: bool = True) -> Dataset:
    """The data set of a run.

    Args:
        folder: of the run, which knows where its data are if they were given by a relative path.

    Raises:
        DataError: it cannot be used; MissingDataError if it is not there, and not to be downloaded.
    """
    options = at_place(config, folder).data
    data = load_data(
        options.source,
        **options.for_loading(),
        pixel_range=options.pixel_range,
        group_by=options.group_by,
        memory=None if config.hardware.memory is None else config.hardware.memory * 1e9,
        download=download,
    )
    return data if options.subset is None else data.subset(options.subset, options.split_seed)


@contextmanager
def lock_run(folder: Path, config: RunConfig, *, resume: bool) -> Iterator[Run]:
    """Locks the folder of a run for writing within the context, and creates it if it is new.

    Raises:
        RunError: it holds another run, or other things, or another process is writing to it.
    """
    run = Run(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: expected a folder to write to; got a file")
    if folder.is_dir() and not run.exists:
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        if others and others != ["checkpoints"]:  # a run that was killed as it began
            raise RunError(f"{folder}: expected a new or empty folder; it holds {others[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunBusy(f"{folder}: another process is writing to this run") from None
    try:
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


def note_data(run: Run, data: Dataset) -> DataInfo:
    """Writes ``data.json``; if it exists, it must describe the same data."""
    info = DataInfo.of(data)
    if (run.folder / "data.json").exists():
        noted = run.data
        if noted.digest != info.digest:
            raise RunError(f"{run.folder}: the data set {info.name} has changed since this run began")
        if not noted.agrees_with(info):
            raise RunError(
                f"{run.folder / 'data.json'}: expected the description of {info.name}; got another"
            )
    else:
        write_json(run.folder / "data.json", asdict(info))
    return info


@contextmanager
def open_or_resume(
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
                stack.enter_context(lock_run(out, config, resume=resume))
                note_data(run, data)
                note_place(run, config)
                if run.finished:
                    record = run.record
                else:
                    checkpoint = checkpoints.load_last(run.checkpoints, run.digest)
            except (ValueError, OSError) as problem:
                error = problem
        error, record, checkpoint = broadcast_object((error, record, checkpoint))
        if error is not None:
            raise error if accelerator.is_main_process else SystemExit(2)  # one of them says it
        yield run, record, checkpoint


def save_model(run: Run, model: ResNet, record: Record) -> Record:
    """Writes ``model/`` atomically, with a copy of the record, so that the folder can be shared.

    Returns:
        The record with the digest of the weights.
    """
    partial, place = run.folder / ".model.partial", run.folder / "model"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        record = replace(record, weights_sha256=file_sha256(partial / "model.safetensors"))
        write_json(partial / "record.json", record.to_json())
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(place, ignore_errors=True)
        os.replace(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(run.folder)
    return record
