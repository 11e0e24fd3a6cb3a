"""The operation as a function: ``affine_self_conv``, and ``affine_conv``, its form without attention.

``reference`` is its specification, the paper's equations in plain loops, against which every other backend is
tested. The README beside this file has the notation, the gradients and how the kernels work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, overload

import torch.nn.functional as F
from torch import Tensor

from selfconv.groups import Group, get_group
from selfconv.ops._backends import BACKENDS, check_backend, choose_backend, explain_call
from selfconv.ops._call import (
    Call,
    cast,
    check_call,
    check_float,
    check_heads,
    check_probability,
    check_scale,
    owned,
    steer,
)
from selfconv.ops._flops import affine_self_conv_flops
from selfconv.ops._window import PaddingMode, Pair, Window, make_window
from selfconv.ops.eager import attend, pad, run_with_attention
from selfconv.ops.prepared import PreparedCall, filter_tables

__all__ = [
    "BACKENDS",
    "PaddingMode",
    "Pair",
    "PreparedCall",
    "Window",
    "affine_conv",
    "affine_self_conv",
    "affine_self_conv_flops",
    "affine_self_conv_packed",
    "attend",
    "cast",
    "check_backend",
    "check_heads",
    "check_probability",
    "check_scale",
    "explain",
    "filter_tables",
    "make_window",
    "owned",
    "pad",
    "split_packed",
    "steer",
]


@overload
def affine_self_conv(
    query: Tensor, key: Tensor, value: Tensor,
    psi_k: Tensor | None, beta_k: Tensor | None, psi_v: Tensor | None, beta_v: Tensor | None,
    *, num_heads: int, scale: float | None = ..., group: str | Group = ...,
    kernel_size: int | Pair | None = ..., dilation: int | Pair = ..., padding_mode: str = ...,
    lifting: bool = ..., dropout_p: float = ..., backend: str | None = ...,
    return_attention: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def affine_self_conv(
    query: Tensor, key: Tensor, value: Tensor,
    psi_k: Tensor | None, beta_k: Tensor | None, psi_v: Tensor | None, beta_v: Tensor | None,
    *, num_heads: int, scale: float | None = ..., group: str | Group = ...,
    kernel_size: int | Pair | None = ..., dilation: int | Pair = ..., padding_mode: str = ...,
    lifting: bool = ..., dropout_p: float = ..., backend: str | None = ...,
    return_attention: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def affine_self_conv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    psi_k: Tensor | None,
    beta_k: Tensor | None,
    psi_v: Tensor | None,
    beta_v: Tensor | None,
    *,
    num_heads: int,
    scale: float | None = None,
    group: str | Group = "z2",
    kernel_size: int | Pair | None = None,
    dilation: int | Pair = 1,
    padding_mode: str = "zeros",
    lifting: bool = False,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_attention: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Affine self convolution (Eq. 11; on a group Eq. 20) before the output map W^O:

        out_c(P, x) = Σ_y α((P,x), (P,y)) Σ_R A^V_(P,x)[V]_c(R, y)
        α((P,x), (P,y)) = softmax_y(scale · query(P, x) · Σ_R A^K_(P,x)[K](R, y)),   head by head
        Σ_R A_(P,x)[f](R, y) = Σ_R f(R, y) ψ(P⁻¹R, P⁻¹(y − x)) + β(P⁻¹(y − x))

    y runs over the k×k window around x. Outside the image f is 0, but β is still added, unless
    ``padding_mode`` says otherwise. Equivariant to shifts and to every element of ``group``.

    Args:
        query: A^Q[Q](x), after its affine map: ``[N, C_k, h, w]`` on z2, ``[N, C_k, |H|, h, w]`` on a group.
        key, value: shaped like ``query``; ``value`` may have a different number of channels, C_v.
        psi_k, psi_v: per channel, ``[C, k, k]`` (z2) or ``[C, |H|, k, k]``; or channel to channel,
            ``[C, C, k, k]`` or ``[C, C, |H|, k, k]``. None: f is not filtered.
            On groups that map rows to rows (``group.keeps_axes``) the window may be a rectangle: ``[C, 1,
            7]``.
        beta_k, beta_v: ``[C, k, k]``. None: no term is added.
        num_heads: number of heads: equal groups of contiguous channels, each with its own softmax.
        scale: factor of the score; by default 1 / key channels.
        group: a name in ``selfconv.groups.GROUPS`` (``"z2"``, ``"p4"``, ``"c8"``, …) or a ``Group``.
        kernel_size: k, or (rows, columns); only needed when every ψ and β is None.
        dilation: distance between neighbours in the window, in pixels, or (rows, columns).
        padding_mode: what a neighbour outside the image is: ``"zeros"`` (f = 0, β is added: the paper's),
            ``"circular"`` (f repeats, as for ``torch.nn.Conv2d``) or ``"exclude"`` (left out of the softmax).
        lifting: query, key and value are planar, ``[N, C, h, w]``, and so is ψ, ``[C, k, k]``; the result is
            on ``group``.
        dropout_p: the probability of dropping each α after the softmax; only in the eager backend.
        backend: one of ``BACKENDS``; by default the fastest that supports the call (see ``explain``).
        return_attention: also return α, ``[N, num_heads, k, k, h, w]`` (z2) or
            ``[N, num_heads, |H|, k, k, h, w]``; only in the eager backend.

    Returns:
        The aggregated values, in the shape and dtype of ``value``; with ``lifting``, and the group axis.
    """
    call = check_call(
        (query, key, value), (psi_k, beta_k, psi_v, beta_v),
        kernel_size=kernel_size, num_heads=num_heads, scale=scale, group=group,
        dilation=dilation, padding_mode=padding_mode, lifting=lifting,
    )  # fmt: skip
    check_probability("dropout_p", dropout_p)
    if return_attention or dropout_p:
        if backend not in (None, "eager"):
            option = "return_attention" if return_attention else f"dropout_p={dropout_p}"
            raise ValueError(f"{option} needs the eager backend; got backend={backend!r}")
        out, alpha = run_with_attention(call, dropout_p)
        out = owned(out.squeeze(2)) if len(call.group) == 1 else out
        if not return_attention:
            return out
        alpha = alpha.unflatten(3, call.window.size)
        return out, alpha.squeeze(2) if len(call.group) == 1 else alpha
    return _run(call, backend)


def affine_self_conv_packed(
    packed: Tensor,
    channels: Sequence[int],
    psi_k: Tensor | None,
    beta_k: Tensor | None,
    psi_v: Tensor | None,
    beta_v: Tensor | None,
    *,
    num_heads: int,
    scale: float | None = None,
    group: str | Group = "z2",
    kernel_size: int | Pair | None = None,
    dilation: int | Pair = 1,
    padding_mode: str = "zeros",
    lifting: bool = False,
    backend: str | None = None,
) -> Tensor:
    """``affine_self_conv`` for query, key and value concatenated along the channels of one tensor.

    One convolution computes such a tensor, and its gradient is one tensor too, without a concatenation of
    three.

    Args:
        packed: ``[N, C_k + C_k + C_v, h, w]``, on a group with the group axis; or ``[N, C_k + C_k, ...]``,
            where the second half of the channels is used as key and as value.
        channels: (C_k, C_k, C_v), or (C_k, C_k).
    """
    call = check_call(
        split_packed(packed, channels), (psi_k, beta_k, psi_v, beta_v),
        kernel_size=kernel_size, num_heads=num_heads, scale=scale, group=group,
        dilation=dilation, padding_mode=padding_mode, lifting=lifting,
    )  # fmt: skip
    if call.lifting:  # the query has more planes than key and value
        return _run(call, backend)
    return _run(replace(call, packed=packed.unsqueeze(2) if len(call.group) == 1 else packed), backend)


def split_packed(packed: Tensor, channels: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a packed tensor (see ``affine_self_conv_packed``), as views."""
    parts = packed.split(list(channels), 1)
    return parts[0], parts[1], parts[-1]


def _run(call: Call, backend: str | None) -> Tensor:
    out = choose_backend(call, backend)(call)
    return owned(out.squeeze(2)) if len(call.group) == 1 else out


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    psi_k: Tensor | None,
    beta_k: Tensor | None,
    psi_v: Tensor | None,
    beta_v: Tensor | None,
    *,
    num_heads: int,
    scale: float | None = None,
    group: str | Group = "z2",
    kernel_size: int | Pair | None = None,
    dilation: int | Pair = 1,
    padding_mode: str = "zeros",
    lifting: bool = False,
) -> str:
    """Which backend ``affine_self_conv`` would select for these arguments, and why not each of the others.

    Calls with ``dropout_p`` or ``return_attention`` always use the eager backend, and optimised networks
    start the CPU kernels by ``PreparedCall`` where these serve them. Exported networks consist of torch's
    operators.
    """
    return explain_call(
        check_call(
            (query, key, value), (psi_k, beta_k, psi_v, beta_v),
            kernel_size=kernel_size, num_heads=num_heads, scale=scale, group=group,
            dilation=dilation, padding_mode=padding_mode, lifting=lifting,
        )
    )  # fmt: skip


def affine_conv(f: Tensor, psi: Tensor, beta: Tensor | None, *, group: str | Group = "z2") -> Tensor:
    """Affine convolution: affine self convolution with α = 1, that is, no attention.

        out_c(P, x) = Σ_y Σ_R A_(P,x)[f]_c(R, y)

    With a dense ψ and no β it is the convolution ``conv2d(f, psi, padding="same")``, on a group the group
    convolution. The arguments are shaped as for ``affine_self_conv``.
    """
    group = get_group(group)
    check_float("psi", psi)
    # as its own query and key, every check of the full operation applies
    call: Call = check_call(
        (f, f, f), (None, None, psi, beta), kernel_size=None, num_heads=1, scale=None, group=group
    )
    psi_v, beta_v = call.steered(call.psi_v, call.beta_v)
    assert psi_v is not None
    c, order = call.value.shape[1:3]
    if call.dense:
        weight = psi_v.transpose(1, 2).reshape(c * order, c * order, *psi.shape[-2:])
    else:  # a block per channel: [C·P, R, k, k], grouped by channel
        weight = psi_v.flatten(0, 1)
    bias = None if beta_v is None else beta_v.sum((-2, -1)).flatten()
    out = F.conv2d(
        owned(call.value.flatten(1, 2)).to(weight.dtype),
        weight,
        bias,
        padding=call.window.reach,
        groups=1 if call.dense else c,
    )
    return out.to(f.dtype).reshape(f.shape)
