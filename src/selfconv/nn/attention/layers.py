"""Affine self convolution, its lifting and simple forms, and stand-alone self-attention as layers."""

from __future__ import annotations

import torch
from torch import Tensor

from selfconv._arguments import is_whole
from selfconv.groups import Z2, Group, get_group
from selfconv.nn._layout import check_sizes
from selfconv.nn.attention.local_attention import (
    AffineKind,
    AffineParameters,
    LocalAttention2d,
    NewParameter,
    PsiKind,
    fold_query_map,
)
from selfconv.ops import PaddingMode, Pair, check_heads


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
        kernel_size: k; or (rows, columns), on groups that map rows to rows (``group.keeps_axes``).
        dilation: distance between the neighbours in the window, in pixels, or (rows, columns).
        padding_mode: what a neighbour outside the image is: ``"zeros"``, features of 0, to which β is still
            added (the paper's); ``"circular"``, the pixel on the opposite side; ``"exclude"``, left out of
            the softmax.
        psi: ``"channel"`` scales each channel by itself, ``"dense"`` maps all channels to all.
        affine: what the three affine maps consist of: ψ and β (``"both"``), ``"psi"`` alone (β = 0), or
            ``"beta"`` alone (ψ = 1: the features of the centre's own plane are used unchanged).
        scale: factor of the score; by default 1 / key channels.
        dropout: the probability of dropping each α while training, which the eager backend then computes.
        backend: of ``selfconv.ops.affine_self_conv``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair = 5,
        stride: int = 1,
        *,
        dilation: int | Pair = 1,
        padding_mode: PaddingMode = "zeros",
        bias: bool = False,
        num_heads: int = 8,
        key_channels: int | None = None,
        psi: PsiKind = "channel",
        affine: AffineKind = "both",
        qkv_bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
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
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation=dilation, padding_mode=padding_mode,
            bias=bias, dropout=dropout,
            key_channels=out_channels if key_channels is None else key_channels,
            num_heads=num_heads, qkv_bias=qkv_bias, scale=scale, group=group, backend=backend,
            device=device, dtype=dtype, psi=psi, affine=affine,
        )  # fmt: skip

    def _projection_channels(self) -> int:
        return 2 * self.key_channels + self.out_channels

    def _make_affine_parameters(self, new: NewParameter) -> None:
        c_k, c_v = self.key_channels, self.out_channels
        psi, beta = self.affine != "beta", self.affine != "psi"
        planes = len(self.domain) * (c_k if self.psi == "dense" else 1)
        self.psi_q = new(c_k, planes) if psi else None
        self.beta_q = new(c_k) if beta else None
        self.psi_k = self._new_psi(new, c_k) if psi else None
        self.beta_k = self._new_beta(new, c_k) if beta else None
        self.psi_v = self._new_psi(new, c_v) if psi else None
        self.beta_v = self._new_beta(new, c_v) if beta else None

    def affine_parameters(self) -> AffineParameters:
        psi_k, psi_v = self._psi_values(self.psi_k), self._psi_values(self.psi_v)
        return psi_k, self._beta_values(self.beta_k), psi_v, self._beta_values(self.beta_v)

    def projection(self) -> tuple[Tensor, Tensor | None]:
        c_k = self.key_channels
        w, b = self._input_filters(), self.b_in
        psi_q = self.psi_q
        if psi_q is not None and self.psi == "dense":
            psi_q = psi_q.unflatten(1, (c_k, -1))
        w_q, b_q = fold_query_map(w[:c_k], None if b is None else b[:c_k], psi_q, self.beta_q, self.domain)
        rest = w.new_zeros(len(w) - c_k) if b is None else b[c_k:]
        return torch.cat([w_q, w[c_k:]]), torch.cat([b_q, rest])


class LiftingSelfConv2d(AffineSelfConv2d):
    """Affine self convolution from the plane to a group, so that a network may begin with it:

        Q = f ⋆ W^Q,  K = f ⋆ W^K,  V = f ⋆ W^V                                          1×1, with bias
        A_(P,x)[F](y) = F(y) ψ(P⁻¹(y − x)) + β(P⁻¹(y − x))                               ψ, β for Q, K, V
        α((P,x), (P,y)) = softmax_y(scale · A^Q_(x)[Q](x) · A^K_(P,x)[K](y))             in each head
        out(P, x) = W^O ⋆ Σ_y α((P,x), (P,y)) A^V_(P,x)[V](y)                            no bias by default

    This is Eq. 20 for planar Q, K and V, as the lifting convolution of Section 2.1 is Eq. 3 for a planar f.

    Shapes: ``[N, in, h, w] -> [N, out, |H|, h, w]``; on z2 it equals ``AffineSelfConv2d``; arguments and
    equivariance are the same. ψ is planar, ``[C, k, k]``; W^O is a map on the group.
    """

    @property
    def domain(self) -> Group:
        return Z2


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
        kernel_size: int | Pair = 5,
        stride: int = 1,
        *,
        dilation: int | Pair = 1,
        padding_mode: PaddingMode = "zeros",
        bias: bool = False,
        num_heads: int = 8,
        psi: PsiKind = "channel",
        qkv_bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
        group: str | Group = "z2",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_psi(psi)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation=dilation, padding_mode=padding_mode,
            bias=bias, dropout=dropout, key_channels=out_channels,
            num_heads=num_heads, qkv_bias=qkv_bias, scale=scale, group=group, backend=backend,
            device=device, dtype=dtype, psi=psi,
        )  # fmt: skip

    def _projection_channels(self) -> int:
        return self.out_channels

    def _make_affine_parameters(self, new: NewParameter) -> None:
        self.psi_kv, self.beta_kv = (
            self._new_psi(new, self.out_channels),
            self._new_beta(new, self.out_channels),
        )

    def affine_parameters(self) -> AffineParameters:
        psi, beta = self._psi_values(self.psi_kv), self._beta_values(self.beta_kv)
        return psi, beta, psi, beta

    def projection(self) -> tuple[Tensor, Tensor | None]:
        c, (rows, columns) = self.out_channels, self.window.size
        psi, beta = (
            self.group.window_values(filters, (rows, columns))[..., rows // 2, columns // 2]
            for filters in (self.psi_kv, self.beta_kv)
        )
        psi_q = psi.reshape(c, *((c,) if self.psi == "dense" else ()), len(self.group))
        w, b = self._input_filters(), self.b_in
        w_q, b_q = fold_query_map(w, b, psi_q, beta, self.group)
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
        dilation: int | Pair = 1,
        padding_mode: PaddingMode = "zeros",
        bias: bool = False,
        num_heads: int = 8,
        key_channels: int | None = None,
        qkv_bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
        group: str | Group = "z2",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if get_group(group).band_limited:
            raise ValueError(
                "StandAloneSelfAttention2d: β depends on the row or column alone, which a rotation by less "
                "than 90° mixes; expected a group of quarter turns and mirrors, such as 'p4'; "
                f"got {get_group(group).name!r}"
            )
        if not is_whole(kernel_size):
            raise ValueError(
                "StandAloneSelfAttention2d: kernel_size: β^K has as many rows as columns: expected one odd "
                f"integer; got {kernel_size!r}"
            )
        key_channels = out_channels if key_channels is None else key_channels
        check_sizes(type(self).__name__, key_channels=key_channels, out_channels=out_channels)
        check_heads(num_heads, type(self).__name__, key=key_channels, value=out_channels)
        if key_channels // num_heads % 2:
            raise ValueError(
                "StandAloneSelfAttention2d: expected an even number of key channels per head; got "
                f"{key_channels} key channels in {num_heads} heads, {key_channels // num_heads} each"
            )
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation=dilation, padding_mode=padding_mode,
            bias=bias, dropout=dropout, key_channels=key_channels,
            num_heads=num_heads, qkv_bias=qkv_bias, scale=scale, group=group, backend=backend,
            device=device, dtype=dtype,
        )  # fmt: skip

    def _projection_channels(self) -> int:
        return 2 * self.key_channels + self.out_channels

    def _make_affine_parameters(self, new: NewParameter) -> None:
        self.beta_k = new(self.key_channels, self.window.size[0])

    def affine_parameters(self) -> AffineParameters:
        k = self.window.size[0]
        rows, columns = self.beta_k.unflatten(0, (self.num_heads, 2, -1)).unbind(1)  # [heads, d/2, k]
        halves = [rows[..., :, None].expand(-1, -1, k, k), columns[..., None, :].expand(-1, -1, k, k)]
        return None, torch.stack(halves, 1).flatten(0, 2), None, None

    def projection(self) -> tuple[Tensor, Tensor | None]:
        return self._input_filters(), self.b_in
