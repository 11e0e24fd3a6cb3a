"""Checkpoints: one safetensors file each, whose header holds the rest as JSON. Nothing is pickled.

A file gets its name only when it is completely on disk, and older files are removed only after that, so at
any moment the last checkpoint or the one before can be read. One digest detects a damaged file; another, of
the run's options and data, detects a checkpoint of another run.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from selfconv._files import check_file, parse_json, remove_partial_files, write_atomically
from selfconv._memory import machine_memory
from selfconv.train.stopping import RunError

KEPT = 2
_NAME = re.compile(r"(\d{6})-(\d{8})\.safetensors")  # completed epochs and steps: names sort by time


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, ``part/name``, and the state of the run as JSON."""

    all_tensors: dict[str, Tensor]
    state: dict[str, Any]
    run_digest: str  # of the run it belongs to

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of a part by their names without ``part/``."""
        prefix = f"{part}/"
        return {k.removeprefix(prefix): v for k, v in self.all_tensors.items() if k.startswith(prefix)}

    def final_weights(self) -> dict[str, Tensor]:
        """The weights that the run would end with."""
        return final_weights(self.tensors("best"), self.tensors("ema"), self.tensors("model"))

    def to_bytes(self) -> bytes:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.all_tensors.items()}
        state = json.dumps(self.state)
        header = {"state": state, "run": self.run_digest}
        return save(tensors, header | {"sha256": _digest(tensors, header)})


def final_weights(
    best: dict[str, Tensor], ema: dict[str, Tensor], current: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The weights of the best epoch if the run keeps them, else the moving average, else the current ones."""
    return best or ema or current


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    digest = hashlib.sha256(f"{header['run']}{header['state']}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Saves a checkpoint, then removes all but the last two.

    The part of a checkpoint that a killed process left is removed first: it takes space.
    """
    remove_partial_files(folder, "*.safetensors")
    path = folder / _name(checkpoint.state)
    try:
        write_atomically(path, checkpoint.to_bytes())
    except OSError as error:
        kept = "the earlier checkpoints are kept" if checkpoint_files(folder) else "there is no earlier one"
        raise RunError(f"{path}: cannot be written ({error.strerror or error}); {kept}") from error
    for old in checkpoint_files(folder)[:-KEPT]:
        old.unlink()
    return path


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the last one last."""
    return sorted(path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name))


def _name(state: Mapping[str, Any]) -> str:
    return f"{state['epoch']:06d}-{state['step']:08d}.safetensors"


class DamagedError(RunError):
    """The file of a checkpoint is damaged; the previous checkpoint may be intact."""


def read(path: Path, run_digest: str) -> Checkpoint:
    """Reads a checkpoint and checks that it belongs to this run.

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
        raise DamagedError(f"{path}: is damaged (expected the header of a checkpoint)")
    if "run" not in header:
        raise RunError(
            f"{path}: does not say which run it belongs to (an older version wrote it); start a new run"
        )
    if _digest(tensors, header) != header["sha256"]:
        raise DamagedError(f"{path}: is damaged (its digest does not match)")
    if header["run"] != run_digest:
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
        raise RunError(f"{path}: expected the state of this file name; got that of {named}")
    return Checkpoint(tensors, state, run_digest)


def load_last(folder: Path, run_digest: str) -> Checkpoint | None:
    """The last checkpoint that can be read, with a warning for each that cannot; None if there are none."""
    paths = checkpoint_files(folder)
    for path in reversed(paths):
        try:
            return read(path, run_digest)
        except DamagedError as error:
            warnings.warn(f"{error}; trying the previous one", stacklevel=2)
    if paths:
        raise RunError(f"{folder}: none of the {len(paths)} checkpoints can be read")
    return None
