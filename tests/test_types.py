"""The annotations of the package and of its tests are consistent."""

from __future__ import annotations

import subprocess
import sys

from helpers import ROOT


def test_mypy() -> None:
    """As ``make typecheck``; here it runs beside other tests, not before them on one core."""
    run = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
