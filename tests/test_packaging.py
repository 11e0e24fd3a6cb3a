"""What users get: a wheel and a source distribution, and a package that works with its core alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from helpers.tiny_runs import tiny_config, tiny_data
from packaging.requirements import Requirement
from PIL import Image

from selfconv import __version__
from selfconv._extras import EXTRAS
from selfconv.train import train

PACKAGE = ROOT / "src" / "selfconv"
JUNK = [  # what work leaves behind; none of it may go into a distribution
    "src/selfconv/.DS_Store",
    "src/selfconv/notes.txt",
    "src/selfconv/__pycache__/cli.cpython-311.pyc",
    "src/selfconv/data/cifar-10-python.tar.gz",
    "docs/_build/html/index.html",
    "tests/helpers/__pycache__/cases.cpython-311.pyc",
    "runs/a/model/model.safetensors",
    ".venv/pyvenv.cfg",
    ".mypy_cache/cache.json",
]


def source_files(folder: Path) -> set[str]:
    """The files below a folder that belong to the project, relative to it."""
    made = {"__pycache__", "_build", "selfconv.egg-info"}
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if not made & {*path.parts}}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in ("src", "docs", "scripts", "tests"):
        for file in source_files(ROOT / part):
            (source / part / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / part / file, source / part / file)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copyfile(path, source / path.name)
    for name in JUNK:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"junk")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return dist


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_string(archive.read(f"selfconv-{__version__}.dist-info/METADATA").decode())


# ---- what is in them ----


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"selfconv-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = {name.split(".dist-info/")[1] for name in archive.namelist() if ".dist-info/" in name}
        digits = archive.read("selfconv/data/digits.npz")
    cards = "models/weights/"
    files = source_files(PACKAGE)
    expected = {name for name in files if not name.endswith(".md") or name.startswith(cards)}
    assert names == {f"selfconv/{name}" for name in expected}
    assert {"py.typed", "data/digits.npz", "data/NOTICE.txt"} <= expected
    assert digits == (PACKAGE / "data" / "digits.npz").read_bytes()
    assert {"licenses/LICENSE", "licenses/src/selfconv/data/NOTICE.txt", "entry_points.txt"} <= info


def test_the_source_distribution_can_be_tested_and_built(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    assert path.name == f"selfconv-{__version__}.tar.gz"
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for part in ("src/selfconv", "docs", "scripts", "tests"):
        missing = {f"{part}/{name}" for name in source_files(ROOT / part)} - names
        assert not {name for name in missing if not name.endswith("/README.md")}
    assert {"pyproject.toml", "Makefile", "constraints.txt", "README.md", "LICENSE", "CITATION.cff"} <= names
    assert not names & {*JUNK}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_metadata(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Version"] == __version__
    assert found["License-Expression"] == "MIT AND CC-BY-4.0"  # the code, and the digits in the wheel
    assert found.get_all("License-File") == ["LICENSE", "src/selfconv/data/NOTICE.txt"]
    assert found["Requires-Python"] == ">=3.11"
    extras = {"app", "cluster", "dev", "docs", "onnx", "parquet", "plot", "timm", "train", "triton"}
    assert {*found.get_all("Provides-Extra", [])} == extras


def test_the_version_is_in_one_place() -> None:
    assert re.fullmatch(r'__version__ = "(\d+\.\d+\.\d+\S*)"\n', (PACKAGE / "_version.py").read_text())
    for name in ("pyproject.toml", "CITATION.cff", "docs/conf.py"):
        assert not re.search(r"^ *version *[=:] *\W?\d", (ROOT / name).read_text(), re.MULTILINE), name
    latest = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert latest == __version__


def test_citation() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert {"title", "authors", "message"} <= cited.keys()
    (paper,) = cited["references"]
    assert paper["title"] == "Affine Self Convolution"
    assert [author["family-names"] for author in paper["authors"]] == ["Diaconu", "Worrall"]
    assert paper["url"] == "https://arxiv.org/abs/1911.07704"


# ---- what it does in an empty environment ----


def core_dependencies(wheel: Path) -> Iterator[Distribution]:
    """What pip would install beside the wheel, no extra asked for: found among what is installed here."""
    waiting = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        wanted = requirement.extras or {""}
        if requirement.marker is not None and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in wanted
        ):
            continue
        if requirement.name.lower() in seen:
            continue
        seen.add(requirement.name.lower())
        found = distribution(requirement.name)
        yield found
        waiting += [Requirement(line) for line in found.requires or []]


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own in which pip installed the wheel; of other packages only what it requires.

    Those are not installed again, which would take the network, but linked to.
    """
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *install], check=True
    )
    (packages,) = folder.glob("lib/python3*/site-packages")
    for dependency in core_dependencies(wheel):
        for name in {file.parts[0] for file in dependency.files or []} - {"..", "__pycache__"}:
            link = packages / name
            if not link.exists():
                link.symlink_to(Path(str(dependency.locate_file(name))).resolve())
    return folder


def in_empty(empty: Path, *command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [str(empty / "bin" / command[0]), *command[1:]],
        capture_output=True, text=True, check=False, cwd=cwd, timeout=300,
        env=variables | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def test_no_extra_is_there(empty: Path, tmp_path: Path) -> None:
    """What the other tests here rest on."""
    packages = [*EXTRAS, "pandas", "sphinx", "torchvision"]
    code = f"from importlib.util import find_spec; print([p for p in {packages} if find_spec(p)])"
    assert in_empty(empty, "python", "-c", code, cwd=tmp_path).stdout.strip() == "[]"


def test_the_layer_and_a_network(empty: Path, tmp_path: Path) -> None:
    code = f"""
import torch, selfconv
from pathlib import Path
from selfconv.nn import AffineSelfConv2d
from selfconv.ops import affine_self_conv
assert Path(selfconv.__file__).is_relative_to({str(empty)!r}), selfconv.__file__
assert selfconv.__version__ == {__version__!r}
torch.manual_seed(0)
layer = AffineSelfConv2d(4, 4, 3, num_heads=2)
x = torch.randn(1, 4, 6, 6)
torch.testing.assert_close(layer(x), AffineSelfConv2d.forward(selfconv.nn.set_backend(layer, "reference"), x))
print(sum(p.numel() for p in selfconv.create_model("p4resnet29_asc").parameters()))
"""
    run = in_empty(empty, "python", "-W", "error", "-c", code, cwd=tmp_path)
    assert (run.stdout, run.stderr, run.returncode) == ("271842\n", "", 0)


def test_the_installed_command(empty: Path, tmp_path: Path) -> None:
    run = in_empty(empty, "selfconv", "--help", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert {"train", "evaluate", "predict", "export", "models", "audit", "bench"} <= {*run.stdout.split()}
    run = in_empty(empty, "selfconv", "models", "resnet29*", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "267,754" in run.stdout
    assert not list(tmp_path.iterdir())


MISSING = {  # command, {run} being the folder of a run: the extra that it needs
    "train": "train",
    "train --data {run}/images": "train",
    "predict {run} {run}/images/a/1.png": "train",
    "evaluate {run} --data {run}/x.parquet": "parquet",
    "export {run} --to model.onnx": "onnx",
    "bench --quick --out out": "plot",
    "figures digits_asc --out out": "plot",
    "explore": "app",
    "report {run}": "plot",
    "reproduce demo --engine ray": "cluster",
    "reproduce demo": "train",
    "demo": "train",
}


def test_what_is_missing_is_named_in_one_line(empty: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    train(tiny_config(tiny_data(tmp_path)), run_folder, quiet=True)
    for kind in ("a", "b"):
        (run_folder / "images" / kind).mkdir(parents=True)
        Image.new("L", (16, 16)).save(run_folder / "images" / kind / "1.png")
    (run_folder / "x.parquet").write_bytes(b"PAR1")
    commands = {command.format(run=run_folder): extra for command, extra in MISSING.items()}
    code = f"""
import io, json
from contextlib import redirect_stderr
from selfconv import cli
answers = {{}}
for command in {[*commands]!r}:
    with redirect_stderr(io.StringIO()) as said:
        try:
            cli.main(command.split())
            status = 0
        except SystemExit as stop:
            status = stop.code
    answers[command] = [status, said.getvalue()]
print(json.dumps(answers))
"""
    (tmp_path / "work").mkdir()
    run = in_empty(empty, "python", "-c", code, cwd=tmp_path / "work")
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout.splitlines()[-1])
    for command, extra in commands.items():
        status, said = answers[command]
        assert re.fullmatch(rf"selfconv: .*pip install 'selfconv\[{extra}\]'\n", said), (command, said)
        assert status == 2, command
    assert not list((tmp_path / "work").iterdir())  # found out before anything was written


def test_what_is_missing_is_named_in_the_library_too(empty: Path, tmp_path: Path) -> None:
    code = """
import torch, selfconv.nn
try:
    import selfconv.timm
except ModuleNotFoundError as error:
    print(error)
try:
    selfconv.nn.AffineSelfConv2d(4, 4, 3, num_heads=2, backend="triton")(torch.randn(1, 4, 6, 6))
except ValueError as error:
    print(error)
"""
    run = in_empty(empty, "python", "-c", code, cwd=tmp_path, TRITON_INTERPRET="1")
    timm, triton = run.stdout.splitlines()
    assert timm.endswith("pip install 'selfconv[timm]'")
    assert "pip install 'selfconv[triton]'" in triton
