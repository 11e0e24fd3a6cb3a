"""The configuration of a network of the ResNet family, as stored in ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from selfconv._arguments import check_not_negative, check_switch, is_whole
from selfconv.groups import GROUPS, Group, get_group
from selfconv.models.table import SPATIAL_KINDS

_CHOICES = {
    "spatial": tuple(SPATIAL_KINDS),
    "psi": ("channel", "dense"),
    "affine": ("both", "psi", "beta"),
    "scale": ("head", "width"),
    "downsample": ("stride", "pool"),
    "pool": ("mean", "max", "group_max"),
    "stem": ("conv", "pool4"),
}
_OF_SOME_KINDS = frozenset().union(*(kind.options for kind in SPATIAL_KINDS.values()))
MAX_DEPTH = 1001  # a config.json from an unknown source must not exhaust the memory
_MOST = {"kernel_size": 255, "num_heads": 4096, "in_channels": 65536, "num_classes": 1_000_000}
MAX_WIDTH = 65536
MAX_ELEMENTS = 64  # of a group
_LEAST = {"depth": 11, "kernel_size": 1, "num_heads": 1, "in_channels": 1, "num_classes": 0}


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The configuration of a network. ``ResNetConfig.of(...)`` fills in the paper's defaults.

    Attributes:
        depth: 9n+2, for n blocks per stage.
        group: ``"z2"``, ``"p4"``, ``"p4m"``; or one with rotations by less than 90°, such as ``"c8"``; or a
            ``Group`` of one's own, which ``config.json`` describes by its matrices.
        spatial: the layer inside the blocks: ``"conv"``, ``"asc"``, ``"simple_asc"`` or ``"sasa"``; and for
            comparison ``"affine"`` (ASC with α = 1) and ``"depthwise"`` convolution.
        squeeze_excite: whether blocks end with squeeze and excite (reduction 16/|H|: 16, on p4 4).
        widths: channels of the spatial layer in each stage; the stem has as many as the first. By default
            16, 32, 64 divided by √|H|, to the next even number: 8, 16, 32 on p4 and 6, 12, 24 on p4m.
        kernel_size: of the spatial layer; by default 3 for convolution and 5 for the others.
        num_heads: of attention; by default 8, but 6 on p4m, where 8 does not divide the widths.
        psi: ``"channel"`` or ``"dense"``: ψ scales each channel by itself, or maps all channels to all.
        affine_std: initial standard deviation of ψ and β; by default 1/|H|, which on the plane is the paper's
            1. With 1 on every group, as the paper states literally, p4 networks learned more slowly.
        zero_gamma: whether γ of each block's last batch norm starts at 0; by default as ``SPATIAL_KINDS`` in
            ``models/table.py`` says: in attention models and ``"affine"`` ones.
        affine: the parameters of ASC's affine maps: ``"both"`` ψ and β, only ``"psi"``, or only ``"beta"``.
        scale: the score is divided by the channels of a ``"head"``, or by the ``"width"`` of the layer.
        downsample: how convolutions halve a map: by ``"stride"``, or by ``"pool"``, which is exactly
            equivariant to rotations by 90° and flips on even maps. By default stride with ``"conv"`` and pool
            with the other spatial layers, which themselves always pool, and on band-limited groups.
        in_channels: of the image.
        num_classes: outputs of the classifier; 0 for no classifier.
        pool: ``"mean"`` or ``"max"`` over space and group, before the classifier; ``"group_max"``: the mean
            over space, then the maximum over the group.
        stem: ``"conv"``, the paper's 3×3 convolution; or ``"pool4"`` for large images: two 3×3 convolutions,
            each followed by 2×2 average pooling, after which maps have a quarter of the image's side.
    """

    depth: int = 29
    group: str | Group = "z2"
    spatial: str = "conv"
    squeeze_excite: bool = False
    widths: tuple[int, int, int]
    kernel_size: int
    num_heads: int
    psi: Literal["channel", "dense"] = "channel"
    affine: Literal["both", "psi", "beta"] = "both"
    affine_std: float | None = None
    zero_gamma: bool = False
    scale: Literal["head", "width"] = "width"
    downsample: Literal["stride", "pool"]
    in_channels: int = 3
    num_classes: int = 10
    pool: Literal["mean", "max", "group_max"] = "mean"
    stem: Literal["conv", "pool4"] = "conv"

    @classmethod
    def of(cls, **options: Any) -> ResNetConfig:
        """A configuration from some of its fields; fields that are omitted or None get the paper's values."""
        known = [f.name for f in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}; expected some of {', '.join(known)}")
        given = {name: value for name, value in options.items() if value is not None}
        group = _as_group(given.get("group", cls.group))
        given["group"] = group.name if GROUPS.get(group.name) == group else group
        width = 2 * round(8 / math.sqrt(len(group)))
        spatial = given.get("spatial", cls.spatial)
        _check_choice("spatial", spatial)
        by_default = {
            "widths": (width, 2 * width, 4 * width),
            "kernel_size": 3 if spatial == "conv" else 5,
            "num_heads": max(n for n in range(1, 9) if width % n == 0),
            "zero_gamma": SPATIAL_KINDS[spatial].zero_gamma,
            "downsample": "stride" if spatial == "conv" and not group.band_limited else "pool",
        }
        return cls(**by_default | given)

    @classmethod
    def changed(cls, stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> ResNetConfig:
        """A configuration with some fields changed, each of which the spatial layer must have.

        The stored fields may hold what has no effect, as those of saved networks do.
        """
        config = cls.of(**dict(stored) | dict(overrides))
        shared = {name: value for name, value in overrides.items() if name not in _OF_SOME_KINDS}
        unused = _OF_SOME_KINDS & overrides.keys() - SPATIAL_KINDS[config.spatial].options
        without = cls.of(**dict(stored) | shared) if unused else config
        for name in sorted(unused):
            if getattr(config, name) != getattr(without, name):
                kinds = [repr(s) for s, kind in SPATIAL_KINDS.items() if name in kind.options]
                raise ValueError(
                    f"{name}={overrides[name]!r} needs spatial={' or '.join(kinds)}; "
                    f"got spatial={config.spatial!r}"
                )
        return config

    @property
    def attention(self) -> bool:
        return SPATIAL_KINDS[self.spatial].attention

    @property
    def pools(self) -> bool:
        """Whether the spatial layer always pools, whatever ``downsample`` is."""
        return self.spatial != "conv"

    @property
    def stem_stride(self) -> int:
        """How many times smaller than the image the maps after the stem are."""
        return 4 if self.stem == "pool4" else 1

    @property
    def blocks_per_stage(self) -> int:
        return (self.depth - 2) // 9

    def __post_init__(self) -> None:
        get_group(self.group)
        for name in _CHOICES:
            _check_choice(name, getattr(self, name))
        for name, least in _LEAST.items():
            if not _is_integer(getattr(self, name), least):
                raise ValueError(f"{name}: expected an integer ≥ {least}; got {getattr(self, name)!r}")
            object.__setattr__(self, name, int(getattr(self, name)))
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name}: expected an integer ≤ {most}; got {getattr(self, name)}")
        for name in ("squeeze_excite", "zero_gamma"):
            check_switch(name, getattr(self, name))
            object.__setattr__(self, name, bool(getattr(self, name)))  # JSON has no booleans of NumPy
        if self.affine_std is not None:
            object.__setattr__(self, "affine_std", check_not_negative("affine_std", self.affine_std))
        sized = isinstance(self.widths, list | tuple) and len(self.widths) == 3
        if not sized or not all(_is_integer(width, 1) for width in self.widths):
            raise ValueError(f"widths: expected three positive integers; got {self.widths!r}")
        if max(self.widths) > MAX_WIDTH:
            raise ValueError(f"widths: expected at most {MAX_WIDTH} channels; got {self.widths!r}")
        object.__setattr__(self, "widths", tuple(map(int, self.widths)))  # JSON has lists only
        if self.depth % 9 != 2 or self.depth > MAX_DEPTH:
            near = min(9 * self.blocks_per_stage + 2, MAX_DEPTH - 9)
            raise ValueError(
                f"depth: expected 9n+2 up to {MAX_DEPTH}, such as {near} or {near + 9}; got {self.depth}"
            )
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size: expected an odd integer; got {self.kernel_size}")
        group = get_group(self.group)
        if self.spatial == "sasa" and group.band_limited:
            raise ValueError(
                f"sasa: expected a group of rotations by 90° and reflections; got {group.name!r}, whose "
                "rotations mix the rows and columns that its β is made of"
            )
        if self.attention:
            self._check_heads()

    def _check_heads(self) -> None:
        def fits(n: int) -> bool:
            return all(w % n == 0 and (self.spatial != "sasa" or w // n % 2 == 0) for w in self.widths)

        if not fits(self.num_heads):
            divides = all(w % self.num_heads == 0 for w in self.widths)
            fault = "leaves an odd number of channels per head for" if divides else "does not divide"
            fitting = [str(n) for n in range(1, 65) if fits(n)]
            expected = f"one of {', '.join(fitting)}" if fitting else "even widths"
            raise ValueError(
                f"{self.spatial}: num_heads={self.num_heads} {fault} the widths {self.widths} on group "
                f"{get_group(self.group).name!r}; expected {expected}"
            )


def _check_choice(name: str, value: object) -> None:
    if value not in _CHOICES[name]:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, _CHOICES[name]))}; got {value!r}")


def _as_group(value: Any) -> Group:
    """A group by its name, as it is, or as ``config.json`` describes it: its name and matrices."""
    if not isinstance(value, dict):
        return get_group(value)
    try:
        name, matrices = str(value["name"]), value["matrices"]
        rows = [
            [[float(entry) for entry in row] for row in matrix] for matrix in matrices[: MAX_ELEMENTS + 1]
        ]
        if len(rows) > MAX_ELEMENTS or any([len(row) for row in matrix] != [2, 2] for matrix in rows):
            raise ValueError("its matrices")
        return Group(name, tuple(((a, b), (c, d)) for (a, b), (c, d) in rows))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"group: expected a name, or a name and at most {MAX_ELEMENTS} 2×2 matrices; "
            f"got {value!s:.200} ({error})"
        ) from error


def _is_integer(value: Any, least: int) -> bool:
    return is_whole(value) and value >= least
