"""A run of a network in which every call of a layer is recorded, or done differently."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from selfconv.nn import SqueezeExcite
from selfconv.testing.kinds import as_tuple

Images = tuple[Tensor, ...]  # what a model takes
Key = tuple[str, int]  # a layer, and how often it was called before
Stage = Literal["input", "output"]
END: tuple[Key, Stage] = (("the model's output", 0), "output")


@dataclass
class LayerCall:
    """A call of a layer in the first run: what went in and came out, as flat lists of tensors and others."""

    name: str
    module: nn.Module
    spec: TreeSpec  # of its arguments
    leaves: dict[Stage, list[Any]]
    constant: dict[Stage, list[bool]] = field(default_factory=dict)  # whether it ignores the image

    @property
    def shape(self) -> list[int]:
        return next((list(t.shape) for t in self.leaves["output"] if isinstance(t, Tensor)), [])


Observer = Callable[[Key, nn.Module, Stage, list[Any], TreeSpec], list[Any] | None]


def look_away(*_: Any) -> None: ...


def run_observed(
    model: nn.Module,
    x: Tensor | Images,
    observe: Observer,
    *,
    only: Callable[[nn.Module], bool] = lambda _: True,
) -> list[Any]:
    """Runs a model, on x or on each tensor of x, with hooks on its layers: its outputs as a flat list.

    ``observe((name, calls before), module, "input" or "output", tensors, spec)`` may return other tensors,
    which then take the place of the layer's arguments or outputs.

    Args:
        only: whether a layer is observed; the others run without the cost of a hook.
    """
    counts: Counter[str] = Counter()

    @torch.compiler.disable  # a compiled network is compiled without what watches it
    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        changed = observe((name, counts[name]), module, "input", leaves, spec)
        return None if changed is None else tree_unflatten(changed, spec)

    @torch.compiler.disable
    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        changed = observe((name, counts[name]), module, "output", leaves, spec)
        counts[name] += 1
        return None if changed is None else tree_unflatten(changed, spec)

    handles = []
    for name, module in model.named_modules():
        if _is_layer(name, module) and only(module):
            handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(after, name), with_kwargs=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes: what an audit finds out by itself
            return tree_flatten(model(*as_tuple(x)))[0]
    finally:
        for handle in handles:
            handle.remove()


def _is_layer(name: str, module: nn.Module) -> bool:
    if "parametrizations" in name.split("."):
        return False  # it makes weights, not features
    children = [child for child, _ in module.named_children() if child != "parametrizations"]
    return isinstance(module, SqueezeExcite) or not children


def record(model: nn.Module, x: Images) -> tuple[dict[Key, LayerCall], list[Any]]:
    calls: dict[Key, LayerCall] = {}

    def observe(key: Key, module: nn.Module, stage: Stage, leaves: list[Any], spec: TreeSpec) -> None:
        # copies: a later layer may work in place
        kept = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if stage == "output":
            calls[key].leaves["output"] = kept
            return
        name = (key[0] or "the model") + (f" (call {key[1] + 1})" if key[1] else "")
        calls[key] = LayerCall(name, module, spec, {"input": kept, "output": []})

    return calls, run_observed(model, x, observe)


def returned(leaves: list[Any], exact: list[Any], inputs: list[tuple[Any, Any, Any]]) -> list[Any]:
    """A layer's exact outputs. What it did to its input in place is done to the one that it was given."""
    exact = list(exact)
    for given, before, passed in inputs:
        if passed is given:
            continue
        same = [i for i, leaf in enumerate(leaves) if leaf is passed]
        value = exact[same[0]] if same else passed
        if (same or not torch.equal(passed, before)) and given.shape == value.shape:
            for i in same:
                exact[i] = given
            given.copy_(value)
    return exact
