"""``record.json``: the result of a run, and on what, with what and where it was found."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from selfconv._version import __version__
from selfconv.train.record import Machine

PACKAGES = ("numpy", "numba", "triton", "accelerate", "safetensors")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit and machine."""
    return {"versions": versions(), "commit": commit(), "machine": Machine(**machine(device))}


def versions() -> dict[str, str]:
    found = {
        "selfconv": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build (+cpu), which a wheel's metadata may omit
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of the checkout that the package runs from, with ``+`` if files were changed; None if there is none."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(
                ["git", *args], cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
            for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def machine(device: torch.device) -> dict[str, Any]:
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": accelerator or str(device),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
