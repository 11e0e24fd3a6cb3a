"""Affine self convolution in a network that is already there: its spatial convolutions, replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from selfconv.models.flops import count_flops, count_parameters
from selfconv.nn import (
    AffineSelfConv2d,
    GroupConv2d,
    LiftingConv2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)

Conv = nn.Conv2d | GroupConv2d
Where = str | Sequence[str] | Callable[[str, nn.Module], bool]

LAYERS = {"asc": AffineSelfConv2d, "simple_asc": SimpleAffineSelfConv2d, "sasa": StandAloneSelfAttention2d}


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` did to a model."""

    model: nn.Module
    replaced: dict[str, str]  # by name: the convolution that was there
    kept: dict[str, str]  # by name: a spatial convolution that stayed, and why
    parameters: tuple[int, int]  # before and after
    flops: tuple[int, int] | None  # before and after, if an input shape was given

    def __str__(self) -> str:
        total = len(self.replaced) + len(self.kept)
        lines = [f"replaced {len(self.replaced)} of {total} spatial convolutions"]
        for name, conv in self.replaced.items():
            lines.append(f"  {name}: {conv} → {_one_line(self.model.get_submodule(name))}")
        lines += [f"  {name}: kept, {reason}" for name, reason in self.kept.items()]
        lines.append(_change("parameters", self.parameters))
        if self.flops is not None:
            lines.append(_change("FLOPs", self.flops))
        return "\n".join(lines)


def _one_line(module: nn.Module) -> str:
    return " ".join(str(module).split())


def _change(what: str, counts: tuple[int, int]) -> str:
    before, after = counts
    return f"{what}: {before:,} → {after:,} ({(after - before) / before:+.1%})"


def convert(
    model: nn.Module,
    *,
    where: Where | None = None,
    layer: Literal["asc", "simple_asc", "sasa"] = "asc",
    kernel_size: int = 5,
    num_heads: int = 8,
    input_shape: Sequence[int] | None = None,
    **options: Any,
) -> Conversion:
    """Replaces spatial convolutions of a network by affine self convolution, in place, and reports it.

    The layers that come in have the channels, bias, device and dtype of those that go, and fresh weights:
    the network has to be trained (again). Where a convolution had a stride, the attention is followed by an
    average over stride×stride cells, so that every map keeps its size.

    Args:
        model: changed in place. Its ``nn.Conv2d`` and ``GroupConv2d`` layers with a kernel above 1×1 count.
        where: by default every such convolution that allows it but the first of the network (its stem,
            which the paper keeps). Or names of layers, with wildcards (``"layer1.*"``), or a function of
            name and layer; a layer that is named and does not allow it is an error.
        layer: ``"asc"``, ``"simple_asc"`` or ``"sasa"``.
        kernel_size, num_heads: of the new layers.
        input_shape: of an image, such as ``(3, 224, 224)``, to count FLOPs before and after.
        **options: any other argument of the new layer's class, such as ``psi``.
    """
    if layer not in LAYERS:
        raise ValueError(f"layer: expected one of {', '.join(map(repr, LAYERS))}; got {layer!r}")
    if num_heads < 1:
        raise ValueError(f"num_heads: expected ≥ 1; got {num_heads}")
    spatial = dict(_spatial_convolutions(model))
    chosen = None if where is None else _chosen(spatial, where)
    parameters = count_parameters(model)
    flops = None if input_shape is None else count_flops(model, input_shape)
    replaced, kept = {}, {}
    new: dict[nn.Module, nn.Module] = {}  # a convolution in two places is replaced by one layer
    stem = next((m for m in model.modules() if isinstance(m, nn.Conv2d | GroupConv2d | LiftingConv2d)), None)
    for name, conv in spatial.items():
        obstacle = "it is the whole model" if conv is model else _obstacle(conv, layer, num_heads)
        if chosen is None and conv is stem:
            kept[name] = "it is the first convolution of the network"
        elif chosen is not None and name not in chosen:
            kept[name] = "it was not asked for"
        elif chosen is not None and obstacle:
            raise ValueError(f"{name} ({_one_line(conv)}) cannot be replaced: {obstacle}")
        elif obstacle:
            kept[name] = obstacle
        else:
            replaced[name] = _one_line(conv)
            if conv not in new:
                new[conv] = _replacement(conv, layer, kernel_size, num_heads, options)
    for name in replaced:
        model.set_submodule(name, new[spatial[name]])
    return Conversion(
        model,
        replaced,
        kept,
        (parameters, count_parameters(model)),
        None if flops is None or input_shape is None else (flops, count_flops(model, input_shape)),
    )


def _spatial_convolutions(model: nn.Module) -> Iterator[tuple[str, Conv]]:
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Conv2d | GroupConv2d) and max(_pair(layer.kernel_size)) > 1:
            yield name, layer


def _chosen(spatial: dict[str, Conv], where: Where) -> set[str]:
    if callable(where):
        return {name for name, conv in spatial.items() if where(name, conv)}
    chosen: set[str] = set()
    for pattern in [where] if isinstance(where, str) else where:
        matches = {name for name in spatial if fnmatchcase(name, pattern)}
        if not matches:
            near = get_close_matches(pattern, spatial, n=3, cutoff=0.4)
            names = ", ".join(map(repr, near or spatial)) or "none"
            hint = f"the nearest are {names}" if near else f"there are {names}"
            raise ValueError(f"no spatial convolution is named {pattern!r}; {hint}")
        chosen |= matches
    return chosen


def _obstacle(conv: Conv, layer: str, num_heads: int) -> str | None:
    """Why a convolution cannot become an attention layer that keeps the size of its map; None if it can."""
    kernel, stride = _pair(conv.kernel_size), _pair(conv.stride)
    same = {"same": (kernel[0] // 2, kernel[1] // 2), "valid": (0, 0)}
    padding = same[conv.padding] if isinstance(conv.padding, str) else _pair(conv.padding)
    if type(conv) not in (nn.Conv2d, GroupConv2d):
        return f"{type(conv).__name__} may be more than a convolution"
    if isinstance(conv, nn.Conv2d) and (conv.groups > 1 or max(conv.dilation) > 1):
        return f"it has groups={conv.groups}, dilation={conv.dilation}; expected 1 and 1"
    if isinstance(conv, nn.Conv2d) and conv.padding_mode != "zeros":
        return f"it pads with {conv.padding_mode!r}; expected 'zeros'"
    if kernel[0] != kernel[1] or kernel[0] % 2 == 0 or stride[0] != stride[1]:
        return f"its kernel is {kernel} with stride {stride}; expected squares, the kernel odd"
    if padding != (kernel[0] // 2, kernel[0] // 2):
        return f"its padding {padding} does not keep the size of a map; expected {kernel[0] // 2}"
    if conv.out_channels % num_heads:
        return f"{num_heads} heads do not divide its {conv.out_channels} output channels"
    if layer == "sasa" and conv.out_channels // num_heads % 2:
        return f"sasa needs an even number of channels per head; {num_heads} heads have {conv.out_channels}"
    return None


def _replacement(
    conv: Conv, layer: str, kernel_size: int, num_heads: int, options: dict[str, Any]
) -> nn.Module:
    (stride, _) = _pair(conv.stride)
    planar = isinstance(conv, nn.Conv2d)
    attention = LAYERS[layer](
        conv.in_channels,
        conv.out_channels,
        kernel_size,
        1 if planar else stride,
        bias=conv.bias is not None,
        num_heads=num_heads,
        group="z2" if isinstance(conv, nn.Conv2d) else conv.group,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
        **options,
    )
    if planar and stride > 1:  # a strided convolution rounds the size up, and so must the pooling
        return nn.Sequential(attention, nn.AvgPool2d(stride, ceil_mode=True)).train(conv.training)
    return attention.train(conv.training)


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
