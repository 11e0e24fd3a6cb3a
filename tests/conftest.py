"""Every test starts from the same random state, on one thread: two run side by side."""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import EFFORT, number_tried
from helpers.tiny_runs import tiny_data
from hypothesis import settings

TESTS = Path(__file__).parent

settings.register_profile("same", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("new", deadline=None, max_examples=25, print_blob=True)
settings.load_profile("same" if EFFORT == 1 else "new")
torch.set_num_threads(1)
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes, each of which imports torch
if not torch.cuda.is_available():  # before anything imports triton, which reads it once
    os.environ["TRITON_INTERPRET"] = "1"


# the files that take longest, by a worker's time; the others follow in the order of their names
SLOW_FILES = (
    "models/test_compile.py",
    "study/test_jobs.py",
    "test_docs.py",
    "test_types.py",
    "train/test_processes.py",
    "study/test_ray.py",
    "explorer/test_explorer_page.py",
    "models/test_deploy.py",
    "nn/test_nn.py",
    "test_new_group.py",
    "nn/test_new_architectures.py",
    "cli/test_cli.py",
    "study/test_sweep.py",
    "test_packaging.py",
    "train/test_runs.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: a slow file that starts last keeps one worker busy while the others are idle.

    With ``SELFCONV_TEST_ORDER=SEED`` the files come in a random order, to find tests that depend on it.
    """
    rank = {TESTS / name: number for number, name in enumerate(SLOW_FILES)}
    if seed := os.environ.get("SELFCONV_TEST_ORDER"):
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        rank = {path: number for number, path in enumerate(files)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Imported modules are never freed: collections of garbage, which torch calls often, skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of ``tiny_data``, for every test that trains on it."""
    return tiny_data(tmp_path_factory.mktemp("data"))


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
