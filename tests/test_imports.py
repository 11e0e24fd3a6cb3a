"""Which subpackage may import which, read from the source; imports inside functions and for types too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT

PACKAGE = ROOT / "src" / "selfconv"
LEAVES = [  # import nothing of ours
    "_arguments", "_compiler", "_extras", "_files", "_harmonics", "_lazy", "_matrices", "_memory",
    "_resample", "_text", "_threads", "_version",
]  # fmt: skip
SUBPACKAGES = [  # each may import from the leaves and from those before it
    "groups", "ops", "nn", "examples", "models", "testing", "data", "train", "trained", "study", "bench",
    "visualize", "explorer", "cli",
]  # fmt: skip
# modules at the top that belong to a subpackage
TOP_LEVEL_MODULES = {"timm": "models", "escnn": "nn", "__main__": "cli", "__init__": "cli"}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def subpackage_of(module: str) -> str:
    name = [*module.split("."), "__init__"][1]
    return TOP_LEVEL_MODULES.get(name, name)


@cache
def public_names(package: str) -> frozenset[str]:
    """The names in ``__all__``."""
    for node in ast.parse(MODULES[package].read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Our modules that a file imports, each with the name that it takes from it, if it takes one."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "selfconv")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            for alias in node.names if module.split(".")[0] == "selfconv" else ():
                inner = f"{module}.{alias.name}"
                is_name = inner not in MODULES or alias.name in public_names(module)
                yield (module, alias.name) if is_name else (inner, None)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_one_way_and_not_past_an_api(path: Path) -> None:
    here = subpackage_of(module_of(path))
    for module, name in imports(path):
        there = subpackage_of(module)
        if there in LEAVES:
            continue
        assert here not in LEAVES, f"a leaf imports {module}"
        assert SUBPACKAGES.index(there) <= SUBPACKAGES.index(here), (
            f"{here} imports {module}, which comes after it"
        )
        if there != here:
            assert module == f"selfconv.{there}", f"imports {module}, past the API of {there}"
            if MODULES[module].name == "__init__.py":
                assert name in public_names(module), f"imports {name}, which {module} does not offer"


def test_no_import_cycles() -> None:
    graph = {module_of(path): {module for module, _ in imports(path)} for path in FILES}
    assert sum(map(len, graph.values())) > 100
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_every_subpackage_is_listed() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert found == {*LEAVES, *SUBPACKAGES, *TOP_LEVEL_MODULES}
