"""What counts as a number or a switch in an argument.

Tensors do not: a layer would read the value of a parameter once, and never train it.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

Number = TypeVar("Number", int, float)


def is_whole(number: object) -> bool:
    """Whether a size is an integer, of Python or NumPy."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def is_number(number: object) -> bool:
    """Whether a value is a real number, of Python or NumPy."""
    return isinstance(number, int | float | np.integer | np.floating) and not isinstance(number, bool)


def of_python(number: Number) -> Number:
    """A number of NumPy as one of Python, which prints and is saved as such; one of Python as it is."""
    return number.item() if isinstance(number, np.generic) else number


def check_not_negative(name: str, number: float) -> float:
    """Raises an error, which begins with ``name``, unless a number is finite and 0 or more; returns it."""
    if not is_number(number) or not 0 <= number < math.inf:
        raise ValueError(f"{name}: expected a finite number of 0 or more; got {describe_value(number)}")
    return of_python(number)


def check_switch(name: str, switch: object) -> None:
    """Raises an error, which begins with ``name``, unless the switch is a boolean (``"no"`` is true)."""
    if not isinstance(switch, bool | np.bool_):
        raise ValueError(f"{name}: expected True or False; got {describe_value(switch)}")


def describe_value(given: object) -> str:
    """The value for an error message; of tensors, lists and other objects the type alone."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if given is None or isinstance(given, bool | int | float | str | np.generic):
        return repr(given)[:40]
    return type(given).__name__
