"""What each layer of a network is judged by: its output for its exactly transformed input."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from selfconv.groups import Group
from selfconv.testing.errors import (
    Function,
    element_error,
    equivariance_error,
    largest,
    relative_error,
    shift_error,
)
from selfconv.testing.kinds import Actions, Kind, check_kinds, transform
from selfconv.testing.layer_runs import (
    END,
    Images,
    Key,
    LayerCall,
    Observer,
    Stage,
    explore,
    record,
    run_observed,
)
from selfconv.testing.windows import largest_dilation, sampling

BETWEEN = "its input does not turn with the image: a function before it, outside any layer, breaks it"
PLACES = "it treats places differently: its output does not move with its input"
CONSTANT = "its output does not depend on the image, and does not turn with it"
RANDOM = "it is given, or gives, something else each time the network runs"


class _Judge:
    """Compares runs on transformed images with the first run, and puts exact features in their place."""

    def __init__(
        self, actions: Actions, calls: dict[Key, LayerCall], tolerances: dict[tuple[Key, Stage], float]
    ) -> None:
        self.actions, self.group = actions, actions.group
        self.calls, self.tolerances = calls, tolerances
        self.errors: dict[tuple[Key, Stage], float] = dict.fromkeys(product(calls, ("input", "output")), 0.0)
        self.shifts: dict[Key, float | None] = {}
        self.faults: dict[str, str] = {}
        self.sampling: set[str] = set()  # reasons that would not hold on another size of map
        self._found: dict[str, Callable[[], str]] = {}  # who broke, and how to find out why, after all runs

    def start(self, s: int) -> Observer:
        """To observe a run on the image that s transformed."""
        self.s = s
        self.suspect: tuple[str, Callable[[], str]] | None = (
            None  # who rearranged features, and what to say if it matters
        )
        self.inexact: set[Key] = set()  # calls whose input is rearranged
        self.inputs: dict[Key, list[tuple[Any, Any, Any]]] = {}  # as given, exact, and as passed to the layer
        return self.observe

    def observe(
        self, key: Key, module: nn.Module, stage: Stage, leaves: list[Any], spec: TreeSpec
    ) -> list[Any] | None:
        call = self.calls.get(key)
        if call is None or len(call.leaves[stage]) != len(leaves):
            return None  # the network goes another way with this image
        constant = call.constant.get(stage) or [False] * len(leaves)
        exact = [self._exact(key, stage, *x) for x in zip(leaves, call.leaves[stage], constant, strict=True)]
        if stage == "input":
            passed = [e.clone() if e is not leaf else leaf for leaf, e in zip(leaves, exact, strict=True)]
            self.inputs[key] = list(zip(leaves, exact, passed, strict=True))
            return passed
        return _returned(leaves, exact, self.inputs.pop(key, []))

    def _exact(self, key: Key, stage: Stage, leaf: Any, original: Any, constant: bool) -> Any:
        """Judges one tensor; returns what should be in its place, or itself where nobody can say."""
        if not (isinstance(leaf, Tensor) and isinstance(original, Tensor) and leaf.is_floating_point()):
            return leaf
        candidates = self.actions.candidates(original, self.s)
        found = [relative_error(leaf, candidate) for candidate in candidates]
        error = min(found, key=lambda e: math.inf if math.isnan(e) else e)
        exact: Tensor = candidates[found.index(error)]
        breach = (self.calls[key].name, partial(self._reason, key, stage, self.s))
        tolerance = self.tolerances[key, stage]
        if error <= tolerance:
            if not constant and bool(leaf.any()):
                self.suspect = None
        elif constant:
            self.suspect = self.suspect or (self.calls[key].name, lambda: CONSTANT)
            exact, error = leaf, 0.0
        elif not self.actions.on_group(leaf) and (moved := _permuted(leaf, original)) <= tolerance:
            if stage == "input":
                self.inexact.add(key)
            self.suspect = self.suspect or breach
            exact, error = leaf, moved
        else:
            exact = candidates[0]
            inherited = stage == "input" or key in self.inexact
            self._found.setdefault(*(self.suspect if self.suspect and inherited else breach))
        self.errors[key, stage] = max(self.errors[key, stage], error)
        return exact

    def judge_output(self, output: list[Any], original: list[Any], kinds: list[Kind | None]) -> None:
        if not output_error(output, original, self.s, self.group, kinds) <= self.tolerances[END]:
            reason = RANDOM if self.s == 0 else "something after the last layer does not turn with its input"
            self._found.setdefault(*(self.suspect or (END[0][0], lambda: reason)))

    def conclude(self) -> None:
        """After all runs: shifts, and every fault with its reason, in the order of the layers."""
        for key, call in self.calls.items():
            shift = self.shifts[key] = _layer_shift_error(call)
            if shift is not None and not shift <= self.tolerances[key, "output"]:
                self._found.setdefault(call.name, lambda: PLACES)
        names = [call.name for call in self.calls.values()]
        for name in sorted(self._found, key=lambda name: names.index(name) if name in names else len(names)):
            self.faults[name] = self._found[name]()

    def _reason(self, key: Key, stage: Stage, s: int) -> str:
        call = self.calls[key]
        if any(isinstance(leaf, Tensor) and bool(leaf.isnan().any()) for leaf in call.leaves[stage]):
            return f"its {stage} is not a number"
        if s == 0:
            return RANDOM
        if stage == "input":
            return BETWEEN
        off_centre = _off_centre(call, self.group, self.tolerances[key, stage])
        if off_centre:
            self.sampling.add(off_centre)
            return off_centre
        if isinstance(call.module, nn.Conv2d):
            return "an ordinary convolution: its filters do not turn with the image"
        return "its output does not turn with its input"


def judged(
    model: nn.Module,
    images: tuple[Images, Images],
    group: Group,
    tolerance: float,
    inputs: list[Kind | None],
    outputs: Kind | Sequence[Kind] | None,
) -> tuple[_Judge, list[Any], list[Kind | None]]:
    """All runs of the model on the first images (the second serve to compare), judged.

    Also returns its output, and the kind of each of its tensors, as far as the caller named them.
    """
    x, other = images
    calls, y = record(model, x)
    if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in y):
        found = ", ".join(type(leaf).__name__ for leaf in y)
        raise ValueError(f"the model returns no floating-point tensor to compare; got {found or 'nothing'}")
    tolerances: dict[tuple[Key, Stage], float] = defaultdict(lambda: tolerance)
    tolerances |= {at: max(tolerance, rounding) for at, rounding in explore(model, other, calls).items()}
    kinds = check_kinds("outputs", outputs, len(y))
    judge = _Judge(Actions.of(model, group, [*inputs, *kinds]), calls, tolerances)
    for s in (s for s in group if group.exact[s]):
        judge.judge_output(run_observed(model, turned(x, s, group, inputs), judge.start(s)), y, kinds)
    judge.conclude()
    return judge, y, kinds


def turned(x: Images, s: int, group: Group, kinds: list[Kind | None]) -> Images:
    return tuple(transform(t, s, group, kind) for t, kind in zip(x, kinds, strict=True))


def _permuted(a: Tensor, b: Tensor) -> float:
    """The error of a as a rearrangement of the numbers in b."""
    return relative_error(a.flatten().sort().values, b.flatten().sort().values)


def _returned(leaves: list[Any], exact: list[Any], inputs: list[tuple[Any, Any, Any]]) -> list[Any]:
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


def output_error(
    output: list[Any], original: list[Any], s: int, group: Group, kinds: list[Kind | None]
) -> float:
    """The largest error of the tensors that a model returns, of the kind that the element s has."""
    if len(output) != len(original):
        return math.inf
    return largest(
        element_error(a, _output_turned(b, s, group, kind), s, group)
        for a, b, kind in zip(output, original, kinds, strict=True)
        if isinstance(b, Tensor) and b.is_floating_point()
    )


def _output_turned(y: Tensor, s: int, group: Group, kind: Kind | None) -> Tensor:
    """As ``transform``; of five axes that nobody named and without that of the group, two are a map."""
    if len(group) == 1 and kind is None:
        return y
    if kind is None and y.dim() == 5 and y.shape[2] != len(group):
        return group.act_planar(y, s)
    return transform(y, s, group, kind)


def _layer_shift_error(call: LayerCall) -> float | None:
    x, function = as_function(call)
    outputs = call.leaves["output"]
    if x is None or len(outputs) != 1 or not isinstance(outputs[0], Tensor):
        return None
    y, rule = outputs[0], sampling(call.module)
    stride = rule[1] if rule else 1
    maps = min(x.dim(), y.dim()) >= 4 and x.shape[-2] == x.shape[-1]  # or else channels may be last
    if not maps or min(x.shape[-2:]) < 2 * stride + 2 or x.shape[-1] < stride * y.shape[-1]:
        return None
    return shift_error(function, x, stride, stride, frame=largest_dilation(call.module))


def as_function(call: LayerCall) -> tuple[Tensor | None, Function]:
    """A layer's only tensor, and the layer as a function of it; no tensor if there are several."""
    leaves = call.leaves["input"]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(x: Tensor) -> Tensor:
        changed = [x.clone() if i in places else leaf for i, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(changed, call.spec)
        output: Tensor = call.module(*args, **kwargs)
        return output

    single = len(places) == 1 and leaves[places[0]].is_floating_point()
    return (leaves[places[0]] if single else None), function


def _off_centre(call: LayerCall, group: Group, tolerance: float) -> str | None:
    """How a layer samples off centre, if that is all that keeps it from being equivariant."""
    rule, (x, function) = sampling(call.module), as_function(call)
    if rule is None or x is None or x.dim() < 4:
        return None
    k, stride, padding = rule
    left = [(n + 2 * padding - k) % stride for n in x.shape[-2:]]
    if not any(left) or min(x.shape[-2:]) <= max(left):
        return None
    h, w = x.shape[-2:]
    errors = equivariance_error(function, x[..., : h - left[0], : w - left[1]], group)
    if not max(error for error, exact in zip(errors, group.exact, strict=True) if exact) <= tolerance:
        return None
    parity = "even" if h % 2 == 0 else "odd"
    return (
        f"stride {stride} on an {parity}-sized map ({h}x{w}): with window {k} and padding {padding}, "
        f"{left[0]} row and column too many on one side, so that it samples off centre"
    )
