"""Saving and sharing: safetensors beside a ``config.json`` that rebuilds the model. Never pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

PathLike = str | os.PathLike[str]


class Shareable(nn.Module, PyTorchModelHubMixin):
    """``save_pretrained``, ``from_pretrained``, ``push_to_hub``: on a local folder or the Hugging Face hub.

    What is added to the mixin: it never falls back to pickled weights, every weight must fit (the first that
    do not are named), and a damaged file is called damaged. A subclass says how to build itself from the
    content of ``config.json``, and its instances have that content as ``config``.
    """

    @property
    def config(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: PathLike, **options: Any) -> Self:
        """The model saved in a folder, or of that name on the hub, in evaluation mode.

        Args:
            pretrained_model_name_or_path: a folder that ``save_pretrained`` wrote, or ``"user/model"``.
            **options: ``map_location``, and ``revision``, ``token``, ``cache_dir``, ``force_download``,
                ``local_files_only`` for the hub.
        """
        place = os.fspath(pretrained_model_name_or_path)
        looks_local = os.path.isabs(place) or place.startswith((".", "~")) or place.count("/") != 1
        if not os.path.isdir(place) and (looks_local or os.path.exists(place)):
            raise FileNotFoundError(
                f"no folder {place!r}; expected one that save_pretrained wrote, or 'user/model' on the hub"
            )
        try:
            return super().from_pretrained(place, **options)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: {CONFIG_NAME} is not valid JSON ({error})") from None

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        config: dict[str, Any] | None = None,
        map_location: str | torch.device = "cpu",
        **hub_options: Any,
    ) -> Self:
        if config is None:
            raise FileNotFoundError(
                f"no {CONFIG_NAME} for {model_id!r}: not in a folder of that name and, as far as the Hugging "
                "Face hub could be reached, not there"
            )
        if os.path.isdir(model_id):
            file = os.path.join(model_id, SAFETENSORS_SINGLE_FILE)
        else:
            try:
                file = hf_hub_download(model_id, SAFETENSORS_SINGLE_FILE, **hub_options)
            except EntryNotFoundError:
                raise FileNotFoundError(
                    f"{model_id!r} on the hub has no {SAFETENSORS_SINGLE_FILE}, and no pickle is loaded"
                ) from None
        return cls.load(config, file, map_location).eval()

    @classmethod
    def load(
        cls, config: Mapping[str, Any], file: PathLike, map_location: str | torch.device = "cpu"
    ) -> Self:
        """The model of a config, with the weights of a safetensors file."""
        with torch.device("meta"):  # the file brings the weights, so none need be drawn
            model = cls.from_config(config)
        load_weights(model, file, map_location)
        return model

    def _save_pretrained(self, save_directory: Path) -> None:
        with torch.device("meta"):
            rebuilt = self.from_config(self.config)
        problems = mismatches(rebuilt, self.state_dict())
        if problems:
            raise ValueError(
                "this model is no longer what its config describes, so it could not be loaded again: "
                + summary(problems)
            )
        self._hub_mixin_config = self.config
        partial = save_directory / f"{SAFETENSORS_SINGLE_FILE}.partial"
        save_model(self, str(partial))
        partial.replace(save_directory / SAFETENSORS_SINGLE_FILE)


def load_weights(model: nn.Module, file: PathLike, map_location: str | torch.device = "cpu") -> None:
    """Gives a model the weights in a safetensors file, in the dtype they have there.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or holds the weights of another architecture.
    """
    file = os.fspath(file)
    if not os.path.isfile(file):
        raise FileNotFoundError(f"no weights at {file!r}; expected a safetensors file")
    try:
        state = load_file(file, device=str(map_location))
    except SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file, or a damaged or truncated one ({error})") from None
    problems = mismatches(model, state)
    if problems:
        raise ValueError(f"{file} holds the weights of another architecture: {summary(problems)}")
    model.load_state_dict(state, assign=True)


def mismatches(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """How a state differs from what a model expects, a phrase for each entry, in the model's order."""
    expected = model.state_dict()
    problems = []
    for name, tensor in expected.items():
        if name not in state:
            problems.append(f"{name} is missing")
        elif state[name].shape != tensor.shape:
            problems.append(f"{name} is {list(state[name].shape)} instead of {list(tensor.shape)}")
    return problems + [f"{name} is not expected" for name in state if name not in expected]


def summary(problems: list[str], shown: int = 3) -> str:
    rest = f", and {len(problems) - shown} more" if len(problems) > shown else ""
    return ", ".join(problems[:shown]) + rest
