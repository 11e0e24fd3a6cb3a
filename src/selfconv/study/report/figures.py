"""The figures: accuracy against parameters as in the paper, ablations side by side, learning curves.

Each is drawn twice, for wide pages and for narrow ones. The same rows give the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from selfconv.groups import GROUPS
from selfconv.models import ModelFacts
from selfconv.study.claims import Outcome, shown
from selfconv.study.report.summary import ResultRow, ResultTable, Study
from selfconv.study.samples import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

INK, FAINT = "#24292f", "#8c959f"
# Okabe and Ito's colours, told apart by everyone; the shape says the rest
COLOURS = {
    "conv": "#0072B2", "sasa": "#CC79A7", "simple_asc": "#009E73", "asc": "#D55E00",
    "affine": "#E69F00", "depthwise": "#56B4E9",
}  # fmt: skip
# a string for each group: plain, with pooling, with SE; they repeat, and labels tell the groups apart
SHAPES = ("ov^", "sPD", "h*p", "d8H")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "selfconv",
    "svg.fonttype": "path",
    "figure.dpi": 100,
}
# a picture on a dark page: its ink turns light, and its ground is the page's
DARK = (
    "<style>@media (prefers-color-scheme: dark) {"
    f'[style*="fill: {INK}"] {{ fill: #e6edf3 !important }} '
    f'[style*="stroke: {INK}"] {{ stroke: #e6edf3 !important }}}}</style>'
)


@dataclass(frozen=True)
class Picture:
    name: str  # of its files, without suffix
    alt: str
    caption: str
    svg: bytes
    narrow: bytes  # an SVG too
    png: bytes
    late: bool = False  # after the claims


def accuracy_picture(name: str, table: ResultTable) -> Picture:
    """Accuracy against parameters, the paper's beside ours where there is a table of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    panels = [("These runs", [(row, row.outcome) for row in table.rows if row.outcome is not None])]
    printed = [(row, row.paper) for row in table.rows if row.paper is not None]
    if table.paper_table is not None and printed:
        panels.insert(0, ("The paper", printed))

    def draw(figure: Figure, wide: bool) -> None:
        across = wide and len(panels) == 2
        grid = figure.subplots(1 if across else len(panels), 2 if across else 1, squeeze=False, sharex=True)
        for axes, (title, points) in zip(grid.flat, panels, strict=True):
            _scatter(axes, points)
            axes.set_title(title if len(panels) > 1 else "")
            axes.set_ylabel("test accuracy, %")
            axes.set_xlabel("parameters, thousands")
            axes.xaxis.set_tick_params(labelbottom=True)
        if _alike([[o.accuracy.mean for _, o in points] for _, points in panels]):
            limits = [axes.get_ylim() for axes in grid.flat]
            for axes in grid.flat:
                axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        figure.draw_without_rendering()  # settles the layout, which labels are placed in
        canvas = FigureCanvasAgg(figure)
        for axes, (_, points) in zip(grid.flat, panels, strict=True):
            _place_labels(canvas, axes, points)

    values = "; ".join(f"{row.label} {shown(o.accuracy)}, {o.parameters:,}" for row, o in panels[-1][1])
    return _picture(
        name,
        f"Test accuracy in percent against parameters, {table.title}. {values}.",
        "Test accuracy against parameters: means, with one standard deviation as error bar. "
        "Colours tell the spatial layer, shapes the group and squeeze and excite.",
        draw,
        heights=(4.3 if len(panels) == 2 else 4.0, 3.6 * len(panels)),
    )


def ablation_picture(name: str, study: Study) -> Picture:
    """All tables of a study under one another, each row a mean with its deviation."""

    def draw(figure: Figure, wide: bool) -> None:
        axes = figure.add_subplot()
        y, ticks = 0.0, []
        for table in study.tables:
            axes.text(
                0.01, y, _safe(table.title), transform=axes.get_yaxis_transform(), weight="bold", va="center",
                in_layout=False,
            )  # fmt: skip
            for row in table.rows:
                if row.accuracy is not None:
                    y += 1
                    ticks.append((y, row.label))
                    _point(axes, row, y, row.accuracy, upright=False)
            y += 1.3
        axes.set_yticks([y for y, _ in ticks], [_safe(label) for _, label in ticks])
        axes.set_ylim(y - 0.6, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("test accuracy, %")

    lines = sum(len(table.rows) + 1.3 for table in study.tables)
    return _picture(
        name,
        f"Test accuracy in percent of every variant in {study.title}; the table has the numbers.",
        "Test accuracy of each variant: mean and one standard deviation.",
        draw,
        heights=(0.26 * lines + 0.9, 0.26 * lines + 0.9),
    )


def curves_picture(name: str, table: ResultTable) -> Picture | None:
    """Training and validation accuracy of each row over the epochs; None if no run has any."""
    rows = [row for row in table.rows if any(trial.epochs for trial in row.trials)]
    if not rows:
        return None
    values = [
        (epoch.number / len(trial.epochs), value)
        for row in rows
        for trial in row.trials
        for epoch in trial.epochs
        for value in (epoch.train, epoch.val)
        if value is not None
    ]
    long = max(len(trial.epochs) for row in rows for trial in row.trials) >= 20
    low = min(value for done, value in values if done >= 0.1 or not long)
    high = max(value for _, value in values)
    columns = {True: min(3, len(rows)), False: min(2, len(rows))}

    def draw(figure: Figure, wide: bool) -> None:
        lines = math.ceil(len(rows) / columns[wide])
        grid = figure.subplots(lines, columns[wide], squeeze=False, sharex=True, sharey=True)
        for axes, row in zip(grid.flat, rows, strict=False):
            _curves(axes, row)
            runs = len(row.trials)
            axes.set_title(f"{_safe(row.label, 36 if wide else 22)}, n = {runs}", fontsize=8.5 if wide else 7)
        for axes in list(grid.flat)[len(rows) :]:
            axes.set_visible(False)
        for column in range(columns[wide]):
            last = max(i for i in range(lines) if i * columns[wide] + column < len(rows))
            grid[last][column].set_xlabel("epoch")
            grid[last][column].xaxis.set_tick_params(labelbottom=True)
        for line in grid:
            line[0].set_ylabel("accuracy, %")
        margin = 0.05 * (high - low) + 0.5
        grid[0][0].set_ylim(low - margin, high + margin)
        grid[0][0].legend(frameon=False, fontsize=7.5, loc="lower right")

    return _picture(
        name,
        f"Learning curves, {table.title}: training and validation accuracy over the epochs of "
        + ", ".join(row.label for row in rows)
        + ".",
        "Accuracy after each epoch: the mean over runs, and in the band the lowest to the highest of them. "
        "Training accuracy is that of augmented images, while the weights still change."
        + (" What comes before a tenth of the epochs may lie below the picture." if long else ""),
        draw,
        heights=(
            1.75 * math.ceil(len(rows) / columns[True]) + 0.4,
            1.6 * math.ceil(len(rows) / columns[False]) + 0.4,
        ),
        late=True,
    )


def rotation_picture(name: str, table: ResultTable) -> Picture | None:
    """Accuracy against the angle of the test images, a line for each row; None if it was not measured."""
    rows = [row for row in table.rows if row.at_angles]
    if not rows:
        return None

    def draw(figure: Figure, wide: bool) -> None:
        axes = figure.add_subplot()
        dashes = {False: ("-", "-."), True: ("--", ":")}
        seen: dict[tuple[str, str, bool], int] = {}
        for row in rows:
            colour, shape = _look(row.facts)
            rotated = row.trials[0].config.recipe.rotate != "none"
            number = seen.setdefault((colour, shape, rotated), 0)  # the same network, trained in another way
            seen[colour, shape, rotated] += 1
            angles, values = [*row.at_angles], [sample.mean for sample in row.at_angles.values()]
            group = None if row.facts is None else GROUPS.get(row.facts.group)  # None: of another version
            planar = group is None or len(group) == 1
            axes.plot(
                [*angles, 360], [*values, values[0]], color=colour, marker=shape, markersize=4,
                linestyle=dashes[rotated][number % 2], linewidth=1.2 if planar else 2.4,
                label=_safe(row.label, 44),
            )  # fmt: skip
        axes.set_xticks(range(0, 361, 45 if wide else 90))
        axes.xaxis.set_major_formatter("{x:.0f}°")
        axes.set_xlabel("angle of the test images")
        axes.set_ylabel("accuracy, %")
        figure.legend(
            loc="outside right upper" if wide else "outside lower left", fontsize=7.5, frameon=False
        )

    images = max(t.rotation.images for row in rows for t in row.trials if t.rotation is not None)
    values = "; ".join(f"{row.label} {row.every_angle.mean:.1f}" for row in rows if row.every_angle)
    return _picture(
        name,
        f"Accuracy in percent at every angle, {table.title}. Means over all angles: {values}.",
        f"Accuracy on {images:,} test images turned by every multiple of 15°, seen through a round mask: "
        "the mean over runs. Thick lines: networks on a group; if they are exactly equivariant, their lines "
        "repeat after each rotation of the group. Dashed lines: training images were rotated.",
        draw,
        heights=(3.6, 3.4 + 0.18 * len(rows)),
    )


# ---- parts ----


def _look(facts: ModelFacts | None) -> tuple[str, str]:
    """Colour by spatial layer, shape by group, pooling, and squeeze and excite."""
    if facts is None or facts.group not in GROUPS:  # a record of another version
        return INK, "X"
    shapes = SHAPES[list(GROUPS).index(facts.group) % len(SHAPES)]
    colour = COLOURS.get(facts.spatial, INK)
    return colour, shapes[2 if facts.squeeze_excite else int(facts.pooled_convolution)]


def _point(axes: Axes, row: ResultRow, y: float, sample: Sample, *, upright: bool, x: float = 0.0) -> None:
    colour, shape = _look(row.facts)
    x, y = (x, sample.mean) if upright else (sample.mean, y)
    yerr, xerr = (sample.deviation, None) if upright else (None, sample.deviation)
    axes.errorbar(
        x, y, yerr, xerr, fmt=shape, color=colour, markersize=6.5, markeredgecolor="white",
        markeredgewidth=0.6, elinewidth=1.3, capsize=3, zorder=3,
    )  # fmt: skip


def _scatter(axes: Axes, points: Sequence[tuple[ResultRow, Outcome]]) -> None:
    for row, outcome in points:
        _point(axes, row, 0.0, outcome.accuracy, upright=True, x=outcome.parameters / 1000)
    axes.margins(x=0.16, y=0.14)
    axes.locator_params(axis="x", nbins=6)


def _alike(panels: Sequence[Sequence[float]]) -> bool:
    """Whether panels of means can share an axis without one of them being squashed."""
    spans = [max(values) - min(values) for values in panels]
    everything = [value for values in panels for value in values]
    return max(everything) - min(everything) <= 2 * max(min(spans), 0.5)


def _curves(axes: Axes, row: ResultRow) -> None:
    from matplotlib.ticker import MaxNLocator

    colour, _ = _look(row.facts)
    series: list[tuple[str, str, str, Callable[..., float | None]]] = [
        ("training", FAINT, "--", lambda epoch: epoch.train),
        ("validation", colour, "-", lambda epoch: epoch.val),
    ]
    for name, shade, dash, value in series:
        found: dict[int, list[float]] = {}
        for trial in row.trials:
            for epoch in trial.epochs:
                if (y := value(epoch)) is not None:
                    found.setdefault(epoch.number, []).append(y)
        if not found:
            continue
        x = sorted(found)
        low, high = [min(found[i]) for i in x], [max(found[i]) for i in x]
        mean = [sum(found[i]) / len(found[i]) for i in x]
        axes.fill_between(x, low, high, color=shade, alpha=0.22, linewidth=0)
        axes.plot(
            x, mean, color=shade, linestyle=dash, linewidth=1.3, label=name, marker="o" if len(x) == 1 else ""
        )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))


Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels


def _place_labels(canvas: FigureCanvasAgg, axes: Axes, points: Sequence[tuple[ResultRow, Outcome]]) -> None:
    """Writes each point's name beside it, where it covers no point, no error bar and no other name."""
    renderer = canvas.get_renderer()
    frame = axes.get_window_extent(renderer).extents
    taken: list[Box] = []
    centres = []
    for _, outcome in points:
        x, spread = outcome.parameters / 1000, outcome.accuracy.deviation or 0.0
        ends = [outcome.accuracy.mean - spread, outcome.accuracy.mean + spread]
        (left, low), (_, high) = axes.transData.transform([(x, end) for end in ends])
        centre = (left, (low + high) / 2)
        centres.append(centre)
        taken += [(left - 4, low - 2, left + 4, high + 2), _square(centre, 6)]
    crowded = sorted(range(len(points)), key=lambda i: sum(math.dist(centres[i], c) for c in centres))
    for i in crowded:
        text = _safe(points[i][0].label)
        width, height = _size(text, renderer)
        best = min(_candidates(centres[i], width, height), key=lambda c: _cost(c[0], frame, taken) + c[1])
        box, distance = best
        taken.append(box)
        shift = (
            (box[0] - centres[i][0]) * 72 / canvas.figure.dpi,
            (box[1] - centres[i][1]) * 72 / canvas.figure.dpi,
        )
        line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(
            text, (points[i][1].parameters / 1000, points[i][1].accuracy.mean), xytext=shift,
            textcoords="offset points", ha="left", va="bottom", fontsize=8, color=INK, in_layout=False,
            annotation_clip=False, arrowprops=line if distance > 16 else None, zorder=4,
        )  # fmt: skip


def _square(centre: tuple[float, float], half: float) -> Box:
    return centre[0] - half, centre[1] - half, centre[0] + half, centre[1] + half


def _size(text: str, renderer: RendererBase) -> tuple[float, float]:
    from matplotlib.font_manager import FontProperties

    width, height, _ = renderer.get_text_width_height_descent(text, FontProperties(size=8), ismath=False)
    return width, height


def _candidates(centre: Sequence[float], width: float, height: float) -> Iterator[tuple[Box, float]]:
    """Boxes around a point, with how far off they are."""
    for distance in (9, 14, 20, 28, 38, 50, 64, 80):
        for turn in range(16):
            angle = 2 * math.pi * turn / 16
            x = centre[0] + math.cos(angle) * distance + (math.cos(angle) - 1) / 2 * width
            y = centre[1] + math.sin(angle) * distance + (math.sin(angle) - 1) / 2 * height
            yield (x, y, x + width, y + height), distance


def _cost(box: Box, frame: Sequence[float], taken: Sequence[Box]) -> float:
    covered = sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0]) + 3)
        * max(0.0, min(box[3], other[3]) - max(box[1], other[1]) + 3)
        for other in taken
    )
    outside = max(0.0, frame[0] - box[0]) + max(0.0, box[2] - frame[2] - 8)
    outside += max(0.0, frame[1] - box[1]) + max(0.0, box[3] - frame[3] - 8)
    return 8 * covered + 20 * outside


def _safe(text: str, longest: int = 36) -> str:
    """A label as it is, but not too long, and no formula, which matplotlib reads between dollar signs."""
    short = text if len(text) <= longest else text[: longest - 1] + "…"
    return re.sub(r"[\x00-\x1f\x7f]", " ", short).replace("$", r"\$")


# ---- files ----


@contextmanager
def _style() -> Iterator[None]:
    """Ours alone, whatever the user's matplotlibrc says."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def _picture(
    name: str,
    alt: str,
    caption: str,
    draw: Callable[[Figure, bool], None],
    heights: tuple[float, float],
    *,
    late: bool = False,
) -> Picture:
    from matplotlib.figure import Figure

    def drawn(wide: bool) -> Figure:
        size = (9.6, heights[0]) if wide else (4.1, heights[1])
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, wide)
        return figure

    with _style():
        wide = drawn(True)
        return Picture(name, alt, caption, _svg(wide), _svg(drawn(False)), _png(wide), late)


def _svg(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    head, mark, rest = buffer.getvalue().decode().partition("<defs>")
    return (head + DARK + mark + rest).encode()


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
