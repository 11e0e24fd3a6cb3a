"""The operation in PyTorch against the paper's equations, its special cases, and its error messages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import TESTED_GROUPS, Case, assert_close
from torch import Tensor

from selfconv.groups import Group, get_group
from selfconv.ops import BACKENDS, affine_conv, affine_self_conv, explain, reference


@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["channel", "dense"])
def test_gradcheck(group: str | Group, dense: bool) -> None:
    case = Case(group, 1, (1, 2), 2, 3, (2, 3), dense=dense)
    tensors = case.tensors()
    names = list(tensors)
    values = [t for t in tensors.values() if t is not None]

    def run(*leaves: Tensor) -> Tensor:
        return case.run(dict(zip(names, leaves, strict=True)), backend="eager")

    assert torch.autograd.gradcheck(run, values, fast_mode=len(get_group(group)) > 4)


@pytest.mark.parametrize("k", [1, 3, 5, 7, 9, 11])
def test_windows_larger_than_the_image(k: int) -> None:
    case = Case("z2", 1, (2, 2), 2, k, (2, 3))
    assert_close(case.gradients(backend="eager"), case.gradients(backend="reference"), 1e-10)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("group", ["z2", "p4"])
def test_every_backend_is_the_reference(group: str, backend: str) -> None:
    """The output and all gradients, of every entry of ``_BACKENDS``."""
    case = Case(group, 1, (2, 1), 2, 3, (3, 2))
    assert_close(case.gradients(backend=backend), case.expected("reference"))


# ---- special cases of the paper ----


@pytest.mark.parametrize("k", [1, 3, 5])
def test_alpha_one_and_no_beta_is_the_convolution(k: int) -> None:
    x, psi = torch.randn(2, 3, 6, 5, dtype=torch.float64), torch.randn(3, 3, k, k, dtype=torch.float64)
    torch.testing.assert_close(
        affine_conv(x, psi, None), F.conv2d(x, psi, padding=k // 2), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["channel", "dense"])
def test_affine_conv_sums_the_affine_map(group: str | Group, dense: bool) -> None:
    g = get_group(group)
    axis = () if len(g) == 1 else (len(g),)
    f = torch.randn(1, 2, *axis, 3, 4, dtype=torch.float64)
    psi = torch.randn(*((2, 2) if dense else (2,)), *axis, 3, 3, dtype=torch.float64)
    beta = torch.randn(2, 3, 3, dtype=torch.float64)
    image, filters = f[0].reshape(2, len(g), 3, 4), psi if axis else psi.unsqueeze(-3)
    planes = [
        reference.grid(
            image,
            [
                reference.sum_(
                    reference.summed_affine_map(image, filters, beta, g, p, x, y)
                    for y in reference.neighbours(x, 3)
                )
                for x in reference.positions(image)
            ],
        )
        for p in g
    ]
    expected = torch.stack(planes, 1).reshape(f.shape)
    torch.testing.assert_close(affine_conv(f, psi, beta, group=group), expected, rtol=0, atol=1e-12)


def test_alpha_one_on_a_group_is_the_group_convolution() -> None:
    f, psi = torch.randn(1, 2, 4, 4, 3, dtype=torch.float64), torch.randn(2, 2, 4, 3, 3, dtype=torch.float64)
    expected = reference.group_convolution(f[0], psi, get_group("p4"))[None]
    torch.testing.assert_close(affine_conv(f, psi, None, group="p4"), expected, rtol=0, atol=1e-12)


def test_psi_one_is_local_self_attention_with_relative_positions() -> None:
    """Written out: softmax over the window of q·(k + β^K), then the mean of v + β^V by these weights."""
    q, k, v = torch.randn(3, 1, 4, 5, 6, dtype=torch.float64)
    beta_k, beta_v = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    one = torch.ones(4, 3, 3, dtype=torch.float64)
    heads, d, scale = 2, 2, 0.5
    expected = torch.zeros_like(v)
    pad_k, pad_v = F.pad(k, (1, 1, 1, 1)), F.pad(v, (1, 1, 1, 1))
    for h in range(heads):
        c = slice(h * d, (h + 1) * d)
        for i in range(5):
            for j in range(6):
                keys = pad_k[0, c, i : i + 3, j : j + 3] + beta_k[c]
                weights = (
                    (scale * (q[0, c, i, j, None, None] * keys).sum(0)).flatten().softmax(0).reshape(3, 3)
                )
                expected[0, c, i, j] = (weights * (pad_v[0, c, i : i + 3, j : j + 3] + beta_v[c])).sum((1, 2))
    for psi in (one, None):
        out = affine_self_conv(
            q, k, v, psi, beta_k, psi, beta_v, num_heads=heads, scale=scale, backend="eager"
        )
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_p4_with_one_rotation_is_z2() -> None:
    """Features on the plane R = 1 and a ψ that is zero but at P⁻¹R = 1: that plane is the planar layer."""
    case = Case("z2", 2, (2, 2), 2, 3, (4, 5))
    planar = {n: t.detach() for n, t in case.tensors().items() if t is not None}
    lifted: dict[str, Tensor | None] = {}
    for name, t in planar.items():
        axis = {"q": 2, "k": 2, "v": 2, "psi_k": 1, "psi_v": 1}.get(name)
        lifted[name] = t if axis is None else torch.stack([t, *[torch.zeros_like(t)] * 3], axis)
    on_p4 = Case("p4", 2, (2, 2), 2, 3, (4, 5)).run(lifted, backend="eager")
    torch.testing.assert_close(on_p4[:, :, 0], case.run(dict(planar), backend="eager"), rtol=0, atol=1e-12)


def test_scale_zero_is_a_scale() -> None:
    case = Case("z2", 1, (2, 2), 1, 3, (3, 3), missing=("psi_v", "beta_v"), scale=0.0)
    tensors = case.tensors()
    assert tensors["v"] is not None
    expected = F.avg_pool2d(tensors["v"], 3, 1, 1)  # all weights alike: the mean of the window
    torch.testing.assert_close(case.run(tensors, backend="eager"), expected, rtol=0, atol=1e-12)


# ---- α ----


@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_attention_weights_are_the_references(group: str | Group) -> None:
    g = get_group(group)
    case = Case(group, 1, (2, 1), 2, 3, (3, 2))
    t = {n: x.detach() for n, x in case.tensors().items() if x is not None}
    out, alpha = affine_self_conv(
        *(t[n] for n in ("q", "k", "v", "psi_k", "beta_k", "psi_v", "beta_v")),
        num_heads=2, group=group, return_attention=True,
    )  # fmt: skip
    assert alpha.shape == (1, 2, *(() if group == "z2" else (len(g),)), 3, 3, 3, 2)
    torch.testing.assert_close(alpha.sum((-4, -3)), torch.ones_like(alpha[..., 0, 0, :, :]))
    torch.testing.assert_close(out, case.run(dict(t), backend="eager"))
    q, k, psi = t["q"][0], t["k"][0], t["psi_k"]
    if group == "z2":
        q, k, psi, alpha = q[:, None], k[:, None], psi[:, None], alpha.unsqueeze(2)
    for p in g:
        for x in reference.positions(q):
            expected = reference.group_score(q, k, psi, t["beta_k"], g, p, x, 2, 1 / 4)
            weights = torch.stack(list(expected.values()), 1).reshape(2, 3, 3)
            torch.testing.assert_close(alpha[0, :, p, :, :, x[0], x[1]], weights, rtol=0, atol=1e-12)


def test_attention_weights_come_from_eager_alone() -> None:
    x, filters = torch.randn(1, 2, 3, 3), torch.randn(2, 3, 3)
    with pytest.raises(ValueError, match="return_attention needs the eager backend; got backend='reference'"):
        affine_self_conv(
            x, x, x, filters, None, None, None, num_heads=1, backend="reference", return_attention=True
        )


# ---- dtypes, devices, shapes ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_every_float_dtype(dtype: torch.dtype, backend: str | None) -> None:
    case = Case("p4", 1, (2, 2), 2, 3, (4, 3))
    rounded = {n: t.detach().to(dtype) for n, t in case.tensors().items() if t is not None}
    expected = case.run({n: t.double() for n, t in rounded.items()}, backend="reference")
    out = case.run(dict(rounded), backend=backend)
    assert out.dtype == dtype
    # the arithmetic is float32's or better: what is left is the rounding of the result
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_autocast_mixes_half_features_with_float_filters(backend: str | None) -> None:
    case = Case("z2", 2, (2, 2), 2, 3, (4, 4), dtypes=(torch.float32, torch.float32))
    t = case.tensors()
    halves = {n: x if x is None or n not in "qkv" else x.bfloat16() for n, x in t.items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = case.run(halves, backend=backend)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert t["psi_v"] is not None
    assert t["psi_v"].grad is not None
    assert t["psi_v"].grad.isfinite().all()


@pytest.mark.parametrize("backend", [None, "eager", "reference"])
@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_empty_batch(group: str | Group, backend: str | None) -> None:
    found = Case(group, 0, (2, 1), 2, 3, (4, 3)).gradients(backend=backend)
    assert found["out"].shape[0] == 0
    assert not found["psi_k"].any()


def test_meta_device() -> None:
    x, filters = torch.empty(2, 4, 5, 5, device="meta"), torch.empty(4, 3, 3, device="meta")
    assert affine_self_conv(x, x, x, filters, None, None, None, num_heads=2).shape == x.shape


# ---- what a caller can get wrong ----


def arguments(group: str = "z2") -> dict[str, Tensor | None]:
    return {
        n: t if t is None else t.detach() for n, t in Case(group, 1, (2, 2), 2, 3, (4, 4)).tensors().items()
    }


def test_errors_restate_the_shapes() -> None:
    case = Case("z2", 1, (2, 2), 2, 3, (4, 4))
    bad: list[tuple[str, Tensor, str]] = [
        ("q", torch.randn(4, 4), "query: expected [N, C, h, w] on group 'z2'; got shape [4, 4]"),
        ("k", torch.randn(1, 3, 4, 4), "query [1, 4, 4, 4], key [1, 3, 4, 4], value [1, 4, 4, 4]"),
        ("v", torch.randn(1, 4, 5, 4), "value [1, 4, 5, 4]"),
        (
            "psi_k",
            torch.randn(3, 3, 3),
            "psi_k: expected [4, 3, 3], or [4, 4, 3, 3] to map channel to channel",
        ),
        ("beta_v", torch.randn(4, 4, 3, 3), "beta_v: expected [4, 3, 3] for 4 channels; got [4, 4, 3, 3]"),
        ("psi_v", torch.randn(4, 5, 5), "expected one window size among psi and beta; got psi_k [4, 3, 3]"),
    ]
    for name, value, message in bad:
        with pytest.raises(ValueError, match=re.escape(message)):
            case.run(arguments() | {name: value})


def test_even_and_different_windows_are_refused() -> None:
    case = Case("z2", 1, (2, 2), 2, 3, (4, 4))
    for window in ((2, 2), (3, 5)):
        filters: dict[str, Tensor | None] = {
            n: torch.randn(4, *window) for n in ("psi_k", "beta_k", "psi_v", "beta_v")
        }
        with pytest.raises(ValueError, match="expected one window size among psi and beta; got psi_k"):
            case.run(arguments() | filters)
    x = torch.randn(1, 2, 3, 3)
    with pytest.raises(ValueError, match="expected kernel_size, as psi and beta are all None"):
        affine_self_conv(x, x, x, None, None, None, None, num_heads=1)
    with pytest.raises(ValueError, match=r"^kernel_size: expected an odd integer ≥ 1, or two, .*; got 4$"):
        affine_self_conv(x, x, x, None, None, None, None, num_heads=1, kernel_size=4)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_degenerate_sizes_are_refused_in_one_line(backend: str | None) -> None:
    """Whatever backend would run them, and before it is chosen."""

    def run(
        c_k: int, c_v: int, *, num_heads: Any = 1, kernel_size: Any = 3, scale: float | None = 1.0
    ) -> None:
        q, v = torch.randn(2, c_k, 5, 5), torch.randn(2, c_v, 5, 5)
        affine_self_conv(
            q, q, v, None, None, None, None,
            num_heads=num_heads, kernel_size=kernel_size, scale=scale, backend=backend,
        )  # fmt: skip

    for c_k, c_v, scale in ((0, 4, 1.0), (0, 4, None), (4, 0, 1.0), (0, 0, None)):
        with pytest.raises(ValueError, match=rf"^expected one channel or more; got query \[2, {c_k}, 5, 5\]"):
            run(c_k, c_v, scale=scale)
    for kernel_size in (0, -1, -3):
        with pytest.raises(
            ValueError, match=rf"^kernel_size: expected an odd integer .*; got {kernel_size}$"
        ):
            run(4, 4, kernel_size=kernel_size)
    for strange in (3.0, "3", (3, 3, 3), (3, 4), (3, 1.0)):
        message = rf"^kernel_size: expected an odd integer .*; got {re.escape(repr(strange))}$"
        with pytest.raises(ValueError, match=message):
            run(4, 4, kernel_size=strange)
    for num_heads in (2.0, None):
        with pytest.raises(TypeError, match=r"^num_heads: expected an integer ≥ 1; got "):
            run(4, 4, num_heads=num_heads)


@pytest.mark.parametrize("backend", [None, "eager", "reference", "triton"])
@pytest.mark.parametrize("size", [(0, 3), (3, 0), (0, 0)])
def test_maps_of_no_pixels(size: tuple[int, int], backend: str | None) -> None:
    found = Case("p4", 2, (2, 1), 2, 3, size).gradients(backend=backend)
    assert found["out"].shape == (2, 2, 4, *size)
    assert not any(found[name].any() for name in ("psi_k", "beta_k", "psi_v", "beta_v"))


def test_group_features_need_their_axis() -> None:
    x, filters = torch.randn(1, 2, 5, 5), torch.randn(2, 4, 3, 3)
    with pytest.raises(
        ValueError, match=r"query: expected \[N, C, 4, h, w\] on group 'p4'; got shape \[1, 2, 5, 5\]"
    ):
        affine_self_conv(x, x, x, filters, None, None, None, num_heads=1, group="p4")


def test_heads_groups_backends_and_types() -> None:
    case = Case("z2", 1, (2, 2), 2, 3, (4, 4))
    t = arguments()
    names = ("q", "k", "v", "psi_k", "beta_k", "psi_v", "beta_v")
    tensors = [x for x in (t[n] for n in names) if x is not None]
    with pytest.raises(ValueError, match="num_heads=3 does not divide 4 key channels, 4 value channels"):
        affine_self_conv(*tensors, num_heads=3)
    for heads in (0, -1):
        with pytest.raises(ValueError, match=f"^num_heads: expected an integer ≥ 1; got {heads}$"):
            affine_self_conv(*tensors, num_heads=heads)
    with pytest.raises(ValueError, match="unknown group 'p5'"):
        affine_self_conv(*tensors, num_heads=2, group="p5")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        case.run(t, backend="cuda")
    with pytest.raises(
        TypeError, match=r"key: expected a floating-point tensor; got torch.int64 of shape \[1, 4, 4, 4\]"
    ):
        case.run(t | {"k": torch.ones(1, 4, 4, 4, dtype=torch.int64)})
    with pytest.raises(TypeError, match="query: expected a tensor; got list"):
        case.run(t | {"q": [1.0]})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"expected all tensors on one device; got query on cpu.*psi_v on meta"
    ):
        case.run(t | {"psi_v": torch.empty(4, 3, 3, device="meta")})


def test_affine_conv_checks_its_filters() -> None:
    with pytest.raises(TypeError, match="psi: expected a tensor; got NoneType"):
        affine_conv(torch.randn(1, 2, 3, 3), None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"psi_v: expected \[2, 3, 3\]"):
        affine_conv(torch.randn(1, 2, 3, 3), torch.randn(3, 3, 3), None)


# ---- choice of backend ----


def test_explain_names_every_backend() -> None:
    t = [x for x in arguments().values() if x is not None]
    q, k, v, psi_k, beta_k, psi_v, beta_v = t
    lines = explain(q, k, v, psi_k, beta_k, psi_v, beta_v, num_heads=2).splitlines()
    assert [line.split(":")[0] for line in lines] == list(BACKENDS)
    assert sum(line.endswith(": runs") for line in lines) == 1
    dense = torch.randn(4, 4, 3, 3)
    lines = explain(q, k, v, dense, beta_k, psi_v, beta_v, num_heads=2).splitlines()
    assert "eager: runs" in lines
    assert "numba: serves no dense ψ" in lines


def test_a_forced_backend_that_cannot_serve_says_why() -> None:
    case = Case("z2", 1, (2, 2), 1, 3, (3, 3), dense=True)
    with pytest.raises(ValueError, match="backend 'numba' does not serve this call: it serves no dense ψ"):
        case.run(case.tensors(), backend="numba")
