# mypy: disallow-untyped-defs=False
"""The operation for GPUs, in Triton: fused forward and backward, with nothing of size k²·C·h·w in memory.

Verified in Triton's interpreter only, on CPUs; how fast it is on a GPU has not been measured. Serves ψ per
channel, any memory layout, float16, bfloat16 and float32 in any mix, computed in float32, and float64.

The kernels know no group. They get the filters as every rotation P sees them, ψ [C, P, R, k·k] and
β [C, P, k·k]; planar features are the case P = R = 1. A program takes a block of positions, counted over
the whole batch, and a head, and walks over the taps t of the window, y = x + offset(t). With the affine map
of the keys or values, a = Σ_R f(R, y) ψ(P, R, t) + β(P, t),

    s = scale Σ_c query_c(P, x) a^K_c       α = exp(s − lse(P, x))       out_c(P, x) = Σ_t α a^V_c

where lse = log Σ_t exp(s) is all that is kept for the backward pass. There, with g the gradient of out,

    dα = Σ_c g_c(P, x) a^V_c                δ(P, x) = Σ_t α dα           ds = α (dα − δ)

    d query(P, x)  = scale Σ_t ds a^K = scale (Σ_t α dα a^K − δ Σ_t α a^K)    (so δ need not come first)
    d key(R, y)    = scale Σ_(P,t) ds query(P, x) ψ^K(P, R, t)                with x = y − offset(t)
    d value(R, y)  = Σ_(P,t) α g(P, x) ψ^V(P, R, t)                           with x = y − offset(t)
    d ψ^K(P, R, t) = scale Σ_x ds query(P, x) key(R, y)         d β^K(P, t) = scale Σ_x ds query(P, x)
    d ψ^V(P, R, t) = Σ_x α g(P, x) value(R, y)                  d β^V(P, t) = Σ_x α g(P, x)

One kernel gives d query and δ; the next gathers d key and d value at y; the last sums the gradients of the
filters over slices of the batch, for torch to add up. Each number is written once, by one program, without
atomics: a call repeats to the bit, as long as autotuning chose the same blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from selfconv._extras import require
from selfconv.ops._call import Call
from selfconv.ops._transforms import (
    check_gradient,
    refuse_second_derivative,
    refuse_tangents,
    register_vmap,
)

require("the backend", "triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# Functions under ``triton.jit`` go without annotations, which would be instructions to Triton.

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):  # kernels could not take tuples, of strides
    raise ImportError(f"needs triton >= 3.4; found {triton.__version__}")

# the interpreter has nothing to time, and only a small block divides its small maps
BLOCKS = (32,) if os.environ.get("TRITON_INTERPRET") == "1" else (16, 32, 64, 128, 256)
TILE = 2048  # at most so many numbers in a tile of features: more would not fit in registers
SLICES = 32  # at most so many partial sums of a gradient of the filters


def _blocks_that_fit(configs: list[Any], arguments: dict[str, Any], **constants: Any) -> list[Any]:
    depth = max(constants["D_K"], constants["D_V"]) * constants["R"]
    return [config for config in configs if config.kwargs["BLOCK"] * depth <= TILE] or configs[:1]


autotuned = triton.autotune(
    [triton.Config({"BLOCK": block}) for block in BLOCKS],
    key=["height", "width", "K", "R", "D_K", "D_V"],
    prune_configs_by={"early_config_prune": _blocks_that_fit},
)


# ---- tiles: all are [X, D, R], positions by channels by rotations, with length 1 where they do not vary ----


@triton.jit
def _positions(start, positions, height, width, BLOCK: tl.constexpr):
    """A block of positions x: x, its image, row and column, and whether it is one of the batch's."""
    x = (start + tl.arange(0, BLOCK))[:, None, None]
    return x, (x // (height * width)).to(tl.int64), x // width % height, x % width, x < positions


@triton.jit
def _channels(head, depth, D: tl.constexpr):
    """The head's channels, and which of them exist: D is ``depth`` rounded up to a power of two."""
    c = tl.arange(0, D)[None, :, None]
    return head * depth + c, c < depth


@triton.jit
def _at(f, strides, n, c, r, i, j):
    """Pointers to f_c(r, (i, j)) of image n."""
    return f + (n * strides[0] + i * strides[3] + j * strides[4]) + c * strides[1] + r * strides[2]


@triton.jit
def _filters_at(psi, beta, c, p, P: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    """Pointers to ψ_c(p, ·, 0) and β_c(p, 0)."""
    c_p = c * P + p
    return psi + (c_p * R + tl.arange(0, R)[None, None, :]) * T, beta + c_p * T


@triton.jit
def _inside(i, j, height, width):
    return (i >= 0) & (i < height) & (j >= 0) & (j < width)


@triton.jit
def _affine(f_y, psi_t, beta_t, seen, exist, dtype: tl.constexpr):
    """a = Σ_R f(R, y) ψ(P, R, t) + β(P, t), with f = 0 outside the image."""
    f = tl.load(f_y, seen & exist, 0.0).to(dtype)
    return tl.sum(f * tl.load(psi_t, exist, 0.0), 2, keep_dims=True) + tl.load(beta_t, exist, 0.0)


# ---- kernels: *_x and *_y are pointers at x and y ----


@autotuned
@triton.jit
def _forward(
    out, lse, query, key, value, psi_k, beta_k, psi_v, beta_v,
    out_strides, query_strides, key_strides, value_strides,
    scale: tl.float64, positions, height, width, heads, depth_k, depth_v,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out and lse at a block of x, for one head and P: the softmax is rescaled whenever a score is higher."""
    T: tl.constexpr = K * K
    dtype: tl.constexpr = lse.dtype.element_ty
    p, head = tl.program_id(0) % P, (tl.program_id(0) // P % heads).to(tl.int64)
    x, n, i, j, live = _positions(tl.program_id(0) // P // heads * BLOCK, positions, height, width, BLOCK)
    c_k, exist_k = _channels(head, depth_k, D_K)
    c_v, exist_v = _channels(head, depth_v, D_V)
    r = tl.arange(0, R)[None, None, :]
    key_x = _at(key, key_strides, n, c_k, r, i, j)
    value_x = _at(value, value_strides, n, c_v, r, i, j)
    psi_k, beta_k = _filters_at(psi_k, beta_k, c_k, p, P, R, T)
    psi_v, beta_v = _filters_at(psi_v, beta_v, c_v, p, P, R, T)

    q = tl.load(_at(query, query_strides, n, c_k, p, i, j), live & exist_k, 0.0).to(dtype)
    q *= tl.full((1, 1, 1), scale, dtype)
    top = tl.full((BLOCK, 1, 1), float("-inf"), dtype)
    total = tl.zeros((BLOCK, 1, 1), dtype)  # Σ exp(s − top)
    mixed = tl.zeros((BLOCK, D_V, 1), dtype)  # Σ exp(s − top) a^V
    for t in range(T):
        u, v = t // K - K // 2, t % K - K // 2  # offset(t)
        seen = live & _inside(i + u, j + v, height, width)
        key_y = key_x + (u * key_strides[3] + v * key_strides[4])
        value_y = value_x + (u * value_strides[3] + v * value_strides[4])
        a_k = _affine(key_y, psi_k + t, beta_k + t, seen, exist_k, dtype)
        a_v = _affine(value_y, psi_v + t, beta_v + t, seen, exist_v, dtype)
        s = tl.sum(q * a_k, 1, keep_dims=True)
        higher = tl.maximum(top, s)
        shrink, weight = tl.exp(top - higher), tl.exp(s - higher)
        top, total, mixed = higher, total * shrink + weight, mixed * shrink + weight * a_v
    mixed = mixed / total
    tl.store(_at(out, out_strides, n, c_v, p, i, j), mixed.to(out.dtype.element_ty), live & exist_v)
    tl.store(lse + (head * P + p) * positions + x, top + tl.log(total), live)


@autotuned
@triton.jit
def _backward_query(
    d_query, delta, grad, lse, query, key, value, psi_k, beta_k, psi_v, beta_v,
    d_query_strides, grad_strides, query_strides, key_strides, value_strides,
    scale: tl.float64, positions, height, width, heads, depth_k, depth_v,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """d query and δ at a block of x, for one head and P."""
    T: tl.constexpr = K * K
    dtype: tl.constexpr = lse.dtype.element_ty
    p, head = tl.program_id(0) % P, (tl.program_id(0) // P % heads).to(tl.int64)
    x, n, i, j, live = _positions(tl.program_id(0) // P // heads * BLOCK, positions, height, width, BLOCK)
    c_k, exist_k = _channels(head, depth_k, D_K)
    c_v, exist_v = _channels(head, depth_v, D_V)
    r = tl.arange(0, R)[None, None, :]
    key_x = _at(key, key_strides, n, c_k, r, i, j)
    value_x = _at(value, value_strides, n, c_v, r, i, j)
    psi_k, beta_k = _filters_at(psi_k, beta_k, c_k, p, P, R, T)
    psi_v, beta_v = _filters_at(psi_v, beta_v, c_v, p, P, R, T)

    factor = tl.full((1, 1, 1), scale, dtype)
    q = tl.load(_at(query, query_strides, n, c_k, p, i, j), live & exist_k, 0.0).to(dtype) * factor
    g = tl.load(_at(grad, grad_strides, n, c_v, p, i, j), live & exist_v, 0.0).to(dtype)
    lse_x = tl.load(lse + (head * P + p) * positions + x, live, 0.0)
    total = tl.zeros((BLOCK, 1, 1), dtype)  # Σ α
    delta_x = tl.zeros((BLOCK, 1, 1), dtype)  # Σ α dα
    mean = tl.zeros((BLOCK, D_K, 1), dtype)  # Σ α a^K
    tilted = tl.zeros((BLOCK, D_K, 1), dtype)  # Σ α dα a^K
    for t in range(T):
        u, v = t // K - K // 2, t % K - K // 2
        seen = live & _inside(i + u, j + v, height, width)
        key_y = key_x + (u * key_strides[3] + v * key_strides[4])
        value_y = value_x + (u * value_strides[3] + v * value_strides[4])
        a_k = _affine(key_y, psi_k + t, beta_k + t, seen, exist_k, dtype)
        a_v = _affine(value_y, psi_v + t, beta_v + t, seen, exist_v, dtype)
        alpha = tl.exp(tl.sum(q * a_k, 1, keep_dims=True) - lse_x)
        d_alpha = tl.sum(g * a_v, 1, keep_dims=True)
        total += alpha
        delta_x += alpha * d_alpha
        mean += alpha * a_k
        tilted += alpha * d_alpha * a_k
    delta_x /= total  # which is 1 but for the rounding of lse, that would not cancel in dα − δ
    d_q = (tilted - delta_x * mean) * factor
    tl.store(_at(d_query, d_query_strides, n, c_k, p, i, j), d_q.to(d_query.dtype.element_ty), live & exist_k)
    tl.store(delta + (head * P + p) * positions + x, delta_x, live)


@autotuned
@triton.jit
def _backward_key_value(
    d_key, d_value, delta, grad, lse, query, key, value, psi_k, beta_k, psi_v, beta_v,
    d_key_strides, d_value_strides, grad_strides, query_strides, key_strides, value_strides,
    scale: tl.float64, positions, height, width, heads, depth_k, depth_v,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """d key and d value at a block of y, for one head and every R: gathers from each (P, x) that sees y."""
    T: tl.constexpr = K * K
    dtype: tl.constexpr = lse.dtype.element_ty
    head = (tl.program_id(0) % heads).to(tl.int64)
    y, n, i, j, live = _positions(tl.program_id(0) // heads * BLOCK, positions, height, width, BLOCK)
    c_k, exist_k = _channels(head, depth_k, D_K)
    c_v, exist_v = _channels(head, depth_v, D_V)
    r = tl.arange(0, R)[None, None, :]
    query_y = _at(query, query_strides, n, c_k, 0, i, j)
    grad_y = _at(grad, grad_strides, n, c_v, 0, i, j)
    psi_k, beta_k = _filters_at(psi_k, beta_k, c_k, 0, P, R, T)
    psi_v, beta_v = _filters_at(psi_v, beta_v, c_v, 0, P, R, T)

    factor = tl.full((1, 1, 1), scale, dtype)
    f_k = tl.load(_at(key, key_strides, n, c_k, r, i, j), live & exist_k, 0.0).to(dtype)
    f_v = tl.load(_at(value, value_strides, n, c_v, r, i, j), live & exist_v, 0.0).to(dtype)
    d_k = tl.zeros((BLOCK, D_K, R), dtype)
    d_v = tl.zeros((BLOCK, D_V, R), dtype)
    for p_t in range(P * T):
        p, t = p_t // T, p_t % T
        u, v = K // 2 - t // K, K // 2 - t % K  # −offset(t), which leads from y to x
        seen = live & _inside(i + u, j + v, height, width)
        query_x = query_y + (p * query_strides[2] + u * query_strides[3] + v * query_strides[4])
        grad_x = grad_y + (p * grad_strides[2] + u * grad_strides[3] + v * grad_strides[4])
        at_x = (head * P + p) * positions + y + (u * width + v)
        q = tl.load(query_x, seen & exist_k, 0.0).to(dtype) * factor
        g = tl.load(grad_x, seen & exist_v, 0.0).to(dtype)
        psi_k_t = tl.load(psi_k + (p * R * T + t), exist_k, 0.0)
        psi_v_t = tl.load(psi_v + (p * R * T + t), exist_v, 0.0)
        a_k = tl.sum(f_k * psi_k_t, 2, keep_dims=True) + tl.load(beta_k + p_t, exist_k, 0.0)
        a_v = tl.sum(f_v * psi_v_t, 2, keep_dims=True) + tl.load(beta_v + p_t, exist_v, 0.0)
        # lse = ∞ where there is no x, so that α = 0 there
        alpha = tl.exp(tl.sum(q * a_k, 1, keep_dims=True) - tl.load(lse + at_x, seen, float("inf")))
        d_s = alpha * (tl.sum(g * a_v, 1, keep_dims=True) - tl.load(delta + at_x, seen, 0.0))
        d_k += d_s * q * psi_k_t
        d_v += alpha * g * psi_v_t
    tl.store(_at(d_key, d_key_strides, n, c_k, r, i, j), d_k.to(d_key.dtype.element_ty), live & exist_k)
    tl.store(_at(d_value, d_value_strides, n, c_v, r, i, j), d_v.to(d_value.dtype.element_ty), live & exist_v)


@autotuned
@triton.jit
def _backward_filters(
    d_psi_k, d_beta_k, d_psi_v, d_beta_v, delta, grad, lse, query, key, value, psi_k, beta_k, psi_v, beta_v,
    grad_strides, query_strides, key_strides, value_strides,
    scale: tl.float64, positions, height, width, heads, depth_k, depth_v,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """d ψ and d β at one tap, for one head and P, summed over one slice of the blocks of x."""
    T: tl.constexpr = K * K
    dtype: tl.constexpr = lse.dtype.element_ty
    t, p, head = tl.program_id(0) % T, tl.program_id(0) // T % P, (tl.program_id(0) // T // P).to(tl.int64)
    u, v = t // K - K // 2, t % K - K // 2
    c_k, exist_k = _channels(head, depth_k, D_K)
    c_v, exist_v = _channels(head, depth_v, D_V)
    r = tl.arange(0, R)[None, None, :]
    factor = tl.full((1, 1, 1), scale, dtype)
    psi_k, beta_k = _filters_at(psi_k, beta_k, c_k, p, P, R, T)
    psi_v, beta_v = _filters_at(psi_v, beta_v, c_v, p, P, R, T)
    psi_k_t, beta_k_t = tl.load(psi_k + t, exist_k, 0.0), tl.load(beta_k + t, exist_k, 0.0)
    psi_v_t, beta_v_t = tl.load(psi_v + t, exist_v, 0.0), tl.load(beta_v + t, exist_v, 0.0)

    sum_psi_k = tl.zeros((BLOCK, D_K, R), dtype)
    sum_psi_v = tl.zeros((BLOCK, D_V, R), dtype)
    sum_beta_k = tl.zeros((BLOCK, D_K, 1), dtype)
    sum_beta_v = tl.zeros((BLOCK, D_V, 1), dtype)
    for start in range(tl.program_id(1) * BLOCK, positions, tl.num_programs(1) * BLOCK):
        x, n, i, j, live = _positions(start, positions, height, width, BLOCK)
        at_x = (head * P + p) * positions + x
        seen = live & _inside(i + u, j + v, height, width)
        q = tl.load(_at(query, query_strides, n, c_k, p, i, j), live & exist_k, 0.0).to(dtype) * factor
        g = tl.load(_at(grad, grad_strides, n, c_v, p, i, j), live & exist_v, 0.0).to(dtype)
        f_k = tl.load(_at(key, key_strides, n, c_k, r, i + u, j + v), seen & exist_k, 0.0).to(dtype)
        f_v = tl.load(_at(value, value_strides, n, c_v, r, i + u, j + v), seen & exist_v, 0.0).to(dtype)
        a_k = tl.sum(f_k * psi_k_t, 2, keep_dims=True) + beta_k_t
        a_v = tl.sum(f_v * psi_v_t, 2, keep_dims=True) + beta_v_t
        alpha = tl.exp(tl.sum(q * a_k, 1, keep_dims=True) - tl.load(lse + at_x, live, float("inf")))
        d_s = alpha * (tl.sum(g * a_v, 1, keep_dims=True) - tl.load(delta + at_x, live, 0.0))
        sum_psi_k += d_s * q * f_k
        sum_psi_v += alpha * g * f_v
        sum_beta_k += d_s * q
        sum_beta_v += alpha * g
    c_k += tl.program_id(1) * heads * depth_k  # the slice's own sums: [slices, C, P, R, T]
    c_v += tl.program_id(1) * heads * depth_v
    if d_psi_k is not None:
        tl.store(d_psi_k + ((c_k * P + p) * R + r) * T + t, tl.sum(sum_psi_k, 0, keep_dims=True), exist_k)
    if d_beta_k is not None:
        tl.store(d_beta_k + (c_k * P + p) * T + t, tl.sum(sum_beta_k, 0, keep_dims=True), exist_k)
    if d_psi_v is not None:
        tl.store(d_psi_v + ((c_v * P + p) * R + r) * T + t, tl.sum(sum_psi_v, 0, keep_dims=True), exist_v)
    if d_beta_v is not None:
        tl.store(d_beta_v + (c_v * P + p) * T + t, tl.sum(sum_beta_v, 0, keep_dims=True), exist_v)


# ---- as operators of torch, which torch.compile calls as they are ----

Filter = Tensor | None


def _filters(f: Tensor, psi: Filter, beta: Filter, kernel_size: int, dtype: torch.dtype) -> list[Tensor]:
    """ψ and β as the kernels read them. Without ψ, f passes as it is: R = P alone; without β, it is zero."""
    channels, order = f.shape[1:3]
    window = (kernel_size, kernel_size)
    if psi is None:
        identity = torch.eye(order, dtype=dtype, device=f.device)
        psi = identity[..., None, None].expand(channels, order, order, *window)
    if beta is None:
        beta = f.new_zeros((channels, order, *window), dtype=dtype)
    return [psi.contiguous(), beta.contiguous()]


def _sizes(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int, num_heads: int, scale: float
) -> dict[str, Any]:
    """What every kernel takes last. P = R is a power of two, as is the order of every group of the square."""
    n, c_k, order, height, width = query.shape
    depth_k, depth_v = c_k // num_heads, value.shape[1] // num_heads
    return {
        "scale": scale, "positions": n * height * width, "height": height, "width": width,
        "heads": num_heads, "depth_k": depth_k, "depth_v": depth_v,
        "K": kernel_size, "P": order, "R": key.shape[2],
        "D_K": triton.next_power_of_2(depth_k), "D_V": triton.next_power_of_2(depth_v),
    }  # fmt: skip


def _grid(positions: int, programs: int) -> Callable[[dict[str, Any]], tuple[int]]:
    """So many programs for every block of positions."""
    return lambda constants: (triton.cdiv(positions, constants["BLOCK"]) * programs,)


@torch.library.custom_op("selfconv::triton_forward", mutates_args=())
def _forward_op(
    query: Tensor,  # [N, C_k, P, h, w]
    key: Tensor,  # [N, C_k, R, h, w]
    value: Tensor,  # [N, C_v, R, h, w]
    psi_k: Tensor | None,  # [C_k, P, R, k, k]
    beta_k: Tensor | None,  # [C_k, P, k, k]
    psi_v: Tensor | None,  # [C_v, P, R, k, k]
    beta_v: Tensor | None,  # [C_v, P, k, k]
    kernel_size: int,
    num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out, laid out like value, and lse [heads, P, N, h, w]."""
    refuse_tangents()
    out, lse = _forward_fake(query, key, value, psi_k, beta_k, psi_v, beta_v, kernel_size, num_heads, scale)
    if not out.numel():
        return out, lse.zero_()
    sizes = _sizes(query, key, value, kernel_size, num_heads, scale)
    filters = (
        *_filters(key, psi_k, beta_k, kernel_size, lse.dtype),
        *_filters(value, psi_v, beta_v, kernel_size, lse.dtype),
    )
    strides = [t.stride() for t in (out, query, key, value)]
    with torch.cuda.device_of(query):
        _forward[_grid(sizes["positions"], num_heads * sizes["P"])](
            out, lse, query, key, value, *filters, *strides, **sizes
        )
    return out, lse


@_forward_op.register_fake
def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, psi_k: Filter, beta_k: Filter, psi_v: Filter, beta_v: Filter,
    kernel_size: int, num_heads: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    given = (t for t in (query, key, value, psi_k, beta_k, psi_v, beta_v) if t is not None)
    dtype = reduce(torch.promote_types, (t.dtype for t in given), torch.float32)
    n, _, order, height, width = query.shape
    return torch.empty_like(value), query.new_empty((num_heads, order, n, height, width), dtype=dtype)


@torch.library.custom_op("selfconv::triton_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    psi_k: Tensor | None,
    beta_k: Tensor | None,
    psi_v: Tensor | None,
    beta_v: Tensor | None,
    kernel_size: int,
    num_heads: int,
    scale: float,
) -> list[Tensor]:
    """The gradients of query, key, value and those filters that there are."""
    refuse_tangents()
    given = [psi_k, beta_k, psi_v, beta_v]
    d_query, d_key, d_value, *d_filters = gradients = _backward_fake(grad, lse, query, key, value, *given)
    if not grad.numel():
        return [t.zero_() for t in gradients]
    sizes = _sizes(query, key, value, kernel_size, num_heads, scale)
    positions, planes = sizes["positions"], num_heads * sizes["P"]
    slices = min(SLICES, triton.cdiv(positions, max(BLOCKS)))
    sums = [None if t is None else lse.new_empty((slices, *t.shape)) for t in given]
    inputs = (
        torch.empty_like(lse), grad, lse, query, key, value,
        *_filters(key, psi_k, beta_k, kernel_size, lse.dtype),
        *_filters(value, psi_v, beta_v, kernel_size, lse.dtype),
    )  # fmt: skip
    strides = [t.stride() for t in (grad, query, key, value)]
    with torch.cuda.device_of(query):
        _backward_query[_grid(positions, planes)](d_query, *inputs, d_query.stride(), *strides, **sizes)
        _backward_key_value[_grid(positions, num_heads)](
            d_key, d_value, *inputs, d_key.stride(), d_value.stride(), *strides, **sizes
        )
        if d_filters:
            _backward_filters[(planes * kernel_size**2, slices)](*sums, *inputs, *strides, **sizes)
    for total, partial in zip(d_filters, (t for t in sums if t is not None), strict=True):
        total.copy_(partial.sum(0))
    return gradients


@_backward_op.register_fake
def _backward_fake(
    grad: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *filters_and_options: Any
) -> list[Tensor]:
    filters = [t for t in filters_and_options[:4] if t is not None]
    return [torch.empty_like(t) for t in (query, key, value, *filters)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:7])
    ctx.options = inputs[7:]
    ctx.set_materialize_grads(False)  # nothing depends on lse


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    lse, *inputs = ctx.saved_tensors
    check_gradient(grad)
    gradients = iter(_backward_op(grad, lse, *inputs, *ctx.options))
    return *(None if t is None else next(gradients) for t in inputs), None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(refuse_second_derivative)
register_vmap(_forward_op)
register_vmap(_backward_op)


def run(call: Call) -> Tensor:
    filters = (*call.steered(call.psi_k, call.beta_k), *call.steered(call.psi_v, call.beta_v))
    out, _ = _forward_op(
        call.query, call.key, call.value, *filters, call.kernel_size, call.num_heads, call.scale
    )
    return out
