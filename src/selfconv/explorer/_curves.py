"""How training went: loss and accuracy of each epoch, as SVG that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 40
COLOURS = {"train": "#0072B2", "val": "#D55E00"}  # tell apart whatever one's eyes
NAMES = {"train": "training", "val": "validation"}
DASHES = {"train": "none", "val": "6 4"}


def curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Two charts of a run's ``metrics.jsonl``."""
    if not metrics:
        return '<p class="sc-note">This run has no curves: no epoch of it has ended.</p>'
    charts = [chart("Loss", metrics, "loss"), chart("Accuracy", metrics, "accuracy", top=1.0)]
    return f'<div class="sc-charts">{"".join(charts)}</div>'


def chart(title: str, metrics: Sequence[Mapping[str, Any]], what: str, top: float | None = None) -> str:
    """One quantity over the epochs, of training and validation."""
    lines = {part: _points(metrics, f"{part}_{what}") for part in COLOURS}
    lines = {part: points for part, points in lines.items() if points}
    values = [value for points in lines.values() for _, value in points]
    highest = top if top is not None else max(values, default=1.0)
    ticks = _ticks(highest)
    last = max((epoch for points in lines.values() for epoch, _ in points), default=1)

    def x(epoch: float) -> float:
        return LEFT + (epoch - 1) / max(last - 1, 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="sc-chart-title" x="{LEFT}" y="18">{escape(title)}</text>']
    for tick in ticks:
        parts.append(
            f'<line class="sc-tick" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>'
        )
        parts.append(f'<text x="{LEFT - 7}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for epoch in _epochs(last):
        parts.append(f'<text x="{x(epoch)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{epoch}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">epoch</text>')
    for number, (part, points) in enumerate(lines.items()):
        path = " ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in points)
        style = f'stroke="{COLOURS[part]}" stroke-dasharray="{DASHES[part]}"'
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2" {style}/>')
        if len(points) == 1:
            parts.append(
                f'<circle cx="{x(points[0][0])}" cy="{y(points[0][1])}" r="4" fill="{COLOURS[part]}"/>'
            )
        legend = WIDTH - RIGHT - 190 + 96 * number
        parts.append(f'<line x1="{legend}" x2="{legend + 20}" y1="14" y2="14" stroke-width="2" {style}/>')
        parts.append(f'<text x="{legend + 25}" y="18">{NAMES[part]}</text>')
    ends = ", ".join(f"{NAMES[part]} {points[-1][1]:.3g}" for part, points in lines.items())
    label = escape(f"{title} over {last} epochs; at the end: {ends}", quote=True)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f"<figcaption>At the end: {escape(ends)}</figcaption></figure>"
    )


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    found = [(int(row["epoch"]), row.get(name)) for row in metrics]
    return [(epoch, float(value)) for epoch, value in found if value is not None and math.isfinite(value)]


def _ticks(highest: float) -> list[float]:
    """From 0 to at least ``highest``, in steps that are round numbers."""
    rough = max(highest, 1e-9) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999)
    return [step * n for n in range(math.ceil(highest / step * 0.999) + 1)]


def _epochs(last: int) -> list[int]:
    step = max(1, math.ceil(last / 6))
    step = next((n for n in (1, 2, 5, 10, 20, 25, 50) if n >= step), step)
    return [1, *range(step, last + 1, step)] if step > 1 else list(range(1, last + 1))
