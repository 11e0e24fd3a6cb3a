# mypy: disallow-untyped-defs=False
"""The GPU kernels, in Triton: fused forward and backward passes, with nothing of size taps·C·h·w in memory.

They know no group. They get the filters as every rotation P sees them, ψ [C, P, R, taps] and
β [C, P, taps]; planar features are the case P = R = 1. A program takes a block of positions, counted over
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
from typing import Any

from selfconv._extras import require

require("the backend", "triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# Functions under ``triton.jit`` go without annotations, which would be instructions to Triton.

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):  # kernels could not take tuples, of strides
    raise ImportError(f"needs triton >= 3.4; found {triton.__version__}")

# the interpreter has nothing to time, and only a small block divides its small maps
BLOCKS = (32,) if os.environ.get("TRITON_INTERPRET") == "1" else (16, 32, 64, 128, 256)
TILE = 2048  # at most so many numbers in a tile of features: more would not fit in registers


def blocks_that_fit(configs: list[Any], arguments: dict[str, Any], **constants: Any) -> list[Any]:
    depth = max(constants["D_K"], constants["D_V"]) * constants["R"]
    return [config for config in configs if config.kwargs["BLOCK"] * depth <= TILE] or configs[:1]


autotuned = triton.autotune(
    [triton.Config({"BLOCK": block}) for block in BLOCKS],
    key=["height", "width", "ROWS", "COLUMNS", "R", "D_K", "D_V"],
    prune_configs_by={"early_config_prune": blocks_that_fit},
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
def _offset(t, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """offset(t), in rows and columns: the taps are DOWN rows and ACROSS columns apart."""
    return (t // COLUMNS - ROWS // 2) * DOWN, (t % COLUMNS - COLUMNS // 2) * ACROSS


@triton.jit
def _step(i, j, u, v, height, width, CIRCULAR: tl.constexpr):
    """The offset to the neighbour of (i, j) at offset (u, v), and whether it is inside the image.

    If images are CIRCULAR it always is, and each position has an offset of its own.
    """
    if CIRCULAR:
        u = ((i + u) % height + height) % height - i
        v = ((j + v) % width + width) % width - j
    return u, v, (i + u >= 0) & (i + u < height) & (j + v >= 0) & (j + v < width)


@triton.jit
def _included(score, inside, EXCLUDE: tl.constexpr):
    """The score; if neighbours outside the image are to EXCLUDE, theirs is lower than any.

    It is finite: a window may begin with them, and the running softmax subtracts its highest score so far.
    """
    return tl.where(inside, score, -3.4e38) if EXCLUDE else score


@triton.jit
def _affine(f_y, psi_t, beta_t, seen, exist, dtype: tl.constexpr):
    """a = Σ_R f(R, y) ψ(P, R, t) + β(P, t), with f = 0 outside the image."""
    f = tl.load(f_y, seen & exist, 0.0).to(dtype)
    return tl.sum(f * tl.load(psi_t, exist, 0.0), 2, keep_dims=True) + tl.load(beta_t, exist, 0.0)


# ---- kernels: *_x and *_y are pointers at x and y ----


@autotuned
@triton.jit
def forward(
    out, lse, query, key, value, psi_k, beta_k, psi_v, beta_v,
    out_strides, query_strides, key_strides, value_strides,
    scale: tl.float64, positions, height, width, heads, depth_k, depth_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    CIRCULAR: tl.constexpr, EXCLUDE: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out and lse at a block of x, for one head and P: the softmax is rescaled whenever a score is higher."""
    T: tl.constexpr = ROWS * COLUMNS
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
        u, v = _offset(t, ROWS, COLUMNS, DOWN, ACROSS)
        u, v, inside = _step(i, j, u, v, height, width, CIRCULAR)
        seen = live & inside
        key_y = key_x + (u * key_strides[3] + v * key_strides[4])
        value_y = value_x + (u * value_strides[3] + v * value_strides[4])
        a_k = _affine(key_y, psi_k + t, beta_k + t, seen, exist_k, dtype)
        a_v = _affine(value_y, psi_v + t, beta_v + t, seen, exist_v, dtype)
        s = _included(tl.sum(q * a_k, 1, keep_dims=True), inside, EXCLUDE)
        higher = tl.maximum(top, s)
        shrink, weight = tl.exp(top - higher), tl.exp(s - higher)
        top, total, mixed = higher, total * shrink + weight, mixed * shrink + weight * a_v
    mixed = mixed / total
    tl.store(_at(out, out_strides, n, c_v, p, i, j), mixed.to(out.dtype.element_ty), live & exist_v)
    tl.store(lse + (head * P + p) * positions + x, top + tl.log(total), live)


@autotuned
@triton.jit
def backward_query(
    d_query, delta, grad, lse, query, key, value, psi_k, beta_k, psi_v, beta_v,
    d_query_strides, grad_strides, query_strides, key_strides, value_strides,
    scale: tl.float64, positions, height, width, heads, depth_k, depth_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    CIRCULAR: tl.constexpr, EXCLUDE: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d query and δ at a block of x, for one head and P."""
    T: tl.constexpr = ROWS * COLUMNS
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
        u, v = _offset(t, ROWS, COLUMNS, DOWN, ACROSS)
        u, v, inside = _step(i, j, u, v, height, width, CIRCULAR)
        seen = live & inside
        key_y = key_x + (u * key_strides[3] + v * key_strides[4])
        value_y = value_x + (u * value_strides[3] + v * value_strides[4])
        a_k = _affine(key_y, psi_k + t, beta_k + t, seen, exist_k, dtype)
        a_v = _affine(value_y, psi_v + t, beta_v + t, seen, exist_v, dtype)
        alpha = tl.exp(_included(tl.sum(q * a_k, 1, keep_dims=True), inside, EXCLUDE) - lse_x)
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
def backward_key_value(
    d_key, d_value, delta, grad, lse, query, key, value, psi_k, beta_k, psi_v, beta_v,
    d_key_strides, d_value_strides, grad_strides, query_strides, key_strides, value_strides,
    scale: tl.float64, positions, height, width, heads, depth_k, depth_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    CIRCULAR: tl.constexpr, EXCLUDE: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d key and d value at a block of y, for one head and every R: gathers from each (P, x) that sees y."""
    T: tl.constexpr = ROWS * COLUMNS
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
        u, v = _offset(t, ROWS, COLUMNS, DOWN, ACROSS)
        u, v, inside = _step(i, j, -u, -v, height, width, CIRCULAR)  # from y to x
        seen = live & inside
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
def backward_filters(
    d_psi_k, d_beta_k, d_psi_v, d_beta_v, delta, grad, lse, query, key, value, psi_k, beta_k, psi_v, beta_v,
    grad_strides, query_strides, key_strides, value_strides,
    scale: tl.float64, positions, height, width, heads, depth_k, depth_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    CIRCULAR: tl.constexpr, EXCLUDE: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d ψ and d β at one tap, for one head and P, summed over one slice of the blocks of x."""
    T: tl.constexpr = ROWS * COLUMNS
    dtype: tl.constexpr = lse.dtype.element_ty
    t, p, head = tl.program_id(0) % T, tl.program_id(0) // T % P, (tl.program_id(0) // T // P).to(tl.int64)
    u_t, v_t = _offset(t, ROWS, COLUMNS, DOWN, ACROSS)
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
        u, v, inside = _step(i, j, u_t, v_t, height, width, CIRCULAR)
        seen = live & inside
        q = tl.load(_at(query, query_strides, n, c_k, p, i, j), live & exist_k, 0.0).to(dtype) * factor
        g = tl.load(_at(grad, grad_strides, n, c_v, p, i, j), live & exist_v, 0.0).to(dtype)
        f_k = tl.load(_at(key, key_strides, n, c_k, r, i + u, j + v), seen & exist_k, 0.0).to(dtype)
        f_v = tl.load(_at(value, value_strides, n, c_v, r, i + u, j + v), seen & exist_v, 0.0).to(dtype)
        a_k = tl.sum(f_k * psi_k_t, 2, keep_dims=True) + beta_k_t
        a_v = tl.sum(f_v * psi_v_t, 2, keep_dims=True) + beta_v_t
        s = _included(tl.sum(q * a_k, 1, keep_dims=True), inside, EXCLUDE)
        alpha = tl.exp(s - tl.load(lse + at_x, live, float("inf")))
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
