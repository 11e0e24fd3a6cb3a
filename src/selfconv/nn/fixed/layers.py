"""Layers with fixed, precomputed filters, for a network that is no longer trained.

During training, every call steers the filters of a group and folds A^Q into its map. Here this is done once:
a convolution on a group becomes an ordinary convolution, whose channels are the channels and planes of the
group, and attention stores ψ and β transformed by every element of the group. The function is the same, with
a fraction of the operators; the filters are stored |H| times.

There are two forms. The native form keeps the fused kernels and holds features in channels_last; the plain
form, for exports, consists of torch's operators alone: ``PlainAttention2d`` (``taps.py``) for a square,
undilated window with zeros outside the image, and ``UnfoldedAttention2d``, the eager form of the operation,
for other windows and for attention that lifts.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv.groups import Z2, Group
from selfconv.nn._conv import GroupConv2d, LiftingConv2d
from selfconv.nn._layout import avg_pool, check_features, fold_bias, fold_filters
from selfconv.nn.attention.layers import (
    AffineSelfConv2d,
    LiftingSelfConv2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from selfconv.nn.attention.local_attention import LocalAttention2d
from selfconv.nn.fixed.taps import TapAttention2d
from selfconv.ops import (
    Pair,
    PreparedCall,
    Window,
    affine_self_conv_packed,
    attend,
    cast,
    filter_tables,
    split_packed,
    steer,
)

CONVOLUTIONS = (LiftingConv2d, GroupConv2d)
ATTENTION = (AffineSelfConv2d, LiftingSelfConv2d, SimpleAffineSelfConv2d, StandAloneSelfAttention2d)


def is_unmodified(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether calling the layer does what its class says: no subclass, parametrization, hook, own forward."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return type(layer) in kinds and not hooked


def fix_filters(module: nn.Module, *, native: bool = False) -> nn.Module:
    """The module with fixed filters, or what it becomes if it is such a layer itself.

    Layers are replaced in ``Sequential`` containers, ours among them: another parent might ask a layer for
    more than its output.

    Args:
        native: whether attention runs in the fused kernels; otherwise in torch's operators.
    """
    fixed: dict[nn.Module | None, nn.Module] = {}
    for layer in module.modules():
        if is_unmodified(layer, *CONVOLUTIONS):
            fixed[layer] = FixedConv2d.of(layer, innermost=native).eval()  # type: ignore[arg-type]
        elif is_unmodified(layer, *ATTENTION):
            fixed[layer] = _fixed_attention(layer, native).eval()  # type: ignore[arg-type]
    for parent in module.modules():
        if type(parent).forward is nn.Sequential.forward:
            for name, child in parent._modules.items():
                setattr(parent, name, fixed.get(child, child))
    return fixed.get(module, module)


def _fixed_attention(layer: LocalAttention2d, native: bool) -> nn.Module:
    if native:
        return NativeAttention2d(layer)
    return PlainAttention2d(layer) if _is_ordinary(layer) else UnfoldedAttention2d(layer)


def _is_ordinary(layer: LocalAttention2d) -> bool:
    """Whether the window is square, not dilated and with zeros outside the image, on one group."""
    k = layer.window.size[0]
    return layer.window == Window((k, k)) and layer.domain is layer.group


class FixedLayer(nn.Module):
    """A layer whose filters are copies: it refuses to be trained."""

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise RuntimeError(
                f"{type(self).__name__}: expected evaluation mode; its filters are fixed copies: train the "
                "model that was optimised, and optimise it again"
            )
        return super().train(mode)


class FixedConv2d(FixedLayer):
    """A convolution, its filters steered: ``[N, C, (R,) h, w] -> [N, C', P, h', w']``, on z2 without P.

    Args:
        innermost: whether features have their channels innermost in memory, before the planes of a group.
    """

    @torch.no_grad()
    def __init__(
        self,
        filters: Tensor,
        bias: Tensor | None,
        domain: Group,
        stride: int = 1,
        padding: int = 0,
        pool: int | Pair = 1,
        *,
        innermost: bool,
    ) -> None:
        super().__init__()
        self.domain, self.channels, self.order = domain, filters.shape[1], filters.shape[2]
        self.innermost = innermost
        self.stride, self.padding = stride, padding
        weight = fold_filters(filters, innermost)  # [C'·P, C·R, k, k], or [P·C', R·C, k, k]
        pointwise = weight.shape[-1] == 1 and padding == 0  # and commutes with pooling: the cheap order
        self.pool_before: int | Pair = pool if pointwise else 1
        self.pool_after: int | Pair = 1 if pointwise else pool
        # with channels innermost a matrix product, which for few images takes half the time of conv2d
        self.is_matrix = pointwise and stride == 1 and innermost
        layout = torch.channels_last if innermost else torch.contiguous_format
        weight = weight.flatten(1).contiguous() if self.is_matrix else weight.contiguous(memory_format=layout)
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(fold_bias(bias, self.order, innermost))

    @classmethod
    def of(cls, layer: LiftingConv2d | GroupConv2d, *, innermost: bool) -> FixedConv2d:
        domain = Z2 if isinstance(layer, LiftingConv2d) else layer.group
        stride, pool = (layer.stride, 1) if layer.downsample == "stride" else (1, layer.stride)
        filters = layer.steered_filters()
        return cls(filters, layer.bias, domain, stride, layer.padding, pool, innermost=innermost)

    def forward(self, x: Tensor) -> Tensor:
        check_features(type(self).__name__, x, self.channels, self.domain, weight=self.weight)
        maps = x
        if x.dim() == 5:
            maps = (x.transpose(1, 2) if self.innermost else x).flatten(1, 2)
        maps = avg_pool(maps, self.pool_before, type(self).__name__)
        if self.is_matrix:
            y = F.linear(maps.permute(0, 2, 3, 1), self.weight, self.bias).permute(0, 3, 1, 2)
        else:
            y = F.conv2d(maps, self.weight, self.bias, self.stride, self.padding)
            y = avg_pool(y, self.pool_after, type(self).__name__)
        if self.order == 1:
            return y
        return (
            y.unflatten(1, (self.order, -1)).transpose(1, 2)
            if self.innermost
            else y.unflatten(1, (-1, self.order))
        )


class NativeAttention2d(FixedLayer):
    """An attention layer with its filters steered and packed as the fused kernels take them."""

    psi_k: Tensor | None
    beta_k: Tensor | None
    psi_v: Tensor | None
    beta_v: Tensor | None
    table_k: Tensor | None
    table_v: Tensor | None

    @torch.no_grad()
    def __init__(self, layer: LocalAttention2d) -> None:
        super().__init__()
        filters, bias = layer.steered_projection()
        self.project = FixedConv2d(filters, bias, layer.domain, innermost=True)
        self.channels, self.backend = layer.packed_channels, layer.backend
        self.options: dict[str, Any] = layer.op_arguments
        affine = layer.affine_parameters()
        for name, t in zip(("psi_k", "beta_k", "psi_v", "beta_v"), affine, strict=True):
            self.register_buffer(name, None if t is None else t.detach().clone())
        tables = None
        if self.backend in (None, "numba") and _is_ordinary(layer):
            tables = filter_tables(self.channels, *affine, dtype=filters.dtype, **self.options)
        for i, name in enumerate(("table_k", "table_v")):
            self.register_buffer(name, None if tables is None else tables[i].to(filters.device))
        self.prepared = PreparedCall(layer.scale)
        self.output = FixedConv2d(
            layer.steered_output(), layer.b_out, layer.group, pool=layer.cells, innermost=True
        )

    def forward(self, x: Tensor) -> Tensor:
        packed = self.project(x)  # A^Q[Q], K, V: [N, C_k + C_k + C_v, R, h, w]
        values = None
        if self.table_k is not None and self.table_v is not None:
            values = self.prepared(packed, self.table_k, self.table_v)
        if values is None:
            values = affine_self_conv_packed(
                packed, self.channels, self.psi_k, self.beta_k, self.psi_v, self.beta_v,
                backend=self.backend, **self.options,
            )  # fmt: skip
        return self.output(values)


class PlainAttention2d(FixedLayer):
    """An attention layer, its filters steered, as convolutions and elementwise operators."""

    @torch.no_grad()
    def __init__(self, layer: LocalAttention2d) -> None:
        super().__init__()
        group = self.group = layer.group
        self.in_channels = layer.in_channels
        filters, bias = layer.steered_projection()
        psi_k, beta_k, psi_v, beta_v = layer.affine_parameters()

        def steered(psi: Tensor | None, beta: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            if psi is not None:
                psi = group.steer(psi.unsqueeze(-3) if len(group) == 1 else psi)
            return psi, None if beta is None else group.steer(beta, planar=True)

        self.taps = TapAttention2d(
            (filters, bias),
            layer.packed_channels,
            steered(psi_k, beta_k),
            steered(psi_v, beta_v),
            (layer.steered_output(), layer.b_out),
            kernel_size=layer.window.size[0],
            num_heads=layer.num_heads,
            scale=layer.scale,
            pool=layer.stride,
            dtype=torch.promote_types(filters.dtype, torch.float32),  # half precision needs it in the softmax
        ).to(filters.device)

    def forward(self, x: Tensor) -> Tensor:
        check_features(type(self).__name__, x, self.in_channels, self.group)
        planar = x.dim() == 4
        y = self.taps(x if planar else x.flatten(1, 2))
        return y if planar else y.unflatten(1, (-1, len(self.group)))


class UnfoldedAttention2d(FixedLayer):
    """An attention layer with any window, its filters steered, in the eager form of the operation.

    It unfolds: its largest tensors are k² times the features.
    """

    psi_k: Tensor | None
    beta_k: Tensor | None
    psi_v: Tensor | None
    beta_v: Tensor | None

    @torch.no_grad()
    def __init__(self, layer: LocalAttention2d) -> None:
        super().__init__()
        group = self.group = layer.group
        self.window, self.num_heads, self.scale = layer.window, layer.num_heads, layer.scale
        filters, bias = layer.steered_projection()
        self.channels = layer.packed_channels
        self.project = FixedConv2d(filters, bias, layer.domain, innermost=False)
        # half precision is computed in float32, as everywhere
        self.dtype = torch.promote_types(filters.dtype, torch.float32)
        psi_k, beta_k, psi_v, beta_v = layer.affine_parameters()
        for name, psi in (("psi_k", psi_k), ("psi_v", psi_v)):
            if psi is not None:
                planar = len(layer.domain) == 1
                psi = steer(psi.unsqueeze(-3) if planar else psi, group, planar)
            self._keep(name, psi)
        for name, beta in (("beta_k", beta_k), ("beta_v", beta_v)):
            self._keep(name, None if beta is None else group.steer(beta, planar=True))
        self.output = FixedConv2d(
            layer.steered_output(), layer.b_out, group, pool=layer.cells, innermost=False
        )

    def _keep(self, name: str, filters: Tensor | None) -> None:
        self.register_buffer(name, None if filters is None else cast(filters, self.dtype).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        maps = self.project(x)
        maps = cast(maps.unsqueeze(2) if maps.dim() == 4 else maps, self.dtype)  # [N, C, R, h, w]
        filters = (self.psi_k, self.beta_k, self.psi_v, self.beta_v)
        query, key, value = split_packed(maps, self.channels)
        query = query.expand(-1, -1, len(self.group), -1, -1)  # where the layer lifts
        out, _ = attend(query, key, value, filters, self.window, self.num_heads, self.scale)
        return self.output(cast(out.squeeze(2) if len(self.group) == 1 else out, x.dtype))
