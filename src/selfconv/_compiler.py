"""Keeps torch.compile out of functions without loading it: torch._dynamo imports more slowly than torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which torch.compile does not trace when a compiled program calls it.

    ``torch.compiler.disable`` does the same, but imports torch._dynamo, although nothing can be compiled
    before somebody else has done so.
    """

    @cache
    def disabled() -> Callable[..., Any]:
        import torch

        return torch.compiler.disable(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **options)

    return call
