"""The paper's networks: one ResNet of depth 9n+2, built from its configuration.

stem (3×3) → three stages of n bottleneck blocks → mean over space and group → linear classifier
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from selfconv.groups import own_group
from selfconv.models._config import ResNetConfig
from selfconv.models._sharing import MODEL_CARD, Shareable
from selfconv.nn import (
    AffineConv2d,
    AffineSelfConv2d,
    Bottleneck,
    ConvNorm,
    DepthwiseConv2d,
    GlobalPool,
    GroupConv2d,
    LiftingConv2d,
    LocalAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)

DOWNSAMPLING = 4  # of the stages: the second and third halve the map
LARGE = 112  # side of images from which the stem for large images is advised


def block(config: ResNetConfig, in_channels: int, width: int, stride: int) -> Bottleneck:
    return Bottleneck(
        in_channels,
        width,
        stride,
        spatial=partial(spatial_layer, config),
        squeeze_excite=config.squeeze_excite,
        zero_gamma=config.zero_gamma,
        downsample=config.downsample,
        group=config.group,
    )


def spatial_layer(config: ResNetConfig, width: int, stride: int) -> nn.Module:
    """The spatial layer of a block, in which the models of the paper differ."""
    k, group = config.kernel_size, config.group
    if config.spatial == "conv":
        return GroupConv2d(
            width, width, k, stride, padding="same", bias=False, group=group, downsample=config.downsample
        )
    if config.spatial == "depthwise":
        return DepthwiseConv2d(width, k, stride, bias=False, group=group)
    if config.spatial == "affine":
        return AffineConv2d(width, width, k, stride, group=group)
    heads = {
        "num_heads": config.num_heads,
        "scale": (1 if config.scale == "width" else config.num_heads) / width,
        "group": group,
    }
    layer: LocalAttention2d
    if config.spatial == "sasa":
        layer = StandAloneSelfAttention2d(width, width, k, stride, **heads)  # type: ignore[arg-type]
    elif config.spatial == "simple_asc":
        layer = SimpleAffineSelfConv2d(width, width, k, stride, psi=config.psi, **heads)  # type: ignore[arg-type]
    else:
        layer = AffineSelfConv2d(width, width, k, stride, psi=config.psi, affine=config.affine, **heads)  # type: ignore[arg-type]
    if config.affine_std is not None:
        layer.reset_parameters(config.affine_std)
    return layer


class ResNet(
    Shareable,
    model_card_template=MODEL_CARD,
    library_name="selfconv",
    pipeline_tag="image-classification",
    tags=["affine-self-convolution", "equivariance"],
):
    """A network of the family: ``[N, in_channels, h, w] -> [N, num_classes]``, for images of any size ≥ 4.

    Its logits are invariant to ``group`` and its features equivariant. This is exact on suitable image sizes:
    with ``downsample="pool"`` sides that are multiples of 4, with ``"stride"`` sides of 4n+1; with
    ``stem="pool4"`` four times these. For other sizes the model warns, once per size. On a band-limited group
    this holds for the exact elements; the others are approximate on every size.

    It also has the methods of timm's models. Features before the head are ``[N, C, |H|, h/4, w/4]``; on z2
    without |H|.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self._config = config
        self.group = own_group(config.group)
        stem_width = config.widths[0]
        shrinks = config.stem == "pool4"
        lift = partial(LiftingConv2d, config.in_channels, stem_width, 3, padding=1, bias=False)
        lifting = lift(stride=2, downsample="pool", group=self.group) if shrinks else lift(group=self.group)
        self.stem = ConvNorm(lifting, stem_width, self.group)
        self.shrink: nn.Module = nn.Identity()
        if shrinks:
            conv = GroupConv2d(
                stem_width, stem_width, 3, 2, "same", bias=False, group=self.group, downsample="pool"
            )
            self.shrink = nn.Sequential(ConvNorm(conv, stem_width, self.group), nn.ReLU())
        stages, channels = [], stem_width
        for stage, width in enumerate(config.widths):
            blocks = []
            for n in range(config.blocks_per_stage):
                blocks.append(block(config, channels, width, 2 if stage and not n else 1))
                channels = Bottleneck.expansion * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.num_features = channels
        self.pool = GlobalPool(config.pool, group=self.group)
        self.fc: nn.Module = self._classifier(config.num_classes)
        self.grad_checkpointing = False
        self._warned_sizes: set[tuple[int, int]] = set()

    @property
    def config(self) -> dict[str, Any]:
        """The complete configuration, as in ``config.json`` and for ``from_config``."""
        return asdict(self._config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(ResNetConfig.of(**config))

    @property
    def in_channels(self) -> int:
        return self._config.in_channels

    @property
    def num_classes(self) -> int:
        return self._config.num_classes

    def _classifier(self, num_classes: int, **factory: Any) -> nn.Module:
        return nn.Linear(self.num_features, num_classes, **factory) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier by a new one; with 0 classes there is none, and the model returns features.

        Args:
            global_pool: ``"mean"`` (timm's ``"avg"``) or ``"max"``; None keeps the current one.
        """
        pool = "mean" if global_pool == "avg" else global_pool
        changed = {"num_classes": num_classes} | ({} if pool is None else {"pool": pool})
        self._config = ResNetConfig.of(**self.config | changed)
        self.pool = GlobalPool(self._config.pool, group=self.group)
        like = self.stem.conv.weight
        self.fc = self._classifier(num_classes, device=like.device, dtype=like.dtype)

    def start_from(self, other: ResNet) -> None:
        """Copies the weights of a trained network of the same architecture, for fine-tuning.

        If the numbers of classes differ, the classifier is not copied. If one network is for grey images and
        the other for colour images, the first layer is adapted: a grey image is treated as a colour image
        with three equal channels, and a colour image as the mean of its channels.

        Raises:
            ValueError: the networks differ in more than that.
        """
        changed = [
            f"{key} {value!r}, not {other.config[key]!r}"
            for key, value in self.config.items()
            if key not in ("in_channels", "num_classes") and value != other.config[key]
        ]
        if changed:
            raise ValueError(f"expected a trained network of this architecture: {'; '.join(changed)}")
        state = dict(other.state_dict())
        state["stem.conv.weight"] = _for_channels(state["stem.conv.weight"], self.in_channels)
        if other.num_classes != self.num_classes:
            state |= {f"fc.{name}": value for name, value in self.fc.state_dict().items()}
        self.load_state_dict(state)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training stores only the blocks' inputs and recomputes the rest in the backward pass."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        self._check_input(x)
        x = self.shrink(F.relu(self.stem(x)))
        if not (self.grad_checkpointing and torch.is_grad_enabled()):
            return self.stages(x)
        for block in [block for stage in self.stages.children() for block in stage.children()]:
            if torch.compiler.is_compiling():  # a compiler recomputes values alone, and moves no statistics
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=partial(_recompute_contexts, block))
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.pool(x)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    @property
    def takes_any_size(self) -> bool:
        """Whether images may have any sides from 4 on, so that an exported program may take any, too."""
        return self._config.stem_stride == 1 and not self._mixes

    @property
    def _mixes(self) -> bool:
        """Whether spatial layers pool beside shortcuts that stride: their maps agree on some sizes only."""
        return self._config.pools and self._config.downsample == "stride"

    def _check_input(self, x: Tensor) -> None:
        pooled = self._config.pools or self._config.downsample == "pool"
        first = self._config.stem_stride
        least = first * (DOWNSAMPLING if pooled else 1)
        channels = self.in_channels
        if x.dim() != 4 or x.shape[1] != channels or min(x.shape[2:]) < least:
            raise ValueError(
                f"expected images [N, {channels}, h, w] of {least}×{least} or more; got shape {list(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"expected floating-point images; got {x.dtype} of shape {list(x.shape)}")
        unit = first * DOWNSAMPLING
        if self._mixes and any(side % unit for side in x.shape[2:]):
            raise ValueError(
                "a spatial layer that pools beside strided shortcuts needs images whose sides are "
                f"multiples of {unit}; got shape {list(x.shape)}"
            )
        if not torch.compiler.is_compiling() and tuple(x.shape[2:]) not in self._warned_sizes:
            self._warned_sizes.add((x.shape[2], x.shape[3]))
            self._warn_of_size(x.shape[2], x.shape[3])

    def _warn_of_size(self, h: int, w: int) -> None:
        if min(h, w) >= LARGE and self._config.stem == "conv":
            warnings.warn(
                f"{h}×{w} images are large for this model, whose first stage keeps their size: stem='pool4' "
                "(--stem pool4) computes a quarter of the side, or resize the images",
                stacklevel=2,
            )
        if len(self.group) > 1:
            self._warn_unless_exact(h, w)

    def _warn_unless_exact(self, h: int, w: int) -> None:
        """Cells of 2×2 tile a map of even size; strides of 2 meet both of its ends if the size is odd."""
        strided, first = self._config.downsample == "stride", self._config.stem_stride
        unit, rest = first * DOWNSAMPLING, first if strided else 0  # 4n+1 on the map after the stem
        exact = {h % unit, w % unit} == {rest}
        if exact and not (strided and self._config.pools):
            return
        needed = f"sides that are multiples of {unit} ({_near(h, unit, 0)})"
        if strided and self._config.pools:
            needed = f"downsample='pool' and {needed}"
        elif strided:
            needed = f"sides of {unit}n+{rest} ({_near(h, unit, rest)}), or downsample='pool' and {needed}"
        what = f"the exact elements of {self.group}" if self.group.band_limited else self.group
        warnings.warn(
            f"{h}×{w} images: with downsample={self._config.downsample!r} this model is equivariant to "
            f"{what} only approximately; exactness needs {needed}",
            stacklevel=2,
        )


def _near(side: int, unit: int, rest: int) -> str:
    """The sizes n·unit + rest that are nearest to a side, from below and from above."""
    below = max(unit + rest if side < unit + rest else 0, (side - rest) // unit * unit + rest)
    return f"{below}" if below >= side else f"{below} or {below + unit}"


def _recompute_contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _frozen_statistics(block)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Batch norm as in training, but its running statistics stay: they moved in the first pass."""
    norms = [layer for layer in block.modules() if isinstance(layer, _BatchNorm)]
    before = [(norm.momentum, copy.deepcopy(norm.num_batches_tracked)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


def _for_channels(weight: Tensor, channels: int) -> Tensor:
    """The first layer's filters ``[out, in, k, k]`` for grey images instead of colour, or the reverse."""
    own = weight.shape[1]
    if own == channels:
        return weight
    if {own, channels} != {1, 3}:
        raise ValueError(f"expected weights for images of {channels} channels; got weights for {own}")
    return weight.sum(1, keepdim=True) if channels == 1 else weight.expand(-1, 3, -1, -1) / 3
