"""The CPU kernels: fused forward and backward passes for any numbers of planes, heads and channels.

A task is one head of one image. It copies that head's keys and values into zero-padded tiles, in a memory
order of its own: so borders need no branches, and any strides of the caller's tensors do. Lanes run along
the rows of the map. For each output plane P the window is walked offset by offset:

    score[t]  = Σ_c query_c · A^K_c[t],     A^K_c[t] = Σ_R key_{c,R}(x + t) ψ_{c,R}[t] + β_c[t]
    α[t]      = 2^(score[t] · scale·log2(e) − lse)
    out_c     = Σ_t α[t] · A^V_c[t]

and backwards, with g the gradient of out (README.md beside this file derives it):

    dα[t] = Σ_c g_c · A^V_c[t]              ds[t] = scale · α[t] (dα[t] − Σ_t α[t] dα[t])
    dquery_c = Σ_t ds[t] · A^K_c[t]
    e[t] = ds[t] · query_c:
        dβ^K_c[t] = Σ_x e[t]                dψ^K_{c,R}[t] = Σ_x e[t] · key_{c,R}(x + t)
        dkey_{c,R}(y) = Σ_t ψ^K_{c,R}[t] · e[t](y − t)
    e[t] = α[t] · g_c:                      the same for value, ψ^V and β^V

Filters arrive as tables ``[heads, P, k, C/heads, k, R + 1]``: for each row offset, channel and column offset
first ψ for every R, then β. Nothing of size k²·C·h·w exists: α, ds and e are for one head, one plane and a
band of rows.

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
    accumulate,
    accumulate_product,
    advance,
    broadcast,
    exp2,
    fetch_add,
    fma,
    gather,
    lanes_of,
    load,
    log2,
    maximum,
    pointer,
    scatter,
    splat,
    store,
)  # fmt: skip

LOG2_E = 1.4426950408889634
HEADER = 19  # integers before the maps in the argument block

Map = namedtuple("Map", "data n c p i j")  # features [N, C, P, h, w] of the caller: pointer and strides
Sizes = namedtuple("Sizes", "heads planes height width c_k c_v")
# How a plane lies in a tile: `border` zero columns left and right, `margin` zero rows above and below, and in
# between `rows` of `parts` vector parts: those of the map, then zero rows until whole vectors cover them.
# `band` is how many rows α, ds and e hold at a time, and `e_plane` one offset's part of e, which has margins.
Tile = namedtuple("Tile", "border margin rows parts stride plane band e_plane")

_options = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def make_tile(border, rows, parts, lanes, band):
    margin = 2 * border
    stride = parts * lanes + 2 * border
    plane = (rows + 2 * margin) * stride
    return Tile(border, margin, rows, parts, stride, plane, band, (band + 2 * (margin + PARTS)) * stride)


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
def copy_in(source, n, c0, channels, p0, planes, sizes, tile, target):
    """A head's channels of an image into a tile [channels, planes, rows, stride]."""
    for c in range(channels):
        for p in range(planes):
            for i in range(sizes.height):
                to = (c * planes + p) * tile.plane + (i + tile.margin) * tile.stride + tile.border
                at = n * source.n + (c0 + c) * source.c + (p0 + p) * source.p + i * source.i
                if source.j == 1:
                    for j in range(sizes.width):
                        target[to + j] = source.data[at + j]
                else:
                    for j in range(sizes.width):
                        target[to + j] = source.data[at + j * source.j]


@njit(**_options)
def copy_out(source, n, c0, channels, p0, planes, sizes, tile, target):
    """A tile back into the caller's memory."""
    for c in range(channels):
        for p in range(planes):
            for i in range(sizes.height):
                at = (c * planes + p) * tile.plane + (i + tile.margin) * tile.stride + tile.border
                to = n * target.n + (c0 + c) * target.c + (p0 + p) * target.p + i * target.i
                if target.j == 1:
                    for j in range(sizes.width):
                        target.data[to + j] = source[at + j]
                else:
                    for j in range(sizes.width):
                        target.data[to + j * target.j] = source[at + j]


@njit(**_options)
def offset_of(tile, lanes, index):
    """Where in a plane of a tile the vector part of that index begins."""
    row, part = divmod(index, tile.parts)
    return (row + tile.margin) * tile.stride + tile.border + part * lanes


@njit(**_options)
def offsets_of(tile, lanes, index):
    """Where a vector's parts begin."""
    return (
        offset_of(tile, lanes, index),
        offset_of(tile, lanes, index + 1),
        offset_of(tile, lanes, index + 2),
        offset_of(tile, lanes, index + 3),
    )


@njit(**_options)
def products(planes, k, a, b, table, channels, tile, step, at, out):
    """out[t] = Σ_c a_c(x) · A_c[t]; the sums are kept in memory, so that the loop over columns is plain."""
    R = len(planes)
    entry = 0
    for row in range(k):
        for c in range(channels):
            centre = gather(a, at, c * tile.plane)
            first = c * R * tile.plane + (row - tile.border) * tile.stride - tile.border
            for column in range(k):
                affine = broadcast(table, entry + R)
                for r in range(R):
                    neighbour = gather(b, at, first + r * tile.plane + column)
                    affine = fma(neighbour, broadcast(table, entry + r), affine)
                t = (row * k + column) * step
                if c == 0:
                    store(out, t, centre * affine)
                else:
                    store(out, t, fma(centre, affine, load(out, t)))
                entry += R + 1


@njit(**_options)
def spread(planes, k, e, table, skip, start, stop, tile, lanes, gradient):
    """gradient_R(y) += Σ_t ψ_R[t] · e[t](y − t): every y that the rows from start to stop can see."""
    R = len(planes)
    first = max(start - tile.border, 0)
    while first * tile.parts % PARTS:
        first -= 1
    last = min(stop + tile.border, tile.rows)
    while last * tile.parts % PARTS:
        last += 1
    for index in range(first * tile.parts, last * tile.parts, PARTS):
        at = offsets_of(tile, lanes, index)
        for r in range(R):
            total = gather(gradient, at, r * tile.plane)
            entry = r
            for row in range(k):
                back = (
                    row * k * tile.e_plane + (PARTS - start - row + tile.border) * tile.stride + tile.border
                )
                for column in range(k):
                    moved = gather(e, at, back + column * (tile.e_plane - 1))
                    total = fma(moved, broadcast(table, entry), total)
                    entry += R + 1
                entry += skip
            scatter(gradient, at, r * tile.plane, total)


@njit(**_options)
def write_sums(sums, lanes, k, R, channels, gradient):
    """Adds the lanes of each filter's sums to its gradient, one channel of [k, C/heads, k, R + 1]."""
    for row in range(k):
        for entry in range(k * (R + 1)):
            total = sums[(row * k * (R + 1) + entry) * lanes]
            for lane in range(1, lanes):
                total += sums[(row * k * (R + 1) + entry) * lanes + lane]
            gradient[row * channels * k * (R + 1) + entry] += total


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
        lanes = lanes_of(dtype)
        step = PARTS * lanes
        sizes, tile = read_sizes(args), _make_tile(k // 2, args[15], args[16], lanes, args[17])
        c_k, c_v = sizes.c_k, sizes.c_v
        scale = splat(dtype(pointer(args[10], np.float64)[0] * LOG2_E))
        query, key = read_map(args, HEADER, dtype), read_map(args, HEADER + 6, dtype)
        value, out = read_map(args, HEADER + 12, dtype), read_map(args, HEADER + 18, dtype)
        lse = read_map(args, HEADER + 24, dtype)

        q = advance(pointer(args[11], dtype), fetch_add(args, 0, 1) * args[12])
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
                copy_in(key, n, head * c_k, c_k, 0, R, sizes, tile, keys)
                copy_in(value, n, head * c_v, c_v, 0, R, sizes, tile, values)
                for p in range(sizes.planes):
                    copy_in(query, n, head * c_k, c_k, p, 1, sizes, tile, q)
                    window = (head * sizes.planes + p) * k * k * (R + 1)
                    table_k = advance(pointer(args[13], dtype), window * c_k)
                    table_v = advance(pointer(args[14], dtype), window * c_v)
                    for index in range(0, tile.rows * tile.parts, PARTS):
                        at = offsets_of(tile, lanes, index)
                        products(planes, k, q, keys, table_k, c_k, tile, step, at, alpha)
                        largest = load(alpha, 0)
                        for t in range(step, k * k * step, step):
                            largest = maximum(largest, load(alpha, t))
                        total = splat(dtype(0))
                        for t in range(0, k * k * step, step):
                            weight = exp2((load(alpha, t) - largest) * scale)
                            total = total + weight
                            store(alpha, t, weight)
                        inverse = splat(dtype(1)) / total
                        for c in range(c_v):
                            aggregated = splat(dtype(0))
                            entry = c * k * (R + 1)
                            for row in range(k):
                                first = c * R * tile.plane + (row - tile.border) * tile.stride - tile.border
                                for column in range(k):
                                    affine = broadcast(table_v, entry + R)
                                    for r in range(R):
                                        neighbour = gather(values, at, first + r * tile.plane + column)
                                        affine = fma(neighbour, broadcast(table_v, entry + r), affine)
                                    aggregated = fma(
                                        load(alpha, (row * k + column) * step), affine, aggregated
                                    )
                                    entry += R + 1
                                entry += (c_v - 1) * k * (R + 1)
                            scatter(o, at, c * tile.plane, aggregated * inverse)
                        scatter(logs, at, 0, fma(largest, scale, log2(total)))
                    copy_out(o, n, head * c_v, c_v, p, 1, sizes, tile, out)
                    copy_out(logs, n, head, 1, p, 1, sizes, tile, lse)

    return worker


@cache
def backward_worker(name, order):
    """The backward pass, likewise."""
    dtype, planes = np.dtype(name).type, (0,) * order

    @native(_signature)
    def worker(args):
        R = len(planes)
        k = args[18]
        lanes = lanes_of(dtype)
        step = PARTS * lanes
        sizes, tile = read_sizes(args), _make_tile(k // 2, args[15], args[16], lanes, args[17])
        c_k, c_v = sizes.c_k, sizes.c_v
        scale = dtype(pointer(args[10], np.float64)[0])
        exponent = splat(dtype(pointer(args[10], np.float64)[0] * LOG2_E))
        query, key = read_map(args, HEADER, dtype), read_map(args, HEADER + 6, dtype)
        value, grad = read_map(args, HEADER + 12, dtype), read_map(args, HEADER + 18, dtype)
        lse, d_query = read_map(args, HEADER + 24, dtype), read_map(args, HEADER + 30, dtype)
        d_key, d_value = read_map(args, HEADER + 36, dtype), read_map(args, HEADER + 42, dtype)
        shared = args[HEADER + 42] == args[HEADER + 36]  # key and value are one tensor: so is their gradient

        q = advance(pointer(args[11], dtype), fetch_add(args, 0, 1) * args[12])
        clear(q, args[12])
        dq = advance(q, c_k * tile.plane)
        g = advance(dq, c_k * tile.plane)
        logs = advance(g, c_v * tile.plane)
        keys = advance(logs, tile.plane)
        d_keys = advance(keys, c_k * R * tile.plane)
        values = advance(d_keys, c_k * R * tile.plane)
        d_values = d_keys if shared else advance(values, c_v * R * tile.plane)
        alpha = advance(values, 2 * c_v * R * tile.plane)  # for a band of rows, as are ds and e
        band_plane = tile.band * tile.stride
        ds = advance(alpha, k * k * band_plane)
        e = advance(ds, k * k * band_plane)
        block = advance(e, k * k * tile.e_plane)  # scores, then α, for one vector of positions
        d_block = advance(block, k * k * step)
        sums = advance(d_block, k * k * step)

        while True:
            task = fetch_add(args, 1, args[3])
            if task >= args[2]:
                break
            for head_of_image in range(task, min(task + args[3], args[2])):
                n, head = divmod(head_of_image, sizes.heads)
                copy_in(key, n, head * c_k, c_k, 0, R, sizes, tile, keys)
                copy_in(value, n, head * c_v, c_v, 0, R, sizes, tile, values)
                clear(d_keys, c_k * R * tile.plane)
                clear(d_values, c_v * R * tile.plane)
                for p in range(sizes.planes):
                    copy_in(query, n, head * c_k, c_k, p, 1, sizes, tile, q)
                    copy_in(grad, n, head * c_v, c_v, p, 1, sizes, tile, g)
                    copy_in(lse, n, head, 1, p, 1, sizes, tile, logs)
                    window = (head * sizes.planes + p) * k * k * (R + 1)
                    table_k = advance(pointer(args[13], dtype), window * c_k)
                    table_v = advance(pointer(args[14], dtype), window * c_v)
                    windows = n * sizes.heads * sizes.planes * k * k * (R + 1) + window
                    d_table_k = advance(pointer(args[HEADER + 48], dtype), windows * c_k)
                    d_table_v = advance(pointer(args[HEADER + 49], dtype), windows * c_v)
                    for start in range(0, tile.rows, tile.band):
                        stop = min(start + tile.band, tile.rows)
                        here = -(start + tile.margin) * tile.stride  # from a tile's offsets to a band's
                        if stop - start < tile.band:
                            clear(e, k * k * tile.e_plane)
                        for index in range(start * tile.parts, stop * tile.parts, PARTS):
                            at = offsets_of(tile, lanes, index)
                            products(planes, k, q, keys, table_k, c_k, tile, step, at, block)
                            products(planes, k, g, values, table_v, c_v, tile, step, at, d_block)
                            log = gather(logs, at, 0)
                            mean = splat(dtype(0))  # Σ_t α[t] dα[t]
                            weights = splat(dtype(0))  # Σ_t α[t]: one, but for the rounding of lse
                            for t in range(0, k * k * step, step):
                                weight = exp2(load(block, t) * exponent - log)
                                mean = fma(weight, load(d_block, t), mean)
                                weights = weights + weight
                                store(block, t, weight)
                            mean = mean / weights
                            for t in range(k * k):
                                weight = load(block, t * step)
                                scatter(alpha, at, here + t * band_plane, weight)
                                d_score = weight * (load(d_block, t * step) - mean) * splat(scale)
                                scatter(ds, at, here + t * band_plane, d_score)
                        band_e = (PARTS - start) * tile.stride
                        for c in range(c_k):
                            clear(sums, k * k * (R + 1) * lanes)
                            for index in range(start * tile.parts, stop * tile.parts, PARTS):
                                at = offsets_of(tile, lanes, index)
                                centre = gather(q, at, c * tile.plane)
                                total = splat(dtype(0))
                                entry = c * k * (R + 1)
                                for row in range(k):
                                    first = (
                                        c * R * tile.plane + (row - tile.border) * tile.stride - tile.border
                                    )
                                    for column in range(k):
                                        t = row * k + column
                                        d_score = gather(ds, at, here + t * band_plane)
                                        d_affine = d_score * centre
                                        affine = broadcast(table_k, entry + R)
                                        for r in range(R):
                                            neighbour = gather(keys, at, first + r * tile.plane + column)
                                            affine = fma(neighbour, broadcast(table_k, entry + r), affine)
                                            accumulate_product(
                                                sums, (t * (R + 1) + r) * lanes, d_affine, neighbour
                                            )
                                        accumulate(sums, (t * (R + 1) + R) * lanes, d_affine)
                                        total = fma(d_score, affine, total)
                                        scatter(e, at, band_e + t * tile.e_plane, d_affine)
                                        entry += R + 1
                                    entry += (c_k - 1) * k * (R + 1)
                                scatter(dq, at, c * tile.plane, total)
                            write_sums(sums, lanes, k, R, c_k, advance(d_table_k, c * k * (R + 1)))
                            spread(
                                planes, k, e, advance(table_k, c * k * (R + 1)), (c_k - 1) * k * (R + 1),
                                start, stop, tile, lanes, advance(d_keys, c * R * tile.plane),
                            )  # fmt: skip
                        for c in range(c_v):
                            clear(sums, k * k * (R + 1) * lanes)
                            for index in range(start * tile.parts, stop * tile.parts, PARTS):
                                at = offsets_of(tile, lanes, index)
                                centre = gather(g, at, c * tile.plane)
                                for row in range(k):
                                    first = (
                                        c * R * tile.plane + (row - tile.border) * tile.stride - tile.border
                                    )
                                    for column in range(k):
                                        t = row * k + column
                                        d_affine = gather(alpha, at, here + t * band_plane) * centre
                                        for r in range(R):
                                            neighbour = gather(values, at, first + r * tile.plane + column)
                                            accumulate_product(
                                                sums, (t * (R + 1) + r) * lanes, d_affine, neighbour
                                            )
                                        accumulate(sums, (t * (R + 1) + R) * lanes, d_affine)
                                        scatter(e, at, band_e + t * tile.e_plane, d_affine)
                            write_sums(sums, lanes, k, R, c_v, advance(d_table_v, c * k * (R + 1)))
                            spread(
                                planes, k, e, advance(table_v, c * k * (R + 1)), (c_v - 1) * k * (R + 1),
                                start, stop, tile, lanes, advance(d_values, c * R * tile.plane),
                            )  # fmt: skip
                    copy_out(dq, n, head * c_k, c_k, p, 1, sizes, tile, d_query)
                copy_out(d_keys, n, head * c_k, c_k, 0, R, sizes, tile, d_key)
                if not shared:
                    copy_out(d_values, n, head * c_v, c_v, 0, R, sizes, tile, d_value)

    return worker
