"""Checkpoints: one safetensors file each, whose header holds the rest as JSON. Nothing is pickled.

A file gets its name only when it is completely on disk, and older files are removed only after that, so at
any moment the last checkpoint or the one before can be read. One digest detects a damaged file; another, of
the run's options and data, detects a checkpoint of another run.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from selfconv._files import check_file, parse_json, write_atomically
from selfconv._memory import machine_memory
from selfconv.train.record import EpochMetrics
from selfconv.train.stopping import RunError

KEPT = 2
_NAME = re.compile(r"(\d{6})-(\d{8})\.safetensors")  # epoch and step in it: names sort by time


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, ``part/name``, and a state that JSON can hold."""

    all_tensors: dict[str, Tensor]
    state: dict[str, Any]
    run: str  # digest of the run it belongs to

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of a part, without its name as a prefix."""
        prefix = f"{part}/"
        return {k.removeprefix(prefix): v for k, v in self.all_tensors.items() if k.startswith(prefix)}

    def to_bytes(self) -> bytes:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.all_tensors.items()}
        state = json.dumps(self.state)
        header = {"state": state, "run": self.run}
        return save(tensors, header | {"sha256": _digest(tensors, header)})


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    digest = hashlib.sha256(f"{header['run']}{header['state']}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Saves a checkpoint, then removes all but the last two."""
    path = folder / _name(checkpoint.state)
    try:
        write_atomically(path, checkpoint.to_bytes())
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}); the earlier checkpoints are kept"
        ) from error
    for old in listed(folder)[:-KEPT]:
        old.unlink()
    return path


def listed(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the last one last."""
    return sorted(path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name))


def _name(state: Mapping[str, Any]) -> str:
    return f"{state['epoch']:06d}-{state['step']:08d}.safetensors"


class DamagedError(RunError):
    """The file of a checkpoint is damaged; the previous checkpoint may be intact."""


def read(path: Path, run: str) -> Checkpoint:
    """The checkpoint of a run, which is given by its digest.

    Raises:
        DamagedError: the file is damaged.
        RunError: it belongs to another run, or is not a checkpoint.
    """
    try:
        check_file(path, machine_memory() / 2)
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{path}: cannot be read ({error})") from None
    if "state" not in header or "sha256" not in header:
        raise DamagedError(f"{path}: is damaged (its header is not that of a checkpoint)")
    if "run" not in header:
        raise RunError(
            f"{path}: does not say which run it belongs to (an older version wrote it); start a new run"
        )
    if _digest(tensors, header) != header["sha256"]:
        raise DamagedError(f"{path}: is damaged (its digest does not match)")
    if header["run"] != run:
        raise RunError(
            f"{path}: belongs to another run: it was saved with other options or data than "
            "config.json and data.json say"
        )
    try:
        state = parse_json(header["state"])
        named = _name(state)
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path}: expected the state of a run ({error})") from None
    if named != path.name:
        raise RunError(f"{path}: contains the state that belongs in {named}")
    return Checkpoint(tensors, state, run)


def load_last(folder: Path, run: str) -> Checkpoint | None:
    """The last checkpoint that can be read, with a warning for each that cannot; None if there are none."""
    paths = listed(folder)
    for path in reversed(paths):
        try:
            return read(path, run)
        except DamagedError as error:
            warnings.warn(f"{error}; using the one before", stacklevel=2)
    if paths:
        raise RunError(f"{folder}: none of the {len(paths)} checkpoints can be read")
    return None


# ---- random states ----


def random_states() -> dict[str, Tensor]:
    """The states of the random generators of Python, NumPy and torch, as tensors."""
    _, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, position, has_gauss, cached = numpy
    assert kind == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def expected_random_states(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with the shapes and dtypes that saved random states must have.

    Two parts are optional: the state of a GPU, and the second of a pair of normal numbers.
    """
    states = random_states()
    pending = "python_gauss" in found and found["python_gauss"].numel() > 0
    states["python_gauss"] = torch.zeros(int(pending), dtype=torch.float64)
    if "cuda" not in found:
        states.pop("cuda", None)
    elif "cuda" not in states:  # not used here
        states["cuda"] = found["cuda"]
    return states


def check_random_states(states: Mapping[str, Tensor]) -> None:
    """Raises ValueError if a generator refuses its state; shapes and dtypes were checked before."""
    try:
        for name in ("python_gauss", "numpy_gauss"):
            if not states[name].isfinite().all():
                raise ValueError(f"{name} is not a finite number")
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(_python_state(states))
        np.random.RandomState().set_state(_numpy_state(states))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"random states: expected those of generators ({error})") from None


def _python_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    gauss = states["python_gauss"].tolist()
    return 3, tuple(states["python"].tolist()), gauss[0] if gauss else None


def _numpy_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    *keys, position, has_gauss = states["numpy"].tolist()
    if not 0 <= position <= len(keys):  # which NumPy itself would not notice
        raise ValueError(f"expected a position of 0 to {len(keys)}; got {position}")
    return "MT19937", np.array(keys, np.uint32), position, has_gauss, states["numpy_gauss"].item()


def set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@dataclass
class MetricTotals:
    """Sums of losses and correct answers over images."""

    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0

    def add(self, values: list[float]) -> None:
        loss, correct, images = values
        self.loss, self.correct, self.images = self.loss + loss, self.correct + correct, self.images + images

    @property
    def means(self) -> tuple[float, float]:
        """Loss and accuracy."""
        return self.loss / self.images, self.correct / self.images


@dataclass
class State:
    """The progress of a run. With the tensors of a checkpoint, this is all that is needed to resume."""

    epoch: int = 0  # complete ones
    step: int = 0  # complete ones of the next epoch
    sums: MetricTotals = field(default_factory=MetricTotals)  # of those steps
    seconds: float = 0.0  # of those steps
    history: list[EpochMetrics] = field(default_factory=list)

    @property
    def best_epoch(self) -> int | None:
        """The first epoch with the highest validation accuracy."""
        validated = [(h.val_accuracy, -h.epoch) for h in self.history if h.val_accuracy is not None]
        return -max(validated)[1] if validated else None

    def stalled(self, patience: int | None) -> bool:
        """Whether the best epoch is that many epochs ago."""
        best = self.best_epoch
        return patience is not None and best is not None and len(self.history) - best >= patience

    def check(self, epochs: int, steps: int, batch_size: int) -> None:
        """Raises ValueError unless a run of so many epochs and steps can have come so far."""
        most = steps if self.epoch < epochs else 0
        if not (0 <= self.epoch <= epochs and 0 <= self.step <= most):
            raise ValueError(
                f"expected up to {epochs} epochs of {steps} steps; got epoch {self.epoch}, step {self.step}"
            )
        if [metrics.epoch for metrics in self.history] != [*range(1, self.epoch + 1)]:
            raise ValueError(f"history: expected epochs 1 to {self.epoch}; got {len(self.history)} others")
        sums, images = self.sums, self.step * batch_size
        if sums.images != images or not 0 <= sums.correct <= images or (self.seconds > 0) != (self.step > 0):
            raise ValueError(f"sums: expected those of {images} images; got {sums} in {self.seconds} s")


@dataclass(kw_only=True)
class SavedState(State):
    """The part of a checkpoint that is not tensors."""

    scaler: ScalerState | None  # of mixed precision
    threads: int


@dataclass(frozen=True)
class ScalerState:
    """The state of torch's GradScaler."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int

    def __post_init__(self) -> None:
        if not (
            self.scale > 0
            and 0 < self.backoff_factor < 1 < self.growth_factor
            and 0 <= self._growth_tracker < self.growth_interval
        ):
            raise ValueError(f"scaler: expected the state of a gradient scaler; got {self}")
