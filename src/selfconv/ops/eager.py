"""The operation in vectorised PyTorch: any device and dtype, dense ψ, differentiable, exportable.

It unfolds: for every offset of the window a shifted copy of keys and values is in memory. That makes it
simple, but slow and large; the kernels beside it never do. Exports use it only for attention that lifts, or
whose window is rectangular, dilated, or padded other than with zeros.
"""

from __future__ import annotations

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from selfconv.ops._call import Call, cast
from selfconv.ops._window import Pair, Window

Filters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # ψ^K, β^K, ψ^V, β^V


def run(call: Call) -> Tensor:
    return run_with_attention(call)[0]


def run_with_attention(call: Call, dropout_p: float = 0.0) -> tuple[Tensor, Tensor]:
    """The aggregated values [N, C_v, P, h, w] and the weights α [N, heads, P, taps, h, w]."""
    dtype = call.compute_dtype
    filters = (*call.steered(call.psi_k, call.beta_k), *call.steered(call.psi_v, call.beta_v))
    features = (cast(call.query, dtype), cast(call.key, dtype), cast(call.value, dtype))
    out, alpha = attend(*features, filters, call.window, call.num_heads, call.scale, dropout_p)
    return cast(out, call.value.dtype), alpha


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    filters: Filters,
    window: Window,
    num_heads: int,
    scale: float,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The operation on features [N, C, R, h, w] with steered filters, in the shapes of ``affine_map``."""
    psi_k, beta_k, psi_v, beta_v = filters
    if not torch.compiler.is_compiling():  # whose sizes may be symbols, which must not be compared
        window = window.fitted_to((key.shape[-2], key.shape[-1]))
    products = query.unsqueeze(3) * affine_map(key, psi_k, beta_k, window)  # [N, C_k, P, taps, h, w]
    scores = products.unflatten(1, (num_heads, -1)).sum(2) * scale
    if window.padding_mode == "exclude":
        inside = neighbours(key.new_ones(key.shape[-2:]), window)  # [taps, h, w]
        scores = scores + inside.log()  # −∞ outside the image
    alpha = scores.softmax(3)  # [N, heads, P, taps, h, w]
    alpha = F.dropout(alpha, dropout_p) if dropout_p else alpha
    a_v = affine_map(value, psi_v, beta_v, window)
    out = (alpha.unsqueeze(2) * a_v.unflatten(1, (num_heads, -1))).sum(4).flatten(1, 2)
    return out, alpha


def affine_map(f: Tensor, psi: Tensor | None, beta: Tensor | None, window: Window) -> Tensor:
    """Σ_R A_(P,x)[f](R, y) for every centre (P, x) and neighbour y: [N, C, P, taps, h, w].

    Args:
        f: ``[N, C, R, h, w]``.
        psi: steered, ``[C, P, R, k, k]`` or dense ``[C_out, C, P, R, k, k]``; None passes f as it is.
        beta: steered, ``[C, P, k, k]``; None adds nothing.
    """
    a = neighbours(f, window)  # [N, C, R, taps, h, w]
    if psi is not None:
        psi = psi.flatten(-2)
        if psi.dim() == 5:
            a = torch.einsum("ncrthw,dcprt->ndpthw", a, psi)
        elif psi.shape[2] == 1:
            a = a * psi[:, :, 0, :, None, None]
        else:
            a = torch.einsum("ncrthw,cprt->ncpthw", a, psi)
        if torch.compiler.is_exporting():  # which would add a guard on other strides, and refuse a batch of 1
            a = a.clone(memory_format=torch.contiguous_format)
    return a if beta is None else a + beta.flatten(-2)[..., None, None]


def neighbours(f: Tensor, window: Window) -> Tensor:
    """f(x + t) for every offset t of the window: [..., h, w] -> [..., taps, h, w]."""
    h, w = f.shape[-2:]
    d_i, d_j = window.dilation
    if torch.compiler.is_exporting():  # unfold would make constants of height and width
        (rows, columns), padded = window.size, pad(f, window)
        parts = [padded.narrow(-2, i * d_i, h) for i in range(rows)]
        return torch.stack([part.narrow(-1, j * d_j, w) for part in parts for j in range(columns)], -3)
    # one shifted copy per row and column offset of the window: [..., rows, columns, h, w]
    copies = pad(f, window).unfold(-2, h, d_i).unfold(-2, w, d_j)
    return copies.flatten(-4, -3)


def pad(f: Tensor, window: Window) -> Tensor:
    """f padded by half the window: circularly, or with zeros, which ``attend`` may exclude."""
    i, j = window.reach
    match window.padding_mode:
        case "zeros" | "exclude":
            return F.pad(f, (j, j, i, i))
        case "circular":
            return pad_circular(f, (i, j))
        case _:
            assert_never(window.padding_mode)


def pad_circular(f: Tensor, reach: Pair) -> Tensor:
    """f padded circularly by half the window, which may be wider than f."""
    if 0 in f.shape[-2:]:
        return F.pad(f, (reach[1], reach[1], reach[0], reach[0]))
    for axis, r in zip((-2, -1), reach, strict=True):
        while r > 0:  # once, unless the window reaches further than the image is long
            n = f.shape[axis]
            step = min(r, n)
            f = torch.cat([f.narrow(axis, n - step, step), f, f.narrow(axis, 0, step)], axis)
            r -= step
    return f
