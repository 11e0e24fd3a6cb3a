"""Layers with filters that are made once: a network that is not trained any more.

While parameters move, every call steers the filters of a group anew and folds A^Q into its map anew. Here
that is done for good: a convolution on a group is an ordinary one, whose channels are the channels and planes
of the group, and attention keeps ψ and β as every element of the group sees them. Same function, a fraction
of the operators; the filters are stored |H| times.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfconv.nn._attention import LocalAttention2d
from selfconv.nn._conv import _SteeredConv2d
from selfconv.nn._layout import avg_pool, fold_bias, fold_filters
from selfconv.ops._call import cast
from selfconv.ops.eager import attend


def fix_filters(module: nn.Module) -> nn.Module:
    """The module itself with its convolutions and attention layers replaced; or what such a layer becomes."""
    if isinstance(module, _SteeredConv2d):
        return FixedConv2d.of(module)
    if isinstance(module, LocalAttention2d):
        return FixedAttention2d(module)
    for name, child in module.named_children():
        setattr(module, name, fix_filters(child))
    return module


class FixedConv2d(nn.Module):
    """A convolution, its filters steered: ``[N, C, (R,) h, w] -> [N, C', P, h', w']``, on z2 without P."""

    @torch.no_grad()
    def __init__(
        self, filters: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0, pool: int = 1
    ) -> None:
        super().__init__()
        weight = fold_filters(filters, innermost=False)  # [C'·P, C·R, k, k]
        c_out, c_in, k, _ = weight.shape
        self.order = filters.shape[2]
        self.conv = nn.Conv2d(c_in, c_out, k, stride, padding, bias=bias is not None)
        self.conv.weight = nn.Parameter(weight.contiguous())
        if bias is not None:
            self.conv.bias = nn.Parameter(fold_bias(bias, self.order, innermost=False))
        pointwise = k == 1 and padding == 0  # and commutes with pooling: the cheap order
        self.pool_before, self.pool_after = (pool, 1) if pointwise else (1, pool)

    @classmethod
    def of(cls, layer: _SteeredConv2d) -> FixedConv2d:
        stride, pool = (layer.stride, 1) if layer.downsample == "stride" else (1, layer.stride)
        return cls(layer.steered_filters(), layer.bias, stride, layer.padding, pool)

    def forward(self, x: Tensor) -> Tensor:
        maps = x if x.dim() == 4 else x.flatten(1, 2)
        y = avg_pool(self.conv(avg_pool(maps, self.pool_before)), self.pool_after)
        return y if self.order == 1 else y.unflatten(1, (-1, self.order))


class FixedAttention2d(nn.Module):
    """An attention layer with filters that are steered, in the plain form of the operation."""

    psi_k: Tensor | None
    beta_k: Tensor | None
    psi_v: Tensor | None
    beta_v: Tensor | None

    @torch.no_grad()
    def __init__(self, layer: LocalAttention2d) -> None:
        super().__init__()
        self.kernel_size, self.num_heads, self.scale = layer.kernel_size, layer.num_heads, layer.scale
        filters, bias, self.channels = layer._projection()
        self.project = FixedConv2d(layer.group.steer(filters[..., None, None]), bias)
        # half precision is computed in float32, as everywhere
        self.dtype = torch.promote_types(filters.dtype, torch.float32)
        psi_k, beta_k, psi_v, beta_v = layer.affine_parameters()
        for name, psi in (("psi_k", psi_k), ("psi_v", psi_v)):
            if psi is not None:
                psi = layer.group.steer(psi.unsqueeze(-3) if len(layer.group) == 1 else psi)
            self._keep(name, psi)
        for name, beta in (("beta_k", beta_k), ("beta_v", beta_v)):
            self._keep(name, None if beta is None else layer.group.steer(beta, planar=True))
        self.output = FixedConv2d(layer.steered_output(), layer.b_out, pool=layer.stride)

    def _keep(self, name: str, filters: Tensor | None) -> None:
        self.register_buffer(name, None if filters is None else cast(filters, self.dtype).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        maps = self.project(x)
        maps = cast(maps if maps.dim() == 5 else maps.unsqueeze(2), self.dtype)  # [N, C, R, h, w]
        query, key, *value = maps.split(list(self.channels), 1)
        filters = (self.psi_k, self.beta_k, self.psi_v, self.beta_v)
        out, _ = attend(
            query, key, value[0] if value else key, *filters, self.kernel_size, self.num_heads, self.scale
        )
        return self.output(cast(out, x.dtype))
