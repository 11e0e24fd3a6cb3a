"""Affine self convolution of sequences."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from selfconv._arguments import is_whole
from selfconv.groups import get_group
from selfconv.nn.attention.layers import AffineSelfConv2d
from selfconv.ops import Pair


class AffineSelfConv1d(AffineSelfConv2d):
    """Affine self convolution of sequences: ``AffineSelfConv2d`` on maps of one row, with a 1×k window.

    Shapes: ``[N, in, L] -> [N, out, L / stride]``. ``group`` may be one that maps rows to rows,
    such as that of reflections, ``Group("mirror", (IDENTITY, MIRROR))``: ``[N, in, |H|, L]``. ψ and β are
    ``[C, (|H|,) 1, k]``. ``stride`` is the mean of as many neighbours. In ``selfconv.testing`` these
    are the kinds ``"sequence"`` and ``"group sequence"``.

    Args:
        kernel_size, dilation: integers.
        **options: those of ``AffineSelfConv2d``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 5,
        stride: int = 1,
        *,
        dilation: int = 1,
        **options: Any,
    ) -> None:
        for name, size, kind in (("kernel_size", kernel_size, "odd "), ("dilation", dilation, "")):
            if not is_whole(size) or size < 1 or (kind and size % 2 == 0):
                raise ValueError(f"AffineSelfConv1d: {name}: expected one {kind}integer ≥ 1; got {size!r}")
        known = inspect.signature(AffineSelfConv2d.__init__).parameters
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(
                f"AffineSelfConv1d: expected options of AffineSelfConv2d; got {', '.join(unknown)}"
            )
        group = get_group(options.get("group", "z2"))
        if not group.keeps_axes:
            raise ValueError(
                f"AffineSelfConv1d: group {group.name!r} turns rows into columns: expected one that maps "
                "rows to rows, such as Group('mirror', (IDENTITY, MIRROR))"
            )
        super().__init__(
            in_channels, out_channels, (1, kernel_size), stride, dilation=(1, dilation), **options
        )

    @property
    def kernel_size(self) -> int:
        return self.window.size[1]

    @property
    def dilation(self) -> int:
        return self.window.dilation[1]

    @property
    def cells(self) -> Pair:
        return 1, self.stride

    def forward(self, x: Tensor, need_weights: bool = False) -> Any:
        """Also α, ``[N, num_heads, (|H|,) k, L]``, with ``need_weights``."""
        if not isinstance(x, Tensor):
            raise TypeError(f"AffineSelfConv1d expects a torch.Tensor; got {type(x).__name__}")
        axis = () if len(self.group) == 1 else (len(self.group),)
        if x.dim() != 3 + len(axis) or tuple(x.shape[1:-1]) != (self.in_channels, *axis):
            expected = ", ".join(map(str, ("N", self.in_channels, *axis, "L")))
            where = f"AffineSelfConv1d on group {self.group.name!r}"
            raise ValueError(f"{where} expects [{expected}]; got shape {list(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(
                f"AffineSelfConv1d expects floating-point features; got {x.dtype} of shape {list(x.shape)}"
            )
        if x.shape[-1] < self.stride:
            raise ValueError(
                f"AffineSelfConv1d with stride={self.stride} expects so many positions or more; "
                f"got shape {list(x.shape)}"
            )
        out = super().forward(x.unsqueeze(-2), need_weights)
        if isinstance(out, Tensor):
            return out.squeeze(-2)
        values, alpha = out
        return values.squeeze(-2), alpha.squeeze(-2).squeeze(-3)
