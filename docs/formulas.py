"""Formulas as the sources write them, typeset as MathML.

    α(x, y) = softmax_y(scale · Q(x) · K(y))        in each head

Docstrings and pages hold formulas as indented plain text, which reads well in an editor. Two or more spaces
separate the columns of a line: those with an equals sign are equations, the others remarks. ``_`` and ``^``
take the next name, or what stands in brackets after them.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from docutils import nodes

_TOKEN = re.compile(r"d(?=[A-Z](?![a-z])|[α-ωΑ-Ω])|[A-Za-z]+|[α-ωΑ-Ω]|\d+(?:\.\d+)?|[⁰¹²³⁻ᵀ]+|\s+|.")
_RAISED = str.maketrans("⁰¹²³⁻ᵀ", "0123−T")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


def is_formula(text: str) -> bool:
    """Whether an indented block is a formula, and not a list of files or a piece of a program."""
    return "=" in text and bool(re.search(r"[Σαβψ⋆]", text))


def mathml(text: str) -> str:
    """A block of formulas, a row for each line."""
    rows = []
    for line in filter(str.strip, text.splitlines()):
        first, *others = re.split(r"\s{2,}", line.strip())
        cells = [_equation(first)]
        cells += [_equation(part) if "=" in part else f"<mtext>{escape(part)}</mtext>" for part in others]
        rows.append("<mtr>" + "".join(f"<mtd>{cell}</mtd>" for cell in cells) + "</mtr>")
    table = f'<mtable columnalign="left" columnspacing="2em" displaystyle="true">{"".join(rows)}</mtable>'
    return f'<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">{table}</math>'


def _equation(text: str) -> str:
    tokens = [token for token in _TOKEN.findall(text) if not token.isspace()]
    found: list[str] = []
    while tokens:
        found.append(_scripted(tokens))
    return f"<mrow>{''.join(found)}</mrow>"


def _scripted(tokens: list[str]) -> str:
    """The next symbol with what stands below and above it."""
    base = tokens.pop(0)
    scripts: dict[str, str] = {}
    while tokens and (tokens[0] in "_^" or tokens[0].translate(_RAISED) != tokens[0]):
        mark = tokens.pop(0)
        raised = mark not in ("_", "^")
        scripts["_" if mark == "_" else "^"] = (
            _symbols(mark.translate(_RAISED)) if raised else _script(tokens)
        )
    below, above = scripts.get("_"), scripts.get("^")
    if below is not None and base == "Σ":
        return f"<munder>{_symbol(base)}{below}</munder>"
    if below is not None and above is not None:
        return f"<msubsup>{_symbol(base)}{below}{above}</msubsup>"
    if below is not None:
        return f"<msub>{_symbol(base)}{below}</msub>"
    return f"<msup>{_symbol(base)}{above}</msup>" if above is not None else _symbol(base)


def _script(tokens: list[str]) -> str:
    opening = tokens.pop(0) if tokens else ""
    if opening not in _CLOSING:
        return _symbol(opening)
    inside, depth = [opening], 1
    while tokens and depth:
        depth += (tokens[0] == opening) - (tokens[0] == _CLOSING[opening])
        inside.append(tokens.pop(0))
    inside = inside[1:-1] if opening == "{" else inside
    return f"<mrow>{''.join(map(_symbol, inside))}</mrow>"


def _symbols(text: str) -> str:
    return f"<mrow>{''.join(map(_symbol, text))}</mrow>"


def _symbol(token: str) -> str:
    if token == "Σ":
        return "<mo>∑</mo>"
    if token[:1].isdigit():
        return f"<mn>{token}</mn>"
    if token.isalpha():
        return f"<mi>{token}</mi>"
    return f'<mo stretchy="false">{escape(token)}</mo>'


def typeset(_app: Any, doctree: nodes.document) -> None:
    """Replaces the formulas of a page, which docutils takes for blocks of code."""
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language", "none") in ("none", "default") and is_formula(block.astext()):
            block.replace_self(nodes.raw("", mathml(block.astext()), format="html"))
