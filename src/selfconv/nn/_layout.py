"""Group features as the 4-D maps that convolutions and pooling take, without copying them.

A feature map ``[N, C, |H|, h, w]`` folds its two channel axes into one. Which goes first follows its
memory: channels innermost (channels_last) folds as ``|H|·C``, anything else as ``C·|H|``. Either way the
fold is a view, and so is the unfold of what the convolution returns; batch norm finds its channels
innermost, or its maps contiguous, as its fast paths want them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv._arguments import check_switch, is_whole
from selfconv.groups import Group
from selfconv.ops import Pair, owned


def draw_normal(parameter: Tensor, std: float) -> None:
    """From N(0, std²). The meta device has no numbers, and torch would load its compiler to draw them."""
    if not parameter.is_meta:
        nn.init.normal_(parameter, std=std)


def check_sizes(module: str, **sizes: int) -> None:
    if not all(is_whole(n) and n >= 1 for n in sizes.values()):
        given = ", ".join(f"{name}={n!r}" for name, n in sizes.items())
        raise ValueError(f"{module}: expected sizes that are integers ≥ 1; got {given}")


def check_options(module: str, dtype: torch.dtype | None, **switches: bool) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{module}: dtype: expected one of floating-point numbers; got {dtype!r}")
    for name, switch in switches.items():
        check_switch(f"{module}: {name}", switch)


def check_window(module: str, kernel_size: int) -> None:
    if not is_whole(kernel_size) or kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"{module}: kernel_size: expected an odd integer ≥ 1; got {kernel_size}")


def check_features(
    module: str,
    x: Tensor,
    channels: int | None,
    group: Group,
    *,
    lifted_to: Group | None = None,
    weight: Tensor | None = None,
) -> None:
    """Features of the right rank, sizes and dtype: [N, C, h, w] on z2, [N, C, |H|, h, w] on a larger group.

    Args:
        lifted_to: the group of the output, which differs from that of the features if the layer lifts.
        weight: of the layer, whose dtype the features must have outside autocast.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{module} expects a torch.Tensor; got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{module} expects dense features; got {x.layout} of shape {list(x.shape)}")
    planar = len(group) == 1
    fits = x.dim() == (4 if planar else 5) and (planar or x.shape[2] == len(group))
    if not fits or (channels is not None and x.shape[1] != channels):
        c = "C" if channels is None else channels
        axis = "" if planar else f"{len(group)}, "
        where = f"on group {group.name!r} expects"
        if lifted_to is not None and lifted_to != group:
            where = f"lifts planar features to group {lifted_to.name!r} and expects"
        raise ValueError(f"{module} {where} [N, {c}, {axis}h, w]; got shape {list(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{module} expects floating-point features; got {x.dtype} of shape {list(x.shape)}")
    if weight is not None and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{module} has weights of {weight.dtype} and expects such features; got {x.dtype}")
    if 0 in x.shape[-2:]:
        raise ValueError(f"{module} expects maps of 1×1 or more; got shape {list(x.shape)}")


def is_sequence(x: Tensor, channels: int | None, group: Group) -> bool:
    """Whether features are sequences, maps of one row without its axis: [N, C, L] on z2, [N, C, |H|, L].

    Args:
        channels: by default any number.
    """
    if not isinstance(x, Tensor):
        return False  # check_features refuses it
    axis = () if len(group) == 1 else (len(group),)
    fits = x.dim() == 3 + len(axis) and x.shape[2:-1] == axis and x.shape[-1] > 0
    return group.keeps_axes and fits and channels in (None, x.shape[1])


def channels_innermost(x: Tensor) -> bool:
    """Whether memory runs along the channels first, for planar and group features alike."""
    return x.stride(1) == 1


def fold(x: Tensor) -> Tensor:
    """[N, C, |H|, h, w] -> [N, C·|H| or |H|·C, h, w], a view in either memory order; planar x as it is."""
    if x.dim() == 4:
        return x
    return owned((x.transpose(1, 2) if channels_innermost(x) else x).flatten(1, 2))


def unfold(y: Tensor, like: Tensor, group: Group) -> Tensor:
    """The inverse of ``fold``, for a 4-D result made from features ``like``."""
    if len(group) == 1:
        return y
    if channels_innermost(like):
        return y.unflatten(1, (len(group), -1)).transpose(1, 2)
    return y.unflatten(1, (-1, len(group)))


def fold_filters(filters: Tensor, innermost: bool) -> Tensor:
    """Steered filters as conv2d takes them.

    Args:
        filters: ``[C_out, C_in, P, R, k, k]``, or ``[C_out, C_in, P, k, k]`` on planar input.
        innermost: whether the features they will meet have their channels innermost, and fold so.

    Returns:
        ``[C_out·P, C_in·R, k, k]`` or ``[P·C_out, R·C_in, k, k]``.
    """
    if filters.dim() == 5:
        filters = filters.unsqueeze(3)
    order = (2, 0, 3, 1, 4, 5) if innermost else (0, 2, 1, 3, 4, 5)
    return filters.permute(order).flatten(2, 3).flatten(0, 1)


def fold_bias(bias: Tensor, order: int, innermost: bool) -> Tensor:
    """One value per channel as conv2d's bias, the same for each of the group's ``order`` elements."""
    return bias.repeat(order) if innermost else bias.repeat_interleave(order)


def on_folded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of 4-D maps that treats channels alike, on group features."""
    if x.dim() == 4:
        return function(x)
    y = function(fold(x))
    if channels_innermost(x):
        return y.unflatten(1, (x.shape[2], x.shape[1])).transpose(1, 2)
    return y.unflatten(1, x.shape[1:3])


def in_memory_of(like: Tensor, y: Tensor) -> Tensor:
    """y with its channels innermost if they are so in ``like``; a copy where they are not yet."""
    if not channels_innermost(like) or channels_innermost(y):
        return y
    if y.dim() == 4:
        return y.contiguous(memory_format=torch.channels_last)
    folded = y.transpose(1, 2).flatten(1, 2).contiguous(memory_format=torch.channels_last)  # [N, |H|·C, h, w]
    return folded.unflatten(1, (y.shape[2], y.shape[1])).transpose(1, 2)


def check_poolable(x: Tensor, size: int | Pair, module: str) -> None:
    rows, columns = size if isinstance(size, tuple) else (size, size)
    if x.shape[-2] < rows or x.shape[-1] < columns:
        raise ValueError(
            f"{module}: expected maps of {rows}×{columns} or more, to pool; got shape {list(x.shape)}"
        )


def avg_pool(x: Tensor, size: int | Pair, module: str) -> Tensor:
    """Mean over size×size cells: the downsampling that keeps quarter turns and flips exact.

    Args:
        module: the name of the layer, for errors.
    """
    if size in (1, (1, 1)):
        return x
    check_poolable(x, size, module)
    return on_folded(lambda maps: F.avg_pool2d(maps, size), x)


def group_conv(
    x: Tensor, filters: Tensor, bias: Tensor | None, group: Group, stride: int = 1, padding: int | str = 0
) -> Tensor:
    """Convolution of group (or, if the filters are planar, plane) features with steered filters."""
    innermost = channels_innermost(x)
    y = F.conv2d(
        fold(x),
        fold_filters(filters, innermost),
        None if bias is None else fold_bias(bias, len(group), innermost),
        stride=stride,
        padding=padding,
    )
    return unfold(y, x, group)


def channels_to_end(x: Tensor) -> Tensor:
    """[N, C, |H|, h, w] -> [N, h, w, |H|, C], planar x -> [N, h, w, C]: contiguous if x is channels_last."""
    return x.permute((0, 2, 3, 1) if x.dim() == 4 else (0, 3, 4, 2, 1))


def channels_to_front(y: Tensor) -> Tensor:
    """The inverse of ``channels_to_end``."""
    return y.permute((0, 3, 1, 2) if y.dim() == 4 else (0, 4, 3, 1, 2))
