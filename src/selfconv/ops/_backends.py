"""Which backend runs a call, and why. A new one is a file with a function ``run(call)``, and a line here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from selfconv.ops._call import Call

Run = Callable[[Call], Tensor]


@dataclass(frozen=True)
class Backend:
    """How to import a backend, at its first use, and why it would not serve a call (None if it would)."""

    load: Callable[[], Run]
    refusal: Callable[[Call], str | None]


# Import statements, not importlib: torch.compile traces through them.


def _numba() -> Run:
    from selfconv.ops.numba_cpu import run

    return run


def _eager() -> Run:
    from selfconv.ops.eager import run

    return run


def _reference() -> Run:
    from selfconv.ops.reference import run

    return run


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
    "numba": Backend(_numba, _numba_refusal),
    "eager": Backend(_eager, _serves_all),
    "reference": Backend(_reference, _only_when_asked),
}
BACKENDS = tuple(_BACKENDS)
_loaded: dict[str, Run | str] = {}


def _load(name: str) -> Run | str:
    """The backend's ``run``, or why it cannot be had."""
    if name not in _loaded:
        try:
            _loaded[name] = _BACKENDS[name].load()
        except Exception as error:  # a broken installation must not take the others down
            _loaded[name] = f"cannot be imported ({type(error).__name__}: {error})"
    return _loaded[name]


def check_backend(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"unknown backend {name!r}; expected one of {', '.join(map(repr, BACKENDS))}, or None"
        )


def choose_backend(call: Call, name: str | None) -> Run:
    """The function that runs a call: the one asked for, or else the first in order that serves it."""
    check_backend(name)
    if name == "reference":
        return _reference()
    for candidate in [name] if name else BACKENDS:
        refusal = _BACKENDS[candidate].refusal(call)
        run = refusal or _load(candidate)
        if callable(run):
            return run
        if name:
            raise ValueError(f"backend {name!r} does not serve this call: it {run}")
        if not refusal and candidate not in _warned:
            _warned.add(candidate)
            message = f"selfconv: the {candidate} backend {run}; falling back to a slower one"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    raise AssertionError("the eager backend serves every call")


_warned: set[str] = set()


def explain_call(call: Call) -> str:
    """A line per backend, in order of preference: whether it would run the call, or why not."""
    lines, chosen = [], False
    for name, backend in _BACKENDS.items():
        reason = backend.refusal(call) or _load(name)
        if callable(reason):
            verdict = "would serve, if asked for" if chosen else "runs"
            chosen = True
        else:
            verdict = reason
        lines.append(f"{name}: {verdict}")
    return "\n".join(lines)
