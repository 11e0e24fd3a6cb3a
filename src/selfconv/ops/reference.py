"""The paper, one function per equation, in its order: every fast implementation is tested against it.

Plain loops over positions that read like the equations; each value is a vector over channels, so that
autograd gives reference gradients too. Slow by design: use it on small maps, in float64.

One image at a time: a planar function f: Z² → R^d is a tensor ``[d, h, w]``, a function on G is
``[d, |H|, h, w]`` for the point group H. Positions x, y are (row, column) pairs; P, R, S are indices of
elements of H. Filters ψ and position terms β live on a k×k window around offset (0, 0): ``[d, k, k]``,
on G ``[d, |H|, k, k]``. A ψ with one leading axis more, ``[d, d, ...]``, maps all channels to all
channels (dense) where the other scales each channel by itself.

Images are zero outside their borders; β is still added there, and every softmax includes the whole window.
The paper knows no other window than this square one. Eq. 19, 20 and 24 take others too, by their last
argument: rectangles, neighbours ``dilation`` apart, images that repeat (``"circular"``) and neighbours
outside the image that are left out (``"exclude"``).
``num_heads`` splits the channels into equal groups, each with its own scores (the multi-head mechanism).
``scale`` multiplies the dot product of the score.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from selfconv import _harmonics
from selfconv.groups import Group
from selfconv.ops._call import Call
from selfconv.ops._window import PaddingMode, Window

Position = tuple[int, int]
Scores = dict[Position, Tensor]  # α(x, ·): neighbour y -> one weight per head


# ---- functions on the grid: evaluation, extent, the operator L ----


def at(f: Tensor, y: Position, padding_mode: PaddingMode = "zeros") -> Tensor:
    """f(y): the vector at y; outside the image zero, or that of the image repeated."""
    match padding_mode:
        case "zeros" | "exclude":
            return f[..., y[0], y[1]] if inside(f, y) else torch.zeros_like(f[..., 0, 0])
        case "circular":
            return f[..., y[0] % f.shape[-2], y[1] % f.shape[-1]]
        case _:
            assert_never(padding_mode)


def inside(f: Tensor, y: Position) -> bool:
    return 0 <= y[0] < f.shape[-2] and 0 <= y[1] < f.shape[-1]


def positions(f: Tensor) -> Iterator[Position]:
    """All x of the image."""
    return product(range(f.shape[-2]), range(f.shape[-1]))


def neighbours(x: Position, k: int | Window) -> Iterator[Position]:
    """All y of the k×k window around x: the extent of the filters, outside which they are zero."""
    window = k if isinstance(k, Window) else Window((k, k))
    (d_i, d_j), (r_i, r_j) = window.dilation, window.reach
    return product(
        range(x[0] - r_i, x[0] + r_i + 1, d_i),
        range(x[1] - r_j, x[1] + r_j + 1, d_j),
    )


def translated(psi: Tensor, x: Position, y: Position) -> Tensor:
    """L_(x)[ψ](y) = ψ(y − x)."""
    r_i, r_j = psi.shape[-2] // 2, psi.shape[-1] // 2
    return psi[..., y[0] - x[0] + r_i, y[1] - x[1] + r_j]


def transformed(
    psi: Tensor, group: Group, p: int, x: Position, y: Position, dilation: Position = (1, 1)
) -> Tensor:
    """L_(P,x)[ψ](·, y) = ψ(·, P⁻¹(y − x)): the window transformed by P, for ψ on Z² or on G.

    Where P does not map the grid to itself, ψ is replaced by its least-squares fit in the group's basis.
    Distances in a dilated window are counted in steps of the dilation.
    """
    steps = ((y[0] - x[0]) // dilation[0], (y[1] - x[1]) // dilation[1])
    offset = group.apply(group.inverse[p], steps)
    if group.band_limited:
        k = psi.shape[-1]
        coefficients = psi.flatten(-2) @ torch.from_numpy(_harmonics.expansion(k)).to(psi)
        return coefficients @ torch.from_numpy(_harmonics.at(k, np.array([offset]))[:, 0]).to(psi)
    return translated(psi, (0, 0), (int(offset[0]), int(offset[1])))


def apply_filter(psi: Tensor, f: Tensor) -> Tensor:
    """ψ·f for one position: channel by channel if ψ is a vector, channel to channel if a matrix."""
    return psi @ f if psi.dim() == 2 else psi * f


def score(a: Tensor, b: Tensor, num_heads: int, scale: float) -> Tensor:
    """score(a, b): the scaled dot product of each head's channels, [num_heads]."""
    return scale * (a * b).unflatten(0, (num_heads, -1)).sum(1)


def softmax(scores: Scores) -> Scores:
    """softmax_y: the weights over all neighbours y sum to one, for each head."""
    weights = torch.stack(list(scores.values())).softmax(0)
    return dict(zip(scores, weights, strict=True))


def apply_weights(alpha: Tensor, f: Tensor) -> Tensor:
    """α·f: multiplies each channel by the weight of its head."""
    return alpha.repeat_interleave(len(f) // len(alpha)) * f


def grid(f: Tensor, values: list[Tensor]) -> Tensor:
    """Vectors in the order of ``positions(f)`` as an image: [d, h, w]."""
    return torch.stack(values, -1).unflatten(-1, f.shape[-2:])


# ---- Background ----


def convolution(f: Tensor, psi: Tensor) -> Tensor:
    """Eq. 1: [f ⋆ ψ](x) = Σ_y f(y) L_(x)[ψ](y), with ψ [d_out, d_in, k, k]."""
    k = psi.shape[-1]
    return grid(f, [sum_(translated(psi, x, y) @ at(f, y) for y in neighbours(x, k)) for x in positions(f)])


def lifting_convolution(f: Tensor, psi: Tensor, group: Group) -> Tensor:
    """Section 2.1: [f ⋆ ψ](P, x) = Σ_y f(y) L_(P,x)[ψ](y), planar f, ψ [d_out, d_in, k, k]."""
    k = psi.shape[-1]
    planes = [
        grid(
            f,
            [
                sum_(transformed(psi, group, p, x, y) @ at(f, y) for y in neighbours(x, k))
                for x in positions(f)
            ],
        )
        for p in group
    ]
    return torch.stack(planes, 1)


def group_convolution(f: Tensor, psi: Tensor, group: Group) -> Tensor:
    """Eq. 3: [f ⋆ ψ](P, x) = Σ_(R,y) f(R, y) L_(P,x)[ψ](R, y), with ψ [d_out, d_in, |H|, k, k]."""
    k = psi.shape[-1]

    def value(p: int, x: Position) -> Tensor:
        return sum_(
            transformed(psi, group, p, x, y)[:, :, group.quotient[p][r]] @ at(f, y)[:, r]
            for r in group
            for y in neighbours(x, k)
        )

    return torch.stack([grid(f, [value(p, x) for x in positions(f)]) for p in group], 1)


def simple_attention(f: Tensor, k: int, num_heads: int, scale: float) -> Tensor:
    """Eq. 4: Attention[f](x) = Σ_y α(x, y) f(y), α(x, y) = softmax_y(score(f(x), f(y)))."""
    return attention(f, f, f, k, num_heads, scale)


def attention(q: Tensor, key: Tensor, v: Tensor, k: int, num_heads: int, scale: float) -> Tensor:
    """Eq. 5: Attention[Q, K, V]_c(x) = Σ_y α(x, y) V_c(y), α(x, y) = softmax_y(score(Q(x), K(y)))."""

    def value(x: Position) -> Tensor:
        alpha = softmax({y: score(at(q, x), at(key, y), num_heads, scale) for y in neighbours(x, k)})
        return sum_(apply_weights(alpha[y], at(v, y)) for y in alpha)

    return grid(v, [value(x) for x in positions(v)])


# ---- Affine Self Convolution ----


def affine_map(f: Tensor, psi: Tensor, beta: Tensor, x: Position, y: Position) -> Tensor:
    """Eq. 6: A_(x)[f](y) = f(y) L_(x)[ψ](y) + L_(x)[β](y)."""
    return apply_filter(translated(psi, x, y), at(f, y)) + translated(beta, x, y)


def simple_asc(f: Tensor, psi: Tensor, beta: Tensor, num_heads: int, scale: float) -> Tensor:
    """Eq. 7: □[f, A](x) = Σ_y α(x, y) A_(x)[f](y), α(x, y) = softmax_y(score(A_(x)[f](x), A_(x)[f](y)))."""

    def value(x: Position) -> Tensor:
        a = {y: affine_map(f, psi, beta, x, y) for y in neighbours(x, psi.shape[-1])}
        alpha = softmax({y: score(a[x], a[y], num_heads, scale) for y in a})
        return sum_(apply_weights(alpha[y], a[y]) for y in a)

    return grid(f, [value(x) for x in positions(f)])


def linear_map(f: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Eq. 8: Q_c(x) = [f ⋆ W^Q_c](x), a 1×1 convolution, W [d_out, d_in], with its bias b [d_out]."""
    return grid(f, [w @ at(f, x) + b for x in positions(f)])


def asc_query(q: Tensor, psi_q: Tensor, beta_q: Tensor) -> Tensor:
    """Eq. 9: A^Q_(x)[Q]_c(y) = Q_c(y) L_(x)[ψ^Q]_c(y) + L_(x)[β^Q]_c(y), only ever needed at y = x.

    So ψ^Q and β^Q are one value per channel, [d]; the maps of K and V are ``affine_map``.
    """
    return grid(
        q, [affine_map(q, psi_q[..., None, None], beta_q[..., None, None], x, x) for x in positions(q)]
    )


def asc_score(
    query: Tensor, key: Tensor, psi_k: Tensor, beta_k: Tensor, x: Position, num_heads: int, scale: float
) -> Scores:
    """Eq. 10: α(x, y) = softmax_y(score(A^Q_(x)[Q](x), A^K_(x)[K](y))), with ``query`` = A^Q[Q]."""
    return softmax(
        {
            y: score(at(query, x), affine_map(key, psi_k, beta_k, x, y), num_heads, scale)
            for y in neighbours(x, psi_k.shape[-1])
        }
    )


def asc(
    query: Tensor,
    key: Tensor,
    v: Tensor,
    psi_k: Tensor,
    beta_k: Tensor,
    psi_v: Tensor,
    beta_v: Tensor,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Eq. 11: □[V, A^V]_c(x) = Σ_y α(x, y) A^V_(x)[V]_c(y)."""

    def value(x: Position) -> Tensor:
        alpha = asc_score(query, key, psi_k, beta_k, x, num_heads, scale)
        return sum_(apply_weights(alpha[y], affine_map(v, psi_v, beta_v, x, y)) for y in alpha)

    return grid(v, [value(x) for x in positions(v)])


# ---- Roto-translation Affine Self Convolution ----


def group_affine_map(
    f: Tensor, psi: Tensor, beta: Tensor, group: Group, p: int, x: Position, r: int, y: Position
) -> Tensor:
    """Eq. 12: A_(P,x)[f](R, y) = f(R, y) L_(P,x)[ψ](R, y) + L_(P,x)[β](R, y), ψ and β on G."""
    p_inv_r = group.quotient[p][r]
    return (
        apply_filter(transformed(psi, group, p, x, y)[..., p_inv_r], at(f, y)[:, r])
        + (transformed(beta, group, p, x, y)[..., p_inv_r])
    )


def summed_affine_map(
    f: Tensor,
    psi: Tensor | None,
    beta: Tensor,
    group: Group,
    p: int,
    x: Position,
    y: Position,
    window: Window | None = None,
) -> Tensor:
    """Eq. 24: Σ_R A_(P,x)[f](R, y) = Σ_R f(R, y) L_(P,x)[ψ](R, y) + L_(P,x)[β](y).

    The paper's proof: β only ever appears summed over R, so it is learned as a function on Z², [d, k, k].
    A ψ that is None is 1 at R = 1 and 0 elsewhere: plane P passes itself on. A planar f, with ψ on Z², is
    lifted as by the convolution of Section 2.1: A_(P,x)[f](y) = f(y) L_(P,x)[ψ](y) + L_(P,x)[β](y).
    """
    window = window or Window((beta.shape[-2], beta.shape[-1]))
    f_y = at(f, y, window.padding_mode)  # [d, |H|], of a planar f [d]
    beta_p = transformed(beta, group, p, x, y, window.dilation)
    if psi is None:
        return of_plane(f_y, p) + beta_p
    psi_p = transformed(psi, group, p, x, y, window.dilation)
    if f_y.dim() == 1:
        return apply_filter(psi_p, f_y) + beta_p
    return sum_(apply_filter(psi_p[..., group.quotient[p][r]], f_y[:, r]) for r in group) + beta_p


def of_plane(f_x: Tensor, p: int) -> Tensor:
    """f(P, x), for f(·, x) of a function on G; a planar one is the same for every P."""
    return f_x if f_x.dim() == 1 else f_x[:, p]


def simple_group_score(
    f: Tensor, psi: Tensor, beta: Tensor, group: Group, p: int, x: Position, num_heads: int, scale: float
) -> Scores:
    """Eq. 13: α((P,x), (P,y)) = softmax_y((Σ_R A_(P,x)[f](R, x)) · (Σ_R A_(P,x)[f](R, y)))."""
    centre = summed_affine_map(f, psi, beta, group, p, x, x)
    return softmax(
        {
            y: score(centre, summed_affine_map(f, psi, beta, group, p, x, y), num_heads, scale)
            for y in neighbours(x, psi.shape[-1])
        }
    )


def simple_group_asc(
    f: Tensor, psi: Tensor, beta: Tensor, group: Group, num_heads: int, scale: float
) -> Tensor:
    """Eq. 14: □_G[f, A](P, x) = Σ_y α((P,x), (P,y)) Σ_R A_(P,x)[f](R, y)."""

    def value(p: int, x: Position) -> Tensor:
        alpha = simple_group_score(f, psi, beta, group, p, x, num_heads, scale)
        return sum_(apply_weights(alpha[y], summed_affine_map(f, psi, beta, group, p, x, y)) for y in alpha)

    return torch.stack([grid(f, [value(p, x) for x in positions(f)]) for p in group], 1)


# ---- Group Squeeze and Excite ----


def squeeze(f: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, b_2: Tensor) -> Tensor:
    """Eq. 15: squeeze(f) = σ(W_1 ReLU(W_2 (1/|G|) Σ_h f(h))), for f on Z² or on G; a vector over channels."""
    mean = sum_(f.flatten(1).unbind(1)) / f[0].numel()
    return torch.sigmoid(w_1 @ torch.relu(w_2 @ mean + b_2) + b_1)


def excite(f: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, b_2: Tensor) -> Tensor:
    """Eq. 16: f'_c(g) = f_c(g) squeeze_c(f), which commutes with every L_(s)."""
    s = squeeze(f, w_1, b_1, w_2, b_2)
    return torch.stack([f[c] * s[c] for c in range(len(f))])


# ---- Appendix: roto-translation ASC ----


def group_linear_map(f: Tensor, w: Tensor, b: Tensor, group: Group) -> Tensor:
    """Eq. 17: Q_c(P, x) = [f ⋆_G W^Q_c](P, x), a 1×1 group convolution, W [d_out, d_in, |H|], bias b."""
    return group_convolution(f, w[..., None, None], group) + b[:, None, None, None]


def group_query(q: Tensor, psi_q: Tensor, beta_q: Tensor, group: Group) -> Tensor:
    """Eq. 18: A^Q_(P,x)[Q]_c(R, y) = Q_c(R, y) L_(P,x)[ψ^Q]_c(R, y) + L_(P,x)[β^Q]_c(y).

    As the score needs it: summed over R at y = x. So ψ^Q is [d, |H|] and β^Q [d], as for ``asc_query``.
    """
    psi, beta = psi_q[..., None, None], beta_q[..., None, None]
    planes = [grid(q, [summed_affine_map(q, psi, beta, group, p, x, x) for x in positions(q)]) for p in group]
    return torch.stack(planes, 1)


def group_score(
    query: Tensor,
    key: Tensor,
    psi_k: Tensor | None,
    beta_k: Tensor,
    group: Group,
    p: int,
    x: Position,
    num_heads: int,
    scale: float,
    window: Window | None = None,
) -> Scores:
    """Eq. 19: α((P,x), (P,y)) = softmax_y(score(Σ_R A^Q_(P,x)[Q](R, x), Σ_R A^K_(P,x)[K](R, y)))."""
    window = window or Window((beta_k.shape[-2], beta_k.shape[-1]))
    return softmax(
        {
            y: score(
                of_plane(at(query, x), p),
                summed_affine_map(key, psi_k, beta_k, group, p, x, y, window),
                num_heads,
                scale,
            )
            for y in neighbours(x, window)
            if window.padding_mode != "exclude" or inside(key, y)
        }
    )


def group_asc(
    query: Tensor,
    key: Tensor,
    v: Tensor,
    psi_k: Tensor | None,
    beta_k: Tensor,
    psi_v: Tensor | None,
    beta_v: Tensor,
    group: Group,
    num_heads: int,
    scale: float,
    window: Window | None = None,
) -> Tensor:
    """Eq. 20: □_G[V, A^V]_c(P, x) = Σ_y α((P,x), (P,y)) Σ_R A^V_(P,x)[V]_c(R, y)."""

    def value(p: int, x: Position) -> Tensor:
        alpha = group_score(query, key, psi_k, beta_k, group, p, x, num_heads, scale, window)
        return sum_(
            apply_weights(alpha[y], summed_affine_map(v, psi_v, beta_v, group, p, x, y, window))
            for y in alpha
        )

    return torch.stack([grid(v, [value(p, x) for x in positions(v)]) for p in group], 1)


def sum_(terms: Iterator[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Σ over vectors of one shape."""
    return torch.stack(list(terms)).sum(0)


# ---- as a backend of the public operation ----


def run(call: Call) -> Tensor:
    """Eq. 20 for each image of the batch, in float64."""
    if not call.value.numel():
        return call.value.expand(-1, -1, len(call.group), -1, -1).clone()
    lift = (lambda t: t.select(-3, 0)) if call.lifting else (lambda t: t)  # planar functions

    def filters(psi: Tensor | None, beta: Tensor | None, f: Tensor) -> tuple[Tensor | None, Tensor]:
        if beta is None:
            beta = f.new_zeros(f.shape[1], *call.window.size)
        return None if psi is None else lift(psi.double()), beta.double()

    affine = *filters(call.psi_k, call.beta_k, call.key), *filters(call.psi_v, call.beta_v, call.value)
    images = [
        group_asc(lift(q), lift(key), lift(v), *affine, call.group, call.num_heads, call.scale, call.window)
        for q, key, v in zip(call.query.double(), call.key.double(), call.value.double(), strict=True)
    ]
    return torch.stack(images).to(call.value.dtype)
