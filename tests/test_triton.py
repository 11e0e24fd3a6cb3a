"""The Triton backend against the reference: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfconv.groups import get_group
from selfconv.ops import affine_self_conv, explain, triton_gpu
from selfconv.ops._call import check_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES = ("query", "key", "value")
FILTERS = ("psi_k", "beta_k", "psi_v", "beta_v")
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


# ---- memory layouts of [N, C, (P,) h, w] ----


def contiguous(f: Tensor) -> Tensor:
    return f


def channels_last(f: Tensor) -> Tensor:
    """A view of a channels_last map with the channels (C, P)."""
    return f.flatten(1, -3).contiguous(memory_format=torch.channels_last).unflatten(1, f.shape[1:-2])


def part_of_a_projection(f: Tensor) -> Tensor:
    """A third of the channels of a channels_last map, as from one convolution for query, key and value."""
    return channels_last(torch.cat([f * float("nan"), f, f * float("nan")], 1)).chunk(3, 1)[1]


def crop(f: Tensor) -> Tensor:
    return torch.nn.functional.pad(f, (2, 1, 1, 2), value=float("nan"))[..., 1:-2, 2:-1]


LAYOUTS = (contiguous, channels_last, part_of_a_projection, crop)


# ---- cases ----


@dataclass(frozen=True)
class Case:
    group: str = "z2"
    kernel_size: int = 3
    num_heads: int = 1
    n: int = 2
    size: tuple[int, int] = (4, 3)
    depths: tuple[int, int] = (2, 3)  # channels per head, of the keys and of the values
    layout: Callable[[Tensor], Tensor] = contiguous
    without: frozenset[str] = frozenset()
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    filter_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.group}-{self.kernel_size}-{self.dtype}-{self.filter_dtype}".replace("torch.", "")

    def inputs(self) -> dict[str, Any]:
        order = len(get_group(self.group))
        axis, window = (order,) if order > 1 else (), (self.kernel_size, self.kernel_size)
        c_k, c_v = (self.num_heads * depth for depth in self.depths)
        shapes = {
            "query": (self.n, c_k, *axis, *self.size),
            "key": (self.n, c_k, *axis, *self.size),
            "value": (self.n, c_v, *axis, *self.size),
            "psi_k": (c_k, *axis, *window),
            "beta_k": (c_k, *window),
            "psi_v": (c_v, *axis, *window),
            "beta_v": (c_v, *window),
        }
        inputs = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
        features = {name: self.layout(inputs[name].to(self.dtype)) for name in FEATURES}
        filters = {name: inputs[name].to(self.filter_dtype) for name in FILTERS}
        return features | filters | dict.fromkeys(self.without)

    def options(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads,
            "scale": self.scale,
            "group": self.group,
            "kernel_size": self.kernel_size,
        }

    def run(self, inputs: dict[str, Any], backend: str, grad: Tensor) -> dict[str, Tensor]:
        """The output, and the gradient of every input that there is."""
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items() if t is not None}
        out = affine_self_conv(**(inputs | leaves), **self.options(), backend=backend)
        gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
        return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def check(case: Case, against: str = "reference") -> None:
    inputs = case.inputs()
    grad = torch.randn_like(inputs["value"])
    actual = case.run(inputs, "triton", grad)
    in_float64 = {name: None if t is None else t.double() for name, t in inputs.items()}
    expected = case.run(in_float64, against, grad)
    assert actual["out"].stride() == torch.empty_like(inputs["value"]).stride()
    assert actual.keys() == expected.keys()
    for name, t in actual.items():
        assert t.dtype == (case.filter_dtype if name in FILTERS else case.dtype), name
        bound = TOLERANCE[t.dtype] * expected[name].abs() + min(TOLERANCE[t.dtype], 2e-5)
        error = (t.double() - expected[name]).abs() - bound
        assert (error <= 0).all(), f"{name} is off by {error.max()} more than allowed"  # NaN is not <= 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # few taps in all: the interpreter takes a tenth of a second for each of them
    few = [("z2", 1, 2), ("z2", 3, 1), ("p4", 1, 2), ("p4m", 1, 1)]
    group, kernel_size, num_heads = draw(st.sampled_from(few))
    return Case(
        group,
        kernel_size,
        num_heads,
        n=draw(st.integers(1, 2)),
        size=(draw(st.integers(1, 4)), draw(st.integers(1, 6))),
        depths=(draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        layout=draw(st.sampled_from(LAYOUTS)),
        without=draw(st.frozensets(st.sampled_from(FILTERS))),
        scale=draw(st.sampled_from([None, 0.0, 1.7])),
    )


@settings(max_examples=8)
@given(cases())
def test_agrees_with_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("z2", 7, size=(2, 3)),  # a map smaller than the window
        Case("z2", 3, 2, size=(6, 6), layout=crop),  # several blocks of positions, and slices of them
        Case("z2", 3, dtype=torch.float16, filter_dtype=torch.float16),
        Case("z2", 3, dtype=torch.bfloat16, filter_dtype=torch.bfloat16),
        Case("p4", 1, dtype=torch.float16, layout=channels_last),  # as under autocast
        Case("p4", 3, dtype=torch.float64, filter_dtype=torch.float64, layout=channels_last),
        Case("p4m", 3, n=1, size=(2, 3), dtype=torch.float64, filter_dtype=torch.float64),
    ],
    ids=str,
)
def test_agrees_with_the_reference_on_more_taps_and_dtypes(case: Case) -> None:
    check(case)


def test_an_empty_batch() -> None:
    check(Case("p4", n=0), against="eager")  # the reference has no graph to differentiate


def test_operators() -> None:
    """Schema, autograd registration, fake tensors and tracing with symbolic sizes."""
    inputs = Case(kernel_size=1, without=frozenset({"psi_k", "beta_v"})).inputs()
    call = check_call(**inputs, kernel_size=1, num_heads=1, scale=None, group="z2")
    filters = (*call.steered(call.psi_k, call.beta_k), *call.steered(call.psi_v, call.beta_v))
    arguments = (call.query, call.key, call.value, *filters)
    leaves = [None if t is None else t.clone().requires_grad_() for t in arguments]
    torch.library.opcheck(torch.ops.selfconv.triton_forward.default, (*leaves, 1, 1, call.scale))
    out, lse = torch.ops.selfconv.triton_forward(*arguments, 1, 1, call.scale)
    torch.library.opcheck(
        torch.ops.selfconv.triton_backward.default, (torch.ones_like(out), lse, *arguments, 1, 1, call.scale)
    )


def test_compiles_to_one_graph() -> None:
    case = Case("p4", 1)
    inputs = case.inputs()
    grad = torch.randn_like(inputs["value"])
    expected = case.run(inputs, "triton", grad)
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    compiled = torch.compile(affine_self_conv, fullgraph=True, backend="aot_eager")
    out = compiled(**leaves, **case.options(), backend="triton")
    gradients = torch.autograd.grad(out, list(leaves.values()), grad)
    assert torch.equal(out, expected.pop("out"))
    # a graph may add up steered filters in another order
    for t, d in zip(
        expected.values(), gradients, strict=True
    ):  # a graph may sum steered filters in another order
        torch.testing.assert_close(d, t, rtol=1e-5, atol=1e-5)


def test_keeps_only_the_log_sum_exp() -> None:
    case = Case("p4", 1, 2)
    inputs = {name: t.requires_grad_() for name, t in case.inputs().items()}
    kept: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = affine_self_conv(**inputs, **case.options(), backend="triton")
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
from selfconv.ops import _call, triton_gpu

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

class Compile:
    def __init__(self, name):
        self.name, self.kernel = name, getattr(triton_gpu, name).fn
    def __getitem__(self, grid):
        return self
    def __call__(self, *args, **sizes):
        binary = self.kernel.warmup(*args, **sizes, BLOCK=16, grid=(1,))
        assert binary.asm["cubin"]
        print(self.name)

driver.set_active(Driver())
for name in ("_forward", "_backward_query", "_backward_key_value", "_backward_filters"):
    setattr(triton_gpu, name, Compile(name))

def train(dtype, group, f_shape, psi_shape):
    f = torch.zeros(f_shape, dtype=dtype, requires_grad=True)
    psi = torch.zeros(psi_shape, dtype=dtype, requires_grad=True)
    call = _call.check_call(
        f, f, f, psi, None, None, psi.sum(1) if psi.dim() == 4 else psi,
        kernel_size=None, num_heads=1, scale=None, group=group,
    )
    triton_gpu.run(call).sum().backward()

train(torch.bfloat16, "p4", (2, 3, 4, 5, 6), (3, 4, 5, 5))
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
    kernels = ["_forward", "_backward_query", "_backward_key_value", "_backward_filters"]
    assert done.stdout.split() == 2 * kernels


@pytest.mark.parametrize(
    ("depths", "blocks"), [((1, 2), [16, 32, 64, 128, 256]), ((3, 64), [16, 32]), ((1, 512), [16])]
)
def test_blocks_to_choose_from_fit(depths: tuple[int, int], blocks: list[int]) -> None:
    configs = [triton_gpu.triton.Config({"BLOCK": block}) for block in (16, 32, 64, 128, 256)]
    sizes = {"D_K": depths[0], "D_V": depths[1], "R": 1}
    assert [c.kwargs["BLOCK"] for c in triton_gpu._blocks_that_fit(configs, {}, **sizes)] == blocks


# ---- when it runs ----


def test_refuses_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    x, psi, dense = torch.randn(1, 2, 3, 3), torch.randn(2, 3, 3), torch.randn(2, 2, 3, 3)
    with pytest.raises(ValueError, match="'triton' does not serve this call: it serves no dense ψ"):
        affine_self_conv(x, x, x, dense, None, psi, None, num_heads=1, backend="triton")
    with pytest.raises(ValueError, match=r"or float64 alone; got torch\.float32, torch\.float64"):
        affine_self_conv(x, x, x, psi.double(), None, psi, None, num_heads=1, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="it runs on GPUs; the tensors are on cpu"):
        affine_self_conv(x, x, x, psi, None, psi, None, num_heads=1, backend="triton")


def test_is_never_chosen_to_be_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, psi = torch.randn(1, 2, 3, 3), torch.randn(2, 3, 3)
    lines = explain(x, x, x, psi, None, psi, None, num_heads=1).splitlines()
    assert "triton: runs in Triton's interpreter here, for checking; ask for it by name" in lines
    assert any(line.endswith(": runs") for line in lines)
