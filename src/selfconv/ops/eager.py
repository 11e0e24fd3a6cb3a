"""The operation in vectorised PyTorch: any device and dtype, dense ψ, differentiable, exportable.

It unfolds: k² shifted copies of the keys and values are in memory at once. That makes it simple, and the
form to export (plain operators only), but slow and large; the kernels beside it never do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfconv.ops._call import Call, cast

Filters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # ψ^K, β^K, ψ^V, β^V


def run(call: Call) -> Tensor:
    return run_with_attention(call)[0]


def run_with_attention(call: Call) -> tuple[Tensor, Tensor]:
    """The aggregated values [N, C_v, P, h, w] and the weights α [N, heads, P, k·k, h, w]."""
    dtype = call.compute_dtype
    filters = (*call.steered(call.psi_k, call.beta_k), *call.steered(call.psi_v, call.beta_v))
    features = (cast(call.query, dtype), cast(call.key, dtype), cast(call.value, dtype))
    out, alpha = attend(*features, filters, call.kernel_size, call.num_heads, call.scale)
    return cast(out, call.value.dtype), alpha


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    filters: Filters,
    kernel_size: int,
    num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The operation on features [N, C, R, h, w] with filters that are steered, as ``affine_map`` has them."""
    psi_k, beta_k, psi_v, beta_v = filters
    products = query.unsqueeze(3) * affine_map(key, psi_k, beta_k, kernel_size)  # [N, C_k, P, k·k, h, w]
    scores = products.unflatten(1, (num_heads, -1)).sum(2) * scale
    alpha = scores.softmax(3)  # [N, heads, P, k·k, h, w]
    a_v = affine_map(value, psi_v, beta_v, kernel_size)
    out = (alpha.unsqueeze(2) * a_v.unflatten(1, (num_heads, -1))).sum(4).flatten(1, 2)
    return out, alpha


def affine_map(f: Tensor, psi: Tensor | None, beta: Tensor | None, k: int) -> Tensor:
    """Σ_R A_(P,x)[f](R, y) for every centre (P, x) and neighbour y: [N, C, P, k·k, h, w].

    Args:
        f: ``[N, C, R, h, w]``.
        psi: steered, ``[C, P, R, k, k]`` or dense ``[C_out, C, P, R, k, k]``; None passes f as it is.
        beta: steered, ``[C, P, k, k]``; None adds nothing.
    """
    a = windows(f, k)  # [N, C, R, k·k, h, w]
    if psi is not None:
        psi = psi.flatten(-2)
        if psi.dim() == 5:
            a = torch.einsum("ncrthw,dcprt->ndpthw", a, psi)
        elif psi.shape[2] == 1:
            a = a * psi[:, :, 0, :, None, None]
        else:
            a = torch.einsum("ncrthw,cprt->ncpthw", a, psi)
    return a if beta is None else a + beta.flatten(-2)[..., None, None]


def windows(f: Tensor, k: int) -> Tensor:
    """The k×k neighbourhood of every position, zero outside the map: [..., h, w] -> [..., k·k, h, w]."""
    h, w = f.shape[-2:]
    padded = F.pad(f, (k // 2,) * 4)
    return padded.unfold(-2, h, 1).unfold(-2, w, 1).flatten(-4, -3)  # k ways to lay h rows, k for w columns
