"""The documentation is true: its code runs, its commands exist, its links lead somewhere, and it builds."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from inspect import isclass, isfunction
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from helpers import source_of
from helpers.pages import PAGES, ROOT, blocks, check_options, commands, compare, run_console, run_page
from helpers.timm_import import import_timm

from selfconv.data import IMAGE_FORMATS

formulas = runpy.run_path(str(ROOT / "docs" / "formulas.py"))
RUN = [page for page in PAGES if any(block.kind in ("python", "console") for block in blocks(page))]
SHOWN = [args for page in PAGES for args in commands(page)]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run a page in, of which nothing is left behind in the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the command replaces
    dtype = torch.get_default_dtype()
    yield tmp_path
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore")  # of torch's exporter; a page is about what it prints
def test_page_does_what_it_shows(page: Path, elsewhere: Path) -> None:
    import_timm()  # which one page imports
    run_page(page)


@pytest.mark.parametrize("args", SHOWN, ids=" ".join)
def test_options_of_commands_that_are_not_executed(args: list[str], elsewhere: Path) -> None:
    check_options(args)


def test_python_that_needs_data_compiles() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.kind == "py":
                compile(block.text, str(page), "exec")


def test_lists_of_image_formats() -> None:
    found = {}
    for page in [*PAGES, ROOT / "SECURITY.md"]:
        text = " ".join(page.read_text("utf-8").split())
        lists = re.findall(f"{IMAGE_FORMATS[0]}, .*?{IMAGE_FORMATS[-1]}", text)
        for names in lists:
            names = re.sub(r" \([^)]*\)", "", names)  # as in PPM (and PGM)
            assert tuple(re.split(", | and ", names)) == IMAGE_FORMATS, page
        if lists:
            found[page.name] = len(lists)
    assert found == {"data.md": 2, "explore.md": 1, "training.md": 1, "SECURITY.md": 1}


def test_make_has_the_targets_that_pages_name() -> None:
    named = re.findall(
        r"^make (\S+)|`make (\S+?)`", "".join(page.read_text() for page in PAGES), re.MULTILINE
    )
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {a or b for a, b in named} >= {"demo", "test", "docs"}
    assert {a or b for a, b in named} <= {*targets}


def test_there_are_tutorials_to_run() -> None:
    assert len([page for page in RUN if page.parent.name == "tutorials"]) == 4


def test_wrong_output_in_documentation_is_detected(elsewhere: Path) -> None:
    compare("a ...\n", "a b\n", "")
    for session in ("$ echo a\nb\n", "$ false\n", "$ false\n$ echo $?\n0\n"):
        with pytest.raises(AssertionError):
            run_console(session, "")
    run_console("$ false\n$ echo $?\n1\n$ echo a \\\n    b\na b\n", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for file, name in re.findall(r"`(test_\w+)\.(test_\w+)`", page.read_text()):
        assert re.search(rf"^ *def {name}\(", source_of(file), re.MULTILINE), f"no {name} in {file}"


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as `make docs` builds it: a warning is an error."""
    out = tmp_path_factory.mktemp("html")
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "-q", "-d", str(out / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(out)]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (build.returncode, build.stderr) == (0, "")
    return out


def test_the_reference_holds_every_public_name(html: Path) -> None:
    for name in ("ops", "nn", "models", "data", "train", "trained", "study", "bench", "visualize"):
        module = importlib.import_module(f"selfconv.{name}")
        page = (html / "api" / f"{name}.html").read_text()
        public = [n for n in module.__all__ if isfunction(getattr(module, n)) or isclass(getattr(module, n))]
        assert public
        assert not [item for item in public if f'id="selfconv.{name}.{item}"' not in page]


def test_formulas_are_typeset(html: Path) -> None:
    for name in ("index", "operation", "api/ops", "api/nn"):
        page = (html / f"{name}.html").read_text("utf-8")
        assert "<math" in page, name
        code = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
        assert not [block for block in code if formulas["is_formula"](block)], name


def test_a_formula_as_mathml() -> None:
    typeset = ElementTree.fromstring(
        formulas["mathml"]("A^K_(P,x)[F](y) = Σ_R F(R, y) ψ(P⁻¹R) < 2,  K = f ⋆ W^K      in each head")
    )
    plain = "".join(typeset.itertext())
    assert plain == "A(P,x)K[F](y)=∑RF(R,y)ψ(P−1R)<2,K=f⋆WKin each head"
    kinds = [element.tag.rpartition("}")[2] for element in typeset.iter()]
    assert [kinds.count(kind) for kind in ("msubsup", "munder", "msup", "mtd", "mtext")] == [1, 1, 2, 3, 1]


def test_built_pages_fetch_nothing(html: Path) -> None:
    """What a browser would load by itself: scripts, styles, fonts, pictures."""
    pages = list(html.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        loads = re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert not [target for target in loads if target.startswith(("http", "//"))], page.name
    for style in html.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text()), style.name
