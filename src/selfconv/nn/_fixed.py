"""Layers with fixed, precomputed filters, for a network that is no longer trained.

During training, every call steers the filters of a group and folds A^Q into its map. Here this is done once:
a convolution on a group becomes an ordinary convolution, whose channels are the channels and planes of the
group, and attention stores ψ and β transformed by every element of the group. The function is the same, with
a fraction of the operators; the filters are stored |H| times.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfconv.groups import Z2, Group
from selfconv.nn._attention import (
    AffineSelfConv2d,
    LocalAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from selfconv.nn._conv import GroupConv2d, LiftingConv2d
from selfconv.nn._layout import avg_pool, check_features, fold_bias, fold_filters
from selfconv.ops import attend, cast, split_packed

CONVOLUTIONS = (LiftingConv2d, GroupConv2d)
ATTENTION = (AffineSelfConv2d, SimpleAffineSelfConv2d, StandAloneSelfAttention2d)


def is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether calling the layer does what its class says: no subclass, parametrization, hook, own forward."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return type(layer) in kinds and not hooked


def fix_filters(module: nn.Module) -> nn.Module:
    """The module with fixed filters, or what it becomes if it is such a layer itself.

    Layers are replaced in ``Sequential`` containers, ours among them: another parent might ask a layer for
    more than its output.
    """
    fixed: dict[nn.Module | None, nn.Module] = {}
    for layer in module.modules():
        if is_plain(layer, *CONVOLUTIONS):
            fixed[layer] = FixedConv2d.of(layer).train(layer.training)  # type: ignore[arg-type]
        elif is_plain(layer, *ATTENTION):
            fixed[layer] = FixedAttention2d(layer).train(layer.training)  # type: ignore[arg-type]
    for parent in module.modules():
        if type(parent).forward is nn.Sequential.forward:
            for name, child in parent._modules.items():
                setattr(parent, name, fixed.get(child, child))
    return fixed.get(module, module)


class FixedConv2d(nn.Module):
    """A convolution, its filters steered: ``[N, C, (R,) h, w] -> [N, C', P, h', w']``, on z2 without P."""

    @torch.no_grad()
    def __init__(
        self,
        filters: Tensor,
        bias: Tensor | None,
        domain: Group,
        stride: int = 1,
        padding: int = 0,
        pool: int = 1,
    ) -> None:
        super().__init__()
        self.domain, self.channels, self.order = domain, filters.shape[1], filters.shape[2]
        weight = fold_filters(filters, innermost=False)  # [C'·P, C·R, k, k]
        c_out, c_in, k, _ = weight.shape
        self.conv = nn.Conv2d(c_in, c_out, k, stride, padding, bias=bias is not None, device="meta")
        self.conv.weight = nn.Parameter(weight.contiguous())
        if bias is not None:
            self.conv.bias = nn.Parameter(fold_bias(bias, self.order, innermost=False))
        pointwise = k == 1 and padding == 0  # and commutes with pooling: the cheap order
        self.pool_before, self.pool_after = (pool, 1) if pointwise else (1, pool)

    @classmethod
    def of(cls, layer: LiftingConv2d | GroupConv2d) -> FixedConv2d:
        domain = Z2 if isinstance(layer, LiftingConv2d) else layer.group
        stride, pool = (layer.stride, 1) if layer.downsample == "stride" else (1, layer.stride)
        return cls(layer.steered_filters(), layer.bias, domain, stride, layer.padding, pool)

    def forward(self, x: Tensor) -> Tensor:
        check_features(type(self).__name__, x, self.channels, self.domain)
        maps = x if x.dim() == 4 else x.flatten(1, 2)
        y = avg_pool(self.conv(avg_pool(maps, self.pool_before)), self.pool_after)
        return y if self.order == 1 else y.unflatten(1, (-1, self.order))


class FixedAttention2d(nn.Module):
    """An attention layer, its filters steered, in the plain form of the operation."""

    psi_k: Tensor | None
    beta_k: Tensor | None
    psi_v: Tensor | None
    beta_v: Tensor | None

    @torch.no_grad()
    def __init__(self, layer: LocalAttention2d) -> None:
        super().__init__()
        group = self.group = layer.group
        self.kernel_size, self.num_heads, self.scale = layer.kernel_size, layer.num_heads, layer.scale
        filters, bias = layer.projection()
        self.channels = layer.packed_channels
        self.project = FixedConv2d(group.steer(filters[..., None, None]), bias, group)
        # half precision is computed in float32, as everywhere
        self.dtype = torch.promote_types(filters.dtype, torch.float32)
        psi_k, beta_k, psi_v, beta_v = layer.affine_parameters()
        for name, psi in (("psi_k", psi_k), ("psi_v", psi_v)):
            if psi is not None:
                psi = group.steer(psi.unsqueeze(-3) if len(group) == 1 else psi)
            self._keep(name, psi)
        for name, beta in (("beta_k", beta_k), ("beta_v", beta_v)):
            self._keep(name, None if beta is None else group.steer(beta, planar=True))
        self.output = FixedConv2d(layer.steered_output(), layer.b_out, group, pool=layer.stride)

    def _keep(self, name: str, filters: Tensor | None) -> None:
        self.register_buffer(name, None if filters is None else cast(filters, self.dtype).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        maps = self.project(x)
        maps = cast(maps.unsqueeze(2) if len(self.group) == 1 else maps, self.dtype)  # [N, C, R, h, w]
        filters = (self.psi_k, self.beta_k, self.psi_v, self.beta_v)
        features = split_packed(maps, self.channels)
        out, _ = attend(*features, filters, self.kernel_size, self.num_heads, self.scale)
        return self.output(cast(out.squeeze(2) if len(self.group) == 1 else out, x.dtype))
