"""The report as a page of HTML that needs nothing else, and as Markdown for a README."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfconv._text import count
from selfconv.study.claims import RULES, Verdict
from selfconv.study.report import tables as _tables
from selfconv.study.report.figures import Picture
from selfconv.study.report.summary import ResultTable, Study

WARNING = "Reduced: not the experiment at its full size. Judge the accuracies accordingly."
MARKS = {Verdict.HOLDS: "✓", Verdict.FAILS: "✗", Verdict.OPEN: "?", Verdict.FEW: "?"}
CLASSES = {Verdict.HOLDS: "holds", Verdict.FAILS: "fails", Verdict.OPEN: "open", Verdict.FEW: "open"}


@dataclass(frozen=True)
class ReportSection:
    """A study with its pictures, as the page shows it."""

    study: Study
    overview: Picture | None
    pictures: dict[str, list[Picture]]  # by the title of the table


def pictures_of(parts: Sequence[ReportSection]) -> list[Picture]:
    found = []
    for part in parts:
        found += [part.overview] if part.overview is not None else []
        found += [picture for table in part.study.tables for picture in part.pictures[table.title]]
    return found


def title_of(parts: Sequence[ReportSection]) -> str:
    return parts[0].study.title if len(parts) == 1 else "Affine Self Convolution: results"


def lead_of(parts: Sequence[ReportSection], problems: Sequence[tuple[str, str]]) -> str:
    trials = [trial for part in parts for trial in part.study.trials]
    models = {
        (table.title, row.label)
        for p in parts
        for table in p.study.tables
        for row in table.rows
        if row.trials
    }
    left = f" {count(len(problems), 'folder')} left out: see the end." if problems else ""
    runs, of = count(len(trials), "finished run"), count(len(models), "model")
    return f"{runs} of {of}, read from their records.{left}"


def claims_heading(table: ResultTable, study: Study) -> str:
    return (
        "The paper's claims"
        if table.paper_table is not None
        else f"The paper's claims for CIFAR-10, put to {study.data}"
    )


def tally(table: ResultTable) -> str:
    verdicts = [judged.ours.verdict for judged in table.judged]
    counts = ", ".join(f"{n} × {verdict}" for verdict in Verdict if (n := verdicts.count(verdict)))
    return f"{count(len(verdicts), 'claim')}: {counts}."


# ---- HTML ----


def html(parts: Sequence[ReportSection], problems: Sequence[tuple[str, str]]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["uri"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return environment.get_template("report.html.jinja").render(
        title=title_of(parts),
        lead=lead_of(parts, problems),
        parts=parts,
        problems=problems,
        rules=RULES,
        marks=MARKS,
        classes=CLASSES,
        columns=_tables.columns,
        sections=_tables.sections,
        papers=_tables.PAPERS,
        tally=tally,
        notes=_tables.notes,
        origin=_tables.origin,
        claims_heading=claims_heading,
        style="\n" + (here / "report.css").read_text("utf-8"),
        warning=WARNING,
    )


# ---- Markdown ----


def markdown(parts: Sequence[ReportSection], problems: Sequence[tuple[str, str]], figures: str) -> str:
    """``figures`` is the folder of the pictures, relative to the page."""
    lines = [f"# {_escaped(title_of(parts))}", "", lead_of(parts, problems), ""]
    reduced = [(part.study.title, line) for part in parts for line in part.study.reduced]
    if reduced:
        lines += [f"> **{WARNING}**", ">"]
        lines += [f"> - {_escaped(f'{name}: {line}' if len(parts) > 1 else line)}" for name, line in reduced]
        lines.append("")
    for part in parts:
        study = part.study
        if len(parts) > 1:
            lines += [f"## {_escaped(study.title)}", ""]
        if part.overview is not None:
            lines += _figure(part.overview, figures)
        for table in study.tables:
            if len(study.tables) > 1 or len(parts) == 1:
                title = table.title if len(study.tables) > 1 else "Results"
                lines += [f"{'###' if len(parts) > 1 else '##'} {_escaped(title)}", ""]
            lines += _markdown_table(table)
            lines += [f"- {_escaped(note)}" for note in _tables.notes(table)]
            lines += [f"- {name}: {_escaped(value)}" for name, value in _tables.origin(table)]
            lines.append("")
            early, late = (
                [p for p in part.pictures[table.title] if p.late is when] for when in (False, True)
            )
            lines += [line for picture in early for line in _figure(picture, figures)]
            lines += _markdown_claims(table, study)
            lines += [line for picture in late for line in _figure(picture, figures)]
    if problems:
        lines += ["## Folders that were left out", ""]
        lines += [f"- {_escaped(name)}: {_escaped(reason)}" for name, reason in problems]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(table: ResultTable) -> list[str]:
    columns = _tables.columns(table)
    headings = [
        f"Paper: {column.heading}" if column.of == _tables.PAPERS else column.heading for column in columns
    ]
    lines = [headings, ["---", *(["---:"] * (len(columns) - 1))]]
    lines += [[_escaped(column.cell(row)) for column in columns] for row in table.rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _markdown_claims(table: ResultTable, study: Study) -> list[str]:
    if not table.judged:
        return []
    lines = [
        f"### {_escaped(claims_heading(table, study))}",
        "",
        "| Claim | Here | By the paper's numbers |",
        "|---|---|---|",
    ]
    for judged in table.judged:
        evidence = "<br>".join(_escaped(line) for line in judged.ours.evidence)
        verdict = f"{MARKS[judged.ours.verdict]} {judged.ours.verdict}"
        lines.append(
            f"| {judged.claim.sentence}<br><sub>{evidence}</sub> | **{verdict}** | {judged.papers.verdict} |"
        )
    return [*lines, "", tally(table), "", *(f"- {rule}" for rule in RULES), ""]


def _figure(picture: Picture, figures: str) -> list[str]:
    return [f"![{_escaped(picture.alt)}]({figures}/{picture.name}.svg)", "", picture.caption, ""]


def _escaped(text: str) -> str:
    """As it is read, not as Markdown or HTML."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]{}|#!$~])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
