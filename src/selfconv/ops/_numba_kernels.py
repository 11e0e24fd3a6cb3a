"""The CPU kernels: fused forward and backward passes for any numbers of planes, heads and channels.

A task is some heads of one image, or of a few small ones. It copies their channels into zero-padded tiles,
in a memory order of its own: so borders need no branches, and any strides of the caller's tensors do. A
vector covers a few columns of a few rows of the map. For each head and output plane P the window is walked
offset by offset:

    score[t]  = Σ_c query_c · A^K_c[t],     A^K_c[t] = Σ_R key_{c,R}(x + t) ψ_{c,R}[t] + β_c[t]
    α[t]      = 2^(score[t] · scale·log2(e) − lse)
    out_c     = Σ_t α[t] · A^V_c[t]

and backwards, with g the gradient of out (README.md beside this file derives it), first from where x is:

    dα[t] = Σ_c g_c · A^V_c[t]              ds[t] = scale · α[t] (dα[t] − Σ_t α[t] dα[t])
    dquery_c = Σ_t ds[t] · A^K_c[t]

    dβ^K_c[t] = Σ_x ds[t] · query_c         dβ^V_c[t] = Σ_x α[t] · g_c

then from where the neighbour y = x + t is, with e[t](y) = ds[t](y − t) · query_c(y − t):

    dkey_{c,R}(y) = Σ_t e[t](y) · ψ^K_{c,R}[t]
    dψ^K_{c,R}[t] = Σ_y e[t](y) · key_{c,R}(y)

and with e[t](y) = α[t](y − t) · g_c(y − t) the same for value and ψ^V.

Filters arrive as tables ``[heads, P, C/heads, k, k, R + 1]``: for each channel and offset first ψ for every
R, then β. Nothing of size k²·C·h·w exists: α and ds are for one head, one plane and a band of rows.

Compiled for a dtype, for R = ``len(planes)``, so that loops over R unroll, and for ``len(block)`` channels,
one or two, that share a pass over the window. All else, the window's size and all strides included, is read
at run time: one compilation serves all shapes.
"""

# No `from __future__ import annotations`: Numba reads these functions, and they are not annotated.
from collections import namedtuple
from functools import cache

import numpy as np
from numba import njit, types

from selfconv.ops._native import EDITION, native
from selfconv.ops._simd import (
    PARTS,
    accumulate_product,
    advance,
    broadcast,
    exp2,
    fetch_add,
    fma,
    gather,
    lane_sum,
    lanes_of,
    load,
    log2,
    maximum,
    pointer,
    scatter,
    splat,
    store,
    transpose,
    zeros,
)  # fmt: skip

LOG2_E = 1.4426950408889634
HEADER = 23  # integers before the maps in the argument block

Map = namedtuple("Map", "data n c p i j")  # features [N, C, P, h, w] of the caller: pointer and strides
Sizes = namedtuple("Sizes", "heads planes height width c_k c_v images batch staged")
# How a plane lies in a tile: `border` zero rows above; `rows` of `parts` vector parts, those of the map and
# then zeros until whole vectors cover them; zero rows below. Left of every row are `pad` zeros, whole parts
# so that rows begin aligned, and they serve the row before as its right border too. α and ds hold `band`
# rows at a time, in planes with twice the border above: who asks from two borders away finds zeros.
Tile = namedtuple("Tile", "border pad taps rows parts stride plane band band_plane")

_options = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def make_tile(border, rows, parts, lanes, band):
    pad = (border + lanes - 1) // lanes * lanes
    stride = parts * lanes + pad
    skew = 2 * lanes  # a plane of a power of two would share few of a cache's lines with the others
    plane = (rows + 2 * border + PARTS) * stride + skew
    band_plane = (band + 4 * border + PARTS) * stride + skew
    return Tile(border, pad, (2 * border + 1) ** 2, rows, parts, stride, plane, band, band_plane)


_make_tile = njit(**_options)(make_tile)


@njit(**_options)
def read_sizes(args):
    return Sizes(args[4], args[5], args[6], args[7], args[8], args[9], args[20], args[21], args[22])


@njit(**_options)
def read_map(args, i, dtype):
    return Map(pointer(args[i], dtype), args[i + 1], args[i + 2], args[i + 3], args[i + 4], args[i + 5])


@njit(**_options)
def clear(p, n):
    for i in range(n):
        p[i] = 0


@njit(**_options)
def copy(inward, features, n, c0, channels, c_step, planes, p_step, sizes, tile, tiles):
    """Some channels of an image into tiles, so many numbers apart for channels and for planes; or back.

    Channels that lie side by side are turned into rows in squares of one vector part each way.
    """
    lanes = lanes_of(tiles)
    outside = advance(features.data, n * features.n + c0 * features.c)
    if features.c != 1 or channels % lanes or sizes.width < lanes:
        copy_rows(inward, outside, features, channels, c_step, planes, p_step, sizes, tile, tiles)
        return
    for p in range(planes):
        for i in range(sizes.height):
            for c in range(0, channels, lanes):
                row = c * c_step + p * p_step + (i + tile.border) * tile.stride + tile.pad
                for part in range(0, sizes.width, lanes):
                    j = min(part, sizes.width - lanes)
                    here = advance(tiles, row + j)
                    there = advance(outside, c + p * features.p + i * features.i + j * features.j)
                    if inward:
                        transpose(there, features.j, here, c_step)
                    else:
                        transpose(here, c_step, there, features.j)


@njit(**_options)
def copy_rows(inward, outside, features, channels, c_step, planes, p_step, sizes, tile, tiles):
    for c in range(channels):
        for p in range(planes):
            for i in range(sizes.height):
                there = advance(outside, c * features.c + p * features.p + i * features.i)
                here = advance(tiles, c * c_step + p * p_step + (i + tile.border) * tile.stride + tile.pad)
                if inward:
                    copy_row(there, features.j, here, 1, sizes.width)
                else:
                    copy_row(here, 1, there, features.j, sizes.width)


@njit(**_options)
def copy_row(source, step, target, to_step, n):
    if step == 1 and to_step == 1:  # many at once
        for j in range(n):
            target[j] = source[j]
    else:
        for j in range(n):
            target[j * to_step] = source[j * step]


@njit(**_options)
def corner_of(tile, lanes, i, part):
    """Where the window begins, in a plane of a tile, for the vector whose first row and part these are."""
    return i * tile.stride + tile.pad - tile.border + part * lanes


@njit(forceinline=True, **_options)
def affine_map(planes, f, at, tile, table, entry):
    """A_c[t] = Σ_R f_{c,R}(x + t) ψ_{c,R}[t] + β_c[t], for the positions at offset ``at`` = x + t of f_c."""
    R = len(planes)
    affine = broadcast(table, entry + R)
    for r in range(R):
        affine = fma(gather(f, at + r * tile.plane, tile.stride), broadcast(table, entry + r), affine)
    return affine


@njit(**_options)
def products(planes, block, window, a, unit, x, f, corner, tile, table, channels, out, affines):
    """out[t] = Σ_c unit · a_c(x) · A_c[t], where A maps f; A itself goes to ``affines``, if not None."""
    R, B = len(planes), len(block)
    step = PARTS * lanes_of(f)
    for c in range(0, channels, B):
        first = gather(a, x + c * tile.plane, tile.stride) * unit
        second = gather(a, x + (c + B - 1) * tile.plane, tile.stride) * unit
        at = corner + c * R * tile.plane
        for t in range(tile.taps):
            entry = c * tile.taps + t
            affine = affine_map(planes, f, at + window[t], tile, table, entry * (R + 1))
            if affines is not None:
                store(affines, entry * step, affine)
            total = fma(first, affine, zeros(f) if c == 0 else load(out, t * step))
            if B == 2:
                entry += tile.taps
                affine = affine_map(planes, f, at + window[t] + R * tile.plane, tile, table, entry * (R + 1))
                if affines is not None:
                    store(affines, entry * step, affine)
                total = fma(second, affine, total)
            store(out, t * step, total)


@njit(**_options)
def attend(planes, block, window, unit, q, keys, values, table_k, table_v, sizes, tile, out, logs, alpha):
    """One head's output and log2-sum-exp2 on one plane.

    Args:
        unit: of the scores: scale · log2(e).
        alpha: room for α of one vector of positions.
    """
    R, B = len(planes), len(block)
    lanes = lanes_of(q)
    step = PARTS * lanes
    zero = zeros(q)
    for i in range(0, tile.rows, PARTS):
        for part in range(tile.parts):
            corner = corner_of(tile, lanes, i, part)
            x = corner + tile.border * (tile.stride + 1)
            products(planes, block, window, q, unit, x, keys, corner, tile, table_k, sizes.c_k, alpha, None)
            largest = load(alpha, 0)
            for t in range(1, tile.taps):
                largest = maximum(largest, load(alpha, t * step))
            total = zero
            for t in range(tile.taps):
                weight = exp2(load(alpha, t * step) - largest)
                total = total + weight
                store(alpha, t * step, weight)
            for c in range(0, sizes.c_v, B):
                first = second = zero
                for t in range(tile.taps):
                    weight = load(alpha, t * step)
                    at, entry = corner + window[t] + c * R * tile.plane, (c * tile.taps + t) * (R + 1)
                    affine = affine_map(planes, values, at, tile, table_v, entry)
                    first = fma(weight, affine, first)
                    if B == 2:
                        at, entry = at + R * tile.plane, entry + tile.taps * (R + 1)
                        affine = affine_map(planes, values, at, tile, table_v, entry)
                        second = fma(weight, affine, second)
                scatter(out, x + c * tile.plane, tile.stride, first / total)
                if B == 2:
                    scatter(out, x + (c + 1) * tile.plane, tile.stride, second / total)
            scatter(logs, x, tile.stride, largest + log2(total))


@njit(**_options)
def walk(
    planes, block, window, unit, scale, q, g, logs, keys, values, table_k, table_v, start, stop, sizes, tile,
    alpha, ds, dq, sums_k, sums_v, scores, d_alpha, affines,
):  # fmt: skip
    """What the centres of a band of rows, from start to stop, get of the gradient: α, ds, dquery, both dβ.

    Args:
        scores, d_alpha, affines: room for those of one vector of positions.
    """
    R, B = len(planes), len(block)
    lanes = lanes_of(q)
    step = PARTS * lanes
    zero = zeros(q)
    for i in range(start, stop, PARTS):
        for part in range(tile.parts):
            corner = corner_of(tile, lanes, i, part)
            x = corner + tile.border * (tile.stride + 1)
            log = gather(logs, x, tile.stride)
            products(
                planes, block, window, q, unit, x, keys, corner, tile, table_k, sizes.c_k, scores,
                affines,
            )  # fmt: skip
            products(
                planes, block, window, g, scale, x, values, corner, tile, table_v, sizes.c_v, d_alpha,
                None,
            )  # fmt: skip
            here = x + (tile.border - start) * tile.stride
            mean = zero  # Σ_t α[t] dα[t]
            weights = zero  # Σ_t α[t]: one, but for the rounding of lse
            for t in range(tile.taps):
                weight = exp2(load(scores, t * step) - log)  # of the same bits as log was made from
                mean = fma(weight, load(d_alpha, t * step), mean)
                weights = weights + weight
                scatter(alpha, here + t * tile.band_plane, tile.stride, weight)
            mean = mean / weights
            for c in range(0, sizes.c_k, B):
                a = gather(q, x + c * tile.plane, tile.stride)
                b = gather(q, x + (c + B - 1) * tile.plane, tile.stride)
                first = second = zero
                for t in range(tile.taps):
                    there = here + t * tile.band_plane
                    if c == 0:
                        d_score = gather(alpha, there, tile.stride) * (load(d_alpha, t * step) - mean)
                        scatter(ds, there, tile.stride, d_score)
                    else:
                        d_score = gather(ds, there, tile.stride)
                    entry = c * tile.taps + t
                    first = fma(d_score, load(affines, entry * step), first)
                    accumulate_product(sums_k, (entry * (R + 1) + R) * lanes, d_score, a)
                    if B == 2:
                        entry += tile.taps
                        second = fma(d_score, load(affines, entry * step), second)
                        accumulate_product(sums_k, (entry * (R + 1) + R) * lanes, d_score, b)
                scatter(dq, x + c * tile.plane, tile.stride, first)
                if B == 2:
                    scatter(dq, x + (c + 1) * tile.plane, tile.stride, second)
            for c in range(0, sizes.c_v, B):
                a = gather(g, x + c * tile.plane, tile.stride)
                b = gather(g, x + (c + B - 1) * tile.plane, tile.stride)
                for t in range(tile.taps):
                    weight = gather(alpha, here + t * tile.band_plane, tile.stride)
                    entry = c * tile.taps + t
                    accumulate_product(sums_v, (entry * (R + 1) + R) * lanes, weight, a)
                    if B == 2:
                        entry += tile.taps
                        accumulate_product(sums_v, (entry * (R + 1) + R) * lanes, weight, b)


@njit(**_options)
def pull_back(planes, window, weights, a, f, table, channels, start, stop, tile, gradient, es, sums):
    """What one side, K or V, gets of the gradient from a band of rows: its features f and ψ.

    Args:
        weights: ds or α, for the rows from start to stop.
        a: query or g.
        es: room for e[t] of one vector of positions.
        sums: of the table's gradient, in vector parts.
    """
    R = len(planes)
    lanes = lanes_of(f)
    step = PARTS * lanes
    centre = tile.border * (tile.stride + 1)
    for i in range(max(start - tile.border, 0), min(stop + tile.border, tile.rows), PARTS):
        for part in range(tile.parts):
            corner = corner_of(tile, lanes, i, part)
            band = corner + (3 * tile.border - start) * tile.stride + 2 * tile.border
            for c in range(channels):
                for r in range(R):
                    y = corner + centre + (c * R + r) * tile.plane
                    feature = gather(f, y, tile.stride)
                    total = gather(gradient, y, tile.stride)
                    for t in range(tile.taps):
                        entry = (c * tile.taps + t) * (R + 1) + r
                        if r == 0:
                            weight = gather(weights, band - window[t] + t * tile.band_plane, tile.stride)
                            e = weight * gather(
                                a, corner + 2 * centre - window[t] + c * tile.plane, tile.stride
                            )
                            if R > 1:
                                store(es, t * step, e)
                        else:
                            e = load(es, t * step)
                        total = fma(e, broadcast(table, entry), total)
                        accumulate_product(sums, entry * lanes, e, feature)
                    scatter(gradient, y, tile.stride, total)


@njit(**_options)
def write_sums(sums, entries, gradient):
    """Adds up the lanes of each sum."""
    for entry in range(entries):
        gradient[entry] = lane_sum(sums, entry * lanes_of(sums))


_signature = types.void(types.CPointer(types.int64))


@cache
def forward_worker(name, order, together):
    """The forward pass as a native function of an argument block, for one dtype and R = order.

    The kernel is a closure, not a function that takes these as arguments: Numba would compile that twice.

    Args:
        together: channels that share a pass over the window, 1 or 2.
    """
    dtype, planes, block = np.dtype(name).type, (EDITION,) * order, (EDITION,) * together

    @native(_signature)
    def worker(args):
        R = len(planes)
        # not literals: Numba would compile what takes them once for each value
        outward, inward = np.int64(0), np.int64(1)
        scratch = pointer(args[11], dtype)
        sizes, tile = (
            read_sizes(args),
            _make_tile(args[18] // 2, args[15], args[16], lanes_of(scratch), args[17]),
        )
        P, c_k, c_v = sizes.planes, sizes.c_k, sizes.c_v
        plane, many = tile.plane, R * tile.plane
        heads = sizes.staged
        all_k, all_v = heads * c_k, heads * c_v
        entries = tile.taps * (R + 1)
        window = pointer(args[19], np.int64)
        unit = splat(dtype(pointer(args[10], np.float64)[0] * LOG2_E))
        query, key = read_map(args, HEADER, dtype), read_map(args, HEADER + 6, dtype)
        value, out = read_map(args, HEADER + 12, dtype), read_map(args, HEADER + 18, dtype)
        lse = read_map(args, HEADER + 24, dtype)

        q = advance(scratch, fetch_add(args, 0, 1) * args[12])  # [P, channels, rows, stride]
        clear(q, args[12])
        keys = advance(q, P * all_k * plane)  # [channels, R, rows, stride]
        values = advance(keys, all_k * many)
        o = advance(values, all_v * many)  # as q
        logs = advance(o, P * all_v * plane)
        alpha = advance(logs, P * heads * plane)

        while True:
            turn = fetch_add(args, 1, args[3])
            if turn >= args[2]:
                break
            for task in range(turn, min(turn + args[3], args[2])):
                batch, stage = divmod(task, sizes.heads // heads)
                for n in range(batch * sizes.batch, min((batch + 1) * sizes.batch, sizes.images)):
                    copy(inward, key, n, stage * all_k, all_k, many, R, plane, sizes, tile, keys)
                    copy(inward, value, n, stage * all_v, all_v, many, R, plane, sizes, tile, values)
                    copy(inward, query, n, stage * all_k, all_k, plane, P, all_k * plane, sizes, tile, q)
                    for head in range(heads):
                        for p in range(P):
                            filters = ((stage * heads + head) * P + p) * entries
                            attend(
                                planes, block, window, unit,
                                advance(q, (p * all_k + head * c_k) * plane),
                                advance(keys, head * c_k * many),
                                advance(values, head * c_v * many),
                                advance(pointer(args[13], dtype), filters * c_k),
                                advance(pointer(args[14], dtype), filters * c_v),
                                sizes, tile,
                                advance(o, (p * all_v + head * c_v) * plane),
                                advance(logs, (p * heads + head) * plane),
                                alpha,
                            )  # fmt: skip
                    copy(outward, out, n, stage * all_v, all_v, plane, P, all_v * plane, sizes, tile, o)
                    copy(outward, lse, n, stage * heads, heads, plane, P, heads * plane, sizes, tile, logs)

    return worker


@cache
def backward_worker(name, order, together):
    """The backward pass, likewise."""
    dtype, planes, block = np.dtype(name).type, (EDITION,) * order, (EDITION,) * together

    @native(_signature)
    def worker(args):
        R = len(planes)
        # not literals: Numba would compile what takes them once for each value
        outward, inward = np.int64(0), np.int64(1)
        scratch = pointer(args[11], dtype)
        lanes = lanes_of(scratch)
        step = PARTS * lanes
        sizes, tile = read_sizes(args), _make_tile(args[18] // 2, args[15], args[16], lanes, args[17])
        P, c_k, c_v = sizes.planes, sizes.c_k, sizes.c_v
        plane, many = tile.plane, R * tile.plane
        heads = sizes.staged
        all_k, all_v = heads * c_k, heads * c_v
        entries = tile.taps * (R + 1)
        window = pointer(args[19], np.int64)
        scale = splat(dtype(pointer(args[10], np.float64)[0]))
        unit = splat(dtype(pointer(args[10], np.float64)[0] * LOG2_E))
        query, key = read_map(args, HEADER, dtype), read_map(args, HEADER + 6, dtype)
        value, grad = read_map(args, HEADER + 12, dtype), read_map(args, HEADER + 18, dtype)
        lse, d_query = read_map(args, HEADER + 24, dtype), read_map(args, HEADER + 30, dtype)
        d_key, d_value = read_map(args, HEADER + 36, dtype), read_map(args, HEADER + 42, dtype)
        shared = args[HEADER + 42] == args[HEADER + 36]  # key and value are one tensor: so is their gradient

        q = advance(scratch, fetch_add(args, 0, 1) * args[12])  # [P, channels, rows, stride]
        clear(q, args[12])
        dq = advance(q, P * all_k * plane)
        g = advance(dq, P * all_k * plane)
        logs = advance(g, P * all_v * plane)
        keys = advance(logs, P * heads * plane)  # [channels, R, rows, stride]
        d_keys = advance(keys, all_k * many)
        values = advance(d_keys, all_k * many)
        d_values = d_keys if shared else advance(values, all_v * many)
        alpha = advance(values, 2 * all_v * many)  # for a band of rows, as is ds
        ds = advance(alpha, tile.taps * tile.band_plane)
        scores = advance(ds, tile.taps * tile.band_plane)  # for one vector of positions, as the next two
        d_alpha = advance(scores, tile.taps * step)
        affines = advance(d_alpha, tile.taps * step)
        sums_k = advance(affines, c_k * tile.taps * step)
        sums_v = advance(sums_k, P * entries * all_k * lanes)

        while True:
            turn = fetch_add(args, 1, args[3])
            if turn >= args[2]:
                break
            for task in range(turn, min(turn + args[3], args[2])):
                batch, stage = divmod(task, sizes.heads // heads)
                clear(sums_k, P * entries * (all_k + all_v) * lanes)
                for n in range(batch * sizes.batch, min((batch + 1) * sizes.batch, sizes.images)):
                    copy(inward, key, n, stage * all_k, all_k, many, R, plane, sizes, tile, keys)
                    copy(inward, value, n, stage * all_v, all_v, many, R, plane, sizes, tile, values)
                    copy(inward, query, n, stage * all_k, all_k, plane, P, all_k * plane, sizes, tile, q)
                    copy(inward, grad, n, stage * all_v, all_v, plane, P, all_v * plane, sizes, tile, g)
                    copy(inward, lse, n, stage * heads, heads, plane, P, heads * plane, sizes, tile, logs)
                    clear(d_keys, all_k * many)
                    clear(d_values, all_v * many)
                    for head in range(heads):
                        at_k, at_v = head * c_k * many, head * c_v * many
                        keys_h, d_keys_h = advance(keys, at_k), advance(d_keys, at_k)
                        values_h, d_values_h = advance(values, at_v), advance(d_values, at_v)
                        for p in range(P):
                            filters = ((stage * heads + head) * P + p) * entries
                            table_k = advance(pointer(args[13], dtype), filters * c_k)
                            table_v = advance(pointer(args[14], dtype), filters * c_v)
                            at = (p * all_k + head * c_k) * plane
                            q_p, dq_p = advance(q, at), advance(dq, at)
                            g_p = advance(g, (p * all_v + head * c_v) * plane)
                            logs_p = advance(logs, (p * heads + head) * plane)
                            sums_k_p = advance(sums_k, (head * P + p) * entries * c_k * lanes)
                            sums_v_p = advance(sums_v, (head * P + p) * entries * c_v * lanes)
                            for start in range(0, tile.rows, tile.band):
                                stop = min(start + tile.band, tile.rows)
                                if stop - start < tile.band:
                                    clear(alpha, 2 * tile.taps * tile.band_plane)
                                walk(
                                    planes, block, window, unit, scale, q_p, g_p, logs_p, keys_h, values_h,
                                    table_k, table_v, start, stop, sizes, tile, alpha, ds, dq_p, sums_k_p,
                                    sums_v_p, scores, d_alpha, affines,
                                )  # fmt: skip
                                pull_back(
                                    planes, window, ds, q_p, keys_h, table_k, c_k, start, stop, tile,
                                    d_keys_h, scores, sums_k_p,
                                )  # fmt: skip
                                pull_back(
                                    planes, window, alpha, g_p, values_h, table_v, c_v, start, stop, tile,
                                    d_values_h, scores, sums_v_p,
                                )  # fmt: skip
                    copy(outward, d_query, n, stage * all_k, all_k, plane, P, all_k * plane, sizes, tile, dq)
                    copy(outward, d_key, n, stage * all_k, all_k, many, R, plane, sizes, tile, d_keys)
                    if not shared:
                        copy(outward, d_value, n, stage * all_v, all_v, many, R, plane, sizes, tile, d_values)
                numbers_k, numbers_v = P * entries * all_k, P * entries * all_v
                write_sums(sums_k, numbers_k, advance(pointer(args[HEADER + 48], dtype), task * numbers_k))
                write_sums(sums_v, numbers_v, advance(pointer(args[HEADER + 49], dtype), task * numbers_v))

    return worker
