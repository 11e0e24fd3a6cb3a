"""Rules the project keeps: what an import loads, a paper map that is true, and how packages are installed."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
from helpers import ROOT, source_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from selfconv.ops import reference

PACKAGE = ROOT / "src" / "selfconv"


def test_import_loads_nothing_heavy() -> None:
    heavy = [
        "numba",
        "triton",
        "matplotlib",
        "starlette",
        "uvicorn",
        "ray",
        "accelerate",
        "timm",
        "onnx",
        "PIL",
    ]
    code = f"""
import sys
import selfconv, selfconv.ops, selfconv.nn, selfconv.testing, selfconv.visualize
print([m for m in {[*heavy, "rich", "huggingface_hub", "torch._dynamo"]} if m in sys.modules])
import selfconv.data
print([m for m in {[*heavy, "rich", "huggingface_hub", "torch._dynamo"]} if m in sys.modules])
selfconv.create_model, selfconv.list_models, selfconv.model_info, selfconv.convert
print([m for m in {heavy} if m in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]"] * 3


# ---- the paper map ----

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "paper_map.md").read_text().splitlines()
    if re.match(r"\| \d", line)
]


def test_the_map_lists_every_equation_once() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 29))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"eq{row[0]}")
def test_names_in_the_paper_map_exist(row: list[str]) -> None:
    number, _, function, layer, *tests = row
    module_name, name = function.strip("`").split(".")
    module = reference if module_name == "reference" else importlib.import_module(f"selfconv.{module_name}")
    found = getattr(module, name)
    if module is reference:
        assert found.__doc__.startswith(f"Eq. {number}: ")
    match = re.match(r"`nn\.([\w.]+)`", layer)
    if match:
        target = importlib.import_module("selfconv.nn")
        for part in match[1].split("."):
            target = getattr(target, part)
    else:
        assert layer.startswith("every layer")
    named = [test.strip("`").split(".") for test in tests if test != "–"]
    assert len(tests) == 2
    assert named
    for file, test_name in named:
        assert re.search(rf"^def {test_name}\(", source_of(file), re.MULTILINE)


def test_the_reference_follows_the_papers_order() -> None:
    numbers = [int(n) for n in re.findall(r'"""Eq\. (\d+):', (PACKAGE / "ops" / "reference.py").read_text())]
    assert set(numbers) == {1, *range(3, 21), 24}
    in_order = [n for n in numbers if n != 24]  # the proof about β stands where it is first used
    assert in_order == sorted(in_order)


def test_pips_settings_reach_uv() -> None:
    options = runpy.run_path(str(ROOT / "scripts" / "uv_options.py"))["options"]
    best = "--index-strategy=unsafe-best-match"
    assert options("") == [best]
    settings = """
:env:.find-links='/env'
global.cert='/cert.pem'
global.extra-index-url='\\nhttps://a/simple\\nhttps://b/simple'
global.find-links='/global'
global.index-url='https://mirror/simple'
install.no-index='true'
"""
    mirrors = ["--index-url=https://mirror/simple", "--extra-index-url=https://a/simple"]
    assert options(settings) == [
        best, *mirrors, "--extra-index-url=https://b/simple", "--find-links=/env", "--no-index"
    ]  # fmt: skip


# ---- versions ----

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = METADATA["project"]
README = (ROOT / "README.md").read_text()


def test_the_pinned_versions_are_within_the_bounds() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    lists = [METADATA["build-system"]["requires"], PROJECT["dependencies"]]
    lists += PROJECT["optional-dependencies"].values()
    requirements = [requirement for group in lists for requirement in group]
    assert len(requirements) > 20
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{requirement} is not pinned in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]} is not {requirement}"


def test_the_readme_tells_the_bounds() -> None:
    (torch,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    assert f"pip install '{torch}' --index-url" in README
    pythons = [
        version
        for line in PROJECT["classifiers"]
        if (version := line.removeprefix("Programming Language :: Python :: ")) != line and "." in version
    ]
    table = re.findall(r"^\| (3\.\d+) \|", README, re.MULTILINE)
    assert sorted({*table}) == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]}"
