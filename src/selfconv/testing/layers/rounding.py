"""How much of an error is rounding: by the precision of what a network computes, and by how it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from selfconv.testing.errors import default_tolerance, largest, masked
from selfconv.testing.layers.runs import END, Images, Key, LayerCall, Stage, run_observed
from selfconv.testing.leaves import Nesting, aligned, judgeable

EXACT = torch.float64
REAL = {torch.complex128: EXACT, torch.complex64: torch.float32, torch.complex32: torch.float16}
ESCNN = torch.float32  # in which it computes its filters, whatever the dtype of a network
MARGIN = 100  # an error of up to this many times ``rounding_effect`` counts as rounding


class Precision(TorchDispatchMode):
    """Follows the values that depend on the image, with the least precise dtype that each was rounded to.

    A constant rounds nothing, whatever its dtype: float64 + bfloat16 is computed in float64. Tensors are
    known by their storage, so that views and what is written into them are followed as well.
    """

    def __init__(self) -> None:
        super().__init__()
        # a weak reference keeps the address of its storage from being used again
        self._rounded: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}

    def follow(self, x: Tensor, rounded: torch.dtype = EXACT) -> None:
        storage = _storage(x)
        if storage is not None:
            self._rounded[storage._cdata] = StorageWeakRef(storage), rounded

    def rounded(self, x: Any) -> torch.dtype | None:
        """The least precise dtype in the history of x; None if x does not depend on the image."""
        storage = _storage(x) if isinstance(x, Tensor) else None
        found = None if storage is None else self._rounded.get(storage._cdata)
        return found and found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]
        if name.endswith("_like") or name.startswith("new_"):
            return result  # of the shape of its argument, not of its values
        sources = [dtype for x in tree_flatten((args, kwargs))[0] if (dtype := self.rounded(x))]
        if sources:
            for x in tree_flatten((result, _written(func, args, kwargs)))[0]:
                if isinstance(x, Tensor):
                    self.follow(x, coarsest([*sources, _real(x.dtype)]))
        return result


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=default_tolerance, default=EXACT)


def _real(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose rounding a value of this dtype has; integers are exact."""
    return REAL.get(dtype, dtype if dtype.is_floating_point else EXACT)


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return None


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that an operation writes into."""
    arguments = func._schema.arguments if isinstance(func, torch._ops.OpOverload) else ()
    named = {**{argument.name: x for argument, x in zip(arguments, args, strict=False)}, **kwargs}
    return [
        named[argument.name]
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named
    ]


def explore(
    model: nn.Module, other: Images, calls: dict[Key, LayerCall], output: list[Any]
) -> tuple[dict[tuple[Key, Stage], list[torch.dtype]], list[bool]]:
    """With another image: marks what does not depend on the image, such as weights; and returns, for each
    value at each stage, the least precise dtype in its history since features were last exact, and for each
    tensor of the output, whether it does not depend on the image.

    Args:
        output: that of the first run, as ``judgeable`` returns it.
    """
    rounded: dict[tuple[Key, Stage], list[torch.dtype]] = {}
    precision = Precision()

    def history(leaves: list[Any], constant: list[bool]) -> list[torch.dtype]:
        return [
            coarsest([precision.rounded(x) or EXACT, _real(x.dtype)])
            if isinstance(x, Tensor) and not c
            else EXACT
            for x, c in zip(leaves, constant, strict=True)
        ]

    def observe(key: Key, module: nn.Module, stage: Stage, leaves: list[Any], nesting: Nesting) -> None:
        constant = _unchanged(leaves, calls[key].leaves[stage] if key in calls else [])
        if key in calls:
            calls[key].constant[stage] = constant
        rounded[key, stage] = history(leaves, constant)
        if stage == "output" and nesting.fields and any(True for _ in module.parameters()):
            rounded[key, stage] = [coarsest([dtype, ESCNN]) for dtype in rounded[key, stage]]
        for x, c in zip(leaves, constant, strict=True):
            if isinstance(x, Tensor) and not c:
                precision.follow(x)  # exact from here on, in the runs that are judged

    for x in other:
        precision.follow(x)
    with precision:
        found = judgeable(run_observed(model, other, observe))
    found = aligned(found, output) or found
    constant = _unchanged(found, output)
    tensors = [c for c, leaf in zip(constant, found, strict=True) if isinstance(leaf, Tensor)]
    return {**rounded, END: history(found, constant)}, tensors


def _unchanged(leaves: list[Any], others: list[Any]) -> list[bool]:
    """For each tensor, whether it is the same for another image."""
    if len(leaves) != len(others):
        return [False] * len(leaves)
    pairs = zip(leaves, others, strict=True)
    return [isinstance(a, Tensor) and _same(a, b) for a, b in pairs]


def _same(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)


def rounding_effect(
    model: nn.Module,
    x: Images,
    calls: dict[Key, LayerCall],
    errors: dict[tuple[Key, Stage], float],
    output_error: Callable[[list[Any]], float],
) -> float:
    """The error of the output if every layer has a random error, as large as its own or as rounding."""
    generator = torch.Generator().manual_seed(0)

    def disturbed(t: Tensor, error: float) -> Tensor:
        noise = 2 * torch.rand(t.shape, dtype=torch.float64, generator=generator) - 1
        size = (
            max(error, torch.finfo(t.dtype).eps) * torch.where(t.isfinite() & ~masked(t), t.abs(), 0).amax()
        )
        return t + (noise.to(t.device) * size).to(t.dtype)

    def observe(
        key: Key, module: nn.Module, stage: Stage, leaves: list[Any], nesting: Nesting
    ) -> list[Any] | None:
        if stage == "input" or key not in calls or len(calls[key].leaves[stage]) != len(leaves):
            return None
        error = max(errors[key, "input"], errors[key, "output"])
        constant = calls[key].constant.get(stage) or [False] * len(leaves)
        return [
            disturbed(t, error)
            if isinstance(t, Tensor) and t.is_floating_point() and t.numel() and not c
            else t
            for t, c in zip(leaves, constant, strict=True)
        ]

    def error() -> float:
        noisy = tuple(disturbed(t, 0.0) if t.is_floating_point() else t for t in x)
        return output_error(run_observed(model, noisy, observe))

    return largest(error() for _ in range(2))
