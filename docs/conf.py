"""How Sphinx builds the documentation (`make docs`). Nothing is fetched, to build it or to read it."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

from formulas import typeset  # noqa: E402

project = "selfconv"
author = "The selfconv developers"
copyright = author
release = re.findall(r'__version__ = "(.*)"', (ROOT / "src" / "selfconv" / "_version.py").read_text())[0]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
highlight_language = "none"  # formulas and files; code says what it is

html_theme = "furo"
html_title = f"selfconv {release}"
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_mock_imports = ["escnn"]  # which selfconv.escnn is about, and no extra brings
autodoc_inherit_docstrings = False  # torch's own words about forward()
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

# Every reference to something of ours must lead somewhere; types of other projects,
# and private ones, are named, not linked.
nitpicky = True
suppress_warnings = ["ref.python"]  # the names of options, within Annotated, are taken for types
nitpick_ignore_regex = [("py:.*", r"(?!selfconv\.).*|selfconv\..*\b_.*")]


def as_rst(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are written for readers of the source first; here they become what docutils expects.

    A paragraph that is indented deeper than the one before is a formula (see ``formulas.py``), or a list.
    Elsewhere the bars of |H| are bars, not the marks of a substitution.
    """
    given, indent, formula = lines[:], 0, False  # indent: of the last line of text
    lines.clear()
    for before, line in zip(["", *given], given, strict=False):
        deeper = len(line) - len(line.lstrip()) - indent
        if line and deeper > 0 and not before and not formula:
            lines.extend([" " * indent + "::", ""])
            formula = True
        elif line and (deeper <= 0 or not formula):
            formula, indent = False, indent + deeper
        if not formula:
            parts = line.split("``")  # every other one is code
            line = "``".join(part if k % 2 else part.replace("|", r"\|") for k, part in enumerate(parts))
        lines.append(line)


def link_to_room(app: Any, env: Any, node: Any, text: Any) -> Any:
    """A type is documented where it is public, ``selfconv.data.Dataset``, not in the file that defines it."""
    parts = node.get("reftarget", "").split(".")
    if len(parts) != 4 or parts[0] != "selfconv":
        return None
    public = ".".join([*parts[:2], parts[3]])
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, text)


def setup(app: Any) -> None:
    app.connect("missing-reference", link_to_room)
    app.connect("doctree-read", typeset)
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon
