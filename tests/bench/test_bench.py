"""The benchmark measures what it says, refuses wrong kernels, and writes one page from one set of figures."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_options
from torch import Tensor

from selfconv.bench import BenchOptions, ModelRow, Results, Row, read_results, run, run_bench
from selfconv.bench import inference as _inference
from selfconv.bench import measure as _measure
from selfconv.bench import models as _models
from selfconv.bench import ops as _ops
from selfconv.bench import windows as _windows
from selfconv.bench.report import joined, markdown, op_table, write_results
from selfconv.models import create_model

CPU = torch.device("cpu")


def row(contender: str, milliseconds: float | None, direction: str = "forward", note: str = "") -> Row:
    megabytes = None if milliseconds is None else 2.0
    return Row("op", contender, 64, 16, 32, 5, direction, milliseconds, megabytes, megabytes, None, note)


RESULTS = Results(
    {"processor": "a CPU", "cores": 2, "threads": 2, "torch": "2", "selfconv": "0"},
    50.0,
    [
        row(name, ms, direction, note)
        for direction in ("forward", "forward+backward")
        for name, ms, note in (
            ("ASC", 3.0, ""),
            ("ASC, unfold", None, "not run"),
            ("3x3 convolution", 2.0, ""),
        )
    ],
    [ModelRow("resnet29_asc", "resnet29", 128, "training step", "channels_last", 300.0, 426.7, 900.0, 1.5)],
)


def test_minimum_over_interleaved_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    turns: list[str] = []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def work(name: str, seconds: list[float]) -> _measure.Work:
        def run() -> object:
            clock[0] += seconds[turns.count(name)]
            turns.append(name)
            return None

        return run

    contenders = {"a": work("a", [1, 9, 8, 2, 7, 9]), "b": work("b", [1, 4, 4, 4, 3, 4])}
    assert _measure.interleaved(contenders, 0.0, CPU) == {"a": 2, "b": 3}
    assert turns == ["a", "b"] * 6  # one of each to warm up, then five rounds


def test_peak_memory_counts_what_is_held_at_once() -> None:
    megabyte = 2**18  # float32 numbers

    def work() -> object:
        x = torch.ones(3 * megabyte)
        y = x + 1
        del x
        return torch.ones(megabyte) + y[:megabyte]

    assert _measure.peak_memory(work, CPU) == pytest.approx(6 * 2**20, rel=0.01)


def test_flops_of_a_layer_are_the_operations() -> None:
    layer = _ops.attention("p4 asc", None, 2, 16, 8, 5, CPU)
    assert layer.x.shape == (2, 24, 4, 8, 8)
    assert layer.flops == 2 * (2 * 4 * 64) * 25 * 8 * 2 * (4 + 1)
    assert _ops.convolution("p4", 2, 16, 8, CPU).flops == 2 * 2 * 64 * 32 * 32 * 9


def test_kernels_are_checked_first() -> None:
    for kind in ("asc", "sasa", "p4 asc"):
        assert _ops.check(kind, CPU) < _ops.TOLERANCE


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_kernel_that_disagrees_is_noticed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    original = _ops.affine_self_conv_packed

    def wrong(*args: object, backend: str | None = None, **options: object) -> Tensor:
        out = original(*args, backend=backend, **options)  # type: ignore[arg-type]
        return out if backend else out * factor

    monkeypatch.setattr(_ops, "affine_self_conv_packed", wrong)
    assert not _ops.check("asc", CPU) <= _ops.TOLERANCE


def test_a_kernel_that_disagrees_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "peak_memory", lambda work, device: 0.0)
    monkeypatch.setattr(_ops, "check", lambda kind, device: float("nan") if kind == "asc" else 0.0)
    monkeypatch.setattr(_ops, "compiled", lambda layer: layer)
    rows = {r.contender: r for r in _ops.measure_ops((1,), ((16, 4),), 0.0, CPU) if r.direction == "forward"}
    assert rows["ASC"].milliseconds is None
    assert rows["ASC"].note == "disagrees with the reference by nan: no figure"
    assert rows["SASA"].milliseconds is not None


def test_unfolding_that_would_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "peak_memory", lambda work, device: 0.0)
    monkeypatch.setattr(_ops, "UNFOLD_LIMIT", 1.0)
    monkeypatch.setattr(_ops, "compiled", lambda layer: layer)
    monkeypatch.setattr(_ops, "check", lambda kind, device: 0.0)
    rows = list(_ops.measure_ops((1,), ((16, 4),), 0.0, CPU))
    assert [r.note for r in rows if r.contender == "ASC, unfold"] == ["not run: would take about 0 GB"] * 2
    assert all(r.milliseconds is not None for r in rows if "unfold" not in r.contender)


def test_a_run_from_options_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "compiled", lambda layer: layer)
    monkeypatch.setattr(_ops, "check", lambda kind, device: 0.0)
    monkeypatch.setattr(run, "STAGES", ((16, 4),))
    monkeypatch.setattr(run, "LARGE", ())
    monkeypatch.setattr(run, "keep_memory", lambda: True)
    monkeypatch.setattr(_models, "create_model", partial(create_model, depth=11))
    models = ("resnet29", "resnet29_asc")
    options = BenchOptions(
        ("ops", "models"), batch=(1,), model_batch=2, models=models, seconds=0.01, out=tmp_path / "b"
    )
    threads = torch.get_num_threads()
    results = run_bench(options)
    assert torch.get_num_threads() == threads
    assert [r.section for r in results.ops] == ["op"] * 2 * 9 + ["op, freed memory kept"] * 2 * 9
    assert {r.model for r in results.models} == set(models)
    assert all(r.ratio == 1 for r in results.models if r.model == "resnet29")
    assert read_results(tmp_path / "b" / "bench.json") == results
    page = (tmp_path / "b" / "performance.md").read_text()
    assert "## Operation, batch 1, forward+backward, with a caching allocator: ms" in page
    assert page == markdown(results, ["operation.svg", "networks.svg"])
    for name in ("operation", "networks"):
        assert (tmp_path / "b" / "figures" / f"{name}.svg").stat().st_size > 1000
        assert (tmp_path / "b" / "figures" / f"{name}.png").stat().st_size > 1000


def test_tables_show_ratios_to_the_convolution() -> None:
    header, lines = op_table(RESULTS, "op", 64, "forward")
    assert header == ["", "16 on 32²"]
    assert lines == [["ASC", "3.00 (1.5x)"], ["ASC, unfold", "-"], ["3x3 convolution", "2.00 (1.0x)"]]
    page = markdown(RESULTS, [])
    assert "| resnet29_asc | 300 | 427 | 900 | channels_last | 1.50x (resnet29) |" in page
    assert "- ASC, unfold, 16 channels on 32², batch 64, forward: not run" in page
    assert "verified in Triton's interpreter" in page


def test_inference_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inference, "create_model", lambda name: create_model(name, **tiny_options(name)))
    monkeypatch.setattr(_inference, "BATCHES", (2,))
    # compiling takes a minute, and has its own tests: the program takes its place
    monkeypatch.setattr(_inference, "compile_program", torch.export.save)
    load = "torch._inductor.aoti_load_package"
    monkeypatch.setattr(load, lambda path: torch.export.load(path).module())
    rows = list(_inference.measure_inference(("resnet29_asc",), 0.01))
    assert [r.form for r in rows] == [
        "as trained", "optimised", "torch.export", "AOTInductor", "ONNX Runtime"
    ]  # fmt: skip
    assert all(r.error <= 1e-4 and r.milliseconds and r.ratio for r in rows)
    wrong = replace(rows[1], error=float("nan"), milliseconds=None, ratio=None)
    page = markdown(replace(RESULTS, inference=[rows[0], wrong]), [])
    assert "## Inference, batch 2: ms (times the convolutional counterpart in the same form)" in page
    assert f"| resnet29_asc | {rows[0].milliseconds:.1f} ({rows[0].ratio:.1f}x) | - |" in page
    assert "- resnet29_asc, optimised, batch 2: logits differ by nan of the largest" in page


def test_windows_beside_squares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line through the squares' times; a window that disagrees with the reference gets no figure."""
    wrong = _windows.OTHERS[-1]
    monkeypatch.setattr(_windows, "check", lambda kind, device, window: float(window is wrong))
    monkeypatch.setattr(
        _windows,
        "interleaved",
        lambda works, *_, **__: {w: 1e-3 * (1 + w.taps + sum(w.dilation)) for w in works},
    )
    monkeypatch.setattr(_windows, "SHAPES", ((8, 4),))
    results = run_bench(BenchOptions(("windows",), batch=(1,), seconds=0.01, out=tmp_path))
    page = (tmp_path / "performance.md").read_text()
    assert "## Windows, batch 1, one thread: µs per tap (times square windows of as many taps)" in page
    assert "| 1×7 | 7 | 1429 (1.00x) | 1429 (1.00x) |" in page
    assert "| 3×3, dilation 3 | 9 | 1778 (1.33x) |" in page
    assert "| 1×7, circular | 7 | - | - |" in page
    assert "- 1×7, circular, 8 channels on 4², forward: disagrees with the reference by 1.0e+00" in page
    assert joined(replace(RESULTS, machine=results.machine), results).windows == results.windows
    assert read_results(tmp_path / "bench.json") == results


def test_every_window_is_checked() -> None:
    for window in (_windows.OTHERS[2], _windows.OTHERS[3], *_windows.OTHERS[-2:]):
        assert _ops.check("asc", CPU, window) < _ops.TOLERANCE


def test_unmeasured_sections_are_kept() -> None:
    ops, models = replace(RESULTS, models=[]), replace(RESULTS, ops=[], matmul_gflops=60.0)
    assert joined(ops, models) == RESULTS  # the product is of the run that GFLOP/s are beside
    assert joined(models, ops) == RESULTS
    assert joined(RESULTS, replace(models, machine={"processor": "another"})).ops == []


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_results(RESULTS, tmp_path / name)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert json.loads((tmp_path / "a" / "bench.json").read_text())["matmul_gflops"] == 50.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": 3}, "ops: expected a list; got 3"),
        ({"models": [{}]}, "models: expected model, counterpart, .*; model is missing"),
        ({"colour": 1}, "unknown option 'colour'"),
        ({"machine": {}}, "expected results that fill the tables; KeyError"),
        ({"ops": [asdict(RESULTS.ops[0])]}, "expected results that fill the tables; KeyError"),
    ],
    ids=str,
)
def test_output_path_is_another_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = json.dumps(asdict(RESULTS) | changes)
    (tmp_path / "bench.json").write_text(content)
    with pytest.raises(ValueError, match=rf"bench.json: {message}"):
        run_bench(BenchOptions(out=tmp_path))
    assert (tmp_path / "bench.json").read_text() == content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BenchOptions(seconds=0), "expected positive sizes and times; got seconds=0"),
        (BenchOptions(batch=(0,)), r"batch=\(0,\)"),
        (BenchOptions(threads=0), "threads: expected an integer ≥ 1; got 0"),
        (BenchOptions(models=("resnet30",)), "models: expected some of resnet29, .*; got resnet30"),
        (BenchOptions(device="cuda:99"), "device 'cuda:99' cannot be used here: "),
    ],
)
def test_bad_options_are_restated(options: BenchOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_bench(options)


def test_the_textbook_form_is_the_operation() -> None:
    found = []
    for make in (
        lambda: _ops.textbook(2, 16, 7, 5, CPU),
        lambda: _ops.attention("asc", "reference", 2, 16, 7, 5, CPU),
    ):
        torch.manual_seed(0)
        layer = make()
        x = layer.x.detach().requires_grad_()
        out = layer.run(x)
        found.append([out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters])])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
