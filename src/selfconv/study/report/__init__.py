"""``selfconv report``: tables beside the paper's, figures and verdicts from the records of runs.

The report is a deterministic function of the records: it has no dates and no paths of this machine, and does
not depend on the order of arguments.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from selfconv._extras import require
from selfconv._files import check_writable, write_atomically
from selfconv.study.report.figures import (
    ablation_picture,
    accuracy_picture,
    curves_picture,
    rotation_picture,
)
from selfconv.study.report.page import ReportSection, html, markdown, pictures_of
from selfconv.study.report.read import read
from selfconv.study.report.summary import Study, summarise

__all__ = ["write_report"]

FIGURES = "figures"


def write_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Writes a report on all runs in some folders.

    Args:
        folders: folders of runs, or folders with runs at any depth; a ``plan.json`` defines how its runs are
            grouped. Unfinished or unreadable runs are listed in the report.
        out: folder for ``report.html``, ``report.md`` and ``figures/``.

    Returns:
        The files written: the HTML, the Markdown, then the figures.

    Raises:
        ValueError: a folder does not exist, or no run in it has finished; nothing has been written.
        OSError: the files cannot be written; none has been.
    """
    require("the report", "matplotlib")
    check_writable(out / FIGURES)
    found = read(folders)
    if found.problems:
        warnings.warn(f"{len(found.problems)} folders left out; the report says why", stacklevel=2)
    names: set[str] = set()
    parts = [_part(study, names) for study in summarise(found)]
    files = {
        out / "report.html": html(parts, found.problems).encode(),
        out / "report.md": markdown(parts, found.problems, FIGURES).encode(),
    }
    for picture in pictures_of(parts):
        files[out / FIGURES / f"{picture.name}.svg"] = picture.svg
        files[out / FIGURES / f"{picture.name}.png"] = picture.png
    for folder in (out, out / FIGURES):  # all, before one of an earlier report is replaced
        check_writable(folder, *(path.name for path in files if path.parent == folder))
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _part(study: Study, names: set[str]) -> ReportSection:
    ablation = len(study.tables) > 1 and not any(table.line_up for table in study.tables)
    overview = ablation_picture(_name(names, "accuracy", study.title), study) if ablation else None
    pictures = {}
    for table in study.tables:
        found = [] if ablation else [accuracy_picture(_name(names, "accuracy", table.title), table)]
        drawn = [
            rotation_picture(_name(names, "rotation", table.title), table),
            curves_picture(_name(names, "curves", table.title), table),
        ]
        pictures[table.title] = [*found, *(picture for picture in drawn if picture is not None)]
    return ReportSection(study, overview, pictures)


def _name(names: set[str], *parts: str) -> str:
    """A file name that is safe anywhere, and new."""
    base = re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:60]
    name, number = base, 2
    while name in names:
        name, number = f"{base}-{number}", number + 1
    names.add(name)
    return name
