"""The report as a page of HTML that needs nothing else, and as Markdown for a README."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from selfconv.study.claims import RULES, Verdict
from selfconv.study.report import tables as _tables
from selfconv.study.report.figures import Picture
from selfconv.study.report.summary import Group, Study

WARNING = "Reduced: not the paper's experiment at its full size. Judge the accuracies accordingly."
MARKS = {Verdict.HOLDS: "✓", Verdict.FAILS: "✗", Verdict.FEW: "?"}
CLASSES = {Verdict.HOLDS: "holds", Verdict.FAILS: "fails", Verdict.FEW: "few"}


@dataclass(frozen=True)
class Part:
    """A study with its pictures, as the page shows it."""

    study: Study
    overview: Picture | None
    pictures: dict[str, list[Picture]]  # by the title of the group


def pictures_of(parts: Sequence[Part]) -> list[Picture]:
    found = []
    for part in parts:
        found += [part.overview] if part.overview is not None else []
        found += [picture for group in part.study.groups for picture in part.pictures[group.title]]
    return found


def title_of(parts: Sequence[Part]) -> str:
    return parts[0].study.title if len(parts) == 1 else "Affine Self Convolution: results"


def lead_of(parts: Sequence[Part], problems: Sequence[tuple[str, str]]) -> str:
    trials = [trial for part in parts for trial in part.study.trials]
    models = {
        (group.title, row.label)
        for p in parts
        for group in p.study.groups
        for row in group.rows
        if row.trials
    }
    left = f" {_counted(len(problems), 'folder')} left out: see the end." if problems else ""
    runs, of = _counted(len(trials), "finished run"), _counted(len(models), "model")
    return f"{runs} of {of}, read from their records.{left}"


def _counted(n: int, word: str) -> str:
    return f"{n} {word}{'s' * (n != 1)}"


def claims_heading(group: Group, study: Study) -> str:
    return (
        "The paper's claims"
        if group.table is not None
        else f"The paper's claims for CIFAR-10, put to {study.data}"
    )


def tally(group: Group) -> str:
    verdicts = [judged.ours.verdict for judged in group.judged]
    counts = ", ".join(f"{n} × {verdict}" for verdict in Verdict if (n := verdicts.count(verdict)))
    return f"{_counted(len(verdicts), 'claim')}: {counts}."


# ---- HTML ----


def html(parts: Sequence[Part], problems: Sequence[tuple[str, str]]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["uri"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return environment.from_string(TEMPLATE).render(
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
        style=STYLE,
        warning=WARNING,
    )


STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --faint: #57606a; --line: #d0d7de; --ground: #fff;
  --soft: #f6f8fa; --loud: #fff3cd; --loud-line: #d4a72c; --link: #0550ae;
  --holds: #0b5f8a; --fails: #a33d00; --few: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9aa4af; --line: #373e47;
  --ground: #0f1419; --soft: #171d24; --loud: #3a2e05; --loud-line: #b08800; --link: #79b8ff;
  --holds: #6cb6ff; --fails: #ffa657; --few: #9aa4af; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
main { max-width: 75rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem }
h2 { font-size: 1.45rem; line-height: 1.25; margin: 3rem 0 .8rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line) }
h3 { font-size: 1.15rem; margin: 2rem 0 .6rem } h4 { font-size: 1rem; margin: 1.6rem 0 .5rem }
p, ul { margin: .5rem 0 }
.lead { color: var(--faint); margin-top: 0 }
.loud { background: var(--loud); border: 1px solid var(--loud-line); border-left-width: 6px;
  border-radius: 6px; padding: .8rem 1.1rem; margin: 1.2rem 0 }
.loud strong { display: block }
.loud ul { margin: .3rem 0 0; padding-left: 1.2rem }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums }
th, td { padding: .45rem .55rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line) }
thead th { border-top: 0; background: var(--soft); vertical-align: bottom; font-weight: 600 }
thead .of { text-align: left; border-left: 1px solid var(--line); padding-bottom: 0 }
tr > th:first-child[scope=row], th[rowspan] { text-align: left; font-weight: 600 }
tbody th, th[rowspan] { position: sticky; left: 0 } tbody th { background: var(--ground) }
.papers { color: var(--faint); background: var(--soft) }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem }
a { color: var(--link) }
.none td { color: var(--faint) }
.notes { color: var(--faint); font-size: .86rem; padding-left: 1.1rem }
dl { color: var(--faint); font-size: .86rem; display: grid; grid-template-columns: max-content 1fr;
  gap: .15rem .9rem; margin: .8rem 0 }
dt { font-weight: 600 } dd { margin: 0; overflow-wrap: anywhere }
figure { margin: 1.6rem 0 } img { width: 100%; height: auto; display: block }
figcaption { color: var(--faint); font-size: .86rem; margin-top: .4rem }
.claims { list-style: none; padding: 0; margin: .8rem 0 }
.claims > li { border: 1px solid var(--line); border-radius: 6px; padding: .75rem 1rem; margin: .6rem 0;
  display: grid; grid-template-columns: 9.5rem 1fr; gap: .2rem 1rem }
.claims p { margin: 0 } .claims div { grid-column: 2; min-width: 0 }
.verdict { font-weight: 700; grid-row: span 2 }
.verdict small { display: block; font-weight: 400; color: var(--faint) }
.holds { color: var(--holds) } .fails { color: var(--fails) } .few { color: var(--few) }
.evidence { margin: .2rem 0 0; padding-left: 1.1rem; font-size: .86rem; color: var(--faint);
  font-variant-numeric: tabular-nums }
details { margin: .6rem 0; font-size: .9rem } summary { cursor: pointer; color: var(--link) }
code { font: .88em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere }
@media (max-width: 600px) { main { padding: 1.4rem 1rem 3rem } h1 { font-size: 1.5rem }
  h2 { font-size: 1.25rem }
  .claims > li { grid-template-columns: 1fr } .claims div { grid-column: 1 }
  dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .4rem } }
@media print { .scroll { overflow: visible } }
"""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style|safe }}</style>
</head>
<body>
<main>
{% macro figure(picture) %}
<figure>
<picture>
<source media="(max-width: 600px)" srcset="{{ picture.narrow|uri }}">
<img src="{{ picture.svg|uri }}" alt="{{ picture.alt }}">
</picture>
<figcaption>{{ picture.caption }}</figcaption>
</figure>
{% endmacro %}
<header>
<h1>{{ title }}</h1>
<p class="lead">{{ lead }}</p>
{% if parts|selectattr("study.reduced")|list %}
<div class="loud" role="note">
<strong>{{ warning }}</strong>
<ul>
{% for part in parts if part.study.reduced %}
{% for line in part.study.reduced %}
<li>{% if parts|length > 1 %}{{ part.study.title }}: {% endif %}{{ line }}</li>
{% endfor %}
{% endfor %}
</ul>
</div>
{% endif %}
{% if parts|length > 1 %}
<nav aria-label="Contents"><ul>
{% for part in parts %}
<li><a href="#part-{{ loop.index }}">{{ part.study.title }}</a></li>
{% endfor %}
</ul></nav>
{% endif %}
</header>
{% for part in parts %}
{% set study = part.study %}
{% set many = parts|length > 1 %}
{% set level = (3 if many and study.groups|length > 1 else 2) %}
<section id="part-{{ loop.index }}">
{% if many %}
<h2>{{ study.title }}</h2>
{% endif %}
{% if part.overview %}
{{ figure(part.overview) }}
{% endif %}
{% for group in study.groups %}
{% if study.groups|length > 1 or not many %}
<h{{ level }}>{{ group.title if study.groups|length > 1 else "Results" }}</h{{ level }}>
{% endif %}
<div class="scroll" tabindex="0" role="region" aria-label="Results, {{ group.title }}">
<table>
<thead>
<tr>
{% for name, width in sections(columns(group)) %}
{% if loop.first %}
<th scope="col" rowspan="2">Model</th>
{% else %}
<th scope="colgroup" colspan="{{ width }}" class="of{% if name == papers %} papers{% endif %}">{{ name }}</th>
{% endif %}
{% endfor %}
</tr>
<tr>
{% for column in columns(group)[1:] %}
<th scope="col"{% if column.of == papers %} class="papers"{% endif %}>{{ column.heading }}</th>
{% endfor %}
</tr>
</thead>
<tbody>
{% for row in group.rows %}
<tr{% if not row.trials %} class="none"{% endif %}>
{% for column in columns(group) %}
{% if loop.first %}
<th scope="row">{{ column.cell(row) }}</th>
{% else %}
<td{% if column.of == papers %} class="papers"{% endif %}>{{ column.cell(row) }}</td>
{% endif %}
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
<ul class="notes">
{% for note in notes(group) %}
<li>{{ note }}</li>
{% endfor %}
</ul>
<dl>
{% for name, value in origin(group) %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% for picture in part.pictures[group.title] if not picture.late %}
{{ figure(picture) }}
{% endfor %}
{% if group.judged %}
<h{{ level + 1 }}>{{ claims_heading(group, study) }}</h{{ level + 1 }}>
<p>{{ tally(group) }}</p>
<ol class="claims">
{% for judged in group.judged %}
<li>
<p class="verdict {{ classes[judged.ours.verdict] }}">
{{ marks[judged.ours.verdict] }} {{ judged.ours.verdict }}
<small>by the paper's numbers: {{ judged.papers.verdict }}</small></p>
<div><p>{{ judged.claim.sentence }}</p>
<ul class="evidence">
{% for line in judged.ours.evidence %}
<li>{{ line }}</li>
{% endfor %}
</ul></div>
</li>
{% endfor %}
</ol>
<details>
<summary>How claims are judged</summary>
<ul>
{% for rule in rules %}
<li>{{ rule }}</li>
{% endfor %}
</ul>
</details>
{% endif %}
{% for picture in part.pictures[group.title] if picture.late %}
<h{{ level + 1 }}>Learning curves</h{{ level + 1 }}>
{{ figure(picture) }}
{% endfor %}
{% endfor %}
</section>
{% endfor %}
{% if problems %}
<section>
<h2>Folders that were left out</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Folders that were left out">
<table>
<thead><tr><th scope="col">Folder</th><th scope="col" style="text-align: left">Reason</th></tr></thead>
<tbody>
{% for name, reason in problems %}
<tr><th scope="row"><code>{{ name }}</code></th><td style="text-align: left">{{ reason }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% endif %}
</main>
</body>
</html>
"""


# ---- Markdown ----


def markdown(parts: Sequence[Part], problems: Sequence[tuple[str, str]], figures: str) -> str:
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
        for group in study.groups:
            if len(study.groups) > 1 or len(parts) == 1:
                title = group.title if len(study.groups) > 1 else "Results"
                lines += [f"{'###' if len(parts) > 1 else '##'} {_escaped(title)}", ""]
            lines += _markdown_table(group)
            lines += [f"- {_escaped(note)}" for note in _tables.notes(group)]
            lines += [f"- {name}: {_escaped(value)}" for name, value in _tables.origin(group)]
            lines.append("")
            early, late = (
                [p for p in part.pictures[group.title] if p.late is when] for when in (False, True)
            )
            lines += [line for picture in early for line in _figure(picture, figures)]
            lines += _markdown_claims(group, study)
            lines += [line for picture in late for line in _figure(picture, figures)]
    if problems:
        lines += ["## Folders that were left out", ""]
        lines += [f"- {_escaped(name)}: {_escaped(reason)}" for name, reason in problems]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(group: Group) -> list[str]:
    columns = _tables.columns(group)
    headings = [
        f"Paper: {column.heading}" if column.of == _tables.PAPERS else column.heading for column in columns
    ]
    lines = [headings, ["---", *(["---:"] * (len(columns) - 1))]]
    lines += [[_escaped(column.cell(row)) for column in columns] for row in group.rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _markdown_claims(group: Group, study: Study) -> list[str]:
    if not group.judged:
        return []
    lines = [
        f"### {_escaped(claims_heading(group, study))}",
        "",
        "| Claim | Here | By the paper's numbers |",
        "|---|---|---|",
    ]
    for judged in group.judged:
        evidence = "<br>".join(_escaped(line) for line in judged.ours.evidence)
        verdict = f"{MARKS[judged.ours.verdict]} {judged.ours.verdict}"
        lines.append(
            f"| {judged.claim.sentence}<br><sub>{evidence}</sub> | **{verdict}** | {judged.papers.verdict} |"
        )
    return [*lines, "", tally(group), "", *(f"- {rule}" for rule in RULES), ""]


def _figure(picture: Picture, figures: str) -> list[str]:
    return [f"![{_escaped(picture.alt)}]({figures}/{picture.name}.svg)", "", picture.caption, ""]


def _escaped(text: str) -> str:
    """As it is read, not as Markdown or HTML."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]{}|#!$~])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
