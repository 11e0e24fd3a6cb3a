"""The equations of the CPU kernels along a row of positions: ``attend``, and ``row_backward`` for gradients.

Heads and images never meet, so the lanes of a vector register are heads of images: the same channel, plane
and position of each. A ``Vector`` is PARTS such registers, for PARTS columns side by side. All loads are
then aligned to a register, whatever the offset in the window, and by ``cpu/tiles.py`` pairs of registers
to a cache line; a filter value is one register, used for all columns; and sums over positions are sums of
registers.

For each output plane P and PARTS positions x the window is walked offset by offset:

    score[t]  = Σ_c query_c · A^K_c[t],     A^K_c[t] = Σ_R key_{c,R}(x + t) ψ_{c,R}[t] + β_c[t]
    α[t]      = 2^(score[t] · scale·log2(e) − lse)
    out_c     = Σ_t α[t] · A^V_c[t]

and backwards, with g the gradient of out (ops/README.md derives it; its ds is without the scale):

    dα[t] = Σ_c g_c · A^V_c[t]              ds[t] = scale · α[t] (dα[t] − Σ_t α[t] dα[t])
    dquery_c = Σ_t ds[t] · A^K_c[t]

    df_{c,R}(x + t) += e ψ_{c,R}[t]         dψ_{c,R}[t] += e f_{c,R}(x + t)         dβ_c[t] += e

where f is the key and e = ds[t] · query_c, and again where f is the value and e = α[t] · g_c.

Filters arrive as tables ``[heads, P, C/heads, k, k, R + 1]``: for each channel and offset first ψ for every
R, then β. Nothing of size k²·C·h·w exists: scores, α and dα are those of PARTS positions. A^K is computed
again for dquery, in the pass that loads f and ψ anyway: storing it would take more of the fastest memory.

``planes`` and ``pair`` are tuples whose lengths are constants: R planes of keys and values, and one or two
planes P that share a pass, and with it the loads of keys and values.
"""

# No `from __future__ import annotations`: Numba reads these functions, and they are not annotated.
from collections import namedtuple

from numba import njit

from selfconv.ops.cpu.simd import (
    PARTS,
    accumulate,
    accumulate_product,
    advance,
    exp2,
    fma,
    lanes_of,
    load,
    log2,
    maximum,
    repeat,
    store,
    tiny,
    zeros,
)
from selfconv.ops.cpu.tiles import options

# Keys or values: channels of a head, tiles [c, R, rows, columns, lanes], filters [c, taps, R + 1, lanes].
Side = namedtuple("Side", "channels tiles table")


@njit(**options)
def of_plane(planes, side, p, sizes):
    """The side with its filter table advanced to plane p."""
    entries = sizes.taps * (len(planes) + 1) * side.channels
    return Side(side.channels, side.tiles, advance(side.table, p * entries * lanes_of(side.table)))


@njit(forceinline=True, **options)
def affine_maps(planes, pair, side, at, plane, entry, other):
    """A_c[t] = Σ_R f_{c,R}(x + t) ψ_{c,R}[t] + β_c[t] of one plane P, or of two, which share the loads of f.

    Args:
        at: the offset of x + t in f_c.
        other: how far the second plane's filters are from the first's.
    """
    R, lanes = len(planes), lanes_of(side.tiles)
    beta = (entry * (R + 1) + R) * lanes
    first = repeat(side.table, beta)
    second = repeat(side.table, other + beta) if len(pair) == 2 else first
    for r in range(R):
        feature, psi = load(side.tiles, at + r * plane), (entry * (R + 1) + r) * lanes
        first = fma(feature, repeat(side.table, psi), first)
        if len(pair) == 2:
            second = fma(feature, repeat(side.table, other + psi), second)
    return first, second


@njit(forceinline=True, **options)
def add_product(factor, affine, so_far, out, t):
    """out[t] = so_far[t] + factor · A_c[t], or without so_far if that is None."""
    step = PARTS * lanes_of(out)
    store(out, t * step, factor * affine if so_far is None else fma(factor, affine, load(so_far, t * step)))


@njit(forceinline=True, **options)
def add_products(planes, pair, cells, a, multiplier, x, side, c, column, sizes, so_far, out):
    """out[t] = so_far[t] + multiplier · a_c(x) · A_c[t], of one plane or of two."""
    R, D, taps, plane = len(planes), len(pair), sizes.taps, sizes.plane
    other = taps * side.channels * (R + 1) * lanes_of(a)
    factor = load(a, x + c * plane) * multiplier
    factor2 = load(a, x + (c + (D - 1) * side.channels) * plane) * multiplier
    for t in range(taps):
        entry = c * taps + t
        affine, affine2 = affine_maps(
            planes, pair, side, column + cells[t] + c * R * plane, plane, entry, other
        )
        add_product(factor, affine, so_far, out, t)
        if D == 2:
            add_product(factor2, affine2, so_far, out, taps + t)


@njit(**options)
def products(planes, pair, cells, a, multiplier, x, side, column, sizes, out):
    """out[t] = Σ_c multiplier · a_c(x) · A_c[t], of one plane or of two."""
    add_products(planes, pair, cells, a, multiplier, x, side, 0, column, sizes, None, out)
    for c in range(1, side.channels):
        add_products(planes, pair, cells, a, multiplier, x, side, c, column, sizes, out, out)


@njit(**options)
def exclude(scores, outside, cells, column, taps):
    """Adds −∞ to the scores of neighbours outside the image, where the tile ``outside`` has it."""
    step = PARTS * lanes_of(scores)
    for t in range(taps):
        store(scores, t * step, load(scores, t * step) + load(outside, column + cells[t]))


@njit(**options)
def exponentiate(scores, log, shift, taps):
    """2^(score[t] − log − shift) in place of score[t]."""
    step = PARTS * lanes_of(scores)
    less = zeros(scores) - log
    for t in range(taps):
        store(scores, t * step, exp2(less + load(scores, t * step), shift))


@njit(**options)
def softmax(scores, shift, taps_up, taps, logs, x):
    """Weights 2^(score[t] − largest − shift) in place of score[t]; returns their sum.

    Args:
        shift, taps_up: weights are divided by 2^shift = ``taps_up`` ≥ taps until they are normalised, so that
            no sum over the window is larger than its terms.
    """
    step = PARTS * lanes_of(scores)
    largest = load(scores, 0)
    for t in range(1, taps):
        largest = maximum(largest, load(scores, t * step))
    exponentiate(scores, largest, shift, taps)
    total = zeros(scores)
    for t in range(taps):
        total = total + load(scores, t * step)
    store(logs, x, largest + log2(total * taps_up))
    return total


@njit(**options)
def attend(
    planes, pair, cells, unit, shift, taps_up, q, keys, values, row, sizes, out, logs, outside, alpha
):  # fmt: skip
    """Output and log2-sum-exp2 along a row of one plane, or of two.

    Args:
        unit: of the scores: scale · log2(e).
        cells: where the cells of its windows are.
        row: where its first position is.
        outside: the tile of ``exclude``, if neighbours are excluded.
        alpha: room for α of one vector of positions.
    """
    R, D, taps, plane = len(planes), len(pair), sizes.taps, sizes.plane
    lanes = lanes_of(q)
    step = PARTS * lanes
    alpha2 = advance(alpha, taps * step)
    other = taps * values.channels * (R + 1) * lanes
    for column in range(0, sizes.columns * lanes, step):
        x = row + column
        products(planes, pair, cells, q, unit, x, keys, column, sizes, alpha)
        if sizes.exclude:
            for d in range(D):
                exclude(advance(alpha, d * taps * step), outside, cells, column, taps)
        total = softmax(alpha, shift, taps_up, taps, logs, x)
        total2 = softmax(alpha2, shift, taps_up, taps, logs, x + plane) if D == 2 else total
        for c in range(values.channels):
            first = second = zeros(q)
            for t in range(taps):
                affine, affine2 = affine_maps(
                    planes, pair, values, column + cells[t] + c * R * plane, plane, c * taps + t, other
                )
                first = fma(load(alpha, t * step), affine, first)
                if D == 2:
                    second = fma(load(alpha2, t * step), affine2, second)
            store(out, x + c * plane, first / total)
            if D == 2:
                store(out, x + (values.channels + c) * plane, second / total2)


@njit(**options)
def softmax_backward(logs, x, taps, alpha, ds):
    """Computes α and ds at the centres of one plane.

    Args:
        alpha, ds: scores, of which α is made, and scale · dα, of which ds is made.
    """
    step = PARTS * lanes_of(logs)
    exponentiate(alpha, load(logs, x), zeros(logs), taps)  # scores of the same bits as logs were made from
    mean = zeros(logs)  # scale · Σ_t α[t] dα[t]
    weights = tiny(logs)  # Σ_t α[t]: one, but for the rounding of logs; none where columns have no image
    for t in range(taps):
        weight = load(alpha, t * step)
        mean = fma(weight, load(ds, t * step), mean)
        weights = weights + weight
    mean = mean / weights
    for t in range(taps):
        store(ds, t * step, load(alpha, t * step) * (load(ds, t * step) - mean))


@njit(**options)
def affine_map_backward(planes, pair, cells, weights, a, x, side, column, sizes, gradient, sums, da):
    """Adds the gradients of f, ψ and β, given the gradient of the affine map A_c[t], e = weights[t] · a_c.

    Args:
        weights, a: of one plane P, or of two, one after the other in memory; so are filters and sums.
        da: where the gradient of a, Σ_t weights[t] · A_c[t], goes; or None.
    """
    R, D, taps, plane = len(planes), len(pair), sizes.taps, sizes.plane
    lanes = lanes_of(a)
    step = PARTS * lanes
    other = side.channels * taps * (R + 1) * lanes  # from the first plane's filters to the second's
    for c in range(side.channels):
        first = load(a, x + c * plane)
        second = load(a, x + (c + (D - 1) * side.channels) * plane)
        d_first = d_second = zeros(a)
        for t in range(taps):
            at, entry = column + cells[t] + c * R * plane, (c * taps + t) * (R + 1) * lanes
            weight = load(weights, t * step)
            e, affine = weight * first, repeat(side.table, entry + R * lanes)
            accumulate(sums, entry + R * lanes, e)
            if D == 2:
                weight2 = load(weights, (taps + t) * step)
                e2, affine2 = weight2 * second, repeat(side.table, other + entry + R * lanes)
                accumulate(sums, other + entry + R * lanes, e2)
            for r in range(R):
                here, psi_at = at + r * plane, entry + r * lanes
                feature, psi = load(side.tiles, here), repeat(side.table, psi_at)
                accumulate_product(sums, psi_at, e, feature)
                total = fma(e, psi, load(gradient, here))
                if da is not None:
                    affine = fma(feature, psi, affine)
                if D == 2:
                    psi2 = repeat(side.table, other + psi_at)
                    accumulate_product(sums, other + psi_at, e2, feature)
                    total = fma(e2, psi2, total)
                    if da is not None:
                        affine2 = fma(feature, psi2, affine2)
                store(gradient, here, total)
            if da is not None:
                d_first = fma(weight, affine, d_first)
                if D == 2:
                    d_second = fma(weight2, affine2, d_second)
        if da is not None:
            store(da, x + c * plane, d_first)
            if D == 2:
                store(da, x + (side.channels + c) * plane, d_second)


@njit(**options)
def row_backward(
    planes, pair, cells, unit, scale, q, g, logs, keys, values, row, sizes,
    outside, dq, d_keys, d_values, sums_k, sums_v, alpha, ds,
):  # fmt: skip
    """All gradients along a row of one plane or two.

    Args:
        alpha, ds: room for those of one vector of positions.
    """
    lanes = lanes_of(q)
    step = PARTS * lanes
    plane, room = sizes.plane, sizes.taps * step
    for column in range(0, sizes.columns * lanes, step):
        x = row + column
        products(planes, pair, cells, q, unit, x, keys, column, sizes, alpha)
        products(planes, pair, cells, g, scale, x, values, column, sizes, ds)
        for d in range(len(pair)):
            if sizes.exclude:
                exclude(advance(alpha, d * room), outside, cells, column, sizes.taps)
            softmax_backward(
                advance(logs, d * plane), x, sizes.taps, advance(alpha, d * room), advance(ds, d * room)
            )
        affine_map_backward(planes, pair, cells, alpha, g, x, values, column, sizes, d_values, sums_v, None)
        affine_map_backward(planes, pair, cells, ds, q, x, keys, column, sizes, d_keys, sums_k, dq)
