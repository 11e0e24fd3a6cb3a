"""The CPU kernels: fused forward and backward passes for any numbers of planes, heads and channels.

A task is one head of one image. It copies that head's keys and values into zero-padded tiles, in a memory
order of its own: so borders need no branches, and any strides of the caller's tensors do. A vector covers
a few columns of a few rows of the map. For each output plane P the window is walked offset by offset:

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

Compiled for a dtype and R = ``len(planes)``, so that loops over R unroll. All else, the window's size and all
strides included, is read at run time: one compilation serves all shapes.
"""

# No `from __future__ import annotations`: Numba reads these functions, and they are not annotated.
from collections import namedtuple
from functools import cache

import numpy as np
from numba import njit, types

from selfconv.ops._native import native
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
    transpose_in,
    transpose_out,
)  # fmt: skip

LOG2_E = 1.4426950408889634
HEADER = 20  # integers before the maps in the argument block

Map = namedtuple("Map", "data n c p i j")  # features [N, C, P, h, w] of the caller: pointer and strides
Sizes = namedtuple("Sizes", "heads planes height width c_k c_v")
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
    return Sizes(args[4], args[5], args[6], args[7], args[8], args[9])


@njit(**_options)
def read_map(args, i, dtype):
    return Map(pointer(args[i], dtype), args[i + 1], args[i + 2], args[i + 3], args[i + 4], args[i + 5])


@njit(**_options)
def clear(p, n):
    for i in range(n):
        p[i] = 0


@njit(**_options)
def copy(inward, features, n, c0, channels, p0, planes, sizes, tile, tiles):
    """A head's channels of an image into tiles [channels, planes, rows, stride], or back.

    A vector part of positions at a time, of as many channels at once as lie side by side.
    """
    if features.c != 1 or sizes.width < lanes_of(tiles):
        copy_rows(inward, features, n, c0, channels, p0, planes, sizes, tile, tiles)
    elif channels % 4 == 0:
        copy_blocks((0, 0, 0, 0), inward, features, n, c0, channels, p0, planes, sizes, tile, tiles)
    elif channels % 2 == 0:
        copy_blocks((0, 0), inward, features, n, c0, channels, p0, planes, sizes, tile, tiles)
    else:
        copy_blocks((0,), inward, features, n, c0, channels, p0, planes, sizes, tile, tiles)


@njit(**_options)
def copy_blocks(block, inward, features, n, c0, channels, p0, planes, sizes, tile, tiles):
    lanes = lanes_of(tiles)
    for c in range(0, channels, len(block)):
        for p in range(planes):
            for i in range(sizes.height):
                there = n * features.n + c0 + c + (p0 + p) * features.p + i * features.i
                here = (c * planes + p) * tile.plane + (i + tile.border) * tile.stride + tile.pad
                for part in range(0, sizes.width, lanes):
                    j = min(part, sizes.width - lanes)
                    outside, inside = advance(features.data, there + j * features.j), advance(tiles, here + j)
                    if inward:
                        transpose_in(outside, features.j, inside, planes * tile.plane, block)
                    else:
                        transpose_out(inside, planes * tile.plane, outside, features.j, block)


@njit(**_options)
def copy_rows(inward, features, n, c0, channels, p0, planes, sizes, tile, tiles):
    for c in range(channels):
        for p in range(planes):
            for i in range(sizes.height):
                at = n * features.n + (c0 + c) * features.c + (p0 + p) * features.p + i * features.i
                outside = advance(features.data, at)
                at = (c * planes + p) * tile.plane + (i + tile.border) * tile.stride + tile.pad
                inside = advance(tiles, at)
                if inward:
                    for j in range(sizes.width):
                        inside[j] = outside[j * features.j]
                else:
                    for j in range(sizes.width):
                        outside[j * features.j] = inside[j]


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
def products(planes, window, a, x, f, corner, tile, table, channels, out, affines):
    """out[t] = Σ_c a_c(x) · A_c[t], where A maps f; A itself goes to ``affines``, if that is not None."""
    R = len(planes)
    step = PARTS * lanes_of(f)
    for c in range(channels):
        centre = gather(a, x + c * tile.plane, tile.stride)
        at = corner + c * R * tile.plane
        for t in range(tile.taps):
            entry = c * tile.taps + t
            affine = affine_map(planes, f, at + window[t], tile, table, entry * (R + 1))
            if affines is not None:
                store(affines, entry * step, affine)
            if c == 0:
                store(out, t * step, centre * affine)
            else:
                store(out, t * step, fma(centre, affine, load(out, t * step)))


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
def forward_worker(name, order):
    """The forward pass as a native function of an argument block, for one dtype and R = order.

    The kernel is a closure, not a function that takes these as arguments: Numba would compile that twice.
    """
    dtype, planes = np.dtype(name).type, (0,) * order

    @native(_signature)
    def worker(args):
        R = len(planes)
        k = args[18]
        # not literals: Numba would compile what takes them once for each value
        outward = zero = np.int64(0)
        inward = one = np.int64(1)
        scratch = pointer(args[11], dtype)
        lanes = lanes_of(scratch)
        step = PARTS * lanes
        sizes, tile = read_sizes(args), _make_tile(k // 2, args[15], args[16], lanes, args[17])
        c_k, c_v = sizes.c_k, sizes.c_v
        window = pointer(args[19], np.int64)
        scale = splat(dtype(pointer(args[10], np.float64)[0] * LOG2_E))
        query, key = read_map(args, HEADER, dtype), read_map(args, HEADER + 6, dtype)
        value, out = read_map(args, HEADER + 12, dtype), read_map(args, HEADER + 18, dtype)
        lse = read_map(args, HEADER + 24, dtype)

        q = advance(scratch, fetch_add(args, 0, 1) * args[12])
        clear(q, args[12])
        keys = advance(q, c_k * tile.plane)
        values = advance(keys, c_k * R * tile.plane)
        o = advance(values, c_v * R * tile.plane)
        logs = advance(o, c_v * tile.plane)
        alpha = advance(logs, tile.plane)

        while True:
            task = fetch_add(args, 1, args[3])
            if task >= args[2]:
                break
            for head_of_image in range(task, min(task + args[3], args[2])):
                n, head = divmod(head_of_image, sizes.heads)
                copy(inward, key, n, head * c_k, c_k, zero, R, sizes, tile, keys)
                copy(inward, value, n, head * c_v, c_v, zero, R, sizes, tile, values)
                for p in range(sizes.planes):
                    copy(inward, query, n, head * c_k, c_k, p, one, sizes, tile, q)
                    filters = (head * sizes.planes + p) * k * k * (R + 1)
                    table_k = advance(pointer(args[13], dtype), filters * c_k)
                    table_v = advance(pointer(args[14], dtype), filters * c_v)
                    for i in range(0, tile.rows, PARTS):
                        for part in range(tile.parts):
                            corner = corner_of(tile, lanes, i, part)
                            x = corner + tile.border * (tile.stride + 1)
                            products(planes, window, q, x, keys, corner, tile, table_k, c_k, alpha, None)
                            largest = load(alpha, 0)
                            for t in range(1, tile.taps):
                                largest = maximum(largest, load(alpha, t * step))
                            total = splat(dtype(0))
                            for t in range(tile.taps):
                                weight = exp2((load(alpha, t * step) - largest) * scale)
                                total = total + weight
                                store(alpha, t * step, weight)
                            inverse = splat(dtype(1)) / total
                            for c in range(c_v):
                                aggregated = splat(dtype(0))
                                for t in range(tile.taps):
                                    at = corner + window[t] + c * R * tile.plane
                                    entry = (c * tile.taps + t) * (R + 1)
                                    affine = affine_map(planes, values, at, tile, table_v, entry)
                                    aggregated = fma(load(alpha, t * step), affine, aggregated)
                                scatter(o, x + c * tile.plane, tile.stride, aggregated * inverse)
                            scatter(logs, x, tile.stride, fma(largest, scale, log2(total)))
                    copy(outward, out, n, head * c_v, c_v, p, one, sizes, tile, o)
                    copy(outward, lse, n, head, one, p, one, sizes, tile, logs)

    return worker


@cache
def backward_worker(name, order):
    """The backward pass, likewise."""
    dtype, planes = np.dtype(name).type, (0,) * order

    @native(_signature)
    def worker(args):
        R = len(planes)
        k = args[18]
        # not literals: Numba would compile what takes them once for each value
        outward = zero = np.int64(0)
        inward = one = np.int64(1)
        scratch = pointer(args[11], dtype)
        lanes = lanes_of(scratch)
        step = PARTS * lanes
        sizes, tile = read_sizes(args), _make_tile(k // 2, args[15], args[16], lanes, args[17])
        c_k, c_v = sizes.c_k, sizes.c_v
        window = pointer(args[19], np.int64)
        scale = dtype(pointer(args[10], np.float64)[0])
        exponent = splat(dtype(pointer(args[10], np.float64)[0] * LOG2_E))
        query, key = read_map(args, HEADER, dtype), read_map(args, HEADER + 6, dtype)
        value, grad = read_map(args, HEADER + 12, dtype), read_map(args, HEADER + 18, dtype)
        lse, d_query = read_map(args, HEADER + 24, dtype), read_map(args, HEADER + 30, dtype)
        d_key, d_value = read_map(args, HEADER + 36, dtype), read_map(args, HEADER + 42, dtype)
        shared = args[HEADER + 42] == args[HEADER + 36]  # key and value are one tensor: so is their gradient

        q = advance(scratch, fetch_add(args, 0, 1) * args[12])
        clear(q, args[12])
        dq = advance(q, c_k * tile.plane)
        g = advance(dq, c_k * tile.plane)
        logs = advance(g, c_v * tile.plane)
        keys = advance(logs, tile.plane)
        d_keys = advance(keys, c_k * R * tile.plane)
        values = advance(d_keys, c_k * R * tile.plane)
        d_values = d_keys if shared else advance(values, c_v * R * tile.plane)
        alpha = advance(values, 2 * c_v * R * tile.plane)  # for a band of rows, as is ds
        ds = advance(alpha, k * k * tile.band_plane)
        block = advance(ds, k * k * tile.band_plane)  # scores, then α, for one vector of positions
        d_block = advance(block, k * k * step)
        affines = advance(d_block, k * k * step)
        sums_k = advance(affines, c_k * k * k * step)
        sums_v = advance(sums_k, k * k * c_k * (R + 1) * lanes)

        while True:
            task = fetch_add(args, 1, args[3])
            if task >= args[2]:
                break
            for head_of_image in range(task, min(task + args[3], args[2])):
                n, head = divmod(head_of_image, sizes.heads)
                copy(inward, key, n, head * c_k, c_k, zero, R, sizes, tile, keys)
                copy(inward, value, n, head * c_v, c_v, zero, R, sizes, tile, values)
                clear(d_keys, c_k * R * tile.plane)
                clear(d_values, c_v * R * tile.plane)
                for p in range(sizes.planes):
                    copy(inward, query, n, head * c_k, c_k, p, one, sizes, tile, q)
                    copy(inward, grad, n, head * c_v, c_v, p, one, sizes, tile, g)
                    copy(inward, lse, n, head, one, p, one, sizes, tile, logs)
                    clear(sums_k, k * k * (c_k + c_v) * (R + 1) * lanes)
                    filters = (head * sizes.planes + p) * k * k * (R + 1)
                    table_k = advance(pointer(args[13], dtype), filters * c_k)
                    table_v = advance(pointer(args[14], dtype), filters * c_v)
                    for start in range(0, tile.rows, tile.band):
                        stop = min(start + tile.band, tile.rows)
                        if stop - start < tile.band:
                            clear(alpha, 2 * k * k * tile.band_plane)
                        for i in range(start, stop, PARTS):
                            for part in range(tile.parts):
                                corner = corner_of(tile, lanes, i, part)
                                x = corner + tile.border * (tile.stride + 1)
                                products(
                                    planes, window, q, x, keys, corner, tile, table_k, c_k, block, affines
                                )
                                products(
                                    planes, window, g, x, values, corner, tile, table_v, c_v, d_block, None
                                )
                                log = gather(logs, x, tile.stride)
                                mean = splat(dtype(0))  # Σ_t α[t] dα[t]
                                weights = splat(dtype(0))  # Σ_t α[t]: one, but for the rounding of lse
                                for t in range(tile.taps):
                                    weight = exp2(load(block, t * step) * exponent - log)
                                    mean = fma(weight, load(d_block, t * step), mean)
                                    weights = weights + weight
                                    store(block, t * step, weight)
                                mean = mean / weights
                                band_x = x + (tile.border - start) * tile.stride
                                for t in range(tile.taps):
                                    weight = load(block, t * step)
                                    d_score = weight * (load(d_block, t * step) - mean) * splat(scale)
                                    scatter(alpha, band_x + t * tile.band_plane, tile.stride, weight)
                                    scatter(ds, band_x + t * tile.band_plane, tile.stride, d_score)
                                    store(d_block, t * step, d_score)
                                for c in range(c_k):
                                    centre = gather(q, x + c * tile.plane, tile.stride)
                                    total = splat(dtype(0))
                                    for t in range(tile.taps):
                                        d_score, entry = load(d_block, t * step), c * tile.taps + t
                                        total = fma(d_score, load(affines, entry * step), total)
                                        beta = (entry * (R + 1) + R) * lanes
                                        accumulate_product(sums_k, beta, d_score, centre)
                                    scatter(dq, x + c * tile.plane, tile.stride, total)
                                for c in range(c_v):
                                    centre = gather(g, x + c * tile.plane, tile.stride)
                                    for t in range(tile.taps):
                                        beta = ((c * tile.taps + t) * (R + 1) + R) * lanes
                                        accumulate_product(sums_v, beta, load(block, t * step), centre)
                        pull_back(
                            planes, window, ds, q, keys, table_k, c_k, start, stop, tile, d_keys, block,
                            sums_k,
                        )  # fmt: skip
                        pull_back(
                            planes, window, alpha, g, values, table_v, c_v, start, stop, tile, d_values,
                            block, sums_v,
                        )  # fmt: skip
                    image = n * sizes.heads * sizes.planes * k * k * (R + 1)
                    write_sums(
                        sums_k,
                        k * k * c_k * (R + 1),
                        advance(pointer(args[HEADER + 48], dtype), (image + filters) * c_k),
                    )
                    write_sums(
                        sums_v,
                        k * k * c_v * (R + 1),
                        advance(pointer(args[HEADER + 49], dtype), (image + filters) * c_v),
                    )
                    copy(outward, d_query, n, head * c_k, c_k, p, one, sizes, tile, dq)
                copy(outward, d_key, n, head * c_k, c_k, zero, R, sizes, tile, d_keys)
                if not shared:
                    copy(outward, d_value, n, head * c_v, c_v, zero, R, sizes, tile, d_values)

    return worker
