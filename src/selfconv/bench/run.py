"""What is measured, in which order, and what is done with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from selfconv._extras import require
from selfconv._files import check_writable
from selfconv._memory import keep_memory
from selfconv._threads import torch_threads
from selfconv.bench.inference import InferenceRow, measure_inference
from selfconv.bench.measure import matmul_rate
from selfconv.bench.models import ModelRow, measure_models
from selfconv.bench.ops import KEPT, LARGE, STAGES, measure_growth, measure_ops
from selfconv.bench.options import INFERENCE, PAIRS, BenchOptions
from selfconv.bench.report import AnyRow, Results, joined, machine, print_tables, read_results, write_results
from selfconv.bench.windows import WindowRow, measure_windows


def run_bench(options: BenchOptions) -> Results:
    """Measures with progress, prints tables, and writes the folder if one was asked for."""
    from rich.console import Console

    console = Console()
    _check(options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    earlier = _read_earlier(options.out)
    device = torch.device(options.device)
    with (
        torch_threads(options.threads or torch.get_num_threads()),
        console.status("the machine's matrix product") as status,
    ):
        results = Results(machine(device), matmul_rate(device), [], [])
        for row in _rows(options, device):
            results.add(row)
            status.update(_describe(row))
            if not console.is_terminal:  # where a spinner would not show
                console.print(_describe(row), highlight=False, soft_wrap=True)
    if earlier is not None:
        results = joined(earlier, results)
    print_tables(results, console)
    if options.out is not None:
        write_results(results, options.out)
        console.print(f"written to {options.out}", highlight=False)
    return results


def _read_earlier(out: Path | None) -> Results | None:
    path = None if out is None else out / "bench.json"
    return read_results(path) if path is not None and path.is_file() else None


def _rows(options: BenchOptions, device: torch.device) -> Iterator[AnyRow]:
    seconds = min(options.seconds, 0.3) if options.quick else options.seconds
    if "ops" in options.sections:
        shapes = STAGES if options.quick else STAGES + LARGE
        yield from measure_ops(options.batch, shapes, seconds, device)
    if "growth" in options.sections and not options.quick:
        yield from measure_growth(seconds, device)
    if "inference" in options.sections:  # in a process of the user's own, which keeps no memory
        deployed = ("resnet29", "resnet29_asc") if options.quick else INFERENCE
        yield from measure_inference(deployed, 4 * len(deployed) * seconds)
    kept = keep_memory()  # from here on, as the trainer does
    if "ops" in options.sections and kept and device.type == "cpu" and not options.quick:
        yield from measure_ops((max(options.batch),), STAGES, seconds, device, KEPT)
    if "models" in options.sections:
        names = ("resnet29", "resnet29_asc") if options.quick else options.models
        yield from measure_models(names, options.model_batch, 16 * len(names) * seconds, device)
    if "windows" in options.sections:
        with torch_threads(1):
            yield from measure_windows(max(options.batch), 4 * seconds, device)


def _describe(row: AnyRow) -> str:
    if isinstance(row, InferenceRow):
        shown = "-" if row.milliseconds is None else f"{row.milliseconds:.1f} ms"
        return f"{row.model}, {row.form}, batch {row.batch}: {shown}"
    if isinstance(row, ModelRow):
        return f"{row.model}, {row.direction}: {row.milliseconds:.0f} ms"
    shown = "-" if row.milliseconds is None else f"{row.milliseconds:.2f} ms"
    name = row.window if isinstance(row, WindowRow) else row.contender
    return f"{name}, {row.channels} channels on {row.size}², batch {row.batch}: {shown}"


def _check(options: BenchOptions) -> None:
    if options.seconds <= 0 or options.model_batch < 1 or not options.batch or min(options.batch) < 1:
        raise ValueError(
            f"expected positive sizes and times; got seconds={options.seconds}, batch={options.batch}, "
            f"model_batch={options.model_batch}"
        )
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"threads: expected an integer ≥ 1; got {options.threads}")
    if "inference" in options.sections:
        require("bench --sections inference", "onnx", "onnxscript", "onnxruntime")
        if torch.device(options.device).type != "cpu":
            raise ValueError(f"sections: inference is measured on the cpu; got device={options.device!r}")
    if options.out is not None:
        require("bench --out", "matplotlib")  # now, not after an hour's work
        check_writable(options.out, "bench.json", "performance.md")
    unknown = [name for name in options.models if name not in PAIRS]
    if unknown:
        raise ValueError(f"models: expected some of {', '.join(PAIRS)}; got {', '.join(unknown)}")
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"device {options.device!r} cannot be used here: {first}") from None
