"""Every test starts from the same random state, on one thread: two run side by side."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.cases import EFFORT, number_tried
from hypothesis import settings

settings.register_profile("same", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("new", deadline=None, max_examples=25, print_blob=True)
settings.load_profile("same" if EFFORT == 1 else "new")
torch.set_num_threads(1)
if not torch.cuda.is_available():  # before anything imports triton, which reads it once
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- how many random cases there were, in all processes together ----


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = number_tried()
    try:
        yield
    finally:
        item.user_properties.append(("random cases", number_tried() - before))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    number = sum(value for r in reports for name, value in r.user_properties if name == "random cases")
    if number:
        terminalreporter.write_line(f"{number} random cases")
