"""Outputs in containers: all their tensors are compared, by name, or refused in one line."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfconv.nn import LiftingConv2d
from selfconv.testing import assert_equivariant, audit, equivariance_error

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Pair = namedtuple("Pair", ["good", "other"])


@dataclass
class Result:
    good: Tensor
    other: Any = None


@dataclass(frozen=True)
class Frozen:
    good: Tensor
    other: Any


class View(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered": lambda a, b: OrderedDict(a=a, b=b),
    "default": lambda a, b: defaultdict(list, a=[a], b=[b]),
    "dataclass": Result,
    "frozen": Frozen,
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "UserList": lambda a, b: UserList([a, b]),
    "proxy": lambda a, b: MappingProxyType({"a": a, "b": b}),
    "mapping": lambda a, b: View({"a": a, "b": b}),
    "nested": lambda a, b: (a, {"more": Result(a, UserDict(inner=[3, Frozen(a, b)]))}),
    "beside a tensor": lambda a, b: (a, Result(a, b)),
}


class Returns(nn.Module):
    """Features of a layer, and a function of them, in a container."""

    def __init__(self, container: Callable[[Tensor, Tensor], Any], function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.container, self.function = container, function
        self.lift = LiftingConv2d(3, 4, 3, padding=1, group="p4", dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        y = self.lift(x)
        return self.container(y, self.function(y))


def ramp(y: Tensor) -> Tensor:
    return y + torch.arange(y.shape[-1])


@pytest.mark.parametrize("name", CONTAINERS)
def test_all_tensors_in_a_container_are_compared(name: str) -> None:
    broken, correct = (Returns(CONTAINERS[name], f) for f in (ramp, torch.relu))
    assert max(equivariance_error(broken, X, "p4")) > 0.1
    found = audit(broken, 8, "p4")
    assert found.culprit == "the model's output", found.summary()
    assert_equivariant(correct, X, "p4")
    found = audit(correct, 8, "p4")
    assert found.passed, found.summary()


class Between(nn.Module):
    """A layer that returns a container, and one that takes it."""

    def __init__(self, container: Callable[[Tensor, Tensor], Any], function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second = Returns(container, function), Takes()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Takes(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        values = list(pair.values()) if isinstance(pair, Mapping) else [pair.good, pair.other]
        return values[0] + values[1]


@pytest.mark.parametrize("name", ["dataclass", "frozen", "UserDict", "proxy", "mapping"])
def test_containers_between_layers(name: str) -> None:
    found = audit(Between(CONTAINERS[name], torch.relu), 8, "p4")
    assert found.passed, found.summary()
    assert not audit(Between(CONTAINERS[name], ramp), 8, "p4").passed


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


OTHERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "object": (lambda y: SimpleNamespace(inner={"y": y}), "SimpleNamespace"),
    "slots": (Slots, "Slots"),
    "set": (lambda y: {y}, "set"),
    "iterator": (lambda y: iter([y]), "list_iterator"),
    "array": (lambda y: y.numpy(), "ndarray"),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), "Normal"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_objects_that_hold_tensors_are_refused(name: str) -> None:
    make, kind = OTHERS[name]
    model = Returns(lambda a, b: (a, make(b)), torch.relu)
    for call in (lambda: equivariance_error(model, X, "p4"), lambda: audit(model, 8, "p4")):
        with pytest.raises(ValueError, match=f"; got {kind}, whose values would not be compared") as error:
            call()
        assert "\n" not in str(error.value)


def test_other_objects_without_tensors_are_ignored() -> None:
    model = Returns(lambda a, b: (a, b, None, "name", torch.float64, object(), {1, 2}, range(3)), torch.relu)
    assert_equivariant(model, X, "p4")
    assert audit(model, 8, "p4").passed


def keyed(x: Tensor) -> dict[str, Tensor]:
    return {"a" if x[0, 0, 0, 0] > x[0, 0, 0, -1] else "b": x}


def ordered(x: Tensor) -> dict[str, Tensor]:
    found = [("a", x), ("b", 2 * x)]
    return dict(found if x[0, 0, 0, 0] > x[0, 0, 0, -1] else found[::-1])


def test_keys_that_change_with_the_input_are_an_error() -> None:
    for function in (keyed, lambda x: UserDict(keyed(x)), lambda x: [keyed(x), 1.0]):
        assert max(equivariance_error(function, X, "p4")) == math.inf
        found = audit(Returns(lambda a, b: function(b), mean), 8, "p4")  # noqa: B023
        assert found.culprit == "the model's output", found.summary()


def mean(y: Tensor) -> Tensor:
    return y.mean(2)


def test_the_order_of_keys_does_not_matter() -> None:
    assert max(equivariance_error(ordered, X, "p4")) == 0
    assert audit(Returns(lambda a, b: ordered(b), mean), 8, "p4").passed


def test_sparse_outputs_are_refused_in_one_line() -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    message = "expected dense tensors; got one of layout torch.sparse_coo"
    for call in (
        lambda: equivariance_error(lambda x: x.to_sparse(), X, "p4"),
        lambda: audit(Sparse(), 8, "p4"),
        lambda: audit(nn.Sequential(Sparse(), nn.Identity()), 8),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
