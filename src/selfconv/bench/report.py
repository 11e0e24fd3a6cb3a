"""What a benchmark leaves behind: JSON, tables, plots and a page of Markdown made from them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from selfconv._files import read_as
from selfconv._version import __version__
from selfconv.bench.inference import TOLERANCE, InferenceRow
from selfconv.bench.models import ModelRow
from selfconv.bench.ops import KEPT, OPERATION, Row
from selfconv.bench.windows import WindowRow

if TYPE_CHECKING:
    from rich.console import Console

# Okabe and Ito's colours, told apart by everyone
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

AnyRow = Row | ModelRow | InferenceRow | WindowRow


@dataclass(frozen=True)
class Results:
    machine: dict[str, Any]
    matmul_gflops: float
    ops: list[Row]
    models: list[ModelRow]
    inference: list[InferenceRow] = field(default_factory=list)
    windows: list[WindowRow] = field(default_factory=list)

    def add(self, row: AnyRow) -> None:
        kinds = {Row: self.ops, ModelRow: self.models, InferenceRow: self.inference, WindowRow: self.windows}
        kinds[type(row)].append(row)  # type: ignore[attr-defined]


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on, and nothing that names whose machine it is."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    found = {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "selfconv": __version__,
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def write_results(results: Results, out: Path) -> None:
    (out / "bench.json").write_text(json.dumps(asdict(results), indent=1) + "\n")
    figures = _plots(results, out)
    (out / "performance.md").write_text(markdown(results, figures))


def read_results(path: Path) -> Results:
    """The results in a ``bench.json``; raises ValueError if it holds something else."""
    found = read_as(Results, path)
    try:
        markdown(found, [])
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{path}: expected results that fill the tables; {error!r}") from None
    return found


def joined(earlier: Results, later: Results) -> Results:
    """The later results, with the parts that they lack taken from earlier ones on the same machine."""
    if earlier.machine != later.machine:
        return later
    base = later if later.ops else earlier  # GFLOP/s stand beside the matrix product of their own run
    return replace(
        base,
        models=later.models or earlier.models,
        inference=later.inference or earlier.inference,
        windows=later.windows or earlier.windows,
    )


# ---- tables ----


def op_table(results: Results, section: str, batch: int, direction: str) -> tuple[list[str], list[list[str]]]:
    """One row per implementation, one column per shape: milliseconds (ratio to the 3×3 convolution)."""
    wanted = (section, batch, direction)
    rows = [r for r in results.ops if (r.section, r.batch, r.direction) == wanted]
    shapes = list(dict.fromkeys((r.channels, r.size) for r in rows))
    cells = {(r.contender, r.channels, r.size): r for r in rows}
    header = ["", *(f"{c} on {n}²" for c, n in shapes)]
    lines = []
    for contender in dict.fromkeys(r.contender for r in rows):
        base = "p4 3x3 convolution" if contender.startswith("p4") else "3x3 convolution"
        line = [contender]
        for shape in shapes:
            row, conv = cells[(contender, *shape)], cells[(base, *shape)]
            if row.milliseconds is None or conv.milliseconds is None:
                line.append("-")
            else:
                line.append(f"{row.milliseconds:.2f} ({row.milliseconds / conv.milliseconds:.1f}x)")
        lines.append(line)
    return header, lines


def detail_table(results: Results, batch: int) -> tuple[list[str], list[list[str]]]:
    """Peak memory and GFLOP/s of forward and backward."""
    wanted = (OPERATION, batch, "forward+backward")
    rows = [r for r in results.ops if (r.section, r.batch, r.direction) == wanted]
    shapes = list(dict.fromkeys((r.channels, r.size) for r in rows))
    cells = {(r.contender, r.channels, r.size): r for r in rows}
    lines = []
    for contender in dict.fromkeys(r.contender for r in rows):
        found = [cells[(contender, *shape)] for shape in shapes]
        lines.append(
            [
                contender,
                *("-" if r.megabytes is None else f"{r.megabytes:.1f} MB, {r.gflops:.0f}" for r in found),
            ]
        )
    return ["", *(f"{c} on {n}²" for c, n in shapes)], lines


def growth_table(results: Results, section: str) -> tuple[list[str], list[list[str]]]:
    rows = [r for r in results.ops if r.section == section]
    points = list(dict.fromkeys((r.channels, r.size, r.kernel) for r in rows))
    lines = []
    for contender in dict.fromkeys(r.contender for r in rows):
        cells = {(r.channels, r.size, r.kernel): r for r in rows if r.contender == contender}
        line = [contender]
        for point in points:
            r = cells.get(point)
            line.append("-" if r is None else f"{r.milliseconds:.1f} ms, {r.megabytes:.0f} MB")
        lines.append(line)
    return ["", *(f"C={c}, {n}², k={k}" for c, n, k in points)], lines


def growth_sections(results: Results) -> list[str]:
    return list(dict.fromkeys(r.section for r in results.ops if r.section.startswith("growth")))


def model_table(results: Results, direction: str) -> tuple[list[str], list[list[str]]]:
    header = ["model", "ms", "images/s", "peak MB", "memory format", "times its convolution"]
    lines = [
        [
            r.model, f"{r.milliseconds:.0f}", f"{r.images_per_second:.0f}", f"{r.megabytes:.0f}",
            r.memory_format, f"{r.ratio:.2f}x ({r.counterpart})",
        ]
        for r in results.models
        if r.direction == direction
    ]  # fmt: skip
    return header, lines


def inference_table(results: Results, batch: int) -> tuple[list[str], list[list[str]]]:
    """A network a line, a form a column: milliseconds, and how many times the counterpart's in that form."""
    rows = [r for r in results.inference if r.batch == batch]
    cells = {(r.model, r.form): r for r in rows}
    names, found = (list(dict.fromkeys(key)) for key in zip(*cells, strict=True))
    lines = []
    for name in names:
        line = [name]
        for form in found:
            row = cells[name, form]
            ratio = "" if row.ratio is None or name == row.counterpart else f" ({row.ratio:.1f}x)"
            line.append("-" if row.milliseconds is None else f"{row.milliseconds:.1f}{ratio}")
        lines.append(line)
    return ["", *found], lines


def window_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """A window a line, a shape and direction a column: µs per tap, and how many times the squares'."""
    cells = {(r.window, r.channels, r.size, r.direction): r for r in results.windows}
    columns = list(dict.fromkeys((r.channels, r.size, r.direction) for r in results.windows))
    lines = []
    for window, taps in dict.fromkeys((r.window, r.taps) for r in results.windows):
        found = [cells[(window, *column)] for column in columns]
        shown = [
            "-"
            if r.milliseconds is None or r.ratio is None
            else f"{1e3 * r.milliseconds / taps:.0f} ({r.ratio:.2f}x)"
            for r in found
        ]
        lines.append([window, str(taps), *shown])
    return ["window", "taps", *(f"{c} on {n}², {direction}" for c, n, direction in columns)], lines


def sections(results: Results) -> list[tuple[str, tuple[list[str], list[list[str]]]]]:
    """Every table with its title."""
    found = []
    for section, how in ((OPERATION, ""), (KEPT, ", with a caching allocator")):
        for batch in dict.fromkeys(r.batch for r in results.ops if r.section == section):
            for direction in ("forward", "forward+backward"):
                title = f"Operation, batch {batch}, {direction}{how}: ms (times the 3x3 convolution)"
                found.append((title, op_table(results, section, batch, direction)))
            if section == OPERATION:
                title = f"Operation, batch {batch}, forward+backward: peak memory, GFLOP/s"
                found.append((title, detail_table(results, batch)))
    for section in growth_sections(results):
        found.append((f"{section.capitalize()}, forward+backward", growth_table(results, section)))
    if results.windows:
        batch = results.windows[0].batch
        title = f"Windows, batch {batch}, one thread: µs per tap (times square windows of as many taps)"
        found.append((title, window_table(results)))
    for direction in dict.fromkeys(r.direction for r in results.models):
        batch = results.models[0].batch
        found.append((f"Networks, batch {batch}, {direction}", model_table(results, direction)))
    for batch in dict.fromkeys(r.batch for r in results.inference):
        title = f"Inference, batch {batch}: ms (times the convolutional counterpart in the same form)"
        found.append((title, inference_table(results, batch)))
    return found


def print_tables(results: Results, console: Console) -> None:
    from rich.table import Table

    for title, (header, lines) in sections(results):
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for note in _notes(results):
        console.print(note, highlight=False)
    console.print(_context(results), highlight=False)


def _notes(results: Results) -> list[str]:
    wrong = [
        f"{r.model}, {r.form}, batch {r.batch}: logits differ by {r.error:.0e} of the largest"
        for r in results.inference
        if not r.error <= TOLERANCE
    ]
    return (
        wrong
        + [
            f"{r.contender}, {r.channels} channels on {r.size}², batch {r.batch}, {r.direction}: {r.note}"
            for r in results.ops
            if r.note
        ]
        + [
            f"{r.window}, {r.channels} channels on {r.size}², {r.direction}: disagrees with the reference by "
            f"{r.error:.1e}: no figure"
            for r in results.windows
            if r.milliseconds is None
        ]
    )


def _context(results: Results) -> str:
    m = results.machine
    return (
        f"{m.get('gpu', m['processor'])}, {m['cores']} cores, {m['threads']} threads; torch {m['torch']}, "
        f"selfconv {m['selfconv']}; a matrix product reaches {results.matmul_gflops:.0f} GFLOP/s"
    )


def markdown(results: Results, figures: Sequence[str]) -> str:
    lines = [
        "# Performance",
        "",
        "Generated by `selfconv bench --out DIR`; do not edit. Each time is the minimum over interleaved",
        "repetitions of all contenders: compare ratios, not milliseconds. The operation and the networks",
        "may come from two runs on the machine below; the matrix product belongs to the operation's run.",
        "Before timing, the outputs and all gradients of the kernels are compared with the reference.",
        "Peak memory is the maximum that torch's allocator held, minus what it held before.",
        "",
        "The operation is timed in a plain Python process: glibc returns large freed blocks to the",
        "system, and each new block is mapped and zeroed again, page by page, which is most of the cost",
        "of unfolding. The stages are timed a second time with a caching allocator (freed memory is not",
        "returned to the system), as `selfconv train` runs; the networks are timed that way, too.",
        "Inference compares the forms of a network that [can be deployed](deploy.md), in a plain process,",
        "after a check that their logits agree with the network as trained to 1e-4 of the largest.",
        "Windows of other shapes (`--sections windows`, CPU time on one thread) are compared with the time",
        "that square windows of as many taps would take, on a line between the nearest two of them, because",
        "the part of a call that does not grow with the window is shared by more taps where it is larger.",
        "",
        f"Measured on: {_context(results)}.",
        "",
    ]
    for figure in figures:
        lines += [f"![{figure.removesuffix('.svg').replace('_', ' ')}](figures/{figure})", ""]
    for title, (header, rows) in sections(results):
        lines += [f"## {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines.append("")
    notes = _notes(results)
    if notes:
        lines += ["## Not run", "", *(f"- {note}" for note in notes), ""]
    lines += [
        "## GPUs",
        "",
        "The Triton kernels were verified in Triton's interpreter on a CPU, outputs and all gradients. No",
        "GPU timing is claimed: `selfconv bench --device cuda` measures yours.",
        "",
    ]
    return "\n".join(lines)


# ---- plots ----


def _plots(results: Results, out: Path) -> list[str]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "selfconv"  # the same results, the same bytes
    (out / "figures").mkdir(exist_ok=True)
    found = []
    figures = {
        "operation": _op_figure(results),
        "growth": _growth_figure(results),
        "networks": _model_figure(results),
    }
    for name, figure in figures.items():
        if figure is not None:
            for ending in ("svg", "png"):
                metadata = {"Date": None} if ending == "svg" else None
                figure.savefig(out / "figures" / f"{name}.{ending}", dpi=150, metadata=metadata)
            found.append(f"{name}.svg")
    return found


def _op_figure(results: Results) -> Any:
    from matplotlib.figure import Figure

    rows = [r for r in results.ops if r.section == OPERATION and r.direction == "forward+backward"]
    if not rows:
        return None
    batch = max(r.batch for r in rows)
    rows = [r for r in rows if r.batch == batch]
    shapes = list(dict.fromkeys((r.channels, r.size) for r in rows))
    names = list(dict.fromkeys(r.contender for r in rows))
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        times = [
            next(r.milliseconds for r in rows if (r.contender, r.channels, r.size) == (name, *s))
            for s in shapes
        ]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(shapes))]
        group, plain = name.startswith("p4 "), name.removeprefix("p4 ")
        colour = COLOURS[[n for n in names if not n.startswith("p4 ")].index(plain)]
        style: dict[str, Any] = {
            "color": colour,
            "hatch": "////" if group else "",
            "edgecolor": "white",
            "linewidth": 0,
        }
        axes.bar(places, [t or 0 for t in times], width, label=name, **style)
    axes.set_yscale("log")
    axes.set_xticks(range(len(shapes)), [f"{c} channels\non {n}×{n}" for c, n in shapes])
    axes.set_ylabel("ms, logarithmic")
    axes.set_title(f"Forward and backward, batch {batch}: less is better")
    figure.legend(fontsize=8, ncols=5, loc="outside lower center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _growth_figure(results: Results) -> Any:
    from matplotlib.figure import Figure

    sections = growth_sections(results)
    if not sections:
        return None
    figure = Figure(figsize=(9, 5), layout="constrained")
    grid = figure.subplots(2, len(sections), squeeze=False)
    for column, section in enumerate(sections):
        rows = [r for r in results.ops if r.section == section]
        for i, name in enumerate(dict.fromkeys(r.contender for r in rows)):
            mine = [r for r in rows if r.contender == name]
            xs = [
                {"h·w": r.size**2, "k": r.kernel, "C": r.channels}[section.removeprefix("growth with ")]
                for r in mine
            ]
            style = {"marker": "o", "color": COLOURS[i], "label": name}
            grid[0][column].plot(xs, [r.milliseconds for r in mine], **style)
            grid[1][column].plot(xs, [r.megabytes for r in mine], **style)
        for axes, unit in ((grid[0][column], "ms"), (grid[1][column], "peak MB")):
            axes.set_xscale("log")
            axes.set_xticks(xs, [f"{x:,}" for x in xs])
            axes.minorticks_off()
            axes.set_yscale("log")
            axes.set_ylabel(unit)
            axes.spines[["top", "right"]].set_visible(False)
        grid[1][column].set_xlabel(section.removeprefix("growth with "))
    grid[0][0].legend(fontsize=8)
    figure.suptitle("Forward and backward as the map, the window and the channels grow")
    return figure


def _model_figure(results: Results) -> Any:
    from matplotlib.figure import Figure

    rows = [r for r in results.models if r.direction == "training step"]
    if not rows:
        return None
    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    colours = [COLOURS[0] if r.model == r.counterpart else COLOURS[1] for r in rows]
    bars = axes.barh([r.model for r in rows], [r.images_per_second for r in rows], color=colours)
    axes.bar_label(bars, [f" {r.images_per_second:.0f} ({r.ratio:.2f}x the time)" for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("training images per second: more is better")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
