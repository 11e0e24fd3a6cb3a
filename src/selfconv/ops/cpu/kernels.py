"""The CPU kernels: fused forward and backward passes for any numbers of planes, heads and channels.

Heads and images never meet, so the lanes of a vector register are heads of images: the same channel, plane
and position of each. A ``Vector`` is PARTS such registers, for PARTS columns side by side. All loads are
then aligned, whatever the offset in the window; a filter value is one register, used for all columns; and
sums over positions are sums of registers.

A task is a block of heads of a block of images, or of a few blocks of small ones, and all rows or a strip of
them. It copies their channels into tiles (``cpu/tiles.py``): any strides of the caller's tensors do. For
each output plane P and PARTS positions x the window is walked offset by offset:

    score[t]  = Σ_c query_c · A^K_c[t],     A^K_c[t] = Σ_R key_{c,R}(x + t) ψ_{c,R}[t] + β_c[t]
    α[t]      = 2^(score[t] · scale·log2(e) − lse)
    out_c     = Σ_t α[t] · A^V_c[t]

and backwards, with g the gradient of out (ops/README.md derives it):

    dα[t] = Σ_c g_c · A^V_c[t]              ds[t] = scale · α[t] (dα[t] − Σ_t α[t] dα[t])
    dquery_c = Σ_t ds[t] · A^K_c[t]

    df_{c,R}(x + t) += e ψ_{c,R}[t]         dψ_{c,R}[t] += e f_{c,R}(x + t)         dβ_c[t] += e

where f is the key and e = ds[t] · query_c, and again where f is the value and e = α[t] · g_c.

Filters arrive as tables ``[heads, P, C/heads, k, k, R + 1]``: for each channel and offset first ψ for every
R, then β. Nothing of size k²·C·h·w exists: scores, α, dα and A^K are those of PARTS positions.

Compiled for a dtype; for R = ``len(planes)``, so that loops over R unroll; and for ``len(pair)`` planes P,
one or two, that share a pass backwards. All else, the window's size and all strides included, is read at
run time: one compilation serves all shapes.
"""

# No `from __future__ import annotations`: Numba reads these functions, and they are not annotated.
from collections import namedtuple
from functools import cache

import numpy as np
from numba import njit, types

from selfconv.ops.cpu.native import KERNEL_HASH, native
from selfconv.ops.cpu.simd import (
    PARTS,
    accumulate,
    accumulate_product,
    advance,
    exp2,
    fetch_add,
    fma,
    lanes_of,
    load,
    log2,
    maximum,
    pointer,
    repeat,
    splat,
    store,
    tiny,
    zeros,
)  # fmt: skip
from selfconv.ops.cpu.tiles import (
    MAP,
    MAPS,
    add_copies,
    clear,
    clear_sums,
    copy,
    copy_of,
    fill_copies,
    mark_outside,
    options,
    owned,
    reached,
    read_arguments,
    read_map,
    read_table,
    read_task,
    write_sums,
)

LOG2_E = 1.4426950408889634

# Keys or values: channels of a head, tiles [c, R, rows, columns, lanes], filters [c, taps, R + 1, lanes].
Side = namedtuple("Side", "channels tiles table")


@njit(**options)
def of_plane(planes, side, p, sizes):
    """The side with its filter table advanced to plane p."""
    entries = sizes.taps * (len(planes) + 1) * side.channels
    return Side(side.channels, side.tiles, advance(side.table, p * entries * lanes_of(side.table)))


@njit(forceinline=True, **options)
def affine_map(planes, side, at, plane, entry):
    """A_c[t] = Σ_R f_{c,R}(x + t) ψ_{c,R}[t] + β_c[t], for the positions at offset ``at`` = x + t of f_c."""
    R, lanes = len(planes), lanes_of(side.tiles)
    affine = repeat(side.table, (entry * (R + 1) + R) * lanes)
    for r in range(R):
        psi = repeat(side.table, (entry * (R + 1) + r) * lanes)
        affine = fma(load(side.tiles, at + r * plane), psi, affine)
    return affine


@njit(forceinline=True, **options)
def add_products(planes, window, factor, side, c, corner, sizes, so_far, out, affines):
    """out[t] = so_far[t] + factor · A_c[t]; A_c goes to ``affines``. What is None is left out."""
    R, taps, plane = len(planes), sizes.taps, sizes.plane
    step = PARTS * lanes_of(out)
    for t in range(taps):
        entry = c * taps + t
        affine = affine_map(planes, side, corner + window[t] + c * R * plane, plane, entry)
        if affines is not None:
            store(affines, entry * step, affine)
        store(
            out, t * step, factor * affine if so_far is None else fma(factor, affine, load(so_far, t * step))
        )


@njit(**options)
def products(planes, window, a, unit, x, side, corner, sizes, out, affines):
    """out[t] = Σ_c unit · a_c(x) · A_c[t]; A itself goes to ``affines``, if not None."""
    add_products(planes, window, load(a, x) * unit, side, 0, corner, sizes, None, out, affines)
    for c in range(1, side.channels):
        factor = load(a, x + c * sizes.plane) * unit
        add_products(planes, window, factor, side, c, corner, sizes, out, out, affines)


@njit(**options)
def exclude(scores, outside, window, corner, taps):
    """Adds −∞ to the scores of neighbours outside the image, where the tile ``outside`` has it."""
    step = PARTS * lanes_of(scores)
    for t in range(taps):
        store(scores, t * step, load(scores, t * step) + load(outside, corner + window[t]))


@njit(**options)
def exponentiate(scores, log, shift, taps):
    """2^(score[t] − log − shift) in place of score[t]."""
    step = PARTS * lanes_of(scores)
    less = zeros(scores) - log
    for t in range(taps):
        store(scores, t * step, exp2(less + load(scores, t * step), shift))


@njit(**options)
def attend(planes, window, unit, shift, taps_up, q, keys, values, row, sizes, out, logs, outside, alpha):
    """Output and log2-sum-exp2 along a row of one plane.

    Args:
        unit: of the scores: scale · log2(e).
        shift, taps_up: weights are divided by 2^shift = ``taps_up`` ≥ taps until they are normalised, so that
            no sum over the window is larger than its terms.
        row: where its first window begins.
        outside: the tile of ``exclude``, if neighbours are excluded.
        alpha: room for α of one vector of positions.
    """
    R, taps, plane = len(planes), sizes.taps, sizes.plane
    lanes = lanes_of(q)
    step = PARTS * lanes
    for corner in range(row, row + sizes.columns * lanes, step):
        x = corner + sizes.border * sizes.stride + sizes.margin * lanes
        products(planes, window, q, unit, x, keys, corner, sizes, alpha, None)
        if sizes.exclude:
            exclude(alpha, outside, window, corner, taps)
        largest = load(alpha, 0)
        for t in range(1, taps):
            largest = maximum(largest, load(alpha, t * step))
        exponentiate(alpha, largest, shift, taps)
        total = zeros(q)
        for t in range(taps):
            total = total + load(alpha, t * step)
        store(logs, x, largest + log2(total * taps_up))
        for c in range(values.channels):
            aggregate = zeros(q)
            for t in range(taps):
                affine = affine_map(planes, values, corner + window[t] + c * R * plane, plane, c * taps + t)
                aggregate = fma(load(alpha, t * step), affine, aggregate)
            store(out, x + c * plane, aggregate / total)


@njit(**options)
def softmax_backward(
    planes, window, unit, scale, q, g, logs, keys, values, corner, x, sizes, outside, alpha, ds, dq, affines
):
    """Computes α, ds and dquery at the centres of one plane.

    Args:
        affines: room for A^K.
    """
    taps, plane = sizes.taps, sizes.plane
    step = PARTS * lanes_of(q)
    products(planes, window, q, unit, x, keys, corner, sizes, alpha, affines)
    if sizes.exclude:
        exclude(alpha, outside, window, corner, taps)
    products(planes, window, g, scale, x, values, corner, sizes, ds, None)  # scale · dα; becomes ds below
    exponentiate(alpha, load(logs, x), zeros(q), taps)  # scores of the same bits as logs were made from
    mean = zeros(q)  # scale · Σ_t α[t] dα[t]
    weights = tiny(q)  # Σ_t α[t]: one, but for the rounding of logs; none where columns have no image
    for t in range(taps):
        weight = load(alpha, t * step)
        mean = fma(weight, load(ds, t * step), mean)
        weights = weights + weight
    mean = mean / weights
    for c in range(keys.channels):
        total = zeros(q)
        for t in range(taps):
            d_score = load(ds, t * step)
            if c == 0:
                d_score = load(alpha, t * step) * (d_score - mean)
                store(ds, t * step, d_score)
            total = fma(d_score, load(affines, (c * taps + t) * step), total)
        store(dq, x + c * plane, total)


@njit(**options)
def affine_map_backward(planes, pair, window, weights, a, x, side, corner, sizes, gradient, sums):
    """Adds the gradients of f, ψ and β, given the gradient of the affine map A_c[t], e = weights[t] · a_c.

    Args:
        weights, a: of one plane P, or of two, one after the other in memory; so are filters and sums.
    """
    R, D, taps, plane = len(planes), len(pair), sizes.taps, sizes.plane
    lanes = lanes_of(a)
    step = PARTS * lanes
    other = side.channels * taps * (R + 1) * lanes  # from the first plane's filters to the second's
    for c in range(side.channels):
        first = load(a, x + c * plane)
        second = load(a, x + (c + (D - 1) * side.channels) * plane)
        for t in range(taps):
            at, entry = corner + window[t] + c * R * plane, (c * taps + t) * (R + 1) * lanes
            e = load(weights, t * step) * first
            accumulate(sums, entry + R * lanes, e)
            if D == 2:
                e2 = load(weights, (taps + t) * step) * second
                accumulate(sums, other + entry + R * lanes, e2)
            for r in range(R):
                here, psi_at = at + r * plane, entry + r * lanes
                feature = load(side.tiles, here)
                accumulate_product(sums, psi_at, e, feature)
                total = fma(e, repeat(side.table, psi_at), load(gradient, here))
                if D == 2:
                    accumulate_product(sums, other + psi_at, e2, feature)
                    total = fma(e2, repeat(side.table, other + psi_at), total)
                store(gradient, here, total)


@njit(**options)
def row_backward(
    planes, pair, window, unit, scale, q, g, logs, keys, values, row, sizes,
    outside, dq, d_keys, d_values, sums_k, sums_v, alpha, ds, affines,
):  # fmt: skip
    """All gradients along a row of one plane or two.

    Args:
        alpha, ds, affines: room for those of one vector of positions.
    """
    lanes = lanes_of(q)
    step = PARTS * lanes
    plane, room = sizes.plane, sizes.taps * step
    for corner in range(row, row + sizes.columns * lanes, step):
        x = corner + sizes.border * sizes.stride + sizes.margin * lanes
        for d in range(len(pair)):
            k, v = d * keys.channels * plane, d * values.channels * plane
            softmax_backward(
                planes, window, unit, scale, advance(q, k), advance(g, v), advance(logs, d * plane),
                of_plane(planes, keys, d, sizes), of_plane(planes, values, d, sizes), corner, x, sizes,
                outside, advance(alpha, d * room), advance(ds, d * room), advance(dq, k), affines,
            )  # fmt: skip
        affine_map_backward(planes, pair, window, alpha, g, x, values, corner, sizes, d_values, sums_v)
        affine_map_backward(planes, pair, window, ds, q, x, keys, corner, sizes, d_keys, sums_k)


_signature = types.void(types.CPointer(types.int64))


def _of_length(length):
    """A tuple for a kernel to close over, as ``planes`` or ``pair``.

    Numba compiles its length as a constant, so that loops over it unroll. Its values are part of the key of
    the cache on disk: a change of the sources invalidates kept code (``cpu/native.py``).
    """
    return (KERNEL_HASH,) * length


@cache
def forward_worker(name, order):
    """The forward pass as a native function of an argument block, for one dtype and R = order.

    The kernel is a closure, not a function that takes these as arguments: Numba would compile that twice.
    """
    dtype, planes = np.dtype(name).type, _of_length(order)

    @native(_signature, f"forward-{name}-{order}")
    def worker(args):
        # not literals: Numba would compile what takes them once for each value
        outward, inward, none = np.int64(0), np.int64(1), np.int64(0)
        addresses, sizes = read_arguments(args)
        reach = sizes.reach_j
        R, P, c_k, c_v, plane = len(planes), sizes.planes, sizes.c_k, sizes.c_v, sizes.plane
        entries = P * sizes.taps * (R + 1)
        window = pointer(addresses.window, np.int64)
        unit = splat(dtype(pointer(addresses.scale, np.float64)[0] * LOG2_E))
        shift, taps_up = splat(dtype(sizes.shift)), splat(dtype(np.int64(1) << sizes.shift))
        query, key, value = read_map(args, 0), read_map(args, 1), read_map(args, 2)
        out, lse = read_map(args, 3), read_map(args, 4)

        q = advance(pointer(addresses.scratch, dtype), fetch_add(args, 0, 1) * sizes.scratch)
        lanes = lanes_of(q)
        clear(q, sizes.scratch)
        o = advance(q, P * c_k * plane)  # [P, c, rows, columns, lanes], as q
        logs = advance(o, P * c_v * plane)
        k = advance(logs, P * plane)
        v = advance(k, c_k * R * plane)
        outside = advance(v, c_v * R * plane)
        tiles = (c_k + c_v) * R  # of keys and values
        neighbours = 2 * (sizes.neighbours + lanes)  # these and their copies
        table_k = advance(k, neighbours)
        table_v = advance(table_k, entries * c_k * lanes)
        alpha = advance(table_v, entries * c_v * lanes)
        keys, values = Side(c_k, k, table_k), Side(c_v, v, table_v)
        heads = np.int64(-1)  # whose tables are there

        while True:
            turn = fetch_add(args, 1, sizes.chunk)
            if turn >= sizes.tasks:
                break
            for number in range(turn, min(turn + sizes.chunk, sizes.tasks)):
                task = read_task(number, sizes)
                if task.heads != heads:
                    heads = task.heads
                    read_table(addresses.table_k, heads, entries * c_k, sizes, table_k)
                    read_table(addresses.table_v, heads, entries * c_v, sizes, table_v)
                start, stop = task.start, task.stop
                top, bottom = reached(start, stop, sizes)
                if sizes.exclude:
                    mark_outside(task, sizes, outside)
                for b in range(task.first, task.last):
                    if sizes.strips > 1:  # else nothing writes where the border is
                        clear(k, tiles * plane)
                        clear(copy_of(k, sizes), tiles * plane)
                    copy(inward, query, b, task, start, stop, none, P, plane, c_k * plane, sizes, q)
                    copy(inward, key, b, task, top, bottom, reach, R, R * plane, plane, sizes, k)
                    copy(inward, value, b, task, top, bottom, reach, R, R * plane, plane, sizes, v)
                    fill_copies(k, tiles, top, bottom, task, sizes)
                    for i in range(start, stop):
                        row = (i - start + sizes.halo - sizes.border) * sizes.stride
                        for p in range(P):
                            attend(
                                planes, window, unit, shift, taps_up, advance(q, p * c_k * plane),
                                of_plane(planes, keys, p, sizes), of_plane(planes, values, p, sizes), row,
                                sizes, advance(o, p * c_v * plane), advance(logs, p * plane), outside, alpha,
                            )  # fmt: skip
                    copy(outward, out, b, task, start, stop, none, P, plane, c_v * plane, sizes, o)
                    copy(outward, lse, b, task, start, stop, none, P, plane, plane, sizes, logs)

    return worker


@cache
def backward_worker(name, order):
    """The backward pass as a native function, for one dtype and R = order."""
    dtype, planes = np.dtype(name).type, _of_length(order)
    pair = _of_length(1 if order % 2 else 2)

    @native(_signature, f"backward-{name}-{order}")
    def worker(args):
        # not literals: Numba would compile what takes them once for each value
        outward, inward, none = np.int64(0), np.int64(1), np.int64(0)
        addresses, sizes = read_arguments(args)
        reach = sizes.reach_j
        R, P, c_k, c_v, plane = len(planes), sizes.planes, sizes.c_k, sizes.c_v, sizes.plane
        entries = P * sizes.taps * (R + 1)
        window = pointer(addresses.window, np.int64)
        scale = splat(dtype(pointer(addresses.scale, np.float64)[0]))
        unit = splat(dtype(pointer(addresses.scale, np.float64)[0] * LOG2_E))
        query, key, value = read_map(args, 0), read_map(args, 1), read_map(args, 2)
        grad, lse = read_map(args, 3), read_map(args, 4)
        d_query, d_key, d_value = read_map(args, 5), read_map(args, 6), read_map(args, 7)
        d_table_k, d_table_v = args[MAPS + 8 * MAP], args[MAPS + 8 * MAP + 1]
        shared = d_key.data == d_value.data  # key and value are one tensor: so is their gradient

        q = advance(pointer(addresses.scratch, dtype), fetch_add(args, 0, 1) * sizes.scratch)
        lanes = lanes_of(q)
        clear(q, sizes.scratch)
        dq = advance(q, P * c_k * plane)  # [P, c, rows, columns, lanes], as q
        g = advance(dq, P * c_k * plane)
        logs = advance(g, P * c_v * plane)
        k = advance(logs, P * plane)
        v = advance(k, c_k * R * plane)
        outside = advance(v, c_v * R * plane)
        tiles = (c_k + c_v) * R  # of keys and values
        neighbours = 2 * (sizes.neighbours + lanes)  # these and their copies
        d_k = advance(k, neighbours)
        d_v = d_k if shared else advance(d_k, c_k * R * plane)
        table_k = advance(d_k, neighbours)
        table_v = advance(table_k, entries * c_k * lanes)
        own_sums = advance(table_v, entries * c_v * lanes)  # of K, then of V
        others_sums = advance(own_sums, entries * (c_k + c_v) * lanes)
        alpha = advance(others_sums, entries * (c_k + c_v) * lanes)
        ds = advance(alpha, len(pair) * sizes.taps * PARTS * lanes)
        affines = advance(ds, len(pair) * sizes.taps * PARTS * lanes)
        keys, values = Side(c_k, k, table_k), Side(c_v, v, table_v)
        heads = np.int64(-1)  # whose tables are there

        while True:
            turn = fetch_add(args, 1, sizes.chunk)
            if turn >= sizes.tasks:
                break
            for number in range(turn, min(turn + sizes.chunk, sizes.tasks)):
                task = read_task(number, sizes)
                if task.heads != heads:
                    heads = task.heads
                    read_table(addresses.table_k, heads, entries * c_k, sizes, table_k)
                    read_table(addresses.table_v, heads, entries * c_v, sizes, table_v)
                start, stop, above, below = task.start, task.stop, task.above, task.below
                top, bottom = reached(above, below, sizes)
                first_own, last_own = owned(start, stop, sizes)
                if sizes.exclude:
                    mark_outside(task, sizes, outside)
                clear(own_sums, entries * (c_k + c_v) * lanes)
                for b in range(task.first, task.last):
                    if sizes.strips > 1:  # else nothing writes where the border is
                        clear(k, tiles * plane)
                        clear(copy_of(k, sizes), tiles * plane)
                    copy(inward, query, b, task, above, below, none, P, plane, c_k * plane, sizes, q)
                    copy(inward, grad, b, task, above, below, none, P, plane, c_v * plane, sizes, g)
                    copy(inward, lse, b, task, above, below, none, P, plane, plane, sizes, logs)
                    copy(inward, key, b, task, top, bottom, reach, R, R * plane, plane, sizes, k)
                    copy(inward, value, b, task, top, bottom, reach, R, R * plane, plane, sizes, v)
                    fill_copies(k, tiles, top, bottom, task, sizes)
                    clear_sums(d_k, tiles, first_own, last_own, task, sizes)
                    for i in range(above, below):
                        row = (i - start + sizes.halo - sizes.border) * sizes.stride
                        # rows of other strips have a part in this one's gradients of keys and values alone
                        sums = own_sums if start <= i < stop else others_sums
                        for p in range(0, P, len(pair)):
                            first = p * sizes.taps * (R + 1) * lanes
                            row_backward(
                                planes, pair, window, unit, scale, advance(q, p * c_k * plane),
                                advance(g, p * c_v * plane), advance(logs, p * plane),
                                of_plane(planes, keys, p, sizes), of_plane(planes, values, p, sizes), row,
                                sizes, outside, advance(dq, p * c_k * plane), d_k, d_v,
                                advance(sums, first * c_k),
                                advance(sums, entries * c_k * lanes + first * c_v), alpha, ds, affines,
                            )  # fmt: skip
                    add_copies(d_k, tiles, first_own, last_own, task, sizes)
                    copy(outward, d_query, b, task, start, stop, none, P, plane, c_k * plane, sizes, dq)
                    copy(outward, d_key, b, task, first_own, last_own, reach, R, R * plane, plane, sizes, d_k)
                    if not shared:
                        copy(
                            outward, d_value, b, task, first_own, last_own, reach, R, R * plane, plane, sizes,
                            d_v,
                        )  # fmt: skip
                share = number // (sizes.head_blocks * sizes.strips) * sizes.strips + number % sizes.strips
                write_sums(own_sums, heads, share, entries * c_k, sizes, d_table_k)
                write_sums(
                    advance(own_sums, entries * c_k * lanes), heads, share, entries * c_v, sizes, d_table_v
                )

    return worker
