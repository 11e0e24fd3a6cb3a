"""Refuses arguments that cannot be measured, and measurements in which nothing would be compared: their
errors of 0 would say nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from selfconv._arguments import describe_value, is_whole
from selfconv.groups import Group
from selfconv.testing.kinds import Kind, as_tuple, default_kind
from selfconv.testing.leaves import outputs_of, same

P = ParamSpec("P")
Result = TypeVar("Result")

NO_GRADIENT = "does not require grad"  # in what torch says where a model differentiates
OTHERS = 8  # inputs for which an output is the same before it counts as constant


def without_gradients(measure: Callable[P, Result]) -> Callable[P, Result]:
    """Measures without gradients; with them, if the module differentiates and needs them."""

    @wraps(measure)
    def wrapped(*args: P.args, **options: P.kwargs) -> Result:
        for enabled in (False, True):
            try:
                with torch.set_grad_enabled(enabled):
                    return measure(*args, **options)
            except (RuntimeError, ValueError) as error:
                if NO_GRADIENT not in str(error):
                    raise
                refusal = error
        raise ValueError(
            "expected a module that calls requires_grad_() where it differentiates; got none there"
        ) from refusal

    return wrapped


def check_group(group: Group) -> None:
    if len(group) == 1:
        raise ValueError(
            f"group: expected a group of two or more elements; got {group.name!r}, for which "
            "shift_error and audit test shifts"
        )


def checked_tolerance(name: str, tolerance: Any) -> float:
    """A number of Python, of NumPy or in a tensor, as one of Python."""
    number = tolerance
    if isinstance(tolerance, Tensor | np.generic) and tolerance.ndim == 0:
        number = tolerance.item()
    real = isinstance(number, int | float) and not isinstance(number, bool)
    if not real or not 0 <= number < math.inf:
        raise ValueError(f"{name}: expected a finite number of 0 or more; got {tolerance!r}")
    return number if number is tolerance else float(number)


def check_whole(name: str, number: object) -> None:
    if not is_whole(number) or number < 1:  # type: ignore[operator]
        raise ValueError(f"{name}: expected an integer ≥ 1; got {number!r}")


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected an nn.Module; got {describe_value(model)}")
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError("model: expected parameters with values; got some on the meta device")


def check_module(module: object) -> None:
    if not callable(module) or isinstance(module, type):
        raise ValueError(f"module: expected a function or an nn.Module; got {describe_value(module)}")


def checked_tensors(x: object) -> tuple[Tensor, ...]:
    """The tensor or the tensors that a caller gave."""
    given = as_tuple(x)
    for t in given:
        if not isinstance(t, Tensor):
            inside = " in it" if t is not x else ""
            raise ValueError(f"x: expected a tensor or a tuple of tensors; got {describe_value(t)}{inside}")
    if not given:
        raise ValueError(f"x: expected a tensor or a tuple of tensors; got {x!r}")
    check_values(given)
    return given


def check_values(tensors: Sequence[Tensor]) -> None:
    if any(t.is_meta for t in tensors):
        raise ValueError("x: expected tensors with values; got one on the meta device")


def check_map(x: object, axes: int) -> Tensor:
    """Features to shift."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x: expected a tensor; got {describe_value(x)}")
    check_values([x])
    if x.dim() < 2 + axes:
        raise ValueError(f"x: expected rank {2 + axes} or more for axes={axes}; got shape {shapes_of([x])}")
    if not x.is_floating_point():
        raise ValueError(f"x: expected floating-point numbers; got {x.dtype}")
    if not x.numel():
        raise ValueError(f"x: expected one entry or more; got shape {shapes_of([x])}")
    return x


def check_mapped(y: object, axes: int) -> Tensor:
    """What a module returns for them."""
    if not isinstance(y, Tensor):
        raise ValueError(f"expected a module that returns one tensor; got {describe_value(y)}")
    if y.dim() < 1 + axes:
        raise ValueError(
            f"expected an output of rank {1 + axes} or more for axes={axes}; got shape {shapes_of([y])}"
        )
    check_output([y])
    return y


def check_between(group: Group, between: float | None, error: float | None) -> None:
    """Where no element but the identity is exact, elements between the pixels have to be judged.

    Args:
        between: the largest error under them that passes.
        error: None if there is no output to measure it.
    """
    required = sum(group.exact) == 1 < len(group)
    if error is None and (required or between is not None):
        raise ValueError("between: expected an output that can be interpolated; got attention weights alone")
    if required and between is None:
        raise ValueError(
            f"between: expected the largest error that passes, as the identity alone of {group.name!r} maps "
            f"the grid to itself; got None, where the error is {error:.1%} of the output's deviation"
        )


def check_inputs(kinds: Sequence[Kind | None], inputs: Sequence[Tensor], group: Group) -> None:
    """Where every input is invariant or empty, any module passes."""
    found = [kind or default_kind(x, group) for kind, x in zip(kinds, inputs, strict=True)]
    shapes = shapes_of(inputs)
    if all(kind == "invariant" for kind in found):
        raise ValueError(
            "inputs: expected a kind that transforms, such as 'sequence', 'pixels' or 'group'; "
            f"got 'invariant' for shape {shapes}"
        )
    if not all(x.numel() for x, kind in zip(inputs, found, strict=True) if kind != "invariant"):
        raise ValueError(f"x: expected inputs of one entry or more; got shape {shapes}")


def check_output(leaves: Sequence[Any]) -> None:
    """Raises ValueError unless the first run's output, as ``judgeable`` leaves, has a tensor with entries."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not any(t.numel() for t in tensors):
        raise ValueError(
            f"expected a model that returns a tensor of one entry or more; got shape {shapes_of(tensors)}"
        )


def check_moved(moved: bool, inputs: Sequence[Tensor], group: Group) -> None:
    if not moved:
        raise ValueError(
            f"x: expected values that an element of {group.name!r} changes; got shape {shapes_of(inputs)}, "
            "the same under all of them"
        )


def check_dependent(
    module: Callable[..., Any], inputs: Sequence[Tensor], kinds: Sequence[Kind | None], output: Sequence[Any]
) -> None:
    """Whether an output depends on the inputs that transform: on the order or the size of their values."""
    generator = torch.Generator().manual_seed(0)

    def other(x: Tensor, kind: Kind | None, factor: float) -> Tensor:
        if kind == "invariant":
            return x
        order = torch.randperm(x.numel(), generator=generator).to(x.device)
        return x.flatten()[order].view_as(x) * (factor if x.is_floating_point() else 1)

    for i in range(OTHERS):
        factor = 2.0**i if i else 0.5  # large values change labels too, in spite of biases
        try:
            others = [other(x, kind, factor) for x, kind in zip(inputs, kinds, strict=True)]
            found = outputs_of(module, others)
        except Exception:  # a module may take no other values: then nobody can say
            return
        if not same(found, output):
            return
    tensors = [leaf for leaf in output if isinstance(leaf, Tensor)]
    raise ValueError(
        f"expected an output that depends on x; got one of shape {shapes_of(tensors)} that is the same for "
        f"{OTHERS} other inputs"
    )


def shapes_of(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)
