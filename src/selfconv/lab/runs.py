"""A run's folder: who may write to it, what is in it, and how it is read again.

config.json           what the run was asked to do
data.json             what it was trained on: digest, classes, size, mean and deviation
metrics.jsonl         a line for each epoch; events.out.tfevents.* say the same to TensorBoard
checkpoints/          the last two
model/                config.json and model.safetensors, for ResNet.from_pretrained, once it has finished
record.json           the result, with everything needed to judge and repeat it
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from selfconv.lab._text import read_text
from selfconv.lab.config import RunConfig, differences
from selfconv.lab.errors import RunBusy, RunError

if TYPE_CHECKING:
    from selfconv.lab.data import Dataset
    from selfconv.models import ResNet

MAX_SIZE = 16384  # side of an image


def write_atomically(path: Path, content: bytes) -> None:
    """The file holds either what it held before or all of the content, even if the machine stops."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes sure that the names in a folder survive, not only the files."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: object) -> None:
    write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one too
        raise RunError(f"{path}: expected JSON; got something else ({error})") from None


@dataclass(frozen=True)
class DataInfo:
    """What a trained model must be told of the images it was trained on."""

    name: str
    digest: str
    class_names: list[str]
    in_channels: int
    size: int
    mean: list[float]
    std: list[float]
    images: dict[str, int]

    def __post_init__(self) -> None:
        """A description may come from anywhere, and what it says is used for the sizes of arrays."""
        numbers = [*self.mean, *self.std]
        if not (
            isinstance(self.name, str)
            and isinstance(self.digest, str)
            and all(isinstance(name, str) for name in self.class_names)
            and self.in_channels in (1, 3)
            and type(self.size) is int
            and 1 <= self.size <= MAX_SIZE
            and len(self.mean) == len(self.std) == self.in_channels
            and all(type(number) is float and math.isfinite(number) for number in numbers)
            and min(self.std) > 0
        ):
            raise ValueError("not the description of a data set")

    @classmethod
    def of(cls, data: Dataset) -> DataInfo:
        return cls(
            name=data.name,
            digest=data.digest,
            class_names=list(data.class_names),
            in_channels=data.in_channels,
            size=data.size,
            mean=list(data.mean),
            std=list(data.std),
            images={"train": len(data.train), "val": len(data.val), "test": len(data.test)},
        )


@dataclass(frozen=True)
class Run:
    """The folder of a run, to read."""

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
        return (self.folder / "record.json").is_file()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def config(self) -> RunConfig:
        return RunConfig.load(self.folder)

    @property
    def record(self) -> dict[str, Any]:
        return read_json(self.folder / "record.json")

    @property
    def data(self) -> DataInfo:
        path = self.folder / "data.json"
        content = read_json(path)
        try:
            return DataInfo(**content)
        except (TypeError, ValueError):
            raise RunError(f"{path}: expected the description of a data set; got something else") from None

    def load_model(self) -> ResNet:
        """The trained model, in evaluation mode; of a run that has not finished, from its last checkpoint."""
        from selfconv.models import ResNet

        if (self.folder / "model").is_dir():
            return ResNet.from_pretrained(self.folder / "model")
        from selfconv.lab._trainer import build_model
        from selfconv.lab.checkpoints import load_last

        checkpoint = load_last(self.checkpoints)
        if checkpoint is None:
            raise RunError(f"{self.folder}: this run has no weights yet")
        model = build_model(self.config, self.data)
        weights = checkpoint.tensors("ema") or checkpoint.tensors("model")
        model.load_state_dict(weights)
        return model.eval()


def open_data(config: RunConfig) -> Dataset:
    """The data set of a run."""
    from selfconv.lab.data import load_data

    options = config.data
    data = load_data(
        options.source,
        image_size=options.image_size,
        seed=options.split_seed,
        validation=options.validation,
    )
    return data if options.subset is None else data.with_fewer(options.subset, options.split_seed)


@contextmanager
def claim(folder: Path, config: RunConfig, *, resume: bool) -> Iterator[Run]:
    """The folder for a run to write to, for as long as the context lasts.

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
            raise RunError(f"{folder}: holds a run already; give another --out, or --resume to go on with it")
        elif changed := differences(config, run.config):
            raise RunError(f"{folder}: cannot go on with other options: {changed[0]}")
        yield run
    finally:
        lock.release()


def begin(run: Run, data: Dataset) -> DataInfo:
    """Notes what a run is trained on; if that was noted before, it must be the same."""
    info = DataInfo.of(data)
    if (run.folder / "data.json").is_file():
        if run.data.digest != info.digest:
            raise RunError(f"{run.folder}: the data set {info.name} has changed since this run began")
    else:
        write_json(run.folder / "data.json", asdict(info))
    return info


def save_model(run: Run, model: ResNet) -> None:
    """Puts the final model in place as a whole."""
    import shutil

    partial, place = run.folder / ".model.partial", run.folder / "model"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(place, ignore_errors=True)
        os.replace(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(run.folder)
