"""Arguments that cannot be measured are refused in one line: what was given, and what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import LiftingConv2d
from selfconv.testing import assert_equivariant, audit, equivariance_error, shift_error

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)


def lift() -> nn.Module:
    return LiftingConv2d(3, 4, 3, padding=1, group="p4", dtype=torch.float64)


def refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message), str(error.value)
    assert "\n" not in str(error.value)


FLAGS = [True, np.bool_(True), torch.tensor(True), torch.ones(2), "1", -1, math.nan]


@pytest.mark.parametrize("value", FLAGS, ids=repr)
def test_tolerances_are_numbers(value: Any) -> None:
    for name in ("tolerance", "between"):
        message = f"{name}: expected a finite number of 0 or more; got {value!r}"
        refused(lambda name=name: audit(conv(), 8, **{name: value}), message)  # type: ignore[misc]
        refused(lambda name=name: assert_equivariant(conv(), X, "p4", **{name: value}), message)  # type: ignore[misc]


def test_numbers_of_other_libraries_are_numbers() -> None:
    for value in (np.float32(1e-6), np.float64(1e-6), torch.tensor(1e-6), 1, np.int64(1)):
        assert audit(lift(), 8, tolerance=value, in_channels=np.int64(3)).passed  # type: ignore[arg-type]
        assert_equivariant(lift(), X, "p4", tolerance=value)  # type: ignore[arg-type]
    refused(
        lambda: audit(conv(), 8, tolerance=None),  # type: ignore[arg-type]
        "tolerance: expected a finite number of 0 or more; got None",
    )


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda x: x, {}, "model: expected an nn.Module; got function"),
        (X, {}, "model: expected an nn.Module; got Tensor"),
        (nn.Conv2d, {}, "model: expected an nn.Module; got the class Conv2d"),
        (
            nn.Conv2d(3, 4, 3, device="meta"),
            {},
            "model: expected parameters with values; got some on the meta",
        ),
        (conv(), {"in_channels": 3.0}, "in_channels: expected integers ≥ 1; got 3.0"),
        (conv(), {"in_channels": "3"}, "in_channels: expected integers ≥ 1; got '3'"),
        (conv(), {"in_channels": True}, "in_channels: expected integers ≥ 1; got True"),
        (conv(), {"inputs": []}, "inputs: expected one kind or more; got []"),
    ],
)
def test_audits_of_other_things(model: Any, options: dict[str, Any], message: str) -> None:
    refused(lambda: audit(model, 8, **options), message)


@pytest.mark.parametrize(
    ("module", "x", "message"),
    [
        (5, X, "module: expected a function or an nn.Module; got 5"),
        (nn.ReLU, X, "module: expected a function or an nn.Module; got the class ReLU"),
        (nn.ReLU(), X.numpy(), "x: expected a tensor or a tuple of tensors; got ndarray"),
        (nn.ReLU(), None, "x: expected a tensor or a tuple of tensors; got None"),
        (nn.ReLU(), "abc", "x: expected a tensor or a tuple of tensors; got 'abc'"),
        (nn.ReLU(), [[X]], "x: expected a tensor or a tuple of tensors; got list in it"),
        (nn.ReLU(), (), "x: expected a tensor or a tuple of tensors; got ()"),
        (nn.ReLU(), X.to("meta"), "x: expected tensors with values; got one on the meta device"),
    ],
)
def test_errors_of_other_things(module: Any, x: Any, message: str) -> None:
    refused(lambda: equivariance_error(module, x, "p4"), message)
    refused(lambda: assert_equivariant(module, x, "p4"), message)
    if not isinstance(x, list | tuple):
        refused(lambda: shift_error(module, x), message.replace(" or a tuple of tensors", ""))


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X, {"shift": "1"}, "shift: expected a positive multiple of stride=1; got '1'"),
        (X, {"shift": True}, "shift: expected a positive multiple of stride=1; got True"),
        (X, {"shift": 100}, "shift: expected less than the least side of x, 8; got 100"),
        (X, {"stride": 0}, "stride: expected an integer ≥ 1; got 0"),
        (X, {"axes": 0}, "axes: expected 1 or 2; got 0"),
        (X, {"axes": 3}, "axes: expected 1 or 2; got 3"),
        (X, {"frame": 0}, "frame: expected an integer ≥ 1; got 0"),
        (X, {"frame": -1}, "frame: expected an integer ≥ 1; got -1"),
        (X[0, 0, 0], {}, "x: expected rank 4 or more for axes=2; got shape [8]"),
        (X.long(), {}, "x: expected floating-point numbers; got torch.int64"),
        (torch.ones_like(X), {}, "x: expected values that the shift changes; got shape [2, 3, 8, 8]"),
    ],
)
def test_shift_errors_of_other_arguments(x: Any, options: dict[str, Any], message: str) -> None:
    refused(lambda: shift_error(nn.ReLU(), x, **options), message)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: {"y": x}, "expected a module that returns one tensor; got dict"),
        (lambda x: (x, x), "expected a module that returns one tensor; got tuple"),
        (lambda x: x.mean(), "expected an output of rank 3 or more for axes=2; got shape []"),
        (lambda x: x.mean((2, 3)), "expected an output of rank 3 or more for axes=2; got shape [2, 3]"),
        (lambda x: torch.ones_like(x), "expected an output that depends on x; got one of shape [2, 3, 8, 8]"),
    ],
    ids=["dict", "tuple", "scalar", "numbers", "constant"],
)
def test_shift_errors_of_other_outputs(function: Any, message: str) -> None:
    refused(lambda: shift_error(function, X), message)


def test_the_shift_error_of_what_is_not_a_number() -> None:
    error = shift_error(lambda x: x * math.nan, X)
    assert error is not None
    assert math.isnan(error)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.complex(y * torch.arange(y.shape[-1]), y)


def test_broken_complex_outputs_are_found() -> None:
    found = audit(Complex(), 8)
    assert found.culprit == "the model's output", found.summary()


def test_an_audit_that_guesses_the_channels_says_how_to_name_them() -> None:
    class Backwards(nn.Module):
        """Its first layer by definition is not the first that it calls."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    with pytest.raises(ValueError, match=r"; in_channels= says how many it takes, by default 8$"):
        audit(Backwards(), 8)
    assert audit(Backwards(), 8, in_channels=3).passed
