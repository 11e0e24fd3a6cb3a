"""The CPU kernels as native functions, which take tasks until none is left.

A task is a block of heads of a block of images, or of a few blocks of small ones, and all rows or a strip of
them. A worker copies their channels into tiles (``cpu/tiles.py``): any strides of the caller's tensors do;
computes row after row (``cpu/kernels.py``), and copies the results back.

Compiled for a dtype; for R = ``len(planes)``, so that loops over R unroll; and for ``len(pair)`` planes P,
one or two, that share a pass. All else, the window's size and all strides included, is read at
run time: one compilation serves all shapes.
"""

# No `from __future__ import annotations`: Numba reads these functions, and they are not annotated.
from functools import cache

import numpy as np
from numba import types

from selfconv.ops.cpu.kernels import Side, attend, of_plane, row_backward
from selfconv.ops.cpu.native import KERNEL_HASH, native
from selfconv.ops.cpu.simd import PARTS, advance, fetch_add, lanes_of, pointer, splat
from selfconv.ops.cpu.tiles import (
    MAP,
    MAPS,
    add_copies,
    aim,
    clear,
    clear_sums,
    copy,
    fill_copies,
    mark_outside,
    owned,
    reached,
    read_arguments,
    read_map,
    read_table,
    read_task,
    row_number,
    write_sums,
)

LOG2_E = 1.4426950408889634

_signature = types.void(types.CPointer(types.int64))


def _of_length(length):
    """A tuple for a kernel to close over, as ``planes`` or ``pair``.

    Numba compiles its length as a constant, so that loops over it unroll. Its values are part of the key of
    the cache on disk: a change of the sources invalidates kept code (``cpu/native.py``).
    """
    return (KERNEL_HASH,) * length


def _pair(order):
    """The planes P that share a pass, and so the loads of keys and values.

    Lifting has R = 1; otherwise P = R, so that an even R has an even number of planes P.
    """
    return _of_length(1 if order % 2 else 2)


@cache
def forward_worker(name, order):
    """The forward pass as a native function of an argument block, for one dtype and R = order.

    The kernel is a closure, not a function that takes these as arguments: Numba would compile that twice.
    """
    dtype, planes, pair = np.dtype(name).type, _of_length(order), _pair(order)
    itemsize = np.dtype(name).itemsize

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

        own = addresses.scratch + fetch_add(args, 0, 1) * sizes.scratch * itemsize
        cells = pointer(own, np.int64)
        q = advance(pointer(own, dtype), sizes.cells_room)
        lanes = lanes_of(q)
        clear(q, sizes.scratch - sizes.cells_room)
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
                    copy(inward, query, b, task, start, stop, none, P, plane, c_k * plane, sizes, q)
                    copy(inward, key, b, task, top, bottom, reach, R, R * plane, plane, sizes, k)
                    copy(inward, value, b, task, top, bottom, reach, R, R * plane, plane, sizes, v)
                    fill_copies(k, tiles, top, bottom, task, sizes)
                    for i in range(start, stop):
                        aim(window, i, task, sizes, cells)
                        row = row_number(i, task) * sizes.stride + sizes.margin * lanes
                        for p in range(0, P, len(pair)):
                            attend(
                                planes, pair, cells, unit, shift, taps_up, advance(q, p * c_k * plane),
                                of_plane(planes, keys, p, sizes), of_plane(planes, values, p, sizes), row,
                                sizes, advance(o, p * c_v * plane), advance(logs, p * plane), outside, alpha,
                            )  # fmt: skip
                    copy(outward, out, b, task, start, stop, none, P, plane, c_v * plane, sizes, o)
                    copy(outward, lse, b, task, start, stop, none, P, plane, plane, sizes, logs)

    return worker


@cache
def backward_worker(name, order):
    """The backward pass as a native function, for one dtype and R = order."""
    dtype, planes, pair = np.dtype(name).type, _of_length(order), _pair(order)
    itemsize = np.dtype(name).itemsize

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

        own = addresses.scratch + fetch_add(args, 0, 1) * sizes.scratch * itemsize
        cells = pointer(own, np.int64)
        q = advance(pointer(own, dtype), sizes.cells_room)
        lanes = lanes_of(q)
        clear(q, sizes.scratch - sizes.cells_room)
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
                    copy(inward, query, b, task, above, below, none, P, plane, c_k * plane, sizes, q)
                    copy(inward, grad, b, task, above, below, none, P, plane, c_v * plane, sizes, g)
                    copy(inward, lse, b, task, above, below, none, P, plane, plane, sizes, logs)
                    copy(inward, key, b, task, top, bottom, reach, R, R * plane, plane, sizes, k)
                    copy(inward, value, b, task, top, bottom, reach, R, R * plane, plane, sizes, v)
                    fill_copies(k, tiles, top, bottom, task, sizes)
                    clear_sums(d_k, tiles, first_own, last_own, task, sizes)
                    for i in range(above, below):
                        aim(window, i, task, sizes, cells)
                        row = row_number(i, task) * sizes.stride + sizes.margin * lanes
                        # rows of other strips have a part in this one's gradients of keys and values alone
                        sums = own_sums if start <= i < stop else others_sums
                        for p in range(0, P, len(pair)):
                            first = p * sizes.taps * (R + 1) * lanes
                            row_backward(
                                planes, pair, cells, unit, scale, advance(q, p * c_k * plane),
                                advance(g, p * c_v * plane), advance(logs, p * plane),
                                of_plane(planes, keys, p, sizes), of_plane(planes, values, p, sizes), row,
                                sizes, outside, advance(dq, p * c_k * plane), d_k, d_v,
                                advance(sums, first * c_k),
                                advance(sums, entries * c_k * lanes + first * c_v), alpha, ds,
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
