"""Random calls of the operation, for every test that compares two ways to compute it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from selfconv.groups import IDENTITY, P4, Group, dihedral, get_group
from selfconv.ops import PaddingMode, affine_self_conv

EXACT_GROUPS = ("z2", "p4", "p4m")  # of which every element is exact
D3 = dihedral("d3", 3)  # turns by 120° and mirrors, of which one is exact
C, S = math.cos(math.pi / 6), math.sin(math.pi / 6)
# quarter turns, and mirrors between the pixels; of 8 elements, so that the kernels of p4m serve it
TILTED = Group(
    "tilted", (*P4.matrices, ((C, S), (S, -C)), ((-S, C), (C, S)), ((-C, -S), (-S, C)), ((S, -C), (-C, -S)))
)
SOME_BAND_LIMITED = ("c8", TILTED)
TESTED_GROUPS: tuple[str | Group, ...] = (*EXACT_GROUPS, *SOME_BAND_LIMITED)
C2 = Group("c2", (IDENTITY, ((-1, 0), (0, -1))))  # keeps rows and columns apart
MODES: tuple[PaddingMode, ...] = get_args(PaddingMode)
FILTERS = ("psi_k", "beta_k", "psi_v", "beta_v")
EFFORT = int(os.environ.get("SELFCONV_TEST_EFFORT", "1"))  # `make test-long` tries many times more


def examples(number: int) -> settings:
    """How many random cases a property test tries."""
    return settings(max_examples=number * EFFORT)


def more(*cases: Any) -> tuple[Any, ...]:
    """Cases for `make test-long` alone: each takes many seconds, and others have every part of it."""
    return cases if EFFORT > 1 else ()


_tried = 0


def tried() -> None:
    """Counts a random case; the end of a test run says how many there were."""
    global _tried
    _tried += 1


def number_tried() -> int:
    return _tried


# ---- memory layouts of [N, C, (|H|,) h, w]: same shape, other strides ----


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def channels_last(x: Tensor) -> Tensor:
    """Channels innermost, the group axis next to them."""
    order = (0, 2, 3, 1) if x.dim() == 4 else (0, 3, 4, 2, 1)
    back = (0, 3, 1, 2) if x.dim() == 4 else (0, 4, 3, 1, 2)
    return x.permute(order).contiguous().permute(back)


def part_of_a_projection(x: Tensor) -> Tensor:
    """A third of the channels of a channels_last map, as from one convolution for query, key and value."""
    return channels_last(torch.cat([x * torch.nan, x, x * torch.nan], 1)).chunk(3, 1)[1]


def strided(x: Tensor) -> Tensor:
    """Every other column of a larger tensor."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


def cropped(x: Tensor) -> Tensor:
    """The middle of larger maps."""
    return torch.nn.functional.pad(x, (2, 1, 1, 2), value=torch.nan)[..., 1:-2, 2:-1]


def transposed(x: Tensor) -> Tensor:
    """Columns before rows, and images innermost."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def expanded_over_images(x: Tensor) -> Tensor:
    """The first image for all of them: stride 0. Other numbers than before."""
    return x[:1].expand(x.shape)


def expanded_over_maps(x: Tensor) -> Tensor:
    """One number for each map, as the gradient of a mean has it: strides 0. Other numbers than before."""
    return x[..., :1, :1].expand(x.shape)


def overlapping(x: Tensor) -> Tensor:
    """Every row begins one number after the row before: strides 1 and 1. Other numbers than before."""
    if not x.numel():
        return x
    strides = [1] * x.dim()
    length = 1 + sum(n - 1 for n in x.shape)
    return x.flatten()[:length].repeat(-(-length // x.numel()))[:length].as_strided(x.shape, strides)


Layout = Callable[[Tensor], Tensor]
SAME_NUMBERS = (contiguous, channels_last, part_of_a_projection, strided, cropped, transposed)
LAYOUTS = (*SAME_NUMBERS, expanded_over_images, expanded_over_maps, overlapping)


# ---- cases ----


@dataclass(frozen=True)
class Case:
    """What a call is made of; ``tensors`` makes the same numbers every time."""

    group: str | Group
    batch: int
    head_channels: tuple[int, int]  # of key and value
    num_heads: int
    kernel_size: int | tuple[int, int]
    size: tuple[int, int]
    layouts: tuple[Layout, Layout, Layout, Layout] = (
        contiguous,
    ) * 4  # of q, k, v, and the output's gradient
    dense: bool = False
    missing: tuple[str, ...] = field(default=())  # which of psi_k, beta_k, psi_v, beta_v are None
    scale: float | None = None
    dilation: int | tuple[int, int] = 1
    padding_mode: str = "zeros"
    lifting: bool = False
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float64, torch.float64)  # of features and filters
    seed: int = 0
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.group}-{self.kernel_size}-{self.dtypes[0]}-{self.dtypes[1]}".replace("torch.", "")

    def tensors(self) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)
        order, k = len(get_group(self.group)), self.kernel_size
        window = k if isinstance(k, tuple) else (k, k)
        axis = () if order == 1 or self.lifting else (order,)
        c_k, c_v = (c * self.num_heads for c in self.head_channels)

        def randn(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(self.device, dtype)

        tensors: dict[str, Tensor | None] = {}
        for name, c, layout in zip("qkv", (c_k, c_k, c_v), self.layouts, strict=False):
            tensors[name] = layout(randn(self.dtypes[0], self.batch, c, *axis, *self.size))
        for suffix, c in (("k", c_k), ("v", c_v)):
            shape = (*((c, c) if self.dense else (c,)), *axis, *window)
            tensors[f"psi_{suffix}"] = randn(self.dtypes[1], *shape)
            tensors[f"beta_{suffix}"] = randn(self.dtypes[1], c, *window)
        tensors |= dict.fromkeys(self.missing)
        return {n: None if t is None else t.detach().requires_grad_() for n, t in tensors.items()}

    def run(self, tensors: dict[str, Tensor | None], **options: Any) -> Tensor:
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        assert q is not None
        assert k is not None
        assert v is not None
        return affine_self_conv(
            q, k, v, tensors["psi_k"], tensors["beta_k"], tensors["psi_v"], tensors["beta_v"],
            group=self.group, num_heads=self.num_heads, scale=self.scale,
            kernel_size=self.kernel_size, dilation=self.dilation, padding_mode=self.padding_mode,
            lifting=self.lifting, **options,
        )  # fmt: skip

    def gradients(
        self,
        tensors: dict[str, Tensor | None] | None = None,
        layout: Callable[[Tensor], Tensor] = lambda t: t,
        **options: Any,
    ) -> dict[str, Tensor]:
        """The output and the gradient of every tensor, for one fixed gradient of the output.

        Args:
            tensors: by default those of the case.
            layout: what becomes of the output's gradient before the backward pass.
        """
        tensors = self.tensors() if tensors is None else tensors
        out = self.run(tensors, **options)
        generator = torch.Generator().manual_seed(self.seed + 1)
        grad = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(
            self.device, self.dtypes[0]
        )
        grad = layout(self.layouts[3](grad).to(out.dtype))
        leaves = {name: t for name, t in tensors.items() if t is not None}
        grads = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
        found = {
            name: torch.zeros_like(leaf) if g is None else g
            for (name, leaf), g in zip(leaves.items(), grads, strict=True)
        }
        return {"out": out.detach(), **found}

    def expected(self, backend: str) -> dict[str, Tensor]:
        """``gradients`` by a backend in float64, of the same numbers."""
        exact = {
            n: None if t is None else t.detach().double().contiguous().requires_grad_()
            for n, t in self.tensors().items()
        }
        return self.gradients(exact, backend=backend)


HALVES = ((torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32))
DTYPES = ((torch.float64,) * 2, (torch.float32,) * 2, *HALVES)
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    # computed in float32 and rounded once
    torch.float16: torch.finfo(torch.float16).eps + 2e-5,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps + 2e-5,
}


@st.composite
def cases(
    draw: st.DrawFn, *, dense: bool = True, small: bool = True, dtypes: tuple[Any, ...] = DTYPES
) -> Case:
    """Shapes that fit the slow reference if ``small``; otherwise ones that fill vectors and span strips."""
    group = draw(st.sampled_from((*TESTED_GROUPS, C2)))
    few = st.integers(1, 2)
    heads, channels = (few, few) if small else (st.sampled_from((2, 1, 3, 4, 8, 12)), st.sampled_from(WIDTHS))
    num_heads, head_channels = draw(heads), draw(st.tuples(channels, channels))
    wide = num_heads * max(head_channels) > 9
    sides = {1: (5, 17, 40), 4: (3, 9, 24)}.get(len(get_group(group)), (2, 8, 17))
    side = sides[0 if small else 1 if wide else 2]
    layout = st.sampled_from(LAYOUTS)
    # hypothesis prefers what is simplest: small maps and, counted from the other end, large ones
    length = st.integers(1, side) | st.integers(0, side).map(lambda less: side - less)  # 0 at the very end
    odd = st.sampled_from((1, 3, 5) if small or wide else (1, 3, 5, 7, 9, 11))
    steps = st.sampled_from((1, 2, 3))
    free = get_group(group).keeps_axes
    return Case(
        group=group,
        batch=draw(st.sampled_from((2, 1, 0) if small else (2, 1, 3, 0, 9))),
        head_channels=head_channels,
        num_heads=num_heads,
        kernel_size=draw(odd | st.tuples(odd, odd) if free else odd),
        size=draw(st.tuples(length, length)),
        layouts=draw(st.tuples(layout, layout, layout, layout)),
        dense=dense and draw(st.booleans()),
        missing=tuple(sorted(draw(st.sets(st.sampled_from(FILTERS))))),
        scale=draw(st.sampled_from((None, 0.0, 0.7, -0.7))),
        dilation=draw(steps | st.tuples(steps, steps) if free else steps),
        padding_mode=draw(st.sampled_from(MODES)),
        lifting=draw(st.booleans()),
        dtypes=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )


# NaN as torch makes it, then with payloads: quiet, signalling, of either sign; R's NA is among them
NAN_BITS = {
    torch.float64: (0x7FF8000000000000, 0x7FF0000000000001, -1, 0x7FF00000000007A2),
    torch.float32: (0x7FC00000, 0x7F800001, -1, 0x7FC00001),
    torch.float16: (0x7E00, 0x7C01, -1, 0x7E01),
    torch.bfloat16: (0x7FC0, 0x7F81, -1, 0x7FC1),
}

MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


def nan_bits(dtype: torch.dtype, payload: int) -> int:
    """A NaN with that payload, or as much of it as fits; quiet if its highest bit is set."""
    most = (1 << MANTISSA[dtype]) - 1
    return NAN_BITS[dtype][0] & ~most | (1 + payload % most)


def with_nan(t: Tensor, bits: int, place: float = 0.5) -> Tensor:
    """A contiguous copy, one number of which is the NaN with these bits; ``place`` is from 0 to 1."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    copy = t.detach().clone(memory_format=torch.contiguous_format)
    copy.view(integers).view(-1)[int(place * (copy.numel() - 1))] = bits
    return copy.requires_grad_(t.requires_grad)


WIDTHS = (1, 2, 3, 4, 8, 9)  # channels of a head: those that the kernels copy each in its own way, and others


def assert_close(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float | None = None,
    doubt: dict[str, float] | None = None,
) -> None:
    """Every tensor within the tolerance of the expected one's largest value (or of 1, if that is small).

    Args:
        tolerance: by default that of the tensor's own dtype.
        doubt: how far the expected tensors may be from the truth themselves.
    """
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        a = actual[name]
        assert a.shape == e.shape, name
        if e.numel():
            error = (a.to(e.dtype) - e).abs().max().item()
            allowed = TOLERANCE[a.dtype] if tolerance is None else tolerance
            limit = allowed * max(1.0, e.abs().max().item()) + (doubt[name] if doubt else 0.0)
            assert error <= limit, f"{name}: off by {error:.2e}, allowed {limit:.2e}"
