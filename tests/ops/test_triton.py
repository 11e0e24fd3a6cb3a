"""The Triton backend against the reference: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import FILTERS, Case, Layout, channels_last, contiguous, cropped, part_of_a_projection
from torch import Tensor

from selfconv.ops import affine_self_conv, explain
from selfconv.ops._call import check_call
from selfconv.ops.gpu import backend as _registers_the_operators  # noqa: F401
from selfconv.ops.gpu import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    # computed in float32 and rounded once, to half a unit in the last place
    torch.float16: torch.finfo(torch.float16).eps / 2 + 2e-5,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps + 2e-5,  # which the interpreter cuts off, not rounds
}


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """So that what no kernel has written does not pass for a right number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(case: Case, against: str = "reference") -> None:
    """Every number by itself, not only those that are large."""
    actual, expected = case.gradients(backend="triton"), case.expected(against)
    if case.lifting:
        assert actual["out"].is_contiguous()
    else:
        assert actual["out"].stride() == torch.empty_like(case.tensors()["v"]).stride()  # type: ignore[arg-type]
    assert actual.keys() == expected.keys()
    for name, t in actual.items():
        assert t.dtype == case.dtypes[name in FILTERS], name
        bound = TOLERANCE[t.dtype] * expected[name].abs() + min(TOLERANCE[t.dtype], 2e-5)
        error = (t.double() - expected[name]).abs() - bound
        assert (error <= 0).all(), f"{name} is off by {error.max()} more than allowed"  # NaN is not <= 0


FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def call(
    group: str = "z2",
    kernel_size: int = 3,
    num_heads: int = 1,
    *,
    batch: int = 2,
    size: tuple[int, int] = (4, 3),
    layout: Layout = contiguous,
    dtypes: tuple[torch.dtype, torch.dtype] = (FLOAT32, FLOAT32),
    missing: tuple[str, ...] = (),
) -> Case:
    layouts = (layout, layout, layout, contiguous)
    return Case(
        group, batch, (2, 3), num_heads, kernel_size, size, layouts, dtypes=dtypes, missing=missing,
        device=DEVICE,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        call("z2", 7, size=(2, 3)),  # a map smaller than the window
        call("z2", 3, 2, size=(6, 6), layout=cropped),  # several blocks of positions, and slices of them
        call("z2", 3, dtypes=(FLOAT16, FLOAT16)),
        call("z2", 3, dtypes=(BFLOAT16, BFLOAT16)),
        call("p4", 1, dtypes=(FLOAT16, FLOAT32), layout=channels_last),  # as under autocast
        call("p4", 3, dtypes=(FLOAT64, FLOAT64), layout=part_of_a_projection),
        call("p4m", 3, batch=1, size=(2, 3), dtypes=(FLOAT64, FLOAT64)),
        replace(call("z2", size=(3, 2)), kernel_size=(3, 1), dilation=(2, 1), padding_mode="circular"),
        replace(call("z2", size=(3, 4)), kernel_size=(1, 3), dilation=2, padding_mode="exclude"),
        replace(call("p4", batch=1, size=(2, 2)), padding_mode="exclude", lifting=True),
        replace(call("p4", batch=1, size=(2, 3)), padding_mode="circular", dilation=2),
    ],
    ids=str,
)
def test_agrees_with_the_reference(case: Case) -> None:
    check(case)


def test_an_empty_batch() -> None:
    check(call("p4", batch=0), against="eager")  # the reference has no graph to differentiate


def test_operators() -> None:
    """Schema, autograd registration, fake tensors and tracing with symbolic sizes."""
    tensors = call("z2", 1, missing=("psi_k", "beta_v")).tensors().values()
    given: Any = detached(tensors)
    features, filters = tuple(given[:3]), tuple(given[3:])
    checked = check_call(features, filters, kernel_size=1, num_heads=1, scale=None, group="z2")
    steered = (
        *checked.steered(checked.psi_k, checked.beta_k),
        *checked.steered(checked.psi_v, checked.beta_v),
    )
    arguments = (checked.query, checked.key, checked.value, *steered)
    window = [1, 1, 1, 1, 0, 0]
    leaves = [None if t is None else t.clone().requires_grad_() for t in arguments]
    torch.library.opcheck(torch.ops.selfconv.triton_forward.default, (*leaves, window, 1, checked.scale))
    out, lse = torch.ops.selfconv.triton_forward(*arguments, window, 1, checked.scale)
    torch.library.opcheck(
        torch.ops.selfconv.triton_backward.default,
        (torch.ones_like(out), lse, *arguments, window, 1, checked.scale),
    )


def detached(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.detach() for t in tensors]


def test_compiles_to_one_graph() -> None:
    case = call("p4", 1)
    expected = case.gradients(backend="triton")
    compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    tensors = case.tensors()
    out = compiled(tensors, backend="triton")
    assert torch.equal(out, expected["out"])
    generator = torch.Generator().manual_seed(case.seed + 1)
    grad = torch.randn(out.shape, dtype=FLOAT64, generator=generator).to(out)
    leaves = [t for t in tensors.values() if t is not None]
    # a graph may sum steered filters in another order
    for name, d in zip(tensors, torch.autograd.grad(out, leaves, grad), strict=True):
        torch.testing.assert_close(d, expected[name], rtol=1e-5, atol=1e-5)


def test_backward_stores_only_the_log_sum_exp() -> None:
    case = call("p4", 1, 2)
    inputs = {name: t for name, t in case.tensors().items() if t is not None}
    kept: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = case.run(dict(inputs), backend="triton")
    for t in inputs.values():
        kept.pop(t.untyped_storage().data_ptr(), None)
    assert out.untyped_storage().data_ptr() not in kept
    # what is left: the filters as every rotation sees them, and one number per head, rotation and position
    filters = [4 * t.numel() for name, t in inputs.items() if name in FILTERS]
    assert sorted(t.numel() for t in kept.values() if t.is_floating_point()) == sorted(
        [*filters, 2 * 4 * 2 * 4 * 3]
    )


# ---- on GPUs ----

COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from selfconv.ops import _call
from selfconv.ops.gpu import backend, kernels

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

class Compile:
    def __init__(self, name):
        self.name, self.kernel = name, getattr(kernels, name).fn
    def __getitem__(self, grid):
        return self
    def __call__(self, *args, **sizes):
        binary = self.kernel.warmup(*args, **sizes, BLOCK=16, grid=(1,))
        assert binary.asm["cubin"]
        print(self.name)

driver.set_active(Driver())
for name in ("forward", "backward_query", "backward_key_value", "backward_filters"):
    setattr(kernels, name, Compile(name))

def train(dtype, group, f_shape, psi_shape, **window):
    f = torch.zeros(f_shape, dtype=dtype, requires_grad=True)
    psi = torch.zeros(psi_shape, dtype=dtype, requires_grad=True)
    call = _call.check_call(
        (f, f, f), (psi, None, None, psi.sum(1) if psi.dim() == 4 else psi),
        kernel_size=None, num_heads=1, scale=None, group=group, **window,
    )
    backend.run(call).sum().backward()

train(torch.bfloat16, "p4", (2, 3, 4, 5, 6), (3, 4, 5, 5))
train(torch.float32, "z2", (2, 1, 5, 6), (1, 1, 3), dilation=2, padding_mode="circular")
train(torch.float32, "z2", (2, 1, 5, 6), (1, 3, 3), padding_mode="exclude")
train(torch.float64, "z2", (1, 1, 1, 1), (1, 1, 1))  # Triton makes a constant of an argument that is 1
"""


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Down to machine code, without a GPU, as they would be compiled when first called on one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = ["forward", "backward_query", "backward_key_value", "backward_filters"]
    assert done.stdout.split() == 4 * kernels


@pytest.mark.parametrize(
    ("depths", "blocks"), [((1, 2), [16, 32, 64, 128, 256]), ((3, 64), [16, 32]), ((1, 512), [16])]
)
def test_block_sizes_fit_the_hardware_limits(depths: tuple[int, int], blocks: list[int]) -> None:
    configs = [kernels.triton.Config({"BLOCK": block}) for block in (16, 32, 64, 128, 256)]
    sizes = {"D_K": depths[0], "D_V": depths[1], "R": 1}
    assert [c.kwargs["BLOCK"] for c in kernels.blocks_that_fit(configs, {}, **sizes)] == blocks


# ---- when it runs ----


def test_unsupported_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, psi, dense = torch.randn(1, 2, 3, 3), torch.randn(2, 3, 3), torch.randn(2, 2, 3, 3)
    with pytest.raises(ValueError, match="'triton' does not serve this call: it serves no dense ψ"):
        affine_self_conv(x, x, x, dense, None, psi, None, num_heads=1, backend="triton")
    with pytest.raises(ValueError, match=r"or float64 alone; got torch\.float32, torch\.float64"):
        affine_self_conv(x, x, x, psi.double(), None, psi, None, num_heads=1, backend="triton")
    twelve = torch.randn(1, 2, 12, 3, 3)
    with pytest.raises(ValueError, match=r"it serves 1, 2, 4, 8, … planes of a group; got 12"):
        affine_self_conv(
            twelve, twelve, twelve, None, None, None, None, num_heads=1, kernel_size=3, group="c12",
            backend="triton",
        )  # fmt: skip
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="it runs on GPUs; the tensors are on cpu"):
        affine_self_conv(x, x, x, psi, None, psi, None, num_heads=1, backend="triton")


def test_interpreted_triton_is_never_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, psi = torch.randn(1, 2, 3, 3), torch.randn(2, 3, 3)
    lines = explain(x, x, x, psi, None, psi, None, num_heads=1).splitlines()
    assert "triton: runs in Triton's interpreter here, for checking; ask for it by name" in lines
    assert any(line.endswith(": runs") for line in lines)
