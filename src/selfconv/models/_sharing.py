"""Saving and sharing: safetensors beside a ``config.json`` that rebuilds the model. Never pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from selfconv._files import check_file, read_json
from selfconv._memory import machine_memory

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMED = 3  # how many problems a message names
PathLike = str | os.PathLike[str]

MODEL_CARD = """---
{{ card_data }}
---

An image classifier saved by selfconv. `config.json` says what it is made of.

```python
from selfconv.models import ResNet

model = ResNet.from_pretrained("path/to/this/folder")
```
"""


class Shareable(nn.Module, PyTorchModelHubMixin):
    """``save_pretrained``, ``from_pretrained``, ``push_to_hub``: on a local folder or the Hugging Face hub.

    Unlike the mixin, this class never loads pickled weights, raises an error that names the first weights
    that do not match, and reports damaged files. A subclass defines how to build a model from the content of
    ``config.json``; its instances have that content as ``config``.
    """

    @property
    def config(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        raise NotImplementedError

    @classmethod
    def from_pretrained(  # type: ignore[override]  # no keyword arguments for the model
        cls,
        pretrained_model_name_or_path: PathLike,
        *,
        map_location: str | torch.device = "cpu",
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: PathLike | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> Self:
        """Loads a model from a folder or from the Hugging Face hub, in evaluation mode.

        Args:
            pretrained_model_name_or_path: a folder that ``save_pretrained`` wrote, or ``"user/model"``.
            map_location: the device to load to.
            revision, token, cache_dir, force_download, local_files_only: for the hub, see its documentation.
        """
        place = os.fspath(pretrained_model_name_or_path)
        if os.path.isdir(place):
            config, weights = os.path.join(place, CONFIG_NAME), os.path.join(place, SAFETENSORS_SINGLE_FILE)
        elif place.count("/") != 1 or place.startswith((".", "~", "/")):
            raise FileNotFoundError(
                f"no folder {place!r}; expected one that save_pretrained wrote, or 'user/model' on the hub"
            )
        else:
            download = partial(
                hf_hub_download,
                place,
                revision=revision,
                token=token,
                cache_dir=None if cache_dir is None else os.fspath(cache_dir),
                force_download=force_download,
                local_files_only=local_files_only,
            )
            try:
                config, weights = download(CONFIG_NAME), download(SAFETENSORS_SINGLE_FILE)
            except LocalEntryNotFoundError:  # the hub was not reached, which is another matter
                raise
            except EntryNotFoundError:  # before 1.0 of huggingface_hub its remote form has no name of its own
                raise FileNotFoundError(
                    f"{place!r} on the hub: expected {CONFIG_NAME} and {SAFETENSORS_SINGLE_FILE}, and got no "
                    "such file; pickled weights are not loaded"
                ) from None
        try:
            return cls.load(read_config(config), weights, map_location).eval()
        except TypeError as error:  # an option that there is not, or of another type
            raise ValueError(f"{config}: {error}") from None

    @classmethod
    def load(
        cls, config: Mapping[str, Any], file: PathLike, map_location: str | torch.device = "cpu"
    ) -> Self:
        """Builds the model of a config and loads its weights from a safetensors file."""
        with torch.device("meta"):  # the file brings the weights, so none need be drawn
            model = cls.from_config(config)
        load_weights(model, file, map_location)
        return model

    def _save_pretrained(self, save_directory: Path) -> None:
        with torch.device("meta"):
            rebuilt = self.from_config(self.config)
        if problems := mismatches(rebuilt.state_dict(), self.state_dict(), dtypes=False):
            raise ValueError(
                "this model is no longer what its config describes, so it could not be loaded again: "
                f"{problems}"
            )
        self._hub_mixin_config = self.config
        partial = save_directory / f"{SAFETENSORS_SINGLE_FILE}.partial"
        partial.touch()
        mode = partial.stat().st_mode  # safetensors would make a file that its owner alone may read
        try:
            save_model(self, str(partial))
        except SafetensorError as error:  # of the disk: the weights themselves are fine
            raise OSError(f"{partial}: cannot be written ({error})") from None
        partial.chmod(mode)
        partial.replace(save_directory / SAFETENSORS_SINGLE_FILE)


def read_config(file: PathLike) -> dict[str, Any]:
    """The content of a ``config.json``."""
    file = os.fspath(file)
    if not os.path.exists(file):
        raise FileNotFoundError(f"no file {file!r}; save_pretrained writes one")
    config = read_json(Path(file))
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a JSON object; got {config!r:.40}")
    return config


def load_weights(model: nn.Module, file: PathLike, map_location: str | torch.device = "cpu") -> None:
    """Loads the weights of a safetensors file into a model, in the dtype of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or has weights of another architecture, or infinite or NaN weights.
    """
    file = os.fspath(file)
    if not os.path.exists(file):
        raise FileNotFoundError(f"no weights at {file!r}; expected a safetensors file")
    try:
        check_file(file, machine_memory() / 2)
        state = load_file(file, device=str(map_location))
    except SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file, or a damaged or truncated one ({error})") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if problems := mismatches(model.state_dict(), state, dtypes=False):
        raise ValueError(f"{file} holds the weights of another architecture: {problems}")
    try:
        _check_numbers(model.state_dict(), state)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    # copied: the file's own memory is not aligned, which changes last bits, and goes when the file does
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)


def _check_numbers(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Weights are finite, of one floating dtype that layers compute in, and counters are integers."""
    floating = {name for name, tensor in expected.items() if tensor.is_floating_point()}
    dtypes = sorted({str(state[name].dtype) for name in floating})
    if len(dtypes) != 1 or dtypes[0] not in map(str, WEIGHT_DTYPES):
        known = ", ".join(map(str, WEIGHT_DTYPES))
        raise ValueError(f"expected weights of one dtype, of {known}; got {', '.join(dtypes)}")
    for name, tensor in state.items():
        if name not in floating and tensor.dtype != expected[name].dtype:
            raise ValueError(f"expected {name} of dtype {expected[name].dtype}; got {tensor.dtype}")
    check_finite(state)


def check_finite(state: Mapping[str, Tensor]) -> None:
    """Raises ValueError if a weight is infinite or NaN."""
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise ValueError(f"expected weights that are numbers; {name} has some that are infinite or nan")


def mismatches(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], *, dtypes: bool = True) -> str:
    """The differences from the expected tensors in names, shapes and dtypes; empty if there are none."""
    problems = []
    for name, tensor in expected.items():
        if name not in found:
            problems.append(f"{name} is missing")
        elif found[name].shape != tensor.shape:
            problems.append(f"{name} is {list(found[name].shape)} instead of {list(tensor.shape)}")
        elif dtypes and found[name].dtype != tensor.dtype:
            problems.append(f"{name} is {found[name].dtype} instead of {tensor.dtype}")
    problems += [f"{name} is not expected" for name in found if name not in expected]
    rest = f", and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
    return ", ".join(problems[:NAMED]) + rest
