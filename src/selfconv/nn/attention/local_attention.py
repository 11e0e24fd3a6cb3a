"""What the attention layers share: 1×1 maps before and after the operation, heads, windows, stride."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfconv._arguments import check_not_negative, check_switch
from selfconv.groups import Group, own_group
from selfconv.nn._layout import avg_pool, check_features, check_options, check_sizes, draw_normal, group_conv
from selfconv.ops import (
    PaddingMode,
    Pair,
    affine_self_conv,
    affine_self_conv_packed,
    check_backend,
    check_heads,
    check_probability,
    check_scale,
    make_window,
    split_packed,
)

PsiKind = Literal["channel", "dense"]
AffineKind = Literal["both", "psi", "beta"]
AffineParameters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # ψ^K, β^K, ψ^V, β^V
NewParameter = Callable[..., nn.Parameter]  # of a shape, on the device and with the dtype of the layer


class LocalAttention2d(nn.Module):
    """Base class of the attention layers: input and output 1×1 maps, heads, pooling for stride. Subclasses
    define the input maps (``projection``) and the affine parameters (``affine_parameters``)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int,
        *,
        dilation: int | Pair,
        padding_mode: PaddingMode,
        bias: bool,
        key_channels: int,
        num_heads: int,
        qkv_bias: bool,
        scale: float | None,
        dropout: float,
        group: str | Group,
        backend: str | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        psi: PsiKind = "channel",
        affine: AffineKind = "both",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_sizes(
            name, in_channels=in_channels, out_channels=out_channels, key_channels=key_channels, stride=stride
        )
        check_options(name, dtype, bias=bias, qkv_bias=qkv_bias)
        self.group = own_group(group)
        self.window = make_window(kernel_size, dilation, padding_mode, self.group, name)
        check_heads(num_heads, name, key=key_channels, value=out_channels)
        check_backend(backend)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.key_channels = key_channels
        self.stride = stride
        self.num_heads = num_heads
        self.scale = check_scale(scale, key_channels, name)
        self.dropout = check_probability(f"{name}: dropout", dropout)
        self.backend = backend
        self.psi, self.affine = psi, affine

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.w_in = new(self._projection_channels(), in_channels * len(self.domain), 1, 1)
        self.b_in = new(self._projection_channels()) if qkv_bias else None
        self._make_affine_parameters(new)
        self.w_out = new(out_channels, out_channels * len(self.group), 1, 1)
        self.b_out = new(out_channels) if bias else None
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would register a Parameter given as scale, but the kernels read its value only and would
        # give it no gradient
        if name == "scale":
            value = check_scale(value, self.key_channels, type(self).__name__)
        super().__setattr__(name, value)

    @property
    def kernel_size(self) -> int | Pair:
        """k of a k×k window, (rows, columns) of any other."""
        rows, columns = self.window.size
        return rows if rows == columns else (rows, columns)

    @property
    def dilation(self) -> int | Pair:
        """The distance between neighbours, or that of (rows, columns) where they differ."""
        rows, columns = self.window.dilation
        return rows if rows == columns else (rows, columns)

    @property
    def padding_mode(self) -> PaddingMode:
        return self.window.padding_mode

    @property
    def domain(self) -> Group:
        """The group of the input."""
        return self.group

    @property
    def cells(self) -> Pair:
        """The rows and columns whose mean is one position of the output."""
        return self.stride, self.stride

    def _new_psi(self, new: NewParameter, channels: int) -> nn.Parameter:
        """ψ on the window: [C, |H|, k, k] (z2: [C, k, k]), or dense, stored with rank 4: [C, C·|H|, k, k].

        On a band-limited group coefficients, [..., functions], take the place of the values, [..., k, k].
        """
        window, planes = self.group.parameter_shape(self.window.size), len(self.domain)
        if self.psi == "dense":
            return new(channels, channels * planes, *window)
        return new(channels, *(() if planes == 1 else (planes,)), *window)

    def _new_beta(self, new: NewParameter, channels: int) -> nn.Parameter:
        return new(channels, *self.group.parameter_shape(self.window.size))

    def _psi_values(self, psi: Tensor | None) -> Tensor | None:
        """ψ in the shape that ``affine_self_conv`` takes."""
        if psi is None:
            return None
        psi = self.group.window_values(psi, self.window.size)
        if self.psi == "dense" and len(self.domain) > 1:
            return psi.unflatten(1, (psi.shape[0], -1))
        return psi

    def _beta_values(self, beta: Tensor | None) -> Tensor | None:
        """β in the shape that ``affine_self_conv`` takes."""
        return None if beta is None else self.group.window_values(beta, self.window.size)

    def reset_parameters(self, affine_std: float | None = None) -> None:
        """He initialisation of the 1×1 maps (all planes count in the fan-in), zero biases, ψ, β ~ N(0, std²).

        Args:
            affine_std: standard deviation of ψ and β; by default 1/|H| for features on H, which on the plane
                is the paper's 1.
                On a group the affine map sums |H| planes, and networks with the standard deviation of 1 that
                the paper states for all its examples learn more slowly. On a band-limited group they are also
                less equivariant: a sharp softmax selects single pixels, which do not coincide with pixels
                when the image is rotated by 45°.
        """
        std = 1 / len(self.domain)
        if affine_std is not None:
            std = check_not_negative(f"{type(self).__name__}: affine_std", affine_std)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("w_"):
                draw_normal(parameter, std=math.sqrt(2.0) / math.sqrt(parameter[0].numel()))
            elif name.startswith("b_"):
                nn.init.zeros_(parameter)
            else:
                draw_normal(parameter, std=std)

    def _projection_channels(self) -> int:
        """The number of rows of ``w_in``."""
        raise NotImplementedError

    def _make_affine_parameters(self, new: NewParameter) -> None:
        """Creates the parameters ψ and β of the layer."""
        raise NotImplementedError

    def affine_parameters(self) -> AffineParameters:
        """ψ^K, β^K, ψ^V, β^V in the shapes of ``selfconv.ops.affine_self_conv``."""
        raise NotImplementedError

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """The 1×1 map that computes A^Q[Q], K and V: its filters [C, in, |H|] and bias."""
        raise NotImplementedError

    @property
    def packed_channels(self) -> tuple[int, ...]:
        """The numbers of channels of query, key and value in the output of ``project``."""
        return self.key_channels, self.key_channels, self.out_channels

    def _input_filters(self) -> Tensor:
        """``w_in`` with the axes of channels and group apart: [C, in, |H|]."""
        return self.w_in.reshape(len(self.w_in), self.in_channels, len(self.domain))

    def forward(self, x: Tensor, need_weights: bool = False) -> Any:
        """The class docstring's equations, line by line; on z2 without the axes R and P.

        Args:
            need_weights: also return α, ``[N, num_heads, |H|, k, k, h, w]`` (z2: without |H|), computed by
                the eager backend.
        """
        check_switch(f"{type(self).__name__}: need_weights", need_weights)
        query_key_value = self.project(x)  # A^Q[Q], K, V: [N, C_k + C_k + C_v, R, h, w]
        if need_weights:
            values, alpha = self.attend_with_weights(*split_packed(query_key_value, self.packed_channels))
            return self.output_map(values), alpha
        values = self.attend(query_key_value)  # Σ_y α A^V[V]: [N, C_v, P, h, w]
        return self.output_map(values)  # W^O ⋆ values: [N, out, P, h / stride, w / stride]

    def query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A^Q[Q], K and V of the features x."""
        return split_packed(self.project(x), self.packed_channels)

    def project(self, x: Tensor) -> Tensor:
        """A^Q[Q], K and V of the features x, concatenated along the channels, computed by one convolution."""
        name, channels = type(self).__name__, self.in_channels
        check_features(name, x, channels, self.domain, lifted_to=self.group, weight=self.w_in)
        return group_conv(x, *self.steered_projection(), self.domain)

    def steered_projection(self) -> tuple[Tensor, Tensor | None]:
        """The filters of ``project``, steered by the group of the input, [C, in, P, R, 1, 1]; its bias."""
        filters, bias = self.projection()
        return self.domain.steer(filters[..., None, None]), bias

    def attend(self, packed: Tensor) -> Tensor:
        """Σ_y α((P,x), (P,y)) A^V_(P,x)[V](y) for the output of ``project``."""
        if self.dropout and self.training:
            return self.attend_with_weights(*split_packed(packed, self.packed_channels))[0]
        return affine_self_conv_packed(
            packed, self.packed_channels, *self.affine_parameters(), **self.op_arguments, backend=self.backend
        )

    def attend_with_weights(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output of ``attend`` and α, with dropout in training; computed by the eager backend."""
        return affine_self_conv(
            query, key, value, *self.affine_parameters(), **self.op_arguments,
            dropout_p=self.dropout if self.training else 0.0, return_attention=True,
        )  # fmt: skip

    def attention_weights(self, x: Tensor) -> Tensor:
        """α for features x: ``[N, num_heads, k, k, h, w]``, or ``[N, num_heads, |H|, k, k, h, w]``."""
        return self.attend_with_weights(*self.query_key_value(x))[1]

    @property
    def op_arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``affine_self_conv`` and ``affine_self_conv_packed``."""
        window = self.window
        return {
            "num_heads": self.num_heads,
            "scale": self.scale,
            "group": self.group,
            "kernel_size": window.size,
            "dilation": window.dilation,
            "padding_mode": window.padding_mode,
            "lifting": len(self.domain) < len(self.group),
        }

    def output_map(self, values: Tensor) -> Tensor:
        """W^O ⋆ values after averaging stride×stride cells: the two commute, and this order is cheaper."""
        pooled = avg_pool(values, self.cells, type(self).__name__)
        return group_conv(pooled, self.steered_output(), self.b_out, self.group)

    def steered_output(self) -> Tensor:
        """W^O transformed by every element P of the group: [out, out, P, R, 1, 1]."""
        return self.group.steer(self.w_out.reshape(self.out_channels, self.out_channels, -1, 1, 1))

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        if self.stride > 1:
            parts.append(f"stride={self.stride}")
        if self.dilation != 1:
            parts.append(f"dilation={self.dilation}")
        if self.padding_mode != "zeros":
            parts.append(f"padding_mode={self.padding_mode!r}")
        if self.key_channels != self.out_channels:
            parts.append(f"key_channels={self.key_channels}")
        if self.psi != "channel":
            parts.append(f"psi={self.psi!r}")
        if self.affine != "both":
            parts.append(f"affine={self.affine!r}")
        if self.dropout:
            parts.append(f"dropout={self.dropout:g}")
        parts += [f"num_heads={self.num_heads}", f"scale={self.scale:g}", f"group={self.group.name!r}"]
        return ", ".join(parts)


def fold_query_map(
    filters: Tensor, bias: Tensor | None, psi_q: Tensor | None, beta_q: Tensor | None, group: Group
) -> tuple[Tensor, Tensor]:
    """The affine map A^Q at the centre, folded into the 1×1 map before it.

    Both are convolutions over the group, so their composition is one: with S over the group,
    W'_c(R) = Σ_S ψ^Q_c(S) W_c(S⁻¹R) and b'_c = b_c Σ_S ψ^Q_c(S) + β^Q_c.

    Args:
        filters: W, ``[C, in, |H|]``.
        bias: b, ``[C]`` or None.
        psi_q: ``[C, |H|]``, or dense ``[C, C, |H|]``; None is 1 at S = 1 and 0 elsewhere.
        beta_q: ``[C]``; None is 0.
    """
    bias = filters.new_zeros(len(filters)) if bias is None else bias
    if psi_q is None:
        folded, offset = filters, bias
    else:
        steered = group.steer(filters[..., None, None])[..., 0, 0]  # [C, in, S, R]
        if psi_q.dim() == 3:
            folded, offset = torch.einsum("cds,disr->cir", psi_q, steered), psi_q.sum(2) @ bias
        else:
            folded, offset = (psi_q[:, None, :, None] * steered).sum(2), psi_q.sum(1) * bias
    return folded, offset if beta_q is None else beta_q + offset


def relative_entropy(alpha: Tensor, dim: int) -> Tensor:
    """−Σ α log α over log n, the largest it can be: 1 if all n weights are equal, 0 if one alone is not 0, as
    in a window of one."""
    return torch.special.entr(alpha).sum(dim) / (math.log(alpha.shape[dim]) or 1.0)


def set_backend(module: nn.Module, backend: str | None) -> nn.Module:
    """Sets the backend of every attention layer in ``module`` (None: automatic); returns ``module``."""
    check_backend(backend)
    for layer in module.modules():
        if isinstance(layer, LocalAttention2d):
            layer.backend = backend
    return module
