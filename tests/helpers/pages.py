"""Pages of the documentation, run as they are printed.

Blocks of a page are run in order, in one folder: ``python`` in one namespace, ``console`` as typed after
the ``$``. What a page shows as output is compared: below a command, and in a ``text`` block that follows a
``python`` block at once. There ``...`` stands for anything, as in doctest. A command must succeed, unless the
page shows its exit code by ``$ echo $?``. Blocks of ``sh``, ``bash`` and ``py`` are not run, being
for real data or hours; their options, or syntax, are checked.
"""

from __future__ import annotations

import doctest
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from helpers import ROOT
from selfconv import cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int  # of the page, on which the text begins
    output: str | None  # what the page shows that it prints


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; a ``text`` block right after a ``python`` block is that one's output."""
    content = page.read_text("utf-8")
    found = list(_FENCE.finditer(content))
    for block, following in zip_longest(found, found[1:]):
        output = None
        if block[1] == "python" and following is not None and following[1] == "text":
            output = following[2] if not content[block.end() : following.start()].strip() else None
        yield Block(block[1], block[2], content.count("\n", 0, block.start()) + 1, output)


def run_page(page: Path) -> None:
    """Runs the page in the current folder; AssertionError where it does not do what it shows."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.kind == "python":
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
            compare(block.output, printed.getvalue(), where)
        elif block.kind == "console":
            run_console(block.text, where)


def run_console(text: str, where: str) -> None:
    """Runs the commands of a block and compares what is shown below each."""
    session = [
        (command.replace("\\\n", " "), shown)
        for command, shown in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    ]
    assert session, f"{where}: a console block without a command"
    status = 0
    for (command, shown), (next_command, _) in zip_longest(session, session[1:], fillvalue=("", "")):
        if command == "echo $?":
            printed = f"{status}\n"
        else:
            status, printed = run_command(command)
            assert status == 0 or next_command == "echo $?", f"{where}: $ {command}\n{printed}"
        compare(shown or None, printed, f"{where}: $ {command}")


def run_command(command: str) -> tuple[int, str]:
    """Exit code and output; ``selfconv`` in this process, where torch is loaded already."""
    name, *args = shlex.split(command)
    if name != "selfconv":
        run = subprocess.run(
            command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
        )
        return run.returncode, run.stdout
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            cli.main(args)
        except SystemExit as stop:
            return int(stop.code or 0), printed.getvalue()
    return 0, printed.getvalue()


def compare(shown: str | None, printed: str, where: str) -> None:
    if shown is not None and not doctest.OutputChecker().check_output(shown, printed, _SAME):
        raise AssertionError(f"{where}: the page shows\n{shown}\nand this was printed:\n{printed}")


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every ``selfconv`` command in the page's ``sh`` blocks."""
    for block in blocks(page):
        if block.kind in ("sh", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["selfconv"]:
                    yield words[1:]


def check_options(args: list[str]) -> None:
    """Parses a command's options as the command would, without calling it."""
    cli.parse({"train": cli.train_command(args), **cli.COMMANDS}, args)
