"""Makes a function an operator of torch, for the fused kernels.

``torch.library.custom_op`` does the same, but the first call of its operators imports torch._dynamo (see
``untraced``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from selfconv._compiler import untraced

_LIBRARY = torch.library.Library("selfconv", "FRAGMENT")


class Operator:
    """``torch.ops.selfconv.NAME``, whose arguments and results are those of the kernel.

    Args:
        dispatch_key: of the tensors that the kernel serves; those of all devices by default.
    """

    def __init__(
        self, name: str, kernel: Callable[..., Any], dispatch_key: str = "CompositeExplicitAutograd"
    ) -> None:
        self._name = f"selfconv::{name}"
        schema = torch.library.infer_schema(kernel, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, untraced(kernel), dispatch_key)
        self._overload = getattr(torch.ops.selfconv, name).default

    def __call__(self, *args: Any) -> Any:
        return self._overload(*args)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """What the kernel returns, without its numbers."""
        return torch.library.register_fake(self._name, fake, lib=_LIBRARY)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        torch.library.register_autograd(self._name, backward, setup_context=setup_context, lib=_LIBRARY)

    def register_vmap(self, rule: Callable[..., Any]) -> None:
        torch.library.register_vmap(self._name, rule, lib=_LIBRARY)


def operator(name: str, dispatch_key: str = "CompositeExplicitAutograd") -> Callable[..., Operator]:
    """Decorates a kernel; its annotations become the operator's schema."""
    return lambda kernel: Operator(name, kernel, dispatch_key)
