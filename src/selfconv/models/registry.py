"""Creates, describes and lists the models of the table."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from selfconv._arguments import is_whole
from selfconv.models._config import ResNetConfig
from selfconv.models._sharing import CONFIG_NAME, SAFETENSORS_SINGLE_FILE, read_config
from selfconv.models.flops import count_flops, count_parameters
from selfconv.models.resnet import ResNet
from selfconv.models.table import MODELS, SPATIAL_KINDS, WEIGHTS, list_models

if TYPE_CHECKING:
    from rich.table import Table

# of images up to which computing the maps of a network, in up to 0.5 GB, takes less time than loading what
# torch needs for "meta"
MAX_COMPUTED_SIZE = 256


def _options(name: str) -> dict[str, Any]:
    if name not in MODELS and name in list_models(pretrained=True):
        raise ValueError(f"{name!r} is a model with its weights; expected pretrained=True for it")
    if name not in MODELS:
        near = get_close_matches(name, MODELS, n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "selfconv.list_models() lists them"
        raise ValueError(f"unknown model {name!r}; {hint}")
    return MODELS[name]


def create_model(
    name: str,
    num_classes: int | None = None,
    in_channels: int | None = None,
    *,
    pretrained: bool = False,
    **overrides: Any,
) -> ResNet:
    """Creates a model of the paper, or a variant of one.

    Args:
        name: one of ``list_models()``, or with ``pretrained`` one of ``list_models(pretrained=True)``.
        num_classes: 10 by default, or the number of the pretrained weights; if a different number is given,
            the classifier is newly initialised.
        in_channels: 3 by default (1 for grey images), or the number of the pretrained weights; weights for
            colour images are adapted to grey images and vice versa, as in ``ResNet.start_from``.
        pretrained: whether to load weights that are included in the package.
        **overrides: any other field of ``ResNetConfig``: ``group``, ``widths``, ``depth``, ``kernel_size``,
            ``num_heads``, ``downsample``, ``psi``, ``pool``, …; None selects the model's value. Options that
            the model's spatial layer does not have are refused.
    """
    shipped = list_models(pretrained=True) if pretrained else []
    options = {} if name in shipped else _options(name)
    if num_classes is not None and not (is_whole(num_classes) and num_classes >= 1):
        raise ValueError(
            f"num_classes: expected an integer ≥ 1; got {num_classes!r} "
            "(model.reset_classifier(0) leaves out the classifier)"
        )
    overrides = {key: value for key, value in overrides.items() if value is not None}
    asked = {"num_classes": num_classes, "in_channels": in_channels}
    asked = {key: value for key, value in asked.items() if value is not None}
    if not pretrained:
        return ResNet(ResNetConfig.changed(options, overrides | asked))

    if name not in shipped:
        raise ValueError(
            f"no weights are shipped for {name!r}; "
            + (f"there are some for {', '.join(shipped)}" if shipped else "this version ships none at all")
        )
    folder = WEIGHTS / name
    stored = read_config(folder / CONFIG_NAME)
    ResNetConfig.changed(stored, overrides)
    trained = ResNet.load(stored | overrides, folder / SAFETENSORS_SINGLE_FILE)
    if asked.items() <= trained.config.items():
        return trained
    model = ResNet(ResNetConfig.of(**trained.config | asked))
    model.start_from(trained)
    return model


def load_initial(source: str | os.PathLike[str]) -> ResNet:
    """Loads a trained network for fine-tuning: the folder of a finished run or a saved model, or a name.

    Raises:
        FileNotFoundError: there is no such network.
    """
    for folder in (Path(source) / "model", Path(source), WEIGHTS / source):
        if os.fspath(source) and (folder / SAFETENSORS_SINGLE_FILE).exists():
            return ResNet.from_pretrained(folder)
    raise FileNotFoundError(
        "init: expected the folder of a finished run or of a saved model, or one of "
        f"{', '.join(list_models(pretrained=True))}; got {os.fspath(source)!r}"
    )


@dataclass(frozen=True)
class ModelInfo:
    """Properties of an untrained model."""

    name: str
    group: str
    parameters: int
    flops: int  # of a forward pass for one image; a multiply-add counts as two
    input_shape: tuple[int, int, int]
    layers: dict[str, int]  # how many of each kind, by class
    config: dict[str, Any]


def model_info(name: str, *, input_size: int = 32, **overrides: Any) -> ModelInfo:
    """Parameters, FLOPs, group and layers of a model, by name; overrides are those of ``create_model``.

    Args:
        input_size: side of the square images that FLOPs are counted for.
    """
    with torch.random.fork_rng(devices=[]):
        model = create_model(name, **overrides)
    config = ResNetConfig.of(**model.config)
    input_shape = (config.in_channels, input_size, input_size)
    layers = Counter(
        type(layer).__name__
        for layer in model.modules()
        if next(layer.parameters(recurse=False), None) is not None
    )
    return ModelInfo(
        name=name,
        group=model.group.name,
        parameters=count_parameters(model),
        flops=_flops(config, input_shape),
        input_shape=input_shape,
        layers=dict(layers),
        config=model.config,
    )


def _flops(config: ResNetConfig, input_shape: tuple[int, int, int]) -> int:
    """In each stage all blocks but the first are alike, so one and two per stage tell of any number."""
    one, two = (_counted(replace(config, depth=depth), input_shape) for depth in (11, 20))
    return one + (config.blocks_per_stage - 1) * (two - one)


@cache
def _counted(config: ResNetConfig, input_shape: tuple[int, int, int]) -> int:
    small = input_shape[-1] <= MAX_COMPUTED_SIZE
    with torch.random.fork_rng(devices=[]):
        return count_flops(ResNet(config).to("cpu" if small else "meta"), input_shape)


def models_table(pattern: str = "*", *, input_size: int = 32, **overrides: Any) -> Table:
    """The models that match a wildcard pattern as a table of rich: what ``selfconv models`` prints."""
    from rich.table import Table

    table = Table(title=f"Models, for {input_size}×{input_size} images")
    for heading in ("model", "group", "spatial layer", "widths"):
        table.add_column(heading)
    for heading in ("parameters", "MFLOPs"):
        table.add_column(heading, justify="right")
    for name in list_models(pattern):
        info = model_info(name, input_size=input_size, **overrides)
        config = info.config
        spatial = f"{config['spatial']} {config['kernel_size']}×{config['kernel_size']}"
        if SPATIAL_KINDS[config["spatial"]].attention:
            spatial += f", {config['num_heads']} heads"
        table.add_row(
            name,
            info.group,
            spatial + ", se" * config["squeeze_excite"],
            ", ".join(map(str, config["widths"])),
            f"{info.parameters:,}",
            f"{info.flops / 1e6:,.1f}",
        )
    return table
