"""Random calls of the operation, for every test that compares two ways to compute it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from selfconv.groups import get_group
from selfconv.ops import affine_self_conv

GROUPS = ("z2", "p4", "p4m")
EFFORT = int(os.environ.get("SELFCONV_TEST_EFFORT", "1"))  # `make test-long` tries many times more
FORMATS = ("contiguous", "channels_last", "strided")


def examples(number: int) -> settings:
    """How many random cases a property test tries."""
    return settings(max_examples=number * EFFORT)


@dataclass(frozen=True)
class Case:
    """What a call is made of; ``tensors`` makes the same numbers every time."""

    group: str
    batch: int
    head_channels: tuple[int, int]  # of key and value
    num_heads: int
    kernel_size: int
    size: tuple[int, int]
    memory_format: str = "contiguous"
    dense: bool = False
    missing: tuple[str, ...] = field(default=())  # which of psi_k, beta_k, psi_v, beta_v are None
    scale: float | None = None

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        order, k = len(get_group(self.group)), self.kernel_size
        axis = () if order == 1 else (order,)
        c_k, c_v = (c * self.num_heads for c in self.head_channels)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

        features = {
            n: randn(self.batch, c, *axis, *self.size) for n, c in (("q", c_k), ("k", c_k), ("v", c_v))
        }
        filters: dict[str, Tensor | None] = {}
        for suffix, c in (("k", c_k), ("v", c_v)):
            filters[f"psi_{suffix}"] = randn(*((c, c) if self.dense else (c,)), *axis, k, k)
            filters[f"beta_{suffix}"] = randn(c, k, k)
        filters |= dict.fromkeys(self.missing)
        laid_out = {name: in_memory_format(x, self.memory_format) for name, x in features.items()}
        return {n: None if t is None else t.requires_grad_() for n, t in (laid_out | filters).items()}

    def run(self, tensors: dict[str, Tensor | None], **options: Any) -> Tensor:
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        assert q is not None
        assert k is not None
        assert v is not None
        return affine_self_conv(
            q, k, v, tensors["psi_k"], tensors["beta_k"], tensors["psi_v"], tensors["beta_v"],
            group=self.group, num_heads=self.num_heads, scale=self.scale,
            kernel_size=self.kernel_size, **options,
        )  # fmt: skip

    def gradients(self, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Tensor]:
        """The output and the gradient of every tensor, for one fixed gradient of the output."""
        tensors = self.tensors(dtype)
        out = self.run(tensors, **options)
        grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        leaves = {name: t for name, t in tensors.items() if t is not None}
        grads = torch.autograd.grad(out, list(leaves.values()), grad.to(dtype), allow_unused=True)
        found = {
            name: torch.zeros_like(leaf) if g is None else g
            for (name, leaf), g in zip(leaves.items(), grads, strict=True)
        }
        return {"out": out.detach(), **found}


def in_memory_format(x: Tensor, memory_format: str) -> Tensor:
    """The same numbers, laid out in another order, or as every other column of a larger tensor."""
    if memory_format == "channels_last":  # channels innermost, the group axis next to them
        order = (0, 2, 3, 1) if x.dim() == 4 else (0, 3, 4, 2, 1)
        back = (0, 3, 1, 2) if x.dim() == 4 else (0, 4, 3, 1, 2)
        return x.permute(order).contiguous().permute(back)
    if memory_format == "strided":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


@st.composite
def cases(
    draw: st.DrawFn, *, groups: tuple[str, ...] = GROUPS, dense: bool = True, small: bool = True
) -> Case:
    """Shapes that fit the slow reference if ``small``; otherwise ones that span several vectors and bands."""
    group = draw(st.sampled_from(groups))
    budget = {"z2": 6, "p4": 4, "p4m": 3}[group] if small else 40
    return Case(
        group=group,
        batch=draw(st.integers(0, 2)),
        head_channels=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        num_heads=draw(st.integers(1, 3)),
        kernel_size=draw(st.sampled_from((1, 3, 5) if small else (1, 3, 5, 7, 9, 11))),
        size=draw(st.tuples(st.integers(1, budget), st.integers(1, budget))),
        memory_format=draw(st.sampled_from(FORMATS)),
        dense=dense and draw(st.booleans()),
        missing=tuple(draw(st.sets(st.sampled_from(("psi_k", "beta_k", "psi_v", "beta_v"))))),
        scale=draw(st.sampled_from((None, 0.0, 0.7))),
    )


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within the tolerance of the expected one's largest value (or of 1, if that is small)."""
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        a = actual[name]
        assert a.shape == e.shape, name
        if e.numel():
            error = (a.to(e.dtype) - e).abs().max().item()
            limit = tolerance * max(1.0, e.abs().max().item())
            assert error <= limit, f"{name}: off by {error:.2e}, allowed {limit:.2e}"
