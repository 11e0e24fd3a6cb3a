"""Checkpoints: one safetensors file each, whose header holds the rest as JSON. Nothing is pickled.

A file appears under its name only when all of it is on the disk, and older ones go only after that, so that
at any moment the last or the one before can be read. A digest tells of a damaged file.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from selfconv._files import write_atomically
from selfconv.train.errors import RunError

KEPT = 2
_NAME = re.compile(r"(\d{6})-(\d{8})\.safetensors")  # epoch and step in it: names sort by time


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, ``part/name``, and a state that JSON can hold."""

    all_tensors: dict[str, Tensor]
    state: dict[str, Any]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Those of a part, without its name."""
        prefix = f"{part}/"
        return {k.removeprefix(prefix): v for k, v in self.all_tensors.items() if k.startswith(prefix)}

    def to_bytes(self) -> bytes:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.all_tensors.items()}
        state = json.dumps(self.state)
        return save(tensors, {"state": state, "sha256": _digest(tensors, state)})


def _digest(tensors: Mapping[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Saves a checkpoint, then removes all but the last two."""
    path = folder / f"{checkpoint.state['epoch']:06d}-{checkpoint.state['step']:08d}.safetensors"
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


def read(path: Path) -> Checkpoint:
    """Raises RunError if the file is damaged."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from None
    if "state" not in metadata or _digest(tensors, metadata["state"]) != metadata.get("sha256"):
        raise RunError(f"{path}: is damaged (its digest does not fit)")
    return Checkpoint(tensors, json.loads(metadata["state"]))


def load_last(folder: Path) -> Checkpoint | None:
    """The last checkpoint that can be read, with a warning for each that cannot; None if there are none."""
    paths = listed(folder)
    for path in reversed(paths):
        try:
            return read(path)
        except RunError as error:
            warnings.warn(f"{error}; going back to the one before", stacklevel=2)
    if paths:
        raise RunError(f"{folder}: none of the {len(paths)} checkpoints can be read")
    return None


# ---- random states ----


def random_states() -> dict[str, Tensor]:
    """Those of Python, NumPy and torch, as tensors."""
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


def set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    cached = states["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
