"""The operation for GPUs: the Triton kernels as torch operators, which torch.compile calls as they are.

Verified in Triton's interpreter only, on CPUs; how fast it is on a GPU has not been measured. Serves ψ per
channel, any memory layout, float16, bfloat16 and float32 in any mix, computed in float32, and float64.

What the kernels do is in ``gpu/kernels.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, assert_never

import torch
from torch import Tensor

from selfconv.ops._call import Call
from selfconv.ops._operator import operator
from selfconv.ops._transforms import (
    check_gradient,
    refuse_second_derivative,
    refuse_tangents,
    register_vmap,
)
from selfconv.ops.gpu import kernels
from selfconv.ops.gpu.kernels import BLOCKS, triton

SLICES = 32  # at most so many partial sums of a gradient of the filters

Filter = Tensor | None


def _filters(
    f: Tensor, order: int, psi: Filter, beta: Filter, window: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """ψ and β as the kernels read them, for every P of ``order``.

    Without ψ, f passes as it is: R = P alone, or the one plane that f has; without β, it is zero.
    """
    channels, planes = f.shape[1:3]
    if psi is None:
        planes_of = torch.eye(order, dtype=dtype, device=f.device) if planes > 1 else f.new_ones(order, 1)
        psi = planes_of.to(dtype)[..., None, None].expand(channels, order, planes, *window[:2])
    if beta is None:
        beta = f.new_zeros((channels, order, *window[:2]), dtype=dtype)
    return [psi.contiguous(), beta.contiguous()]


def _sizes(
    query: Tensor, key: Tensor, value: Tensor, window: Sequence[int], num_heads: int, scale: float
) -> dict[str, Any]:
    """What every kernel takes last. R is a power of two, as is the order of every group of the square."""
    n, c_k, order, height, width = query.shape
    depth_k, depth_v = c_k // num_heads, value.shape[1] // num_heads
    return {
        "scale": scale, "positions": n * height * width, "height": height, "width": width,
        "heads": num_heads, "depth_k": depth_k, "depth_v": depth_v,
        **dict(zip(("ROWS", "COLUMNS", "DOWN", "ACROSS", "CIRCULAR", "EXCLUDE"), window, strict=True)),
        "P": order, "R": key.shape[2],
        "D_K": triton.next_power_of_2(depth_k), "D_V": triton.next_power_of_2(depth_v),
    }  # fmt: skip


def _grid(positions: int, programs: int) -> Callable[[dict[str, Any]], tuple[int]]:
    """So many programs for every block of positions."""
    return lambda constants: (triton.cdiv(positions, constants["BLOCK"]) * programs,)


@operator("triton_forward")
def _forward_op(
    query: Tensor,  # [N, C_k, P, h, w]
    key: Tensor,  # [N, C_k, R, h, w]
    value: Tensor,  # [N, C_v, R, h, w]
    psi_k: Filter,  # [C_k, P, R, k, k]
    beta_k: Filter,  # [C_k, P, k, k]
    psi_v: Filter,  # [C_v, P, R, k, k]
    beta_v: Filter,  # [C_v, P, k, k]
    window: Sequence[int],
    num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out, laid out like value, and lse [heads, P, N, h, w].

    Args:
        window: its rows and columns, their dilations, and whether images are circular, and neighbours outside
            them excluded.
    """
    refuse_tangents()
    out, lse = _forward_fake(query, key, value, psi_k, beta_k, psi_v, beta_v, window, num_heads, scale)
    if not out.numel():
        return out, lse.zero_()
    sizes = _sizes(query, key, value, window, num_heads, scale)
    filters = (
        *_filters(key, sizes["P"], psi_k, beta_k, window, lse.dtype),
        *_filters(value, sizes["P"], psi_v, beta_v, window, lse.dtype),
    )
    strides = [t.stride() for t in (out, query, key, value)]
    with torch.cuda.device_of(query):
        kernels.forward[_grid(sizes["positions"], num_heads * sizes["P"])](
            out, lse, query, key, value, *filters, *strides, **sizes
        )
    return out, lse


@_forward_op.register_fake
def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, psi_k: Filter, beta_k: Filter, psi_v: Filter, beta_v: Filter,
    window: Sequence[int], num_heads: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    given = (t for t in (query, key, value, psi_k, beta_k, psi_v, beta_v) if t is not None)
    dtype = reduce(torch.promote_types, (t.dtype for t in given), torch.float32)
    n, _, order, height, width = query.shape
    lse = query.new_empty((num_heads, order, n, height, width), dtype=dtype)
    if value.shape[2] == order:
        return torch.empty_like(value), lse
    return value.new_empty((n, value.shape[1], order, height, width)), lse


@operator("triton_backward")
def _backward_op(
    grad: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    psi_k: Filter,
    beta_k: Filter,
    psi_v: Filter,
    beta_v: Filter,
    window: Sequence[int],
    num_heads: int,
    scale: float,
) -> list[Tensor]:
    """The gradients of query, key, value and the filters that are not None."""
    refuse_tangents()
    given = [psi_k, beta_k, psi_v, beta_v]
    d_query, d_key, d_value, *d_filters = gradients = _backward_fake(grad, lse, query, key, value, *given)
    if not grad.numel():
        return [t.zero_() for t in gradients]
    sizes = _sizes(query, key, value, window, num_heads, scale)
    positions, planes = sizes["positions"], num_heads * sizes["P"]
    slices = min(SLICES, triton.cdiv(positions, max(BLOCKS)))
    sums = [None if t is None else lse.new_empty((slices, *t.shape)) for t in given]
    inputs = (
        torch.empty_like(lse), grad, lse, query, key, value,
        *_filters(key, sizes["P"], psi_k, beta_k, window, lse.dtype),
        *_filters(value, sizes["P"], psi_v, beta_v, window, lse.dtype),
    )  # fmt: skip
    strides = [t.stride() for t in (grad, query, key, value)]
    with torch.cuda.device_of(query):
        kernels.backward_query[_grid(positions, planes)](
            d_query, *inputs, d_query.stride(), *strides, **sizes
        )
        kernels.backward_key_value[_grid(positions, num_heads)](
            d_key, d_value, *inputs, d_key.stride(), d_value.stride(), *strides, **sizes
        )
        if d_filters:
            kernels.backward_filters[(planes * window[0] * window[1], slices)](
                *sums, *inputs, *strides, **sizes
            )
    for total, partial in zip(d_filters, (t for t in sums if t is not None), strict=True):
        total.copy_(partial.sum(0))
    return gradients


@_backward_op.register_fake
def _backward_fake(
    grad: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *filters_and_options: Any
) -> list[Tensor]:
    filters = [t for t in filters_and_options[:4] if t is not None]
    return [torch.empty_like(t) for t in (query, key, value, *filters)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:7])
    ctx.options = inputs[7:]
    ctx.set_materialize_grads(False)  # nothing depends on lse


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    lse, *inputs = ctx.saved_tensors
    check_gradient(grad)
    gradients = iter(_backward_op(grad, lse, *inputs, *ctx.options))
    return *(None if t is None else next(gradients) for t in inputs), None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(refuse_second_derivative)
register_vmap(_forward_op)
register_vmap(_backward_op)


def run(call: Call) -> Tensor:
    filters = (*call.steered(call.psi_k, call.beta_k), *call.steered(call.psi_v, call.beta_v))
    circular = exclude = False
    match call.window.padding_mode:
        case "zeros":
            pass
        case "circular":
            circular = True
        case "exclude":
            exclude = True
        case _:
            assert_never(call.window.padding_mode)
    window = [*call.window.size, *call.window.dilation, circular, exclude]
    out, _ = _forward_op(call.query, call.key, call.value, *filters, window, call.num_heads, call.scale)
    return out
