"""Affine self convolution, its simple form and stand-alone self-attention as layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from selfconv.groups import Group, get_group
from selfconv.nn._layout import avg_pool, check_features, check_sizes, check_window, group_conv
from selfconv.ops import (
    affine_self_conv,
    affine_self_conv_packed,
    check_backend,
    check_heads,
    split_packed,
)

PsiKind = Literal["channel", "dense"]
AffineKind = Literal["both", "psi", "beta"]
AffineParameters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # ψ^K, β^K, ψ^V, β^V


class LocalAttention2d(nn.Module):
    """Base class of the attention layers: input and output 1×1 maps, heads, pooling for stride. Subclasses
    define the input maps (``projection``) and the affine parameters (``affine_parameters``)."""

    psi: PsiKind = "channel"
    affine: AffineKind = "both"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int,
        *,
        bias: bool,
        key_channels: int,
        num_heads: int,
        qkv_bias: bool,
        scale: float | None,
        group: str | Group,
        backend: str | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_sizes(
            name, in_channels=in_channels, out_channels=out_channels, key_channels=key_channels, stride=stride
        )
        check_window(name, kernel_size)
        check_heads(num_heads, key=key_channels, value=out_channels)
        check_backend(backend)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.key_channels = key_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.num_heads = num_heads
        self.scale = 1 / key_channels if scale is None else float(scale)
        self.group = get_group(group)
        self.backend = backend
        self._factory = {"device": device, "dtype": dtype}
        self.w_in = self._parameter(self._map_channels(), in_channels * len(self.group), 1, 1)
        self.b_in = self._parameter(self._map_channels()) if qkv_bias else None
        self._make_affine_parameters()
        self.w_out = self._parameter(out_channels, out_channels * len(self.group), 1, 1)
        self.b_out = self._parameter(out_channels) if bias else None
        del self._factory
        self.reset_parameters()

    def _parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, **self._factory))  # type: ignore[arg-type]

    def _psi(self, channels: int) -> nn.Parameter:
        """ψ on the window: [C, |H|, k, k] (z2: [C, k, k]), or dense, stored with rank 4: [C, C·|H|, k, k].

        On a band-limited group coefficients, [..., functions], take the place of the values, [..., k, k].
        """
        window = self.group.parameter_shape(self.kernel_size)
        if self.psi == "dense":
            return self._parameter(channels, channels * len(self.group), *window)
        return self._parameter(channels, *(() if len(self.group) == 1 else (len(self.group),)), *window)

    def _beta(self, channels: int) -> nn.Parameter:
        return self._parameter(channels, *self.group.parameter_shape(self.kernel_size))

    def _op_psi(self, psi: Tensor | None) -> Tensor | None:
        """A stored ψ as the operation takes it."""
        if psi is None:
            return None
        psi = self.group.window_values(psi, self.kernel_size)
        if self.psi == "dense" and len(self.group) > 1:
            return psi.unflatten(1, (psi.shape[0], -1))
        return psi

    def _op_beta(self, beta: Tensor | None) -> Tensor | None:
        """A stored β as the operation takes it."""
        return None if beta is None else self.group.window_values(beta, self.kernel_size)

    def reset_parameters(self, affine_std: float | None = None) -> None:
        """He initialisation of the 1×1 maps (all planes count in the fan-in), zero biases, ψ, β ~ N(0, std²).

        Args:
            affine_std: standard deviation of ψ and β; by default 1/|H|, which on the plane is the paper's 1.
                On a group the affine map sums |H| planes, and networks with the standard deviation of 1 that
                the paper states for all its examples learn more slowly. On a band-limited group they are also
                less equivariant: a sharp softmax selects single pixels, which do not coincide with pixels
                when the image is rotated by 45°.
        """
        std = 1 / len(self.group) if affine_std is None else affine_std
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("w_"):
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            elif name.startswith("b_"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    @abstractmethod
    def _map_channels(self) -> int:
        """How many channels the 1×1 maps of the input have together."""

    @abstractmethod
    def _make_affine_parameters(self) -> None: ...

    @abstractmethod
    def affine_parameters(self) -> AffineParameters:
        """ψ^K, β^K, ψ^V, β^V in the shapes of ``selfconv.ops.affine_self_conv``."""

    @abstractmethod
    def projection(self) -> tuple[Tensor, Tensor | None]:
        """The 1×1 map that computes A^Q[Q], K and V: its filters [C, in, |H|] and bias."""

    @property
    def packed_channels(self) -> tuple[int, ...]:
        """The numbers of channels of query, key and value in the output of ``project``."""
        return self.key_channels, self.key_channels, self.out_channels

    def _maps(self) -> Tensor:
        return self.w_in.reshape(len(self.w_in), self.in_channels, len(self.group))

    def forward(self, x: Tensor) -> Tensor:
        """The class docstring's equations, line by line; on z2 without the axes R and P."""
        query_key_value = self.project(x)  # A^Q[Q], K, V: [N, C_k + C_k + C_v, R, h, w]
        values = self.attend(query_key_value)  # Σ_y α A^V[V]: [N, C_v, P, h, w]
        return self.output_map(values)  # W^O ⋆ values: [N, out, P, h / stride, w / stride]

    def query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A^Q[Q], K and V of the features x."""
        return split_packed(self.project(x), self.packed_channels)

    def project(self, x: Tensor) -> Tensor:
        """A^Q[Q], K and V of the features x, concatenated along the channels, computed by one convolution."""
        check_features(type(self).__name__, x, self.in_channels, self.group)
        filters, bias = self.projection()
        return group_conv(x, self.group.steer(filters[..., None, None]), bias, self.group)

    def attend(self, packed: Tensor) -> Tensor:
        """Σ_y α((P,x), (P,y)) A^V_(P,x)[V](y) for the output of ``project``."""
        return affine_self_conv_packed(
            packed, self.packed_channels, *self.affine_parameters(),
            num_heads=self.num_heads, scale=self.scale, group=self.group,
            kernel_size=self.kernel_size, backend=self.backend,
        )  # fmt: skip

    def output_map(self, values: Tensor) -> Tensor:
        """W^O ⋆ values after averaging stride×stride cells: the two commute, and this order is cheaper."""
        return group_conv(avg_pool(values, self.stride), self.steered_output(), self.b_out, self.group)

    def steered_output(self) -> Tensor:
        """W^O transformed by every element P of the group: [out, out, P, R, 1, 1]."""
        return self.group.steer(self.w_out.reshape(self.out_channels, self.out_channels, -1, 1, 1))

    def attention_weights(self, x: Tensor) -> Tensor:
        """α for features x: ``[N, num_heads, k, k, h, w]``, or ``[N, num_heads, |H|, k, k, h, w]``."""
        return self.attend_with_weights(*self.query_key_value(x))[1]

    def attend_with_weights(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output of ``attend``, and α."""
        return affine_self_conv(
            query, key, value, *self.affine_parameters(),
            num_heads=self.num_heads, scale=self.scale, group=self.group,
            kernel_size=self.kernel_size, return_attention=True,
        )  # fmt: skip

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        if self.stride > 1:
            parts.append(f"stride={self.stride}")
        if self.key_channels != self.out_channels:
            parts.append(f"key_channels={self.key_channels}")
        if self.psi != "channel":
            parts.append(f"psi={self.psi!r}")
        if self.affine != "both":
            parts.append(f"affine={self.affine!r}")
        parts += [f"num_heads={self.num_heads}", f"scale={self.scale:g}", f"group={self.group.name!r}"]
        return ", ".join(parts)


def mapped_query(
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
        mapped, offset = filters, bias
    else:
        steered = group.steer(filters[..., None, None])[..., 0, 0]  # [C, in, S, R]
        if psi_q.dim() == 3:
            mapped, offset = torch.einsum("cds,disr->cir", psi_q, steered), psi_q.sum(2) @ bias
        else:
            mapped, offset = (psi_q[:, None, :, None] * steered).sum(2), psi_q.sum(1) * bias
    return mapped, offset if beta_q is None else beta_q + offset


def _check_psi(psi: str) -> None:
    if psi not in ("channel", "dense"):
        raise ValueError(f"psi: expected 'channel' or 'dense'; got {psi!r}")


class AffineSelfConv2d(LocalAttention2d):
    """Affine self convolution (Eq. 8–11; on a group Eq. 17–20), with heads and their output map:

        Q = f ⋆ W^Q,  K = f ⋆ W^K,  V = f ⋆ W^V                                          1×1, with bias
        A_(P,x)[F](y) = Σ_R F(R, y) ψ(P⁻¹R, P⁻¹(y − x)) + β(P⁻¹(y − x))                  ψ, β for Q, K, V
        α((P,x), (P,y)) = softmax_y(scale · A^Q_(P,x)[Q](x) · A^K_(P,x)[K](y))           in each head
        out(P, x) = W^O ⋆ Σ_y α((P,x), (P,y)) A^V_(P,x)[V](y)                            no bias by default

    ψ^Q and β^Q are applied only at the centre, so they have one value per channel (and element of the group).

    Shapes: ``[N, in, |H|, h, w] -> [N, out, |H|, h, w]``; on z2 without the group axis.
    Equivariant to shifts and to ``group``. ``stride`` averages stride×stride cells of the result, which
    keeps both exact on maps whose sides are multiples of it.

    Names that differ from the paper's: ``w_in``/``b_in`` hold W^Q, W^K, W^V concatenated along the output
    channels, ``w_out`` is W^O, ``key_channels`` is d_k.

    On a band-limited group (``group.band_limited``: c8, d8, …) ψ and β are stored as coefficients of
    ``group.basis(k)``, one axis of functions instead of k×k. Rotations by multiples of 90° and the
    reflections of the grid are exact, other elements approximate.

    Args:
        psi: ``"channel"`` scales each channel by itself, ``"dense"`` maps all channels to all.
        affine: what the three affine maps consist of: ψ and β (``"both"``), ``"psi"`` alone (β = 0), or
            ``"beta"`` alone (ψ = 1: the features of the centre's own plane are used unchanged).
        scale: factor of the score; by default 1 / key channels.
        backend: of ``selfconv.ops.affine_self_conv``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 5,
        stride: int = 1,
        *,
        bias: bool = False,
        num_heads: int = 8,
        key_channels: int | None = None,
        psi: PsiKind = "channel",
        affine: AffineKind = "both",
        qkv_bias: bool = True,
        scale: float | None = None,
        group: str | Group = "z2",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_psi(psi)
        if affine not in ("both", "psi", "beta"):
            raise ValueError(f"affine: expected 'both', 'psi' or 'beta'; got {affine!r}")
        if affine == "beta" and psi != "channel":
            raise ValueError(f"affine='beta' has no ψ; expected psi='channel'; got psi={psi!r}")
        self.psi, self.affine = psi, affine
        super().__init__(
            in_channels, out_channels, kernel_size, stride, bias=bias,
            key_channels=out_channels if key_channels is None else key_channels,
            num_heads=num_heads, qkv_bias=qkv_bias, scale=scale, group=group, backend=backend,
            device=device, dtype=dtype,
        )  # fmt: skip

    def _map_channels(self) -> int:
        return 2 * self.key_channels + self.out_channels

    def _make_affine_parameters(self) -> None:
        c_k, c_v = self.key_channels, self.out_channels
        psi, beta = self.affine != "beta", self.affine != "psi"
        planes = len(self.group) * (c_k if self.psi == "dense" else 1)
        self.psi_q = self._parameter(c_k, planes) if psi else None
        self.beta_q = self._parameter(c_k) if beta else None
        self.psi_k, self.beta_k = self._psi(c_k) if psi else None, self._beta(c_k) if beta else None
        self.psi_v, self.beta_v = self._psi(c_v) if psi else None, self._beta(c_v) if beta else None

    def affine_parameters(self) -> AffineParameters:
        psi_k, psi_v = self._op_psi(self.psi_k), self._op_psi(self.psi_v)
        return psi_k, self._op_beta(self.beta_k), psi_v, self._op_beta(self.beta_v)

    def projection(self) -> tuple[Tensor, Tensor | None]:
        c_k = self.key_channels
        w, b = self._maps(), self.b_in
        psi_q = self.psi_q
        if psi_q is not None and self.psi == "dense":
            psi_q = psi_q.unflatten(1, (c_k, -1))
        w_q, b_q = mapped_query(w[:c_k], None if b is None else b[:c_k], psi_q, self.beta_q, self.group)
        rest = w.new_zeros(len(w) - c_k) if b is None else b[c_k:]
        return torch.cat([w_q, w[c_k:]]), torch.cat([b_q, rest])


class SimpleAffineSelfConv2d(LocalAttention2d):
    """Simple affine self convolution (Eq. 7; on a group Eq. 14), with one linear map, heads and output map:

        F = f ⋆ W                                                                        1×1, with bias
        A_(P,x)[F](y) = Σ_R F(R, y) ψ(P⁻¹R, P⁻¹(y − x)) + β(P⁻¹(y − x))
        α((P,x), (P,y)) = softmax_y(scale · A_(P,x)[F](x) · A_(P,x)[F](y))               in each head
        out(P, x) = W^O ⋆ Σ_y α((P,x), (P,y)) A_(P,x)[F](y)                              no bias by default

    The same ψ, β is used for the centre, the neighbours and the aggregation. Shapes, equivariance and
    arguments are those of ``AffineSelfConv2d``; ``w_in`` is W, ``w_out`` is W^O.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 5,
        stride: int = 1,
        *,
        bias: bool = False,
        num_heads: int = 8,
        psi: PsiKind = "channel",
        qkv_bias: bool = True,
        scale: float | None = None,
        group: str | Group = "z2",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_psi(psi)
        self.psi = psi
        super().__init__(
            in_channels, out_channels, kernel_size, stride, bias=bias, key_channels=out_channels,
            num_heads=num_heads, qkv_bias=qkv_bias, scale=scale, group=group, backend=backend,
            device=device, dtype=dtype,
        )  # fmt: skip

    def _map_channels(self) -> int:
        return self.out_channels

    def _make_affine_parameters(self) -> None:
        self.psi_kv, self.beta_kv = self._psi(self.out_channels), self._beta(self.out_channels)

    def affine_parameters(self) -> AffineParameters:
        psi, beta = self._op_psi(self.psi_kv), self._op_beta(self.beta_kv)
        return psi, beta, psi, beta

    def projection(self) -> tuple[Tensor, Tensor | None]:
        c, k = self.out_channels, self.kernel_size
        psi, beta = (
            self.group.window_values(filters, k)[..., k // 2, k // 2]
            for filters in (self.psi_kv, self.beta_kv)
        )
        psi_q = psi.reshape(c, *((c,) if self.psi == "dense" else ()), len(self.group))
        w, b = self._maps(), self.b_in
        w_q, b_q = mapped_query(w, b, psi_q, beta, self.group)
        return torch.cat([w_q, w]), torch.cat([b_q, b_q.new_zeros(c) if b is None else b])

    @property
    def packed_channels(self) -> tuple[int, ...]:
        return self.out_channels, self.out_channels  # F is both key and value


class StandAloneSelfAttention2d(LocalAttention2d):
    """Stand-alone self-attention (SASA), the paper's comparison: relative positions in the keys alone,

        α((P,x), (P,y)) = softmax_y(scale · Q(P, x) · (K(P, y) + β^K(P⁻¹(y − x))))       in each head
        out(P, x) = W^O ⋆ Σ_y α((P,x), (P,y)) V(P, y)

    with β^K factorised: in each head the first half of the channels depends on the row offset alone, the
    second half on the column offset (``beta_k`` is ``[C, k]``). On a group every plane attends to itself.
    Groups with rotations other than by multiples of 90° are not supported, because they mix rows and columns.
    Shapes, equivariance and arguments are those of ``AffineSelfConv2d``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 5,
        stride: int = 1,
        *,
        bias: bool = False,
        num_heads: int = 8,
        key_channels: int | None = None,
        qkv_bias: bool = True,
        scale: float | None = None,
        group: str | Group = "z2",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if get_group(group).band_limited:
            raise ValueError(
                "StandAloneSelfAttention2d: β of a row or a column offset cannot be turned by less than 90°; "
                f"expected a group of quarter turns and mirrors, such as 'p4'; got {get_group(group).name!r}"
            )
        key_channels = out_channels if key_channels is None else key_channels
        check_sizes(type(self).__name__, key_channels=key_channels, out_channels=out_channels)
        check_heads(num_heads, key=key_channels, value=out_channels)
        if key_channels // num_heads % 2:
            raise ValueError(
                f"StandAloneSelfAttention2d splits each head's key channels in two halves; got "
                f"{key_channels} key channels in {num_heads} heads, {key_channels // num_heads} each"
            )
        super().__init__(
            in_channels, out_channels, kernel_size, stride, bias=bias, key_channels=key_channels,
            num_heads=num_heads, qkv_bias=qkv_bias, scale=scale, group=group, backend=backend,
            device=device, dtype=dtype,
        )  # fmt: skip

    def _map_channels(self) -> int:
        return 2 * self.key_channels + self.out_channels

    def _make_affine_parameters(self) -> None:
        self.beta_k = self._parameter(self.key_channels, self.kernel_size)

    def affine_parameters(self) -> AffineParameters:
        k = self.kernel_size
        rows, columns = self.beta_k.unflatten(0, (self.num_heads, 2, -1)).unbind(1)  # [heads, d/2, k]
        halves = [rows[..., :, None].expand(-1, -1, k, k), columns[..., None, :].expand(-1, -1, k, k)]
        return None, torch.stack(halves, 1).flatten(0, 2), None, None

    def projection(self) -> tuple[Tensor, Tensor | None]:
        return self._maps(), self.b_in


def set_backend(module: nn.Module, backend: str | None) -> nn.Module:
    """Sets the backend of every attention layer in ``module`` (None: automatic); returns ``module``."""
    check_backend(backend)
    for layer in module.modules():
        if isinstance(layer, LocalAttention2d):
            layer.backend = backend
    return module
