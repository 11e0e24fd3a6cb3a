"""Replaces the spatial convolutions of an existing network by affine self convolution."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from selfconv.models.flops import count_flops, count_parameters, run_on_zeros
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
    """The report of ``convert``."""

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
    share = f" ({(after - before) / before:+.1%})" if before else ""
    return f"{what}: {before:,} → {after:,}{share}"


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
    """Replaces spatial convolutions of a network by affine self convolution, in place; returns a report.

    The new layers have the channels, bias, device and dtype of the convolutions they replace, and random,
    trainable weights: the network has to be trained (again). If a convolution has a stride, the attention is
    followed by an average over stride×stride cells, so that every map keeps its size. A convolution that is
    used in several places is replaced in all of them by one layer. A convolution that is not a plain
    ``Conv2d`` (a subclass, parametrized, with hooks, with weights shared with another layer, with additional
    attributes) is kept. If an error occurs, the model is left unchanged.

    Args:
        model: changed in place. Candidates are its ``nn.Conv2d`` and ``GroupConv2d`` layers with a kernel
            larger than 1×1.
        where: by default every supported candidate except the first of the network (its stem, which the paper
            keeps): the first that runs if an ``input_shape`` is given, otherwise the first in order of
            definition. Or names of layers, with wildcards (``"layer1.*"``), or a function of name and layer;
            selecting an unsupported layer is an error.
        layer: ``"asc"``, ``"simple_asc"`` or ``"sasa"``.
        kernel_size, num_heads: of the new layers.
        input_shape: of an image, such as ``(3, 224, 224)``. If given, the network is run before and after the
            conversion, to find its first convolution, to check that the new layers work, and to count FLOPs.
        **options: any other argument of the new layer's class, such as ``psi``.
    """
    if layer not in LAYERS:
        raise ValueError(f"layer: expected one of {', '.join(map(repr, LAYERS))}; got {layer!r}")
    if num_heads < 1:
        raise ValueError(f"convert: num_heads: expected an integer ≥ 1; got {num_heads}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("model: expected a network before torch.jit made it a script; got a ScriptModule")
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise ValueError("model: expected initialised weights; got lazy layers: run the network once before")
    spatial = dict(_spatial_convolutions(model))
    chosen = None if where is None else _chosen(spatial, where)
    parameters = count_parameters(model)
    flops, calls = None, None
    if input_shape is not None:
        try:
            flops, calls = count_flops(model, input_shape), _calls(model, input_shape)
        except Exception as error:
            raise ValueError(
                f"the network does not run on an image of shape {list(input_shape)}: {_first_line(error)}"
            ) from error
    stem, order = _stem(model, calls)
    owners = _parameter_owners(model)
    replaced, kept = {}, {}
    new: dict[nn.Module, nn.Module] = {}  # a convolution in two places is replaced by one layer
    for name, conv in spatial.items():
        obstacle = "it is the whole model" if conv is model else _obstacle(conv, layer, num_heads, owners)
        if chosen is None and conv is stem:
            kept[name] = f"it is the first convolution of the network{order}"
        elif chosen is not None and conv not in chosen:
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
    after = None
    if input_shape is not None and calls is not None:
        try:
            after = count_flops(model, input_shape)
            _check_used(model, [name for name in calls if name in replaced], input_shape)
        except Exception as error:
            for name in replaced:
                model.set_submodule(name, spatial[name])
            raise ValueError(
                f"with its convolutions replaced, the network does not work on an image of shape "
                f"{list(input_shape)}, and was left as it was: {_first_line(error)}"
            ) from error
    return Conversion(
        model,
        replaced,
        kept,
        (parameters, count_parameters(model)),
        None if flops is None or after is None else (flops, after),
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _calls(model: nn.Module, input_shape: Sequence[int]) -> list[str]:
    """Names of the modules in the order in which they are first called, each under its first name."""
    called: dict[str, None] = {}
    traced = copy.deepcopy(model).eval()
    for name, module in traced.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: called.setdefault(name))
    run_on_zeros(traced, input_shape)
    return list(called)


def _stem(model: nn.Module, calls: list[str] | None) -> tuple[nn.Module | None, str]:
    """The first convolution, of any kernel, and by which order if not by that of a run."""
    names = [name for name, _ in model.named_modules()] if calls is None else calls
    modules = (model.get_submodule(name) for name in names)
    stem = next((m for m in modules if isinstance(m, nn.Conv2d | GroupConv2d | LiftingConv2d)), None)
    return stem, " by order of definition (with input_shape, by order of execution)" if calls is None else ""


def _check_used(model: nn.Module, names: list[str], input_shape: Sequence[int]) -> None:
    """That each layer of these names is called: a parent may hold a convolution elsewhere too, in a list."""
    called = set(_calls(model, input_shape))
    idle = [name for name in names if name not in called]
    if idle:
        raise ValueError(f"it still calls the convolution that was {idle[0]}, which it holds elsewhere too")


def _parameter_owners(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by its id."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)


def _spatial_convolutions(model: nn.Module) -> Iterator[tuple[str, Conv]]:
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Conv2d | GroupConv2d) and max(_pair(layer.kernel_size)) > 1:
            yield name, layer


def _chosen(spatial: dict[str, Conv], where: Where) -> set[Conv]:
    if callable(where):
        return {conv for name, conv in spatial.items() if where(name, conv)}
    chosen: set[Conv] = set()
    for pattern in [where] if isinstance(where, str) else where:
        matches = {conv for name, conv in spatial.items() if fnmatchcase(name, pattern)}
        if not matches:
            near = get_close_matches(pattern, spatial, n=3, cutoff=0.4)
            names = ", ".join(map(repr, near or spatial)) or "none"
            hint = f"the nearest are {names}" if near else f"there are {names}"
            raise ValueError(f"no spatial convolution is named {pattern!r}; {hint}")
        chosen |= matches
    return chosen


def _obstacle(conv: Conv, layer: str, num_heads: int, owners: Counter[int]) -> str | None:
    """Why a convolution cannot become an attention layer that keeps the size of its map; None if it can."""
    kernel, stride = _pair(conv.kernel_size), _pair(conv.stride)
    same = {"same": (kernel[0] // 2, kernel[1] // 2), "valid": (0, 0)}
    padding = same[conv.padding] if isinstance(conv.padding, str) else _pair(conv.padding)
    if type(conv) not in (nn.Conv2d, GroupConv2d):
        return f"{type(conv).__name__} may be more than a convolution"
    addition = _addition(conv, owners)
    if addition:
        return f"it has {addition}, which a new layer would not have"
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


def _addition(conv: Conv, owners: Counter[int]) -> str | None:
    """What a convolution has beside what its class gives it: hooks, shared weights, attributes."""
    hooks = [name for name, value in vars(conv).items() if name.endswith("_hooks") and value]
    if hooks:  # weight norm and spectral norm of the older kind among them
        return hooks[0].strip("_").replace("_", " ")
    for name, parameter in conv._parameters.items():
        if parameter is None:
            continue
        if owners[id(parameter)] > 1:
            return f"a {name} that another layer has too"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"hooks on its {name}"
    own = _names(conv) - _names(type(conv)(1, 1, 1, bias=conv.bias is not None, device="meta"))
    return f"an attribute of its own ({min(own)})" if own else None


def _names(module: nn.Module) -> set[str]:
    """The names of all attributes, parameters, buffers and modules of an instance."""
    return {*vars(module), *module._parameters, *module._buffers, *module._modules}


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
