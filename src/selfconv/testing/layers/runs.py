"""Runs of a network in which every call of a layer is recorded, or has tensors replaced."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfconv._compiler import untraced
from selfconv.nn import SqueezeExcite
from selfconv.testing.kinds import Kind, as_tuple
from selfconv.testing.leaves import Nesting, as_tensor, check_dense, flat, flatten, own

Images = tuple[Tensor, ...]  # what a model takes
Key = tuple[str, int]  # a layer, and how often it was called before
Stage = Literal["input", "output"]
Place = tuple[Key, Stage, int]  # of a tensor in a run
NOTE = "raised in "  # and the name of a layer
GIVEN: Key = ("the model's input", 0)
OUTPUT_NAME = "the model's output"  # in place of the name of a layer
END: tuple[Key, Stage] = ((OUTPUT_NAME, 0), "output")


@dataclass
class LayerCall:
    """A call of a layer in the first run: what went in and came out, as flat lists of tensors and others."""

    name: str
    module: nn.Module
    nesting: Nesting  # of its arguments
    leaves: dict[Stage, list[Any]]
    types: dict[Stage, dict[int, Any]]  # of escnn's fields among the leaves, by place
    constant: dict[Stage, list[bool]] = field(default_factory=dict)  # whether it ignores the image

    @property
    def shape(self) -> list[int]:
        return next((list(t.shape) for t in self.tensors("output").values()), [])

    def tensors(self, stage: Stage) -> dict[int, Tensor]:
        """By their places among the leaves."""
        return {i: t for i, t in enumerate(self.leaves[stage]) if isinstance(t, Tensor)}

    @property
    def takes_features(self) -> bool:
        return any(t.is_floating_point() for t in self.tensors("input").values())

    def only_input(self) -> tuple[int, Tensor] | None:
        """The place and value of the layer's tensor, if it takes a single one, of floating-point numbers."""
        found = list(self.tensors("input").items())
        return found[0] if len(found) == 1 and found[0][1].is_floating_point() else None

    def run(self, changed: dict[int, Tensor]) -> list[Any]:
        """The layer's outputs, flat, for its arguments of the first run except for some tensors."""
        leaves = [changed.get(i, leaf) for i, leaf in enumerate(self.leaves["input"])]
        args, kwargs = self.nesting.nested(own(leaves))
        with _noting([self.name]):
            return flatten(self.module(*args, **kwargs))[0]


@dataclass
class FirstRun:
    """The run of a network on the image as it is, with which the others are compared."""

    model: nn.Module
    x: Images
    moving: list[bool]  # which of the inputs are maps or sequences, and move with a shift
    calls: dict[Key, LayerCall]
    output: list[Any]  # as ``judgeable`` returns it
    kinds: list[Kind | None]  # of the outputs, as far as the caller named them
    axes: int  # the number of trailing spatial axes

    def tensor(self, place: Place) -> Tensor:
        key, stage, i = place
        if key == GIVEN:
            return self.x[i]
        leaf: Tensor = self.calls[key].leaves[stage][i] if key in self.calls else as_tensor(self.output[i])
        return leaf

    def name(self, key: Key) -> str:
        return self.calls[key].name if key in self.calls else key[0]


Observer = Callable[[Key, nn.Module, Stage, list[Any], Nesting], list[Any] | None]
Replace = Callable[[Key, Stage, list[Any]], list[Any]]


def look_away(*_: Any) -> None: ...


def run_observed(
    model: nn.Module,
    x: Tensor | Images,
    observe: Observer,
    *,
    only: Callable[[nn.Module], bool] = lambda _: True,
) -> list[Any]:
    """Runs a model, on x or on each tensor of x, with hooks on its layers: its outputs as a flat list.

    ``observe((name, calls before), module, "input" or "output", tensors, nesting)`` may return other tensors,
    which then take the place of the layer's arguments or outputs.

    Args:
        only: whether a layer is observed; the others run without the cost of a hook.
    """
    counts: Counter[str] = Counter()
    running = ["the model"]  # and layers in it

    @untraced  # keeps the hooks out of the compiled graph
    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        running.append(name or "the model")
        leaves, nesting = flatten((args, kwargs))
        changed = observe((name, counts[name]), module, "input", leaves, nesting)
        return None if changed is None else nesting.nested(changed)

    @untraced
    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        leaves, nesting = flatten(output)
        changed = observe((name, counts[name]), module, "output", leaves, nesting)
        counts[name] += 1
        running.pop()
        return None if changed is None else nesting.nested(changed)

    handles = []
    for name, module in model.named_modules():
        if _is_layer(name, module) and only(module):
            handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(after, name), with_kwargs=True))
    try:
        with warnings.catch_warnings(), _noting(running):
            warnings.simplefilter("ignore")  # about sizes: what an audit finds out by itself
            return flat(model(*own(as_tuple(x))))
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _noting(running: list[str]) -> Iterator[None]:
    """Adds a note to an exception, in which layer it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{NOTE}{running[-1]}")
        raise


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Makes what a model raises in a run a ValueError of one line, which names the layer."""
    try:
        yield
    except Exception as error:
        layers = [note for note in getattr(error, "__notes__", []) if note.startswith(NOTE)]
        if not layers:
            raise
        raise ValueError(
            f"the model cannot be audited: {layers[0].removeprefix(NOTE)}: {first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _is_layer(name: str, module: nn.Module) -> bool:
    if "parametrizations" in name.split("."):
        return False  # it makes weights, not features
    children = [child for child, _ in module.named_children() if child != "parametrizations"]
    return isinstance(module, SqueezeExcite) or not children


def record(model: nn.Module, x: Images) -> tuple[dict[Key, LayerCall], list[Any]]:
    calls: dict[Key, LayerCall] = {}

    def observe(key: Key, module: nn.Module, stage: Stage, leaves: list[Any], nesting: Nesting) -> None:
        check_dense(leaves)
        # copies: a later layer may work in place
        kept = own(leaves)
        types = {i: field.type for i, field in nesting.fields.items()}
        if stage == "output":
            calls[key].leaves["output"], calls[key].types["output"] = kept, types
            return
        name = (key[0] or "the model") + (f" (call {key[1] + 1})" if key[1] else "")
        calls[key] = LayerCall(
            name, module, nesting, {"input": kept, "output": []}, {"input": types, "output": {}}
        )

    return calls, run_observed(model, x, observe)


def replacing(calls: dict[Key, LayerCall], replace: Replace) -> Observer:
    """To observe a run in which ``replace(key, stage, tensors)`` says what takes the place of the arguments
    and outputs of each layer. Calls that the first run did not have remain as they are."""
    inputs: dict[Key, list[tuple[Any, Any, Any]]] = {}  # as given, as replaced, and as passed to the layer

    def observe(
        key: Key, module: nn.Module, stage: Stage, leaves: list[Any], nesting: Nesting
    ) -> list[Any] | None:
        if key not in calls or len(calls[key].leaves[stage]) != len(leaves):
            return None  # the network goes another way with this image
        replaced = replace(key, stage, leaves)
        # copies: code after a layer may work in place, and the first run's features are used again
        passed = [
            _copy(new, leaf) if isinstance(new, Tensor) and new is not leaf else new
            for new, leaf in zip(replaced, leaves, strict=True)
        ]
        if stage == "output":
            return _returned(leaves, passed, inputs.pop(key, []))
        inputs[key] = list(zip(leaves, replaced, passed, strict=True))
        return passed

    return observe


def _copy(new: Tensor, leaf: Any) -> Tensor:
    """With the gradient of what it replaces, for a model that differentiates."""
    new = new.detach().clone()
    if not (isinstance(leaf, Tensor) and leaf.requires_grad and leaf.shape == new.shape):
        return new
    return new + (leaf - leaf.detach()).nan_to_num()


def _returned(leaves: list[Any], exact: list[Any], inputs: list[tuple[Any, Any, Any]]) -> list[Any]:
    """A layer's exact outputs. In-place changes of its exact input are copied to the given one."""
    exact = list(exact)
    for given, before, passed in inputs:
        if passed is given or not isinstance(given, Tensor):
            continue
        same = [i for i, leaf in enumerate(leaves) if leaf is passed]
        value = exact[same[0]] if same else passed
        if (same or not torch.equal(passed, before)) and given.shape == value.shape:
            for i in same:
                exact[i] = given
            given.copy_(value)
    return exact
