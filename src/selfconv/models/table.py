"""The models by name: a variant is a line in ``_VARIANTS``. No other module parses names.

It does not import torch, since the command's help and the plans use it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

DEPTHS = (29, 83)
_ON_BOTH: dict[str, dict[str, Any]] = {  # on p4 and on p4m
    "": {},
    "_pool": {"downsample": "pool"},
    "_se": {"squeeze_excite": True},
    "_simple_asc": {"spatial": "simple_asc"},
    "_asc": {"spatial": "asc"},
    "_asc_se": {"spatial": "asc", "squeeze_excite": True},
}
_VARIANTS: dict[str, dict[str, Any]] = {  # what each differs in from the first
    "resnet{}": {},
    "resnet{}_se": {"squeeze_excite": True},
    "resnet{}_sasa": {"spatial": "sasa"},
    "resnet{}_simple_asc": {"spatial": "simple_asc"},
    "resnet{}_asc": {"spatial": "asc"},
    "resnet{}_asc_se": {"spatial": "asc", "squeeze_excite": True},
    "resnet{}_affine": {"spatial": "affine"},
    "resnet{}_depthwise": {"spatial": "depthwise"},
    **{
        f"{group}resnet{{}}{suffix}": {"group": group} | options
        for group in ("p4", "p4m")
        for suffix, options in _ON_BOTH.items()
    },
    "c8resnet{}": {"group": "c8", "downsample": "pool"},
    "c8resnet{}_asc": {"group": "c8", "spatial": "asc"},
}
MODELS: dict[str, dict[str, Any]] = {
    pattern.format(depth): {"depth": depth} | options
    for depth in DEPTHS
    for pattern, options in _VARIANTS.items()
}
_SPATIAL_NAMES = {  # the paper's, and those of our controls
    "sasa": "SASA",
    "simple_asc": "Simple_ASC",
    "asc": "ASC",
    "affine": "affine",
    "depthwise": "depthwise",
}


# a folder for each model that has weights, as save_pretrained writes it, and the record of their run
WEIGHTS = Path(__file__).parent / "weights"


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """The names that match a wildcard pattern, such as ``"p4*"`` or ``"*29_asc*"``.

    Args:
        pretrained: list the models with included weights instead, for
            ``create_model(name, pretrained=True)``. Each name is a network and its training data, such as
            ``resnet29_asc.cifar10``, or a smaller network whose configuration is stored with the weights,
            such as ``digits_asc``.
    """
    names = sorted(path.name for path in WEIGHTS.iterdir()) if pretrained else MODELS
    return [name for name in names if fnmatchcase(name, pattern)]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the name of a model stands for."""

    depth: int
    group: str = "z2"
    spatial: str = "conv"
    squeeze_excite: bool = False
    downsample: str | None = None  # None: stride for convolution, pooling for the others

    @property
    def planar(self) -> bool:
        """Whether its features have no group axis."""
        return self.group == "z2"

    @property
    def attention(self) -> bool:
        return self.spatial in ("asc", "simple_asc", "sasa")

    @property
    def pooled_convolution(self) -> bool:
        """Whether it is a convolutional network that pools where the paper's have stride."""
        return self.spatial == "conv" and self.downsample == "pool"

    @property
    def label(self) -> str:
        """In the paper's notation: p4ResNet29+ASC+SE."""
        parts = [f"{'' if self.planar else self.group}ResNet{self.depth}"]
        parts += [_SPATIAL_NAMES[self.spatial]] if self.spatial in _SPATIAL_NAMES else []
        parts += ["pool"] if self.pooled_convolution else []
        parts += ["SE"] if self.squeeze_excite else []
        return "+".join(parts)


def model_facts(name: str, **overrides: Any) -> ModelFacts | None:
    """What a name stands for, with some of it changed (None: not changed); None if there is no such model."""
    if name not in MODELS:
        return None
    known = {field.name for field in fields(ModelFacts)}
    changed = {key: value for key, value in overrides.items() if key in known and value is not None}
    return ModelFacts(**MODELS[name] | changed)


def paper_label(name: str, **overrides: Any) -> str:
    """A model in the paper's notation: ``p4resnet29_asc_se`` is p4ResNet29+ASC+SE; unknown names stay."""
    facts = model_facts(name, **overrides)
    return name if facts is None else facts.label


def at_depth(name: str, depth: int) -> str:
    """The model that differs from another in its depth alone; the name itself if there is none."""
    if name not in MODELS:
        return name
    wanted = MODELS[name] | {"depth": depth}
    return next((other for other, options in MODELS.items() if options == wanted), name)
