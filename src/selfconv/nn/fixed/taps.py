"""Attention as ordinary convolutions and elementwise operators, for exported programs.

An exported program has no fused kernel, and unfolding the window would make tensors k² times as large as the
features. Instead the window is walked row by row. The maps of K and V exist once for each column offset j of
the window, next to each other along the channels (t = j·C + c). In these maps

    x-shift     a depthwise 1×k convolution, a single 1 per filter, moves copy j by j − k//2 columns
    y-shift     for each row i of the window, a depthwise convolution moves all copies by i − k//2 rows;
                on the plane its single weight is ψ and its bias β
    ψ on a group, dense ψ      a 1×1 convolution in small groups of channels, with bias β
    sums over a head's channels and over copies, copy of a head's weight to its channels
                1×1 convolutions of zeros and ones

The scores of a row are [N, k·heads·P, h, w]; their maximum over rows and copies makes the exponentials safe.
The products of all rows are added, then the copies. The softmax's denominator, the sum of the exponentials,
is divided out last, once per channel. Where the output is averaged over cells, it is divided out of the
weights of each row instead, and the products are averaged before they are added, which takes less memory. The
largest tensors are k times the features. No operator depends on the size of the images. Runtimes such as ONNX
Runtime have fast kernels for all of these convolutions, as long as the channels of a group fill vector
registers: hence ``LANES``. AOTInductor was faster with this form than with slices and elementwise operators
over all taps.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv.nn._layout import fold_bias, fold_filters
from selfconv.ops import cast

LANES = 16  # float32 numbers in the largest vector register


class TapAttention2d(nn.Module):
    """Σ_y α A^V[V](y), and the output map W^O: from features to the layer's output, on folded channels.

    Args:
        projection: steered filters ``[C, in, P, R, 1, 1]`` of the map to query, key and value, and its bias.
        channels: of query, key and value; of two, the second is both key and value.
        key_filters, value_filters: steered ψ ``[C, (C,) P, R, k, k]`` and β ``[C, P, k, k]``, or None.
        output: steered filters of W^O, and its bias.
        pool: side of the cells that are averaged before W^O.
    """

    @torch.no_grad()
    def __init__(
        self,
        projection: tuple[Tensor, Tensor | None],
        channels: tuple[int, ...],
        key_filters: tuple[Tensor | None, Tensor | None],
        value_filters: tuple[Tensor | None, Tensor | None],
        output: tuple[Tensor, Tensor | None],
        *,
        kernel_size: int,
        num_heads: int,
        scale: float,
        pool: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        filters, bias = projection
        planes, copies = filters.shape[2], kernel_size
        self.copies, self.pool, self.dtype, self.in_dtype = copies, pool, dtype, filters.dtype
        parts = filters.split(channels)
        offsets = [None] * len(parts) if bias is None else list(bias.split(channels))
        maps = [_pointwise(f, b) for f, b in zip(parts, offsets, strict=True)]
        _scale(maps[0], scale)
        self.maps = nn.ModuleList(maps)
        c_k, c_v = channels[0], channels[-1]
        shift = [_column_shift(c * planes, copies, dtype) for c in dict.fromkeys((c_k, c_v))]
        self.key_columns, self.value_columns = shift[0], shift[-1]
        self.key_rows = _affine_rows(*key_filters, c_k, kernel_size, planes, dtype)
        self.value_rows = _affine_rows(*value_filters, c_v, kernel_size, planes, dtype)
        self.head_sums = _head_sums(num_heads, c_k, planes, copies, dtype)
        self.spread = _spread(num_heads, c_v, planes, copies, dtype)
        eye = torch.eye(c_v * planes, dtype=dtype)
        self.sum_copies = _convolution(eye.repeat(1, copies)[..., None, None])
        if pool > 1:
            total = torch.eye(num_heads * planes, dtype=dtype).repeat(copies, 1)  # [k·heads·P, heads·P]
        else:
            total = _to_channels(num_heads, c_v // num_heads, planes, dtype)  # [C·P, heads·P]
        self.total = _convolution(total.repeat(1, copies)[..., None, None])
        self.output = _pointwise(*output).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        maps = [cast(convolution(x), self.dtype) for convolution in self.maps]  # [N, C·P, h, w]
        maps = [torch.cat([f] * self.copies, 1) for f in maps]  # [N, k·C·P, h, w]
        keys, values = self.key_columns(maps[1]), self.value_columns(maps[-1])
        scores = [self.head_sums(maps[0] * row(keys)) for row in self.key_rows]  # k of [N, k·heads·P, h, w]
        largest = reduce(torch.maximum, reduce(torch.maximum, scores).chunk(self.copies, 1))
        largest = torch.cat([largest] * self.copies, 1)
        weights = [torch.exp(score - largest) for score in scores]
        share = self.total(reduce(torch.add, weights)).reciprocal()
        if self.pool > 1:
            weights = [w * share for w in weights]
        products = [self.spread(w) * row(values) for w, row in zip(weights, self.value_rows, strict=True)]
        if self.pool > 1:
            products = [F.avg_pool2d(product, self.pool) for product in products]
        y = self.sum_copies(reduce(torch.add, products))  # [N, C·P, h, w]
        if self.pool == 1:
            y = y * share
        return cast(self.output(y), self.in_dtype)


def _convolution(weight: Tensor, bias: Tensor | None = None, groups: int = 1, **options: object) -> nn.Conv2d:
    c_out, c_in, *size = weight.shape
    made = nn.Conv2d(
        c_in * groups, c_out, tuple(size), groups=groups, bias=bias is not None, device="meta", **options,  # type: ignore[arg-type]
    )  # fmt: skip
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    return made


def _scale(convolution: nn.Conv2d, scale: float) -> None:
    for parameter in convolution.parameters():
        parameter.mul_(scale)


def _pointwise(filters: Tensor, bias: Tensor | None) -> nn.Conv2d:
    offset = None if bias is None else fold_bias(bias, filters.shape[2], innermost=False)
    return _convolution(fold_filters(filters, innermost=False), offset)


def _column_shift(channels: int, copies: int, dtype: torch.dtype) -> nn.Conv2d:
    weight = torch.eye(copies, dtype=dtype).repeat_interleave(channels, 0)[:, None, None]  # [k·C, 1, 1, k]
    return _convolution(weight, groups=len(weight), padding=(0, copies // 2))


def _affine_rows(
    psi: Tensor | None, beta: Tensor | None, c: int, kernel_size: int, planes: int, dtype: torch.dtype
) -> nn.ModuleList:
    """For each row i of the window, what maps the shifted columns to A[t] of its k offsets t."""
    k = kernel_size
    rows: list[nn.Module] = []
    for i in range(k):
        bias = None if beta is None else cast(beta[:, :, i].flatten(0, 1).T.flatten(), dtype)  # [k·C·P]
        if psi is None:
            rows.append(_row_shift(i - k // 2, torch.ones(k * c * planes, dtype=dtype), bias))
        elif psi.dim() == 5 and planes == 1:
            rows.append(_row_shift(i - k // 2, cast(psi[:, 0, 0, i].T.flatten(), dtype), bias))
        else:
            mix = _mix(cast(psi[..., i, :], dtype), bias)
            shift = _row_shift(i - k // 2, torch.ones(k * c * planes, dtype=dtype), None)
            rows.append(mix if i == k // 2 else nn.Sequential(shift, mix))
    return nn.ModuleList(rows)


def _row_shift(offset: int, weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """Depthwise: out_t(x) = weight_t · f_t(x + offset rows) + bias_t, zero outside the map."""
    filters = torch.zeros(len(weight), 1, 3 if offset else 1, 1, dtype=weight.dtype)
    filters[:, 0, 2 if offset > 0 else 0, 0] = weight
    reach = abs(offset)
    return _convolution(
        filters, bias, len(weight), padding=(reach, 0), dilation=(max(reach, 1), 1)
    )  # the filter's ends are reach rows away from its centre


def _mix(psi: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """ψ of a row's k offsets as a 1×1 convolution over channels and planes.

    Args:
        psi: ``[C, P, R, k]``, or dense ``[C_out, C_in, P, R, k]``.
    """
    if psi.dim() == 5:
        weight = psi.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(0, 2)  # [k·C_out·P, C_in·R]
        return _convolution(weight[..., None, None], bias, groups=psi.shape[-1])
    c, planes, _, k = psi.shape
    n = _per_group(c, planes)
    own = torch.eye(n, dtype=psi.dtype)[:, None, :, None]  # [n, 1, n, 1]
    blocks = psi.permute(3, 0, 1, 2).unflatten(1, (-1, n))  # [k, C/n, n, P, R]
    weight = (blocks.unsqueeze(4) * own).flatten(4, 5).flatten(0, 3)  # [k·C·P, n·R]
    return _convolution(weight[..., None, None], bias, groups=k * c // n)


def _per_group(count: int, planes: int) -> int:
    """Of ``count`` blocks of channels, how many share a group of a convolution: few that fill registers."""
    return next(n for n in range(1, count + 1) if n == count or (count % n == 0 and n * planes % LANES == 0))


def _head_sums(heads: int, channels: int, planes: int, copies: int, dtype: torch.dtype) -> nn.Module:
    """The sum over the channels of each head, plane and copy."""
    d, n = channels // heads, _per_group(heads, planes)
    if d == 1:
        return nn.Identity()
    groups = copies * heads // n
    weight = _to_channels(n, d, planes, dtype).T  # [n·P, n·d·P]
    return _convolution(weight.repeat(groups, 1)[..., None, None], groups=groups)


def _spread(heads: int, channels: int, planes: int, copies: int, dtype: torch.dtype) -> nn.Module:
    """One value per head, plane and copy, written to all channels of the head."""
    d, n = channels // heads, _per_group(heads, planes)
    if d == 1:
        return nn.Identity()
    groups = copies * heads // n
    return _convolution(_to_channels(n, d, planes, dtype).repeat(groups, 1)[..., None, None], groups=groups)


def _to_channels(heads: int, d: int, planes: int, dtype: torch.dtype) -> Tensor:
    """The matrix ``[heads·d·P, heads·P]`` that copies a head's values to its d channels."""
    return torch.kron(torch.eye(heads, dtype=dtype), torch.eye(planes, dtype=dtype).repeat(d, 1))
