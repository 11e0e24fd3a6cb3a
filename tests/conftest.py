"""Every test starts from the same random state, on one thread: two run side by side."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("ci")
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
