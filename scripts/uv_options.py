"""Where packages come from by pip's settings, as options of uv, which does not read those."""

from __future__ import annotations

import ast
import subprocess
import sys

SECTIONS = ("global", "install", ":env:")  # of pip's settings, each before the one that overrides it


def options(settings: str) -> list[str]:
    """What follows from the lines of ``pip config list``."""
    found: dict[str, list[str]] = {}
    for section in SECTIONS:
        for line in settings.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                found[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value)).split()
    given = ["--index-strategy=unsafe-best-match"]  # pip's: the best version of all indexes
    for option in ("index-url", "extra-index-url", "find-links"):
        given += [f"--{option}={place}" for place in found.get(option, [])]
    if found.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"):
        given.append("--no-index")
    return given


if __name__ == "__main__":
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    print(*options(listed.stdout))
