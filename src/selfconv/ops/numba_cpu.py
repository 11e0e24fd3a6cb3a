"""The CPU backend: the fused kernels as torch operators.

``selfconv::numba_forward`` and ``selfconv::numba_backward`` take the features (q, k, v, or one tensor that
holds them side by side, as the layers make it) and two filter tables. Making the tables from ψ and β is
left to torch, which therefore knows how to take their gradients apart. Only the log-sum-exp of the scores
is kept between the passes.

What the kernels do is in ``_numba_kernels.py``; how they are spread over threads, in ``_threads.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from selfconv.ops import _numba_kernels as kernels
from selfconv.ops._call import Call
from selfconv.ops._flops import affine_self_conv_flops
from selfconv.ops._simd import PART_BYTES, PARTS
from selfconv.ops._threads import num_threads, run_workers

BAND_BYTES = 256 * 1024  # what α and ds of one head may take: part of a core's own cache
STAGE_BYTES = 2 * 1024 * 1024  # what the tiles of several heads may take


def run(call: Call) -> Tensor:
    dtype = call.compute_dtype
    features = [call.query, call.key, call.value] if call.packed is None else [call.packed]
    table_k = filter_table(call, call.psi_k, call.beta_k, call.key.shape[1])
    table_v = filter_table(call, call.psi_v, call.beta_v, call.value.shape[1])
    if call.scale < 0:  # the kernels take the largest product for the largest score
        table_k = -table_k
    out, _ = torch.ops.selfconv.numba_forward(
        [f.to(dtype) for f in features], table_k, table_v, abs(call.scale)
    )
    return out.to(call.value.dtype)


def filter_table(call: Call, psi: Tensor | None, beta: Tensor | None, channels: int) -> Tensor:
    """ψ and β as every plane P sees them: [heads, P, channels/heads, k, k, R + 1], β last."""
    order, k = len(call.group), call.kernel_size
    psi, beta = call.steered(psi, beta)
    if psi is None:  # every plane passes as it is
        identity = torch.eye(order, dtype=call.compute_dtype)
        psi = identity[None, :, :, None, None].expand(channels, -1, -1, k, k)
    if beta is None:
        beta = psi.new_zeros(channels, order, k, k)
    table = torch.cat([psi, beta.unsqueeze(2)], 2)  # [C, P, R + 1, k, k]
    return table.unflatten(0, (call.num_heads, -1)).permute(0, 2, 1, 4, 5, 3).contiguous()


def _split(features: Sequence[Tensor], table_k: Tensor, table_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: as given, or as slices of one tensor; of two equal ones, the second serves as k and v."""
    if len(features) == 3:
        return features[0], features[1], features[2]
    c_k, c_v = table_k.shape[0] * table_k.shape[2], table_v.shape[0] * table_v.shape[2]
    (packed,) = features
    if packed.shape[1] == 2 * c_k:
        q, k = packed.split(c_k, 1)
        return q, k, k
    q, k, v = packed.split((c_k, c_k, c_v), 1)
    return q, k, v


def _features_like(x: Tensor, channels: int, planes: int) -> Tensor:
    """Unwritten features in the memory order of x: channels innermost, or contiguous."""
    n, _, _, h, w = x.shape
    if x.stride(1) == 1:
        return x.new_empty(n, h, w, planes, channels).permute(0, 4, 3, 1, 2)
    return x.new_empty(n, channels, planes, h, w)


@torch.library.custom_op("selfconv::numba_forward", mutates_args=(), device_types="cpu")
def numba_forward(
    features: Sequence[Tensor], table_k: Tensor, table_v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The aggregated values and the log2-sum-exp2 of the scores, [N, heads, P, h, w]."""
    q, k, v = _split(features, table_k, table_v)
    out, lse = _outputs(q, v, table_k, table_v)
    _run(kernels.forward_worker, (q, k, v, out, lse), (), table_k, table_v, scale)
    return out, lse


@numba_forward.register_fake
def _(features: Sequence[Tensor], table_k: Tensor, table_v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q, _, v = _split(features, table_k, table_v)
    return _outputs(q, v, table_k, table_v)


def _outputs(q: Tensor, v: Tensor, table_k: Tensor, table_v: Tensor) -> tuple[Tensor, Tensor]:
    n, _, planes, h, w = q.shape
    channels = table_v.shape[0] * table_v.shape[2]
    return _features_like(v, channels, planes), q.new_empty(n, table_k.shape[0], planes, h, w)


@torch.library.custom_op("selfconv::numba_backward", mutates_args=(), device_types="cpu")
def numba_backward(
    grad: Tensor, features: Sequence[Tensor], table_k: Tensor, table_v: Tensor, lse: Tensor, scale: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The gradients of the features, shaped as they were given, and of the two tables."""
    q, k, v = _split(features, table_k, table_v)
    d_features, d_table_k, d_table_v = _gradients(features, table_k, table_v)
    maps = (q, k, v, grad, lse, *_split(d_features, table_k, table_v))
    _run(kernels.backward_worker, maps, (d_table_k, d_table_v), table_k, table_v, scale)
    return d_features, d_table_k.sum(0), d_table_v.sum(0)


@numba_backward.register_fake
def _(
    grad: Tensor, features: Sequence[Tensor], table_k: Tensor, table_v: Tensor, lse: Tensor, scale: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    d_features, d_table_k, d_table_v = _gradients(features, table_k, table_v)
    return d_features, d_table_k[0], d_table_v[0]


def _gradients(
    features: Sequence[Tensor], table_k: Tensor, table_v: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Unwritten gradients of the features; zero gradients of the tables for each image by itself.

    Their sum over the images is taken in one order, whatever threads there were: the same bits every time.
    """
    n, _, _, h, w = features[0].shape
    n = math.ceil(n / _images_together(n, h, w))
    return (
        [_features_like(f, f.shape[1], f.shape[2]) for f in features],
        table_k.new_zeros(n, *table_k.shape),
        table_v.new_zeros(n, *table_v.shape),
    )


def _images_together(n: int, h: int, w: int) -> int:
    """Images whose gradients of the tables are added up in the kernel: of small ones, several."""
    return max(1, min(256 // (h * w), n // 8))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    features, table_k, table_v, ctx.scale = inputs
    ctx.save_for_backward(*features, table_k, table_v, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Any:
    *features, table_k, table_v, lse = ctx.saved_tensors
    if grad is None:
        return [None] * len(features), None, None, None
    d_features, d_table_k, d_table_v = torch.ops.selfconv.numba_backward(
        grad, features, table_k, table_v, lse, ctx.scale
    )
    return d_features, d_table_k, d_table_v, None


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("the CPU kernels have no second derivative: choose backend='eager' for it")


numba_forward.register_autograd(_backward, setup_context=_setup_context)
numba_backward.register_autograd(_no_second_derivative)


@register_flop_formula(torch.ops.selfconv.numba_forward)
def _forward_flops(features: Any, table_k: Any, table_v: Any, *args: Any, **kwargs: Any) -> int:
    """From the shapes, which is what torch hands to such a formula."""
    n, _, _, h, w = features[0]
    heads, planes, c_k, k, _, r1 = table_k
    c_v = table_v[2]
    query, value = (n, heads * c_k, planes, h, w), (n, heads * c_v, planes, h, w)
    psi_k, psi_v = (heads * c_k, r1 - 1, k, k), (heads * c_v, r1 - 1, k, k)
    return affine_self_conv_flops(query, query, value, psi_k, None, psi_v, None)


@register_flop_formula(torch.ops.selfconv.numba_backward)
def _backward_flops(grad: Any, features: Any, table_k: Any, table_v: Any, *args: Any, **kwargs: Any) -> int:
    """The forward pass again, and for each of its products one for either factor's gradient."""
    return 3 * _forward_flops(features, table_k, table_v)


def _run(
    make_worker: Any,
    maps: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    table_k: Tensor,
    table_v: Tensor,
    scale: float,
) -> None:
    """Lays the argument block out as the kernels read it, and runs them."""
    q = maps[0]
    n, _, planes, h, w = q.shape
    if q.numel() == 0:
        return
    heads, _, c_k, k, _, r1 = table_k.shape
    c_v = table_v.shape[2]
    lanes = PART_BYTES // q.element_size()
    parts = math.ceil(w / lanes)
    rows = math.ceil(h / PARTS) * PARTS
    row_bytes = 2 * k * k * (parts + 1) * PART_BYTES
    band = min(rows, max(1, BAND_BYTES // row_bytes // PARTS) * PARTS)
    tile = kernels.make_tile(k // 2, rows, parts, lanes, band)
    tiles = (planes * (2 * c_k + c_v + 1) + 2 * (r1 - 1) * (c_k + c_v)) * tile.plane  # of one head
    batch = _images_together(n, h, w)
    batches = math.ceil(n / batch)
    staged = math.gcd(heads, max(1, lanes // min(c_k, c_v)))  # heads whose channels fill a vector part
    if staged * tiles * q.element_size() > STAGE_BYTES or batches * heads < 2 * staged * num_threads():
        staged = 1
    sums = planes * k * k * (c_k + c_v) * r1 * lanes
    bands = k * k * (2 * tile.band_plane + (2 + c_k) * PARTS * lanes)
    size = staged * (tiles + sums) + bands + PARTS * lanes  # whole cache lines, each thread its own
    size = math.ceil(size / (2 * lanes)) * 2 * lanes

    stages = heads // staged
    tasks = batches * stages
    threads = min(num_threads(), tasks)
    chunk = stages if batches >= 2 * threads else 1  # whole images keep their cache lines on one core
    scratch = q.new_empty(threads, size)
    scales = np.array([scale])
    window = (np.arange(k)[:, None] * tile.stride + np.arange(k)).ravel()  # offsets from its first corner
    strided = [number for x in maps for number in (x.data_ptr(), *x.stride())]
    block = np.array(
        [
            0, 0, tasks, chunk, heads, planes, h, w, c_k, c_v, scales.ctypes.data, scratch.data_ptr(), size,
            table_k.data_ptr(), table_v.data_ptr(), rows, parts, band, k, window.ctypes.data, n, batch,
            staged,
            *strided,
            *(x.data_ptr() for x in outputs),
        ],
        np.int64,
    )  # fmt: skip
    dtype = "float32" if q.dtype == torch.float32 else "float64"
    together = 2 if r1 == 2 and c_k % 2 == c_v % 2 == 0 else 1
    run_workers(make_worker(dtype, r1 - 1, together).address, block.ctypes.data, threads)
