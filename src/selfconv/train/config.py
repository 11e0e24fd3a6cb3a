"""The configuration of a run, as stored in its ``config.json``: model, data, recipe, hardware.

It does not import torch, since the command's help is generated from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from selfconv._files import earlier_name, parse, parse_json, read_as
from selfconv.models import model_facts


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The network: a model from `selfconv models`, and changes to it. None: the model's own value."""

    name: Annotated[str, arg(name="model", metavar="MODEL")] = "resnet29_asc"
    """Name of the model; `selfconv models` lists them."""
    init: str | None = None
    """Start from trained weights: the folder of a run or a saved model, or the name of a shipped one."""
    group: str | None = None
    """Name of the symmetry group, such as z2, p4, p4m, or c8 for rotations by 45°."""
    widths: tuple[int, int, int] | None = None
    """Channels of the spatial layers, one number per stage."""
    depth: int | None = None
    """Number of layers: 9n+2 for n blocks per stage."""
    kernel_size: int | None = None
    """Kernel size of the spatial layers, odd."""
    num_heads: int | None = None
    """Number of attention heads."""
    psi: Literal["channel", "dense"] | None = None
    """ψ per channel, or dense (every channel to every channel)."""
    affine: Literal["both", "psi", "beta"] | None = None
    """Parameters of the affine maps in ASC: ψ and β, or only one of them."""
    affine_std: float | None = None
    """Initial standard deviation of ψ and β; default 1/|H|. The paper's literal reading: 1 on every group."""
    zero_gamma: bool | None = None
    """Initialise γ of the last batch norm in each block with 0, as attention models do."""
    scale: Literal["head", "width"] | None = None
    """The score is divided by the channels of one head, or by the width of the layer."""
    downsample: Literal["stride", "pool"] | None = None
    """Downsampling in convolutional models: stride 2, or stride 1 and average pooling."""
    pool: Literal["mean", "max", "group_max"] | None = None
    """Global pooling over space and group; group_max: mean over space, maximum over the group."""
    stem: Literal["conv", "pool4"] | None = None
    """First layers: the paper's convolution, or pool4 for large images: maps of a quarter of their side."""

    def overrides(self) -> dict[str, Any]:
        """The arguments for ``create_model`` other than the name."""
        return {key: value for key, value in asdict(self).items() if key not in ("name", "init")}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data set. The test images are used once, at the end."""

    source: Annotated[str, arg(name="data", metavar="DATA")] = "digits"
    """digits, cifar10, cifar100, a folder with a folder of images for each class, an .npz file, a CSV file
    (path,label[,split][,group]), Parquet files, or hf:NAME on the Hugging Face Hub."""
    image_size: int | None = None
    """Resize and centre-crop images to this many pixels; None: keep their size."""
    validation: float = 0.1
    """Fraction of the training images held out for validation."""
    split_seed: int = 0
    """Random seed of the validation split."""
    subset: int | None = None
    """Number of training images to use, balanced over classes; None: all."""
    pixel_range: Annotated[str, arg(name="range", metavar="RANGE")] = "auto"
    """Values that map to 0 and 1: LOW,HIGH; dtype: the limits of each file's type; auto: from the images."""
    group_by: str | None = None
    """Keep images of one group (slide, patient) in one split: a regular expression for the path, whose first
    parentheses match the group, or the name of a column."""

    def for_loading(self) -> dict[str, Any]:
        """The arguments of ``load_data`` that describe the data, besides the source."""
        return {
            "image_size": self.image_size,
            "seed": self.split_seed,
            "validation": self.validation,
            "pixel_range": self.pixel_range,
            "group_by": self.group_by,
        }


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training recipe. Defaults: the `paper` recipe for CIFAR, `fast` for other data."""

    epochs: int = 100
    """Number of epochs; the learning rate schedule scales with it."""
    batch_size: int = 128
    """Images per step, summed over all processes."""
    lr: float = 0.1
    """Peak learning rate."""
    schedule: Literal["step", "cosine"] = "step"
    """step: divided by 10 at 1/2 and at 3/4 of the epochs; cosine: decays to 0, updated every step."""
    warmup: float = 0.0
    """Fraction of the epochs over which the learning rate rises linearly to its peak."""
    momentum: float = 0.9
    """Nesterov momentum."""
    weight_decay: float = 1e-4
    """Weight decay (L2 penalty)."""
    decay: Literal["all", "maps"] = "all"
    """Apply weight decay to all parameters, or only to weights of convolutions and linear maps (maps): not to
    ψ, β, norms and biases."""
    label_smoothing: float = 0.0
    """Label smoothing."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight the loss of each image by the inverse of its class's number of images."""
    clip: float | None = None
    """Clip the gradient to this norm; None: no clipping."""
    ema: float | None = None
    """Decay per step of an exponential moving average of the weights, which becomes the final model."""
    flip: bool = True
    """Flip images horizontally with probability 1/2."""
    pad: int = 2
    """Random crops after zero padding by this many pixels."""
    rotate: Literal["none", "quarter", "any"] = "none"
    """Random rotations: none, by multiples of 90°, or by any angle."""
    brightness: float = 0.0
    """Random brightness: add a number of up to ± this to all pixels, whose range is 0..1."""
    contrast: float = 0.0
    """Random contrast: multiply it by a factor between 1 - this and 1 + this."""
    colour: float = 0.0
    """Random saturation: multiply it by a factor between 1 - this and 1 + this."""
    erase: float = 0.0
    """Random erasing: half of the images get a rectangle of the mean colour, of up to this fraction of their
    area."""
    keep: Literal["last", "best"] = "last"
    """Weights of the final model: of the last epoch, or of the one with the best validation accuracy."""
    patience: int | None = None
    """Early stopping: end after this many epochs without a better validation accuracy; None: never."""
    sizes: tuple[float, ...] | None = None
    """Sizes of the training images as fractions of the full size, one after another; None: full size."""

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "colour", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number from 0 to 1; got {getattr(self, name)}")
        for name, least in (("epochs", 1), ("batch_size", 1), ("pad", 0), ("patience", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name}: expected an integer ≥ {least}; got {getattr(self, name)}")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected a number > 0; got {value}")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay: expected a number ≥ 0; got {self.weight_decay}")
        if not 0 < self.momentum < 1:
            raise ValueError(f"momentum: expected 0 < momentum < 1; got {self.momentum}")
        for name in ("warmup", "label_smoothing", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name}: expected 0 ≤ {name} < 1; got {value}")
        if self.sizes is not None and not (self.sizes and all(0 < size <= 1 for size in self.sizes)):
            raise ValueError(f"sizes: expected one or more fractions, 0 < size ≤ 1; got {list(self.sizes)}")
        if self.sizes is not None and self.sizes[-1] != 1:
            raise ValueError(
                f"sizes: expected the last to be 1, the size of the test images; got {list(self.sizes)}"
            )

    def size_in(self, epoch: int, full: int) -> int:
        """The side of the training images in an epoch; each of ``sizes`` gets an equal part of the epochs.

        Rounded to a multiple of 4, which halves exactly twice, so p4 networks stay exact (with the stem
        ``"pool4"`` at multiples of 16 only).
        """
        size = 1.0 if self.sizes is None else self.sizes[epoch * len(self.sizes) // self.epochs]
        return full if size == 1 else min(full, max(4, 4 * round(size * full / 4)))

    def all_sizes(self, full: int) -> list[int]:
        """The side of the training images in every epoch."""
        return [self.size_in(epoch, full) for epoch in range(self.epochs)]


def paper_recipe(model: str = "resnet29") -> Recipe:
    """The paper's recipe: 100 epochs, 200 for depth 83; attention models have a warm-up of 10 epochs."""
    facts = model_facts(model)
    epochs = 200 if facts is not None and facts.depth >= 83 else 100
    return Recipe(epochs=epochs, warmup=10 / epochs if facts is not None and facts.attention else 0.0)


def fast_recipe(model: str = "resnet29") -> Recipe:
    """A recipe for minutes on a CPU: few epochs, small batches, a cosine schedule after a warm-up."""
    return Recipe(
        epochs=15, batch_size=32, schedule="cosine", warmup=0.2, weight_decay=5e-4, flip=False, pad=1
    )


def short_recipe(model: str = "resnet29") -> Recipe:
    """For 10 to 30 epochs of CIFAR on a CPU: small batches, a high rate, and smaller images first.

    docs/training.md compares rates ("The rate of `short`") and says why ψ and β do not decay ("Weight decay
    and attention").
    """
    return Recipe(
        epochs=15,
        batch_size=64,
        lr=0.2,
        schedule="cosine",
        warmup=0.2,
        weight_decay=5e-4,
        decay="maps",
        sizes=(0.625, 0.75, 0.875, 1.0),
    )


RecipeName = Literal["paper", "fast", "short"]
RECIPES: dict[RecipeName, Callable[[str], Recipe]] = {
    "paper": paper_recipe,
    "fast": fast_recipe,
    "short": short_recipe,
}


def default_recipe(source: str) -> RecipeName:
    """The name of the recipe for a data set."""
    return "paper" if source in ("cifar10", "cifar100") else "fast"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Hardware. For several processes, start with `torchrun` or `accelerate launch`."""

    device: Literal["auto", "cpu"] = "auto"
    """auto: the GPU if there is one, else the CPU."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision."""
    accumulate: int = 1
    """Gradient accumulation: number of parts per step, to save memory."""
    sync_batch_norm: bool = True
    """With several processes, compute batch norm statistics over all of them."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints within an epoch; one is always saved after each epoch."""
    memory: float | None = None
    """GB of memory for images; if files need more, they are decoded once into a cache on disk. None: a
    quarter of the machine's memory."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate: expected an integer ≥ 1; got {self.accumulate}")
        if not 0 <= self.checkpoint_minutes < float("inf"):
            raise ValueError(f"checkpoint_minutes: expected a number ≥ 0; got {self.checkpoint_minutes}")
        if self.memory is not None and not 0 <= self.memory < float("inf"):
            raise ValueError(f"memory: expected a number of GB ≥ 0; got {self.memory}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All options that determine the result of a run."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    recipe: Recipe = field(default_factory=fast_recipe)
    hardware: Hardware = field(default_factory=Hardware, metadata=earlier_name("engine"))
    seed: int = 0
    """Random seed of the weights, the order of the images, and augmentation."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected 0 ≤ seed < 2³²; got {self.seed}")

    @classmethod
    def of(cls, data: str = "digits", model: str = "resnet29_asc", recipe: str | None = None) -> RunConfig:
        """The default configuration for a data set and a model."""
        recipe = default_recipe(data) if recipe is None else recipe
        if recipe not in RECIPES:
            raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}; got {recipe!r}")
        return cls(
            model=ModelOptions(name=model), data=DataOptions(source=data), recipe=RECIPES[recipe](model)
        )

    def replaced(self, part: str, **changes: Any) -> RunConfig:
        """A copy with some options of a part (``"model"``, ``"recipe"``, …) changed."""
        return replace(self, **{part: replace(getattr(self, part), **changes)})

    def to_json(self) -> dict[str, Any]:
        return parse_json(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, content: object) -> RunConfig:
        """The inverse of ``to_json``; missing options get their defaults."""
        return parse(cls, content, "config")

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Loads a configuration from a file or a run's folder."""
        return read_as(cls, path / "config.json" if path.is_dir() else path)


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """The options in which two runs differ, as ``recipe.epochs: 3, not 5``.

    ``memory`` is not compared: it has no effect on the result.
    """
    b = b.replaced("hardware", memory=a.hardware.memory)

    def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for key, value in content.items():
            parts |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return parts

    left, right = flat(a.to_json()), flat(b.to_json())
    return [f"{key}: {left[key]}, not {right[key]}" for key in left if left[key] != right[key]]
