"""The operation with filters that do not change: what depends on them alone is computed once.

``filter_tables`` steers and packs ψ and β as the CPU kernels take them. ``PreparedCall`` starts the kernel
with such tables, without the checks and operators of ``affine_self_conv``, where nothing observes the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfconv.ops._backends import backend_failure
from selfconv.ops._call import check_call


@torch.no_grad()
def filter_tables(
    channels: tuple[int, ...], *filters: Tensor | None, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, Tensor] | None:
    """The filter tables of the CPU kernels, for keys and for values; None if these do not serve the filters.

    Args:
        channels, filters, options: as for ``affine_self_conv_packed``.
        dtype: of the features.
    """
    if backend_failure("numba") is not None:
        return None
    from selfconv.ops.cpu import backend

    order = len(options["group"])
    sizes = (1, 1) if order == 1 else (order, 1, 1)
    features = [torch.empty(0, c, *sizes, dtype=dtype) for c in channels]
    psi_k, beta_k, psi_v, beta_v = (None if t is None else t.cpu() for t in filters)
    call = check_call((features[0], features[1], features[-1]), (psi_k, beta_k, psi_v, beta_v), **options)
    return None if call.dense or call.compute_dtype != dtype else backend.key_and_value_tables(call)


class PreparedCall:
    """Starts the forward kernel with fixed filter tables; may be called from several threads at once."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._forward: Any = None

    def __call__(self, packed: Tensor, table_k: Tensor, table_v: Tensor) -> Tensor | None:
        """The aggregated values; None where the full operation is needed: for autograd, transforms of torch,
        tracers, other devices and dtypes.

        Args:
            packed: as for ``affine_self_conv_packed``.
        """
        if self._forward is None:
            from selfconv.ops.cpu.backend import PreparedForward

            self._forward = PreparedForward(self.scale)
        if not self._forward.serves(packed, table_k):
            return None
        planar = packed.dim() == 4
        out = self._forward(packed.unsqueeze(2) if planar else packed, table_k, table_v)
        return out.squeeze(2) if planar else out

    def __getstate__(self) -> dict[str, Any]:
        return {"scale": self.scale, "_forward": None}  # the rest holds addresses of this process
