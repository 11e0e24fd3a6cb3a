"""The memory of the CPU kernels: tiles, and what goes between them and the caller's tensors.

A tile holds one channel and plane of a block of heads and images: ``[rows, columns, lanes]``, a lane for
each head of each image. It has a border, so that no window needs a branch: a first row, and ``margin``
columns left of each row. The border holds zeros, and the columns left of a row serve the row before as its
right border too; or, as far as ``reach``, it holds features that the caller has there. For each row of
positions ``aim`` computes where the cells of a window are. Those above and below the image are all in the
first row, so that a tile has no more rows than the features have.

The border of keys and values is cleared once, as nothing writes it. In the tile of ``mark_outside`` it is −∞.
Gradients are added to the border of their tiles, too, and nobody reads them there.

The widest registers hold two columns, a cache line. At an odd column offset such a load would cross two
lines, at twice the cost of one. So what windows reach, ``neighbours`` numbers in all, exists twice: the copy
begins one column later, and the offsets of odd columns lead into it. Gradients are accumulated in the same
way, in the tiles for even offsets and in the copy for odd ones, and then added.
"""

# No `from __future__ import annotations`: Numba reads these functions, and they are not annotated.
from collections import namedtuple

import numpy as np
from numba import njit

from selfconv.ops.cpu.simd import (
    advance,
    lanes_of,
    pointer,
    read_tuple,
    rezip,
    transpose_in,
    transpose_out,
    unzip,
)

# The argument block: two counters that threads share, addresses, sizes, maps, and addresses of outputs.
COUNTERS = 2
Addresses = namedtuple("Addresses", "scratch scale window table_k table_v")
# A window reaches ``border`` rows and ``margin`` columns to either side. ``reach_i`` and ``reach_j`` are the
# same where the caller's keys and values have such a border (circular images), and else 0. The tiles of a
# strip have ``halo`` more rows to either side. ``stride`` and ``plane`` are the numbers from one row of a
# tile to the next, and from one tile to the next; ``neighbours`` those of all tiles of keys and values,
# ``scratch`` those of a thread.
Sizes = namedtuple(
    "Sizes",
    "tasks chunk scratch cells_room images planes height width c_k c_v taps shift border margin reach_i "
    "reach_j exclude lane_images lane_heads head_blocks batch strip strips halo rows stride plane columns "
    "neighbours",
)
# Features [N, C, P, h, w] of the caller: address and strides; then the channels of a head, how far apart
# blocks of images and of heads are, and the address of a table that says where each lane's head begins.
Map = namedtuple("Map", "data c p i j channels block_n block_h lanes")
SIZES = COUNTERS + len(Addresses._fields)
MAPS = SIZES + len(Sizes._fields)
MAP = len(Map._fields)

# A task: blocks of images from first to last, a block of heads, rows from start to stop. The rows whose
# windows reach its own are those from above to below. Its tiles have the row tile_top after the border.
Task = namedtuple("Task", "first last heads start stop above below tile_top")

options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
# Only kernels call these functions; a quarter of the time to compile would go into calls from elsewhere.
options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@njit(**options)
def read_arguments(args):
    return read_tuple(args, COUNTERS, Addresses), read_tuple(args, SIZES, Sizes)


@njit(**options)
def read_map(args, i):
    return read_tuple(args, MAPS + i * MAP, Map)


@njit(**options)
def read_task(task, sizes):
    rest, strip = divmod(task, sizes.strips)
    batch, heads = divmod(rest, sizes.head_blocks)
    blocks = (sizes.images + sizes.lane_images - 1) // sizes.lane_images
    first, last = batch * sizes.batch, min((batch + 1) * sizes.batch, blocks)
    start, stop = strip * sizes.strip, min((strip + 1) * sizes.strip, sizes.height)
    above, below = max(start - sizes.border, 0), min(stop + sizes.border, sizes.height)
    tile_top = max(start - sizes.halo, -sizes.reach_i)
    return Task(first, last, heads, start, stop, above, below, tile_top)


@njit(**options)
def reached(first, stop, sizes):
    """The rows of keys and values in the windows of rows from first to stop."""
    top, bottom = -sizes.reach_i, sizes.height + sizes.reach_i
    return max(first - sizes.border, top), min(stop + sizes.border, bottom)


@njit(**options)
def owned(start, stop, sizes):
    """The rows of keys and values of which the rows from start to stop write the gradient."""
    top, bottom = -sizes.reach_i, sizes.height + sizes.reach_i
    return start if start > 0 else top, stop if stop < sizes.height else bottom


@njit(**options)
def aim(window, i, task, sizes, cells):
    """Where the cells of windows around row i are in a tile, to be added to the column of the leftmost cell.

    Args:
        window: rows of the cells below the centre, then offsets of their columns.
    """
    for t in range(sizes.taps):
        y = i + window[t]
        inside = -sizes.reach_i <= y and y < sizes.height + sizes.reach_i
        cells[t] = window[sizes.taps + t] + (row_number(y, task) * sizes.stride if inside else 0)


@njit(**options)
def mark_outside(task, sizes, tile):
    """A tile that is 0 inside the image and −∞ outside, and its copy: added to a score, it excludes."""
    lanes, copied = lanes_of(tile), copy_of(tile, sizes)
    for i in range(sizes.plane):
        tile[i] = -np.inf
        copied[i] = -np.inf
    for i in range(task.tile_top, min(task.tile_top + sizes.rows, sizes.height)):
        row = advance(rows_from(i, tile, task, sizes), sizes.margin * lanes)
        clear(row, sizes.width * lanes)
        clear(copy_of(row, sizes), sizes.width * lanes)


@njit(**options)
def clear(p, n):
    for i in range(n):
        p[i] = 0


@njit(**options)
def copy_of(tiles, sizes):
    """The copies for odd column offsets of tiles that windows reach."""
    return advance(tiles, sizes.neighbours + lanes_of(tiles))


@njit(**options)
def fill_copies(tiles, number, first, stop, task, sizes):
    """Copies the rows from first to stop of some tiles; in the rows around them, both are zero."""
    for tile in range(number):
        rows = rows_from(first, advance(tiles, tile * sizes.plane), task, sizes)
        copied = copy_of(rows, sizes)
        for i in range((stop - first) * sizes.stride):
            copied[i] = rows[i]


@njit(**options)
def clear_sums(tiles, number, first, stop, task, sizes):
    """Clears gradients of the rows from first to stop, and their copies: nobody reads those around them."""
    for tile in range(number):
        rows = rows_from(first, advance(tiles, tile * sizes.plane), task, sizes)
        clear(rows, (stop - first) * sizes.stride)
        clear(copy_of(rows, sizes), (stop - first) * sizes.stride)


@njit(**options)
def add_copies(tiles, number, first, stop, task, sizes):
    """Gradients of even and of odd column offsets, added."""
    for tile in range(number):
        rows = rows_from(first, advance(tiles, tile * sizes.plane), task, sizes)
        copied = copy_of(rows, sizes)
        for i in range((stop - first) * sizes.stride):
            rows[i] += copied[i]


@njit(**options)
def row_number(i, task):
    """Which row of a tile has row i of the image."""
    return 1 + i - task.tile_top


@njit(**options)
def rows_from(first, tile, task, sizes):
    return advance(tile, row_number(first, task) * sizes.stride)


@njit(**options)
def copy(inward, features, block, task, first, stop, reach, planes, c_step, p_step, sizes, tiles):
    """Rows from first to stop of a block of images into tiles, or back.

    Args:
        reach: how many columns the features have beyond the image, on either side.
        c_step, p_step: numbers from one channel's tile to the next, and from one plane's.
    """
    lanes = lanes_of(tiles)
    present = min(sizes.images - block * sizes.lane_images, sizes.lane_images) * sizes.lane_heads
    begin = block * features.block_n + task.heads * features.block_h - reach * features.j
    outside = advance(pointer(features.data, tiles), begin)
    inside = advance(rows_from(first, tiles, task, sizes), (sizes.margin - reach) * lanes)
    for p in range(planes):
        for i in range(first, stop):
            copy_row(
                inward, features, advance(outside, p * features.p + i * features.i), present,
                sizes.width + 2 * reach, c_step, advance(inside, p * p_step + (i - first) * sizes.stride),
            )  # fmt: skip


@njit(**options)
def copy_row(inward, features, outside, present, width, c_step, inside):
    """One row, of all channels.

    Where the numbers of a lane lie side by side, squares of a register each way are transposed; where lanes
    do, with one, two or four channels each, the channels are deinterleaved into their tiles.

    Args:
        present: lanes that have an image; the others become zero.
    """
    lanes, channels, offsets = lanes_of(inside), features.channels, pointer(features.lanes, np.int64)
    if present == lanes and features.j == 1 and width >= lanes:
        for c in range(channels):
            for part in range(0, width, lanes):
                j = min(part, width - lanes)
                there, here = advance(outside, c * features.c + j), advance(inside, c * c_step + j * lanes)
                if inward:
                    transpose_in(there, offsets, here, lanes)
                else:
                    transpose_out(here, lanes, there, offsets)
    elif present == lanes and features.c == 1 and channels >= lanes:
        for j in range(width):
            for part in range(0, channels, lanes):
                c = min(part, channels - lanes)
                there, here = advance(outside, c + j * features.j), advance(inside, c * c_step + j * lanes)
                if inward:
                    transpose_in(there, offsets, here, c_step)
                else:
                    transpose_out(here, c_step, there, offsets)
    elif present == lanes and features.c == 1 and can_deinterleave(offsets, channels, lanes):
        for j in range(width):
            there, here = advance(outside, j * features.j), advance(inside, j * lanes)
            deinterleave(inward, there, channels, c_step, here)
    else:
        for c in range(channels):
            for j in range(width):
                there = advance(outside, c * features.c + j * features.j)
                here = advance(inside, c * c_step + j * lanes)
                if inward:
                    for lane in range(lanes):
                        here[lane] = there[offsets[lane]] if lane < present else 0
                else:
                    for lane in range(present):
                        there[offsets[lane]] = here[lane]


@njit(**options)
def can_deinterleave(offsets, channels, lanes):
    side_by_side = offsets[lanes - 1] == (lanes - 1) * channels  # heads of one image
    return side_by_side and (channels == 1 or channels == 2 or channels == 4)


@njit(**options)
def deinterleave(inward, outside, channels, c_step, inside):
    """Channels that alternate in the caller's memory to one tile each, or back."""
    if inward:
        if channels == 1:
            unzip(outside, inside, c_step, 1)
        elif channels == 2:
            unzip(outside, inside, c_step, 2)
        else:
            unzip(outside, inside, c_step, 4)
    elif channels == 1:
        rezip(inside, c_step, outside, 1)
    elif channels == 2:
        rezip(inside, c_step, outside, 2)
    else:
        rezip(inside, c_step, outside, 4)


@njit(**options)
def read_table(address, heads, entries, sizes, filters):
    """A table [heads, entries] of the caller's, for a block of heads, as [entries, lanes]."""
    lanes = lanes_of(filters)
    for lane in range(lanes):
        head = heads * sizes.lane_heads + lane % sizes.lane_heads
        row = advance(pointer(address, filters), head * entries)
        for entry in range(entries):
            filters[entry * lanes + lane] = row[entry]


@njit(**options)
def write_sums(sums, heads, share, entries, sizes, address):
    """[entries, lanes], added up over lanes of the same head, to [shares, heads, entries] of the caller's."""
    lanes = lanes_of(sums)
    for lane in range(lanes):
        head = (share * sizes.head_blocks + heads) * sizes.lane_heads + lane % sizes.lane_heads
        row = advance(pointer(address, sums), head * entries)
        for entry in range(entries):
            row[entry] += sums[entry * lanes + lane]
