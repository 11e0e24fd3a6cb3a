"""The models by name: a line in ``_VARIANTS`` makes a model of each depth. No other module parses names.

It does not import torch, since the command's help and the plans use it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

DEPTHS = (29, 83)
_ON_P4_AND_P4M: dict[str, dict[str, Any]] = {
    "": {},
    "_pool": {"downsample": "pool"},
    "_se": {"squeeze_excite": True},
    "_simple_asc": {"spatial": "simple_asc"},
    "_asc": {"spatial": "asc"},
    "_asc_se": {"spatial": "asc", "squeeze_excite": True},
}
_VARIANTS: dict[str, dict[str, Any]] = {  # name → the options in which it differs from the first
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
        for suffix, options in _ON_P4_AND_P4M.items()
    },
    "c8resnet{}": {"group": "c8", "downsample": "pool"},
    "c8resnet{}_asc": {"group": "c8", "spatial": "asc"},
}


def _at_every_depth(variants: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        pattern.format(depth): {"depth": depth} | options
        for depth in DEPTHS
        for pattern, options in variants.items()
    }


MODELS = _at_every_depth(_VARIANTS)


@dataclass(frozen=True, kw_only=True)
class SpatialKind:
    """A kind of spatial layer, the layer inside the blocks.

    Attributes:
        label: in the paper's notation, ResNet29+label; "" for the baseline.
        title: in words.
        attention: whether it has heads and a softmax; the paper's recipe then warms up.
        zero_gamma: whether γ of each block's last batch norm starts at 0 by default.
        options: of ``ResNetConfig`` that it has and some other kind has not.
    """

    label: str
    title: str
    attention: bool = False
    zero_gamma: bool = False
    options: frozenset[str] = frozenset()


_OF_ATTENTION = frozenset({"num_heads", "scale", "affine_std"})
SPATIAL_KINDS = {
    "conv": SpatialKind(label="", title="convolution"),
    "depthwise": SpatialKind(label="depthwise", title="depthwise convolution"),
    "affine": SpatialKind(label="affine", title="affine convolution", zero_gamma=True),
    "asc": SpatialKind(
        label="ASC",
        title="affine self convolution",
        attention=True,
        zero_gamma=True,
        options=_OF_ATTENTION | {"psi", "affine"},
    ),
    "simple_asc": SpatialKind(
        label="Simple_ASC",
        title="simple affine self convolution",
        attention=True,
        zero_gamma=True,
        options=_OF_ATTENTION | {"psi"},
    ),
    "sasa": SpatialKind(
        label="SASA",
        title="stand-alone self-attention",
        attention=True,
        zero_gamma=True,
        options=_OF_ATTENTION,
    ),
}

# a folder for each model that has weights, as save_pretrained writes it, and the record of their run
WEIGHTS = Path(__file__).parent / "weights"


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """The names that match a wildcard pattern, such as ``"p4*"`` or ``"*29_asc*"``.

    Args:
        pretrained: list the models with included weights instead, for
            ``create_model(name, pretrained=True)``. Each name is a network and its training data, such as
            ``resnet29.cifar10``, or a smaller network whose configuration is stored with the weights,
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
    others: tuple[tuple[str, Any], ...] = ()  # further options of ``create_model``

    @property
    def planar(self) -> bool:
        """Whether its features have no group axis."""
        return self.group == "z2"

    @property
    def attention(self) -> bool:
        return SPATIAL_KINDS[self.spatial].attention

    @property
    def pooled_convolution(self) -> bool:
        """Whether it is a convolutional network that pools where the paper's have stride."""
        return self.spatial == "conv" and self.downsample == "pool"

    @property
    def label(self) -> str:
        """In the paper's notation: p4ResNet29+ASC+SE."""
        parts = [f"{'' if self.planar else self.group}ResNet{self.depth}"]
        parts += [SPATIAL_KINDS[self.spatial].label]
        parts += ["pool"] if self.pooled_convolution else []
        parts += ["SE"] if self.squeeze_excite else []
        parts += [f"{name}={value}" for name, value in self.others]
        return "+".join(filter(None, parts))


def model_facts(name: str, **overrides: Any) -> ModelFacts | None:
    """What a name stands for, with some of it changed (None: not changed); None if there is no such model."""
    if name not in MODELS:
        return None
    known = {field.name for field in fields(ModelFacts)}
    changed = {key: value for key, value in overrides.items() if key in known and value is not None}
    facts = {key: value for key, value in MODELS[name].items() if key in known}
    others = tuple((key, value) for key, value in MODELS[name].items() if key not in known)
    return ModelFacts(**facts | changed, others=others)


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
