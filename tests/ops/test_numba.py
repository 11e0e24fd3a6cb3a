"""The CPU kernels against the reference and the eager form, and as citizens of PyTorch."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from helpers.cases import (
    MODES,
    NAN_BITS,
    TESTED_GROUPS,
    Case,
    Layout,
    assert_close,
    channels_last,
    contiguous,
    with_nan,
)
from helpers.tiny_runs import PATIENCE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from selfconv.groups import Group, get_group
from selfconv.nn import AffineSelfConv2d, SimpleAffineSelfConv2d
from selfconv.ops import Window, affine_self_conv
from selfconv.ops._window import PaddingMode
from selfconv.ops.cpu import backend as numba_cpu
from selfconv.ops.cpu.simd import PART_BYTES

FLOAT32 = (torch.float32, torch.float32)


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """Fills memory that nobody has written with NaN, so that reading it cannot go unnoticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# ---- correct ----


@pytest.mark.parametrize("kernel_size", [1, 5, 11])
@pytest.mark.parametrize("tasks", [2, 1000])
def test_splitting_rows_into_tasks_changes_nothing(
    tasks: int, kernel_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adds to the gradients of rows of its neighbours, and each counts its own filters' once."""
    case = Case("p4", 2, (2, 1), 2, kernel_size, (47, 11))

    def gradients(tasks: int) -> dict[str, Tensor]:
        monkeypatch.setattr(numba_cpu, "TASKS", tasks)
        numba_cpu.make_tiling.cache_clear()
        return case.gradients(backend="numba")

    assert_close(gradients(tasks), gradients(1), 1e-12)
    numba_cpu.make_tiling.cache_clear()


@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    half=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    dilation=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding_mode=st.sampled_from(MODES),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    order=st.sampled_from([1, 4, 8]),
    itemsize=st.sampled_from([4, 8]),
    walks=st.sampled_from([1, 2]),
)
def test_every_window_begins_at_an_even_column(
    size: tuple[int, int],
    half: tuple[int, int],
    dilation: tuple[int, int],
    padding_mode: PaddingMode,
    channels: tuple[int, int],
    order: int,
    itemsize: int,
    walks: int,
) -> None:
    """A load of two columns then stays within one cache line, in each row, plane and copy."""
    window = Window((2 * half[0] + 1, 2 * half[1] + 1), dilation, padding_mode).fitted_to(size)
    tiling = numba_cpu.make_tiling(3, order, *size, 8, *channels, window, order, itemsize, walks, 2)
    line = 2 * PART_BYTES // itemsize
    rows, columns = tiling.window
    for distance in (columns, tiling.sizes.stride, tiling.sizes.plane, tiling.sizes.neighbours):
        assert np.all(np.asarray(distance) % line == 0)
    assert len(set(zip(rows, columns, strict=True))) == window.taps


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_large_scores_do_not_overflow(scale: float) -> None:
    """Whichever sign they have: a negative scale makes the smallest product the largest score."""
    found = {}
    for backend in ("numba", "eager"):
        torch.manual_seed(1)
        q, k, v = torch.randn(3, 1, 2, 4, 4)
        q, k, v = leaves = [x.requires_grad_() for x in (1e3 * q, 1e3 * k, v)]
        psi, beta = torch.randn(2, 2, 3, 3)
        out = affine_self_conv(q, k, v, psi, beta, None, None, num_heads=1, scale=scale, backend=backend)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        found[backend] = dict(zip(("out", "q", "k", "v"), (out.detach(), *gradients), strict=True))
    assert_close(found["numba"], found["eager"], 1e-5)


@pytest.mark.parametrize("backend", ["numba", "eager"])
@pytest.mark.parametrize("gap", [5.0, 20.0, 34.0, 40.0])
def test_saturated_attention_is_as_exact_as_its_dtype(gap: float, backend: str) -> None:
    """One weight nearly 1: its score's gradient is a difference that float64 leaves few digits of, if any."""
    torch.manual_seed(0)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    beta_k = torch.zeros(1, 3, 3, dtype=torch.float64)
    beta_k[0, 1, 2] = gap
    beta_k.requires_grad_()
    beta_v = 1e6 * torch.randn(1, 3, 3, dtype=torch.float64)
    out = affine_self_conv(
        one, 0 * one, 0 * one, None, beta_k, None, beta_v, num_heads=1, scale=1.0, backend=backend
    )
    (found,) = torch.autograd.grad(out.sum(), beta_k)

    with mpmath.workdps(60):  # ds = α (dα − Σ α dα), with dα = β^V
        weights = [mpmath.exp(score) for score in beta_k.flatten().tolist()]
        alpha = [w / sum(weights) for w in weights]
        d_alpha = [mpmath.mpf(b) for b in beta_v.flatten().tolist()]
        mean = sum(a * d for a, d in zip(alpha, d_alpha, strict=True))
        expected = [float(a * (d - mean)) for a, d in zip(alpha, d_alpha, strict=True)]
    error = (found.flatten() - torch.tensor(expected, dtype=torch.float64)).abs().max().item()
    assert error <= 8 * torch.finfo(torch.float64).eps * beta_v.abs().max().item()


def test_nan_spreads_to_its_window_alone() -> None:
    k = torch.randn(1, 1, 6, 6)
    k[0, 0, 0, 0] = torch.nan
    out = affine_self_conv(k, k, k, None, None, None, None, num_heads=1, kernel_size=3, backend="numba")
    assert out[0, 0, :2, :2].isnan().all()
    assert not out[0, 0, 2:].isnan().any()
    assert not out[0, 0, :, 2:].isnan().any()


@pytest.mark.parametrize("backend", ["numba", "eager", "reference", "triton"])
@pytest.mark.parametrize("dtype", NAN_BITS)
def test_nan_stays_nan_whatever_its_bits(dtype: torch.dtype, backend: str) -> None:
    """In every input: the output is NaN where that of a plain NaN is, and so are all gradients."""
    kernel_size, size = (1, (1, 3)) if backend == "triton" else (3, (3, 5))  # its interpreter is slow
    case = Case("z2", 1, (2, 1), 2, kernel_size, size, dtypes=(dtype, dtype), scale=0.7)

    def nans(name: str, bits: int, backend: str) -> dict[str, Tensor]:
        tensors = case.tensors()
        tensors[name] = with_nan(tensors[name], bits)  # type: ignore[arg-type]
        return {n: t.isnan() for n, t in case.gradients(tensors, backend=backend).items()}

    for name in case.tensors():
        expected = nans(name, NAN_BITS[dtype][0], "eager")
        assert expected["out"].any()
        for bits in NAN_BITS[dtype] if backend == "numba" else NAN_BITS[dtype][-1:]:
            found = nans(name, bits, backend)
            assert torch.equal(found["out"], expected["out"]), (name, hex(bits))
            missing = [n for n, e in expected.items() if (e & ~found[n]).any()]
            assert not missing, (name, hex(bits), missing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_underflow_are_zero(dtype: torch.dtype) -> None:
    """The largest of numbers behind a score that low adds nothing, forwards and backwards."""
    huge = 0.9 * torch.finfo(dtype).max
    found = {}
    for backend in ("numba", "eager"):
        q = torch.ones(1, 1, 3, 3, dtype=dtype)
        beta_k = torch.zeros(1, 3, 3, dtype=dtype)
        beta_k[0, 0, 0] = -1e4
        v = torch.full((1, 1, 3, 3), 0.125, dtype=dtype)
        v[0, 0, 0, 0] = huge  # seen by (1, 1) under the low score, and by its other neighbours not so
        v.requires_grad_()
        out = affine_self_conv(q, 0 * q, v, None, beta_k, None, None, num_heads=1, scale=1.0, backend=backend)
        assert out[0, 0, 1, 1] == 0.125
        (grad,) = torch.autograd.grad(out[0, 0, 1, 1] * huge, v)
        assert grad[0, 0, 0, 0] == 0
        found[backend] = {"out": out.detach() / huge, "grad": grad / huge}
    assert_close(found["numba"], found["eager"], 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel_size", [1, 3, 11])
def test_the_mean_of_the_largest_numbers_does_not_overflow(kernel_size: int, dtype: torch.dtype) -> None:
    v = torch.full((1, 1, 25, 25), 0.99 * torch.finfo(dtype).max, dtype=dtype)
    zero = torch.zeros_like(v)
    out = affine_self_conv(
        zero, zero, v, None, None, None, None, num_heads=1, kernel_size=kernel_size, backend="numba"
    )
    middle = out[0, 0, 12, 12]
    rounding = kernel_size**2 / 2 + 4  # half an eps for each addition, a few for exponential and division
    torch.testing.assert_close(middle, v[0, 0, 0, 0], rtol=rounding * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("layer", [AffineSelfConv2d, SimpleAffineSelfConv2d])
@pytest.mark.parametrize("layout", [contiguous, channels_last], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_layers_that_pack_their_features(layer: type, layout: Layout, group: str | Group) -> None:
    """The layers hand over one tensor for q, k and v: same result and gradients as three of them."""
    module = layer(3, 4, 5, num_heads=2, group=group, dtype=torch.float64)
    order = len(get_group(group))
    axis = () if order == 1 else (order,)
    x = layout(torch.randn(2, 3, *axis, 7, 6, dtype=torch.float64)).requires_grad_()
    found = {}
    for backend in ("numba", "eager"):
        module.backend = backend
        out = module(x)
        grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        found[backend] = {"out": out.detach()} | {str(i): g for i, g in enumerate(grads)}
    assert_close(found["numba"], found["eager"], 1e-10)


# ---- deterministic, on any number of threads ----


def run_on(threads: int, case: Case) -> dict[str, Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return case.gradients(backend="numba")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [1, 5])
def test_the_same_bits_on_every_run_and_any_number_of_threads(batch: int) -> None:
    case = Case("p4", batch, (2, 2), 4, 5, (9, 12), layouts=(channels_last,) * 4, dtypes=FLOAT32)
    first = run_on(1, case)
    for threads in (1, 2, 2, 3):
        assert all(torch.equal(found, first[name]) for name, found in run_on(threads, case).items())


def test_python_threads_serve_where_openmp_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from selfconv.ops.cpu import threads

    case = Case("z2", 4, (2, 2), 2, 3, (8, 8), dtypes=FLOAT32)
    expected = run_on(2, case)
    monkeypatch.setattr(threads, "_openmp_parallel", lambda: None)
    assert all(torch.equal(found, expected[name]) for name, found in run_on(2, case).items())


def _in_child(queue: multiprocessing.SimpleQueue, case: Case) -> None:
    torch.set_num_threads(2)
    queue.put(case.gradients(backend="numba")["q"].sum().item())


def test_safe_after_fork() -> None:
    case = Case("z2", 4, (2, 2), 2, 3, (8, 8), dtypes=FLOAT32)
    expected = run_on(2, case)["q"].sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(queue, case))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == expected


@pytest.mark.parametrize("imported", ["selfconv.ops", "torch"])
def test_first_use_in_a_forked_child(imported: str) -> None:
    """The parent has a team of threads and has not used the kernels; perhaps not even imported them."""
    code = f"""
import os, {imported}, torch
torch.set_num_threads(2)
x = torch.ones(10**6).sin()[:1296].reshape(4, 4, 9, 9)  # by a team of threads
assert len(os.listdir("/proc/self/task")) > 1
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
import signal
signal.alarm(90)  # ends a child that hangs, whose parent may be gone by then
from selfconv.ops import affine_self_conv
from selfconv.ops.cpu.threads import num_threads
out = affine_self_conv(x, x, x, None, None, None, None, num_heads=2, kernel_size=3, backend="numba")
assert num_threads() == 1 and abs(out[0, 0, 4, 4].item() - x[0, 0, 0, 0].item()) < 1e-6
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def _threads_of_child(queue: multiprocessing.SimpleQueue) -> None:
    from selfconv.ops.cpu.threads import num_threads

    torch.set_num_threads(2)
    queue.put(num_threads())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_children_use_all_threads(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=_threads_of_child, args=(queue,))
    child.start()
    assert queue.get() == 2
    child.join()


class Layered(torch.utils.data.Dataset[Tensor]):
    """A data set that runs the layer itself, as a feature extractor would."""

    layer = AffineSelfConv2d(2, 2, 3, num_heads=1)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        with torch.no_grad():
            return self.layer(torch.full((1, 2, 4, 4), float(i)))[0]


def test_safe_in_data_loader_workers() -> None:
    data = Layered()
    expected = torch.stack([data[i] for i in range(4)])
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)
    assert torch.equal(torch.cat(list(loader)), expected)


def test_concurrent_callers() -> None:
    from concurrent.futures import ThreadPoolExecutor

    case = Case("z2", 3, (2, 2), 2, 3, (8, 8), dtypes=FLOAT32)
    expected = case.gradients(backend="numba")
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: case.gradients(backend="numba"), range(12)):
            assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- a torch operator ----


def operands(group: str = "z2") -> tuple[list[Tensor], Tensor, Tensor]:
    order = {"z2": 1, "p4": 4}[group]
    features = [torch.randn(2, 4, order, 5, 6).requires_grad_() for _ in range(3)]
    tables = [torch.randn(2, order, 2, 3, 3, order + 1).requires_grad_() for _ in range(2)]
    return features, tables[0], tables[1]


@pytest.mark.parametrize("group", ["z2", "p4"])
def test_opcheck(group: str) -> None:
    operator = torch.ops.selfconv.numba_forward.default
    features, table_k, table_v = operands(group)
    torch.library.opcheck(operator, (features, table_k, table_v, 0.5, [1, 1], "zeros"))
    packed = torch.cat([f.detach() for f in features], 1).requires_grad_()
    torch.library.opcheck(operator, ([packed], table_k, table_v, 0.5, [2, 1], "exclude"))
    torch.library.opcheck(operator, ([packed], table_k, table_v, 0.5, [2, 1], "circular"))


def test_no_gradient_for_what_needs_none() -> None:
    case = Case("z2", 2, (2, 2), 2, 3, (5, 5))
    t = {n: x if x is None else x.detach() for n, x in case.tensors().items()}
    assert not case.run(t, backend="numba").requires_grad
    psi_v = t["psi_v"]
    assert psi_v is not None
    case.run(t | {"psi_v": psi_v.requires_grad_()}, backend="numba").sum().backward()
    assert psi_v.grad is not None


def test_a_second_derivative_names_the_backend_that_has_it() -> None:
    layer, x = AffineSelfConv2d(2, 2, 3, num_heads=1), torch.randn(1, 2, 4, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="have no second derivative: choose backend='eager'"):
        grad.square().sum().backward()
    layer.backend = "eager"
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert layer.psi_v is not None
    assert layer.psi_v.grad is not None


@pytest.mark.parametrize("group", ["z2", "p4"])
def test_torch_compile_whole_graph(group: str) -> None:
    layer = AffineSelfConv2d(4, 4, 3, num_heads=2, group=group)
    axis = () if group == "z2" else (4,)
    x = torch.randn(2, 4, *axis, 6, 6, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    (actual,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_torch_export_keeps_the_operator() -> None:
    layer = AffineSelfConv2d(4, 4, 3, num_heads=2).eval()
    x = torch.randn(2, 4, 6, 6)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    assert "selfconv.numba_forward" in str(program.graph)
    y = torch.randn(5, 4, 6, 6)
    torch.testing.assert_close(program.module()(y), layer(y))


def test_autocast_trains() -> None:
    layer = AffineSelfConv2d(4, 4, 3, num_heads=2)
    x = torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(out.float(), layer(x), rtol=0.1, atol=0.3)


def test_flops_are_counted() -> None:
    n, c, heads, k, h, w = 2, 8, 2, 5, 6, 7
    layer = AffineSelfConv2d(c, c, k, num_heads=heads)
    x = torch.randn(n, c, h, w)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    maps = 2 * n * h * w * c * c * 4
    # per position, offset and channel: the affine maps of key and value, the score, the aggregation
    assert counter.get_total_flops() == maps + 2 * 4 * n * h * w * k * k * c
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() > 3 * (maps + 2 * 4 * n * h * w * k * k * c)


def test_peak_memory_stays_far_below_the_unfold() -> None:
    """Anything of size k²·C·h·w would show: 25 copies of the features are 164 MB here."""
    code = """
import resource, torch
from selfconv.nn import AffineSelfConv2d
torch.set_num_threads(1)
layer = AffineSelfConv2d(16, 16, 5, num_heads=8, backend="numba")
layer(torch.randn(1, 16, 8, 8)).sum().backward()
x = torch.randn(100, 16, 32, 32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
layer(x).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    features = 100 * 16 * 32 * 32 * 4 // 1024
    assert int(run.stdout) < 25 * features


def _train(rank: int, port: int, results: multiprocessing.SimpleQueue) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(AffineSelfConv2d(2, 2, 3, num_heads=1))
    x = torch.arange(2 * 2 * 25.0).reshape(2, 2, 5, 5).sin()
    model(x[rank : rank + 1]).square().mean().backward()
    psi = model.module.psi_v.grad
    results.put((rank, psi.double().sum().item()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may still be ending, and the interpreter aborts when it is first


def test_distributed_data_parallel(free_port: int) -> None:
    context = multiprocessing.get_context("forkserver")  # as new processes, but torch is imported once
    context.set_forkserver_preload(["selfconv.nn"])
    results = context.SimpleQueue()
    workers = [
        context.Process(target=_train, args=(rank, free_port, results), daemon=True) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    found = dict(results.get() for _ in range(2))
    torch.manual_seed(0)
    layer = AffineSelfConv2d(2, 2, 3, num_heads=1)
    layer(torch.arange(2 * 2 * 25.0).reshape(2, 2, 5, 5).sin()).square().mean().backward()
    assert layer.psi_v is not None
    assert layer.psi_v.grad is not None
    expected = layer.psi_v.grad.double().sum().item()
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-4)


# ---- compiled code on disk ----


def test_compiled_code_is_kept_on_disk(tmp_path: Path) -> None:
    """One process compiles; others, meanwhile or later, find what it wrote, unless a source changed."""
    code = """
import sys
from selfconv.ops.cpu import native, workers
for change in map(int, sys.argv[1:]):
    workers.KERNEL_HASH = native.KERNEL_HASH + change
    workers.forward_worker.cache_clear()
    print(workers.forward_worker("float32", 1).cache_hits)
"""

    def start(*changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, *changes],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def hits(process: subprocess.Popen[str]) -> list[str]:
        printed, _ = process.communicate(timeout=PATIENCE)
        return printed.split()

    together = [start("0") for _ in range(2)]
    assert sorted(map(hits, together)) == [["0"], ["1"]]
    assert hits(start("0", "1")) == ["1", "0"]


def test_a_call_does_not_load_the_compiler() -> None:
    """Forward, backward, and observed: torch._dynamo imports slowly, and serves compiled programs."""
    program = (
        "import sys, torch; from selfconv.nn import AffineSelfConv2d; "
        "from selfconv.testing import run_observed; "
        "layer = AffineSelfConv2d(4, 4, 3, num_heads=2, group='p4', backend='numba'); "
        "layer(torch.randn(1, 4, 4, 5, 5)).sum().backward(); "
        "assert layer.psi_k.grad is not None; "
        "run_observed(layer, torch.randn(1, 4, 4, 5, 5), lambda *_: None); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
