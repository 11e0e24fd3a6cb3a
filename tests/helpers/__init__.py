"""What tests share: made data, made runs, small networks, cases and fences for the operation, run pages."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def source_of(test: str) -> str:
    """The text of a test file, which pages name without its folder: ``test_nn``."""
    [path] = (ROOT / "tests").rglob(f"{test}.py")
    return path.read_text("utf-8")
