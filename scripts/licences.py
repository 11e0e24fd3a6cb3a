"""Lists the licences of everything that constraints.txt pins, as the installed packages state them.

    python scripts/licences.py            writes docs/licences.md
    python scripts/licences.py --check    fails if a licence would bind users of this library, or is not known

Strong copyleft (GPL, AGPL, SSPL, …) is refused. Weak copyleft (LGPL, MPL) binds changes to those packages
themselves, which this library does not make, and is listed as such.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
STRONG = re.compile(
    r"\b(A?GPL|SSPL|EUPL|OSL|CC[- ]BY[- ](SA|NC)|GNU (Affero )?General Public)", re.IGNORECASE
)
WEAK = re.compile(r"\b(LGPL|MPL|EPL|CDDL|Lesser General Public|Mozilla Public)", re.IGNORECASE)
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|HPND|CNRI|Zlib|Unlicense|CC0|Public Domain"
    r"|MIT-CMU|NCSA|BSL|Boost)",
    re.IGNORECASE,
)
LOOKED_AT = {  # what their metadata cannot say
    "docutils": "Public Domain / BSD (the GPL is of an Emacs file that is not in the installed package)",
}


def pinned() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")]


def licence(found: Distribution) -> str:
    """The SPDX expression, or else the classifiers, or else the first line of the free text."""
    data = found.metadata
    if data.get("License-Expression"):
        return data["License-Expression"]
    classifiers = [c.rpartition("::")[2].strip() for c in data.get_all("Classifier", []) if "License ::" in c]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    text = (data.get("License") or "").strip().splitlines()
    return " / ".join(classifiers) or (text[0][:60] if text else "")


def kind(text: str) -> str:
    """Of a choice ("A OR B"), the one that binds least."""
    kinds = []
    for choice in re.split(r"\bOR\b", text):
        rest = WEAK.sub("", choice)
        if STRONG.search(rest):
            kinds.append("strong copyleft")
        elif rest != choice:
            kinds.append("weak copyleft")
        else:
            kinds.append("permissive" if PERMISSIVE.search(choice) else "unknown")
    order = ("permissive", "weak copyleft", "strong copyleft", "unknown")
    return min(kinds, key=order.index)


def main() -> None:
    rows, missing = [], []
    for name in pinned():
        try:
            found = distribution(name)
            text = LOOKED_AT.get(name) or licence(found)
        except PackageNotFoundError:
            missing.append(name)
            continue
        rows.append((name, text, "permissive" if name in LOOKED_AT else kind(text)))
    refused = [row for row in rows if row[2] in ("strong copyleft", "unknown")]
    for name, text, bound in refused:
        print(f"{name}: {bound}: {text!r}")
    if "--check" in sys.argv[1:]:
        sys.exit(1 if refused or not rows else 0)
    lines = [
        "# Licences of the dependencies",
        "",
        "Made by `scripts/licences.py` from the metadata of the packages that `constraints.txt` pins; a test "
        "refuses strong copyleft.",
        "Most of them serve development or an extra: the core needs torch, numpy, numba, safetensors, "
        "filelock, huggingface_hub, rich and tyro.",
        "",
        "| package | licence | kind |",
        "|---|---|---|",
        *(f"| {name} | {text.replace('|', '/')} | {bound} |" for name, text, bound in rows),
        "",
    ]
    if missing:
        lines += [f"Not installed when this was made: {', '.join(missing)}.", ""]
    (ROOT / "docs" / "licences.md").write_text("\n".join(lines))
    print(f"{len(rows)} packages, {len(missing)} not installed, {len(refused)} refused")


if __name__ == "__main__":
    main()
