"""Which backend runs a call, and why. A new one is a file with a function ``run(call)``, and an entry in
``_BACKENDS``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from selfconv.ops._call import Call
from selfconv.ops._transforms import constant_when_compiled, derivative_refusal
from selfconv.ops.cpu import threads  # noqa: F401  # now, not when a backend needs it: it has to notice forks

Run = Callable[[Call], Tensor]
Refusal = Callable[[Call], str | None]


def _none(call: Call) -> None:
    return None


@dataclass(frozen=True)
class Backend:
    """How to import a backend's ``run``, and why it would not serve a call (None if it would).

    ``reserve`` is why it serves the call only if asked for by name.
    """

    load: Callable[[], Run]
    refusal: Refusal = _none
    reserve: Refusal = _none


# imported when first used, by statements: torch.compile follows those, but not importlib


def _load_triton() -> Run:
    from selfconv.ops.gpu.backend import run

    return run


def _load_numba() -> Run:
    from selfconv.ops.cpu.backend import run

    return run


def _load_eager() -> Run:
    from selfconv.ops.eager import run

    return run


def _load_reference() -> Run:
    from selfconv.ops.reference import run

    return run


def _triton_refusal(call: Call) -> str | None:
    dtypes = {t.dtype for t in call.tensors}
    if call.dense:
        return "serves no dense ψ"
    if not (dtypes <= {torch.float16, torch.bfloat16, torch.float32} or dtypes == {torch.float64}):
        given = ", ".join(sorted(map(str, dtypes)))
        return f"serves float16, bfloat16 and float32 in any mix, or float64 alone; got {given}"
    planes = call.key.shape[2]
    if planes & (planes - 1):
        return f"serves 1, 2, 4, 8, … planes of a group; got {planes}"
    if call.value.device.type != "cuda" and not _interpreted(call):
        return f"runs on GPUs; the tensors are on {call.value.device}"
    return derivative_refusal()


def _triton_reserve(call: Call) -> str | None:
    if _interpreted(call):
        return "runs in Triton's interpreter here, for checking; ask for it by name"
    return None


def _interpreted(call: Call) -> bool:
    return call.value.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def _numba_refusal(call: Call) -> str | None:
    if call.value.device.type != "cpu":
        return f"runs on the CPU; the tensors are on {call.value.device}"
    return "serves no dense ψ" if call.dense else derivative_refusal()


def _reference_reserve(call: Call) -> str:
    return "is for checking the others; ask for it by name"


_BACKENDS = {  # in order of preference
    "triton": Backend(_load_triton, _triton_refusal, _triton_reserve),
    "numba": Backend(_load_numba, _numba_refusal),
    "eager": Backend(_load_eager),
    "reference": Backend(_load_reference, reserve=_reference_reserve),
}
BACKENDS = tuple(_BACKENDS)
_FAILURES: dict[str, str | None] = {}


@constant_when_compiled  # traced, the dict would be a guard, broken by the call that fills it
def backend_failure(name: str) -> str | None:
    """Why a backend cannot be imported; None if it can."""
    if name not in _FAILURES:
        try:
            _BACKENDS[name].load()
            _FAILURES[name] = None
        except Exception as error:  # a broken installation must not take the others down
            _FAILURES[name] = f"cannot be imported ({type(error).__name__}: {error})"
    return _FAILURES[name]


def check_backend(name: str | None) -> None:
    """Raises ValueError unless it is one of ``BACKENDS``, or None."""
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"unknown backend {name!r}; expected one of {', '.join(map(repr, BACKENDS))}, or None"
        )


def choose_backend(call: Call, name: str | None) -> Run:
    """The function that runs a call: that of the backend ``name``, by default of the first that serves it."""
    check_backend(name)
    for candidate in [name] if name else BACKENDS:
        backend = _BACKENDS[candidate]
        refusal = backend.refusal(call) or (None if name else backend.reserve(call))
        failure = None if refusal else backend_failure(candidate)
        if not (refusal or failure):
            return backend.load()
        if name:
            raise ValueError(f"backend {name!r} does not serve this call: it {refusal or failure}")
        if failure:
            _warn_once(f"selfconv: the {candidate} backend {failure}; falling back to a slower one")
    raise AssertionError("the eager backend serves every call")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def explain_call(call: Call) -> str:
    """A line per backend, in order of preference: whether it would run the call, or why not."""
    lines, chosen = [], False
    for name, backend in _BACKENDS.items():
        verdict = backend.refusal(call) or backend.reserve(call) or backend_failure(name)
        if verdict is None:
            verdict = "would serve, if asked for" if chosen else "runs"
            chosen = True
        lines.append(f"{name}: {verdict}")
    return "\n".join(lines)
