"""Judges each layer of a network by its output for its exactly transformed input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfconv.groups import Group
from selfconv.testing.actions import Actions
from selfconv.testing.errors import default_tolerance, element_error, largest, relative_error
from selfconv.testing.kinds import Kind, default_kind, transform
from selfconv.testing.layers.rounding import EXACT, MARGIN, coarsest, explore, rounding_effect
from selfconv.testing.layers.runs import (
    END,
    OUTPUT_NAME,
    FirstRun,
    Images,
    Key,
    LayerCall,
    Observer,
    Stage,
    record,
    replacing,
    run_observed,
)
from selfconv.testing.layers.windows import sampling
from selfconv.testing.leaves import aligned, as_tensor, judgeable, output_kinds
from selfconv.testing.shifts import ShiftReport, permuted, tested_shifts

BETWEEN = "its input does not transform with the image: code between the layers breaks equivariance"
CONSTANT = "its output is the same for every image, and does not transform with it"
RANDOM = "its input or output differs between two runs on the same image"
AFTER = "code after the last layer breaks equivariance"
NAN = "it is not a number"
ROUNDED = "{what} {dtype}, and an error of this size may be rounding, which tolerance={tolerance:.0e} allows"

Dtypes = dict[tuple[Key, Stage], list[torch.dtype]]  # the precision of each value


class Excess(NamedTuple):
    """The error of a fault, and the precision of the values in which it was found."""

    error: float
    dtype: torch.dtype

    def __str__(self) -> str:
        rounding = f"rounding in {str(self.dtype).removeprefix('torch.')} is about"
        return f"error {self.error:.1e}; {rounding} {10 * torch.finfo(self.dtype).eps:.0e}"


class Judge:
    """Compares runs on transformed images with the first run, and replaces features by exact ones.

    Args:
        rounded: the precision of each value.
        constant: for each tensor of the output, whether it does not depend on the image.
        stored: by name of a layer, the least precise dtype in which the model has its parameters.
    """

    def __init__(
        self,
        actions: Actions,
        calls: dict[Key, LayerCall],
        tolerance: float,
        rounded: Dtypes,
        constant: list[bool],
        stored: dict[str, torch.dtype],
    ) -> None:
        self.stored = stored
        self.actions, self.group = actions, actions.group
        self.calls, self.tolerance, self.rounded, self.constant = calls, tolerance, rounded, constant
        self.excess: dict[str, Excess] = {}  # by name of what is at fault
        self.compared: set[Key] = set()  # calls whose output was compared, for a transformed image
        self.errors: dict[tuple[Key, Stage], float] = dict.fromkeys(product(calls, ("input", "output")), 0.0)
        self.faults: dict[str, str] = {}
        self.sampling: set[str] = set()  # reasons that would not hold on another size of map
        self.shifted = ShiftReport()
        self._found: dict[str, Callable[[], str]] = {}  # layers that failed: what finds the reason
        # of one run, set by ``start``:
        self._element = 0  # which transformed the image
        # the layer that rearranged features or returned a constant, and the reason if a later one fails
        self._suspect: tuple[str, Callable[[], str]] | None = None
        self._rearranged: set[Key] = set()  # calls whose input is rearranged

    def precision(self, key: Key, stage: Stage, i: int | None = None) -> torch.dtype:
        """The least precise dtype in the history of tensor i of a call's input or output, or of any."""
        dtypes = self.rounded.get((key, stage), [])
        return coarsest(dtypes if i is None else dtypes[i : i + 1])

    def limit(self, key: Key, stage: Stage, i: int | None = None) -> float:
        """The largest error of such a tensor, or of any of them, that counts as rounding."""
        dtype = self.precision(key, stage, i)
        return self.tolerance if dtype == EXACT else max(self.tolerance, default_tolerance(dtype))

    def uncompared(self) -> list[str]:
        """Layers that are given features and return nothing that depends on the image, or nothing comparable;
        and the output, if it does not depend on the image."""
        found = []
        for key, call in self.calls.items():
            constant = call.constant.get("output", [])
            compared = any(
                t.is_floating_point() and t.numel() and constant[i : i + 1] != [True]
                for i, t in call.tensors("output").items()
            )
            again = key in self.compared or sum(self.group.exact) == 1
            if call.takes_features and not (compared and again):
                found.append(call.name)
        return found + ([OUTPUT_NAME] if all(self.constant) else [])

    def lowered_precision(self) -> dict[str, torch.dtype]:
        """Where the network computes less precisely than in float64, and in which dtype."""
        found: dict[str, torch.dtype] = {}
        for (key, stage), dtypes in self.rounded.items():
            if self.limit(key, stage) > self.tolerance and (key in self.calls or (key, stage) == END):
                name = self.calls[key].name if key in self.calls else key[0]
                found[f"the input of {name}" if stage == "input" else name] = coarsest(dtypes)
        return found

    def start(self, s: int) -> Observer:
        """To observe a run on the image that s transformed."""
        self._element, self._suspect, self._rearranged = s, None, set()
        return replacing(self.calls, self._all_exact)

    def _all_exact(self, key: Key, stage: Stage, leaves: list[Any]) -> list[Any]:
        call = self.calls[key]
        constant = call.constant.get(stage) or [False] * len(leaves)
        triples = enumerate(zip(leaves, call.leaves[stage], constant, strict=True))
        return [self._exact(key, stage, i, *x) for i, x in triples]

    def _exact(self, key: Key, stage: Stage, i: int, leaf: Any, original: Any, constant: bool) -> Any:
        """Judges one tensor; returns the exactly transformed one, or itself if that is unknown."""
        if not (isinstance(leaf, Tensor) and isinstance(original, Tensor) and leaf.is_floating_point()):
            return leaf
        field_type = self.calls[key].types[stage].get(i)
        candidates = self.actions.candidates(original, self._element, field_type)
        if stage == "output" and self._element:
            self.compared.add(key)
        found = [relative_error(leaf, candidate) for candidate in candidates]
        error = min(found, key=lambda e: math.inf if math.isnan(e) else e)
        exact: Tensor = candidates[found.index(error)]
        breach = (self.calls[key].name, partial(self._reason, key, stage, self._element))
        tolerance = self.limit(key, stage, i)
        # which axes or channels are planes; of other layers, channels may be last, and a side be |H|
        on_group = hasattr(self.calls[key].module, "group") and self.actions.on_group(leaf)
        known = field_type is not None or on_group
        if error <= tolerance:
            if not constant and bool(leaf.any()):
                self._suspect = None
        elif constant:
            self._suspect = self._suspect or (self.calls[key].name, lambda: CONSTANT)
            exact, error = leaf, 0.0
        elif not known and (moved := permuted(leaf, original)) <= tolerance:
            if stage == "input":
                self._rearranged.add(key)
            self._suspect = self._suspect or breach
            exact, error = leaf, moved
        else:
            exact = candidates[0] if candidates[0].shape == leaf.shape else leaf
            inherited = stage == "input" or key in self._rearranged
            name, reason = self._suspect if self._suspect and inherited else breach
            self._fault(name, reason, Excess(error, self.precision(key, stage, i)))
        self.errors[key, stage] = max(self.errors[key, stage], error)
        return exact

    def _fault(self, name: str, reason: Callable[[], str], excess: Excess) -> None:
        self._found.setdefault(name, reason)
        known = self.excess.setdefault(name, excess)
        self.excess[name] = excess if excess.error > known.error else known

    def judge_output(self, output: list[Any], original: list[Any], kinds: list[Kind | None]) -> None:
        errors = output_errors(output, original, self._element, self.actions, kinds)
        broken = [i for i, error in enumerate(errors) if not error <= self.limit(*END, i)]
        if not broken:
            return
        y, kind = as_tensor(original[broken[0]]), kinds[broken[0]]
        reason = NAN if bool(y.isnan().any()) else RANDOM if self._element == 0 else AFTER
        if reason == AFTER and kind is None:
            default = default_kind(y, self.group, sequences=self.actions.sequences)
            if default == "invariant":
                reason += f" (shape {list(y.shape)}, taken for 'invariant'; outputs= names other kinds)"
        worst = Excess(largest(errors[i] for i in broken), self.precision(*END))
        self._fault(*(self._suspect or (OUTPUT_NAME, lambda: reason)), worst)

    def conclude(self, shifted: ShiftReport) -> None:
        """After all runs: every fault with its reason, in the order of the layers."""
        self.shifted = shifted
        for name, reason in shifted.faults.items():
            if name not in self._found:
                error, key, stage = shifted.excess[name]
                self._fault(name, partial(str, reason), Excess(error, self.precision(key, stage)))
        names = [call.name for call in self.calls.values()]
        for name in sorted(self._found, key=lambda name: names.index(name) if name in names else len(names)):
            self.faults[name] = self._found[name]()

    def conclude_between(self, error: float | None, limit: float | None) -> None:
        """Notes a fault if the error of the output under elements between the pixels exceeds the limit."""
        if error is not None and limit is not None and not error <= limit:
            self.faults.setdefault(
                OUTPUT_NAME,
                f"under elements between the pixels its error is {error:.1%} of its deviation, "
                f"above {limit:.1%}",
            )

    def conclude_output(
        self, model: nn.Module, x: Images, y: list[Any], error: float, kinds: list[Kind | None]
    ) -> None:
        """If each layer by itself passes: whether their errors explain that of the whole network."""
        if self.faults or error <= self.limit(*END):
            return
        effect = rounding_effect(
            model, x, self.calls, self.errors, lambda noisy: output_error(noisy, y, 0, self.actions, kinds)
        )
        if not error <= MARGIN * effect:
            self.faults[OUTPUT_NAME] = (
                f"its error is {error:.1e}, where the errors of the layers, each within its tolerance, "
                f"explain {effect:.1e}"
            )

    def _reason(self, key: Key, stage: Stage, s: int) -> str:
        call = self.calls[key]
        if any(bool(t.isnan().any()) for t in call.tensors(stage).values()):
            return f"its {stage} is not a number"
        if s == 0:
            return RANDOM
        if stage == "input":
            return BETWEEN
        stored = self.stored.get(key[0], EXACT)
        for what, dtype in (("it is computed in", EXACT), ("its parameters are stored in", stored)):
            if self.excess[call.name].error <= (rounding := 10 * torch.finfo(dtype).eps):
                name = str(dtype).removeprefix("torch.")
                return ROUNDED.format(what=what, dtype=name, tolerance=rounding)
        off_centre = _off_centre(call, self.actions, self.limit(key, stage))
        if off_centre:
            self.sampling.add(off_centre)
            return off_centre
        if isinstance(call.module, nn.Conv2d):
            return "an ordinary convolution: its filters do not turn with the image"
        return "its output does not transform with its input"


def judged(
    model: nn.Module,
    images: tuple[Images, Images],
    group: Group,
    tolerance: float,
    inputs: list[Kind | None],
    outputs: Kind | Sequence[Kind] | None,
    *,
    recorded: tuple[dict[Key, LayerCall], list[Any]] | None = None,
    stored: dict[str, torch.dtype] | None = None,
) -> tuple[Judge, list[Any], list[Kind | None]]:
    """All runs of the model on the first images, judged. The second serve to find what depends on an image.

    Also returns its output, and the kind of each of its tensors and numbers, as far as the caller named them.
    """
    x, other = images
    calls, y = recorded or record(model, x)
    y = judgeable(y)
    kinds = output_kinds(outputs, y)
    actions = Actions.of(model, group, [*inputs, *kinds])
    other = tuple(a if kind == "invariant" else b for a, b, kind in zip(x, other, inputs, strict=True))
    judge = Judge(actions, calls, tolerance, *explore(model, other, calls, y), stored or {})
    for s in (s for s in group if group.exact[s]):
        judge.judge_output(run_observed(model, turned(x, s, group, inputs), judge.start(s)), y, kinds)
    moving = [kind != "invariant" and t.dim() > actions.axes for t, kind in zip(x, inputs, strict=True)]
    first = FirstRun(model, x, moving, calls, y, kinds, actions.axes)
    judge.conclude(tested_shifts(first, judge.limit))
    return judge, y, kinds


def turned(x: Images, s: int, group: Group, kinds: list[Kind | None]) -> Images:
    return tuple(transform(t, s, group, kind) for t, kind in zip(x, kinds, strict=True))


def output_errors(
    output: list[Any], original: list[Any], s: int, actions: Actions, kinds: list[Kind | None]
) -> list[float]:
    """The errors of what a model returns: relative where s is exact, otherwise of the deviation."""
    in_order = aligned(judgeable(output), original)
    if in_order is None:
        return [math.inf]
    triples = zip(map(as_tensor, in_order), map(as_tensor, original), kinds, strict=True)
    return [element_error(a, actions.output(b, s, kind), s, actions.group, kind) for a, b, kind in triples]


def output_error(
    output: list[Any], original: list[Any], s: int, actions: Actions, kinds: list[Kind | None]
) -> float:
    return largest(output_errors(output, original, s, actions, kinds))


def _off_centre(call: LayerCall, actions: Actions, tolerance: float) -> str | None:
    """How a layer samples off centre, if that is all that keeps it from being equivariant."""
    given, axes = call.only_input(), actions.axes
    if given is None or given[1].dim() < 2 + axes:
        return None
    i, x = given
    sides = x.shape[-axes:]
    rules = [sampling(call.module, axis) or (1, 1, 0) for axis in range(-axes, 0)]
    left = [(n + 2 * padding - k) % stride for n, (k, stride, padding) in zip(sides, rules, strict=True)]
    if not any(left) or min(sides) <= max(left):
        return None
    k, stride, padding = rules[left.index(max(left))]
    cut: list[Any] = [slice(n - more) for n, more in zip(sides, left, strict=True)]
    if not _error(call, i, x[(..., *cut)], actions) <= tolerance:
        return None
    parity = "even" if sides[0] % 2 == 0 else "odd"
    where = f"map ({'x'.join(map(str, sides))})" if axes == 2 else f"sequence ({sides[0]})"
    what = "row and column" if axes == 2 else "position"
    return (
        f"stride {stride} on an {parity}-sized {where}: with window {k} and padding {padding}, "
        f"{max(left)} {what} too many on one side, so that it samples off centre"
    )


def _error(call: LayerCall, at: int, x: Tensor, actions: Actions) -> float:
    """The largest error of a layer under the exact elements, for its only tensor, in what it may be."""
    types = call.types

    def outputs(x: Tensor) -> dict[int, Tensor]:
        return {i: leaf for i, leaf in enumerate(call.run({at: x})) if isinstance(leaf, Tensor)}

    before = outputs(x)

    def error(s: int) -> float:
        after = outputs(actions.candidates(x, s, types["input"].get(at))[0])
        return largest(
            min(relative_error(after[i], y) for y in actions.candidates(before[i], s, types["output"].get(i)))
            for i in before
        )

    return largest(error(s) for s in actions.group if actions.group.exact[s])
