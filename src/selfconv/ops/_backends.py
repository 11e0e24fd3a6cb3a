"""Which backend runs a call, and why. A new one is a file with a function ``run(call)``, and a line here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from torch import Tensor

from selfconv.ops._call import Call

Run = Callable[[Call], Tensor]


@dataclass(frozen=True)
class Backend:
    """A backend's module, imported when first used, and why it would not serve a call (None if it would)."""

    module: str
    refusal: Callable[[Call], str | None]

    def load(self) -> Run | str:
        """Its ``run``, or why it cannot be had."""
        return _load(self.module)


@cache
def _load(module: str) -> Run | str:
    try:
        return import_module(f"selfconv.ops.{module}").run
    except Exception as error:  # a broken installation must not take the others down
        return f"cannot be imported ({type(error).__name__}: {error})"


def _numba_refusal(call: Call) -> str | None:
    if call.query.device.type != "cpu":
        return f"runs on the CPU; the tensors are on {call.query.device}"
    if call.dense:
        return "takes ψ per channel; this ψ maps channel to channel"
    return None


def _serves_all(call: Call) -> None:
    return None


def _only_when_asked(call: Call) -> str:
    return "is for checking the others; ask for it by name"


_BACKENDS = {  # in order of preference
    "numba": Backend("numba_cpu", _numba_refusal),
    "eager": Backend("eager", _serves_all),
    "reference": Backend("reference", _only_when_asked),
}
BACKENDS = tuple(_BACKENDS)


def check_backend(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"unknown backend {name!r}; expected one of {', '.join(map(repr, BACKENDS))}, or None"
        )


def choose_backend(call: Call, name: str | None) -> Run:
    """The function that runs a call: the one asked for, or else the first in order that serves it."""
    check_backend(name)
    if name == "reference":
        return import_module("selfconv.ops.reference").run
    for candidate in [name] if name else BACKENDS:
        backend = _BACKENDS[candidate]
        refusal = backend.refusal(call)
        run = refusal or backend.load()
        if callable(run):
            return run
        if name:
            raise ValueError(f"backend {name!r} does not serve this call: it {run}")
        if not refusal:
            _warn_once(f"selfconv: the {candidate} backend {run}; falling back to a slower one")
    raise AssertionError("the eager backend serves every call")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def explain_call(call: Call) -> str:
    """A line per backend, in order of preference: whether it would run the call, or why not."""
    lines, chosen = [], False
    for name, backend in _BACKENDS.items():
        reason = backend.refusal(call) or backend.load()
        if callable(reason):
            verdict = "would serve, if asked for" if chosen else "runs"
            chosen = True
        else:
            verdict = reason
        lines.append(f"{name}: {verdict}")
    return "\n".join(lines)
