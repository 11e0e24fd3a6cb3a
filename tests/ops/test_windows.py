"""Windows other than the paper's: rectangles, dilation, borders, and lifting from the plane."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import C2, MODES, TESTED_GROUPS, Case, assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from selfconv.groups import Group, cyclic, get_group
from selfconv.ops import BACKENDS, Window, affine_self_conv
from selfconv.ops._backends import _BACKENDS
from selfconv.ops._call import check_call
from selfconv.testing import relative_error

WINDOWS: list[dict[str, Any]] = [
    {"kernel_size": (1, 5)},
    {"kernel_size": (3, 1), "dilation": (2, 1)},
    {"kernel_size": 3, "dilation": 2},
    {"kernel_size": 3, "dilation": 4},  # reaches further than the map
]
Z2 = Case("z2", 2, (2, 1), 2, 3, (4, 3))


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_agree_with_the_reference(window: dict[str, Any], mode: str, backend: str) -> None:
    case = replace(Z2, padding_mode=mode, **window)
    assert_close(case.gradients(backend=backend), case.expected("reference"))


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", ["p4", C2], ids=str)
@pytest.mark.parametrize("lifting", [False, True])
def test_windows_on_groups_agree_with_the_reference(
    group: str | Group, mode: str, lifting: bool, backend: str
) -> None:
    case = replace(Z2, group=group, batch=1, padding_mode=mode, dilation=2, lifting=lifting)
    if group == C2:
        case = replace(case, kernel_size=(1, 3), dilation=(1, 2))
    assert_close(case.gradients(backend=backend), case.expected("reference"))


@pytest.mark.parametrize("lifting", [False, True])
def test_groups_of_odd_order_agree_with_the_reference(lifting: bool) -> None:
    """Their planes are computed one at a time, those of other groups in pairs."""
    case = replace(Z2, group=cyclic("c3", 3), lifting=lifting)
    assert_close(case.gradients(backend="numba"), case.expected("reference"))


@pytest.mark.parametrize("backend", ["eager", "numba"])
def test_gradients_of_many_copies_are_summed_before_they_are_rounded(backend: str) -> None:
    """A circular map of two pixels is in every window many times over; sums in half precision would drift."""
    halves = (torch.bfloat16, torch.bfloat16)
    case = Case("p4", 2, (1, 1), 2, 5, (1, 2), dilation=2, padding_mode="circular", dtypes=halves)
    assert_close(case.gradients(backend=backend), case.expected("reference"))


@pytest.mark.parametrize("lifting", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", TESTED_GROUPS, ids=str)
def test_every_window_is_equivariant(group: str | Group, mode: str, lifting: bool) -> None:
    """Under every exact element and, in circular images, under every shift: in float64, below 1e-10."""
    g = get_group(group)
    case = replace(Z2, group=group, size=(5, 5), padding_mode=mode, dilation=2, lifting=lifting)
    tensors = case.tensors()
    out = case.run(tensors)

    def act(t: Tensor, s: int) -> Tensor:
        return g.act(t, s) if t.dim() == 5 else g.act_planar(t, s)

    def run(change: Any) -> Tensor:
        return case.run({n: change(t) if n in ("q", "k", "v") else t for n, t in tensors.items()})

    for s in g:
        if g.exact[s]:
            assert relative_error(run(lambda t, s=s: act(t, s)), act(out, s)) < 1e-10
    if mode == "circular":
        assert relative_error(run(lambda t: t.roll((1, 2), (-2, -1))), out.roll((1, 2), (-2, -1))) < 1e-10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lifting", [False, True])
def test_gradcheck(mode: str, lifting: bool) -> None:
    case = Case("p4", 1, (1, 1), 1, 3, (3, 2), dilation=2, padding_mode=mode, lifting=lifting)
    tensors = {name: t for name, t in case.tensors().items() if t is not None}

    def run(*given: Tensor) -> Tensor:
        return case.run(dict(zip(tensors, given, strict=True)), backend="numba")

    assert torch.autograd.gradcheck(run, tuple(tensors.values()), atol=1e-6, fast_mode=True)


def uniform(x: Tensor, **options: Any) -> Tensor:
    """The mean over the window: queries of 0."""
    return affine_self_conv(0 * x, x, x, None, None, None, None, num_heads=1, **options)


def test_padding_modes_match_torch() -> None:
    x = torch.randn(2, 1, 5, 6, dtype=torch.float64)
    ones = x.new_ones(1, 1, 3, 3)
    zeros = F.conv2d(x, ones / 9, padding=2, dilation=2)
    circular = F.conv2d(F.pad(x, (2,) * 4, mode="circular"), ones / 9, dilation=2)
    exclude = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    torch.testing.assert_close(uniform(x, kernel_size=3, dilation=2), zeros)
    torch.testing.assert_close(uniform(x, kernel_size=3, dilation=2, padding_mode="circular"), circular)
    torch.testing.assert_close(uniform(x, kernel_size=3, padding_mode="exclude"), exclude)
    row = F.avg_pool2d(x, (1, 5), 1, (0, 2), count_include_pad=False)
    torch.testing.assert_close(uniform(x, kernel_size=(1, 5), padding_mode="exclude"), row)


def test_excluded_neighbours_have_no_weight() -> None:
    case = replace(Z2, padding_mode="exclude")
    _, alpha = case.run(case.tensors(), return_attention=True)
    assert alpha.shape == (2, 2, 3, 3, 4, 3)
    assert (alpha[..., 0, :, 0, :] == 0).all()  # above the first row
    assert (alpha[..., 1, 1, :, :] > 0).all()
    torch.testing.assert_close(alpha.sum((2, 3)), torch.ones_like(alpha[:, :, 0, 0]))


def test_lifting_is_the_group_operation_on_equal_planes() -> None:
    """Q, K and V that are the same on every plane, and ψ at R = 1 alone."""
    case = replace(Z2, group="p4", lifting=True)
    t = case.tensors()
    planes = {n: t[n].unsqueeze(2).expand(-1, -1, 4, -1, -1) for n in "qkv"}  # type: ignore[union-attr]
    psi = {n: F.pad(t[n].unsqueeze(1), (0,) * 5 + (3,)) for n in ("psi_k", "psi_v")}  # type: ignore[union-attr]
    expected = replace(case, lifting=False).run(t | planes | psi)
    torch.testing.assert_close(case.run(t), expected)


@given(
    st.sampled_from([(1, 3), (3, 5), (5, 1)]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.sampled_from(MODES),
    st.sampled_from(["eager", "numba"]),
)
def test_dilations_larger_than_the_map(
    kernel_size: tuple[int, int], size: tuple[int, int], dilation: tuple[int, int], mode: str, backend: str
) -> None:
    """The backends use a smaller dilation with the same neighbours."""
    case = Case("z2", 1, (1, 1), 1, kernel_size, size, dilation=dilation, padding_mode=mode)
    assert_close(case.gradients(backend=backend), case.expected("reference"))


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("mode", MODES)
def test_a_huge_dilation_takes_no_memory(mode: str, backend: str) -> None:
    case = Case("z2", 1, (1, 1), 1, 5, (2, 3), dilation=10**6, padding_mode=mode)
    same = replace(case, dilation=(2, 1) if mode == "circular" else 3)  # remainders of 2 rows and 3 columns
    assert_close(case.gradients(backend=backend), same.expected("reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mode_that_a_backend_does_not_know_is_an_error(backend: str) -> None:
    """A mode that is added to ``PaddingMode`` alone would otherwise be computed as zeros."""
    x = torch.ones(1, 2, 3, 3)
    call = check_call((x, x, x), (None,) * 4, kernel_size=3, num_heads=1, scale=None, group="z2")
    unknown: Any = "reflect"
    with pytest.raises(AssertionError, match="'reflect'"):
        _BACKENDS[backend].load()(replace(call, window=Window((3, 3), padding_mode=unknown)))


@pytest.mark.parametrize("dilation", [1, 9])
def test_an_unknown_mode_is_fitted_to_no_map(dilation: int) -> None:
    unknown: Any = "reflect"
    with pytest.raises(AssertionError, match="'reflect'"):
        Window((3, 3), (dilation, dilation), unknown).fitted_to((4, 4))


def test_reach_of_dilated_windows() -> None:
    assert Window((5, 1), (2, 3)).reach == (4, 0)
    assert Window((3, 7)).taps == 21


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dilation": 0}, r"^dilation: expected an integer ≥ 1, or two, \(rows, columns\); got 0$"),
        ({"dilation": (1, 2, 3)}, r"^dilation: expected .*; got \(1, 2, 3\)$"),
        ({"dilation": 1.5}, r"^dilation: expected .*; got 1.5$"),
        (
            {"padding_mode": "reflect"},
            r"^padding_mode: expected one of 'zeros', 'circular', 'exclude'; got 'reflect'$",
        ),
        (
            {"group": "p4", "kernel_size": (1, 3)},
            r"^group 'p4' turns rows into columns: expected a square window and one dilation; got",
        ),
        ({"group": "c8", "dilation": (1, 2)}, r"^group 'c8' turns rows into columns: .*dilation=\(1, 2\)$"),
        ({"dropout_p": 1.1}, r"^dropout_p: expected a probability, 0 to 1; got 1.1$"),
        ({"dropout_p": "a"}, r"^dropout_p: expected a probability, 0 to 1; got 'a'$"),
        ({"scale": "a"}, r"^scale: expected a finite number; got 'a'$"),
        ({"scale": float("nan")}, r"^scale: expected a finite number; got nan$"),
        ({"scale": True}, r"^scale: expected a finite number; got True$"),
        (
            {"scale": torch.tensor(1.0, requires_grad=True)},
            r"^scale: expected a number, which is not trained; got a tensor of shape \[\], of which",
        ),
        ({"scale": torch.ones(2)}, r"^scale: expected a number, .*; got a tensor of shape \[2\], of which"),
        ({"dropout_p": torch.tensor(0.1)}, r"^dropout_p: expected a probability, 0 to 1; got Tensor"),
        ({"kernel_size": True}, r"^kernel_size: expected an odd integer ≥ 1, .*; got True$"),
        ({"dropout_p": 0.5, "backend": "numba"}, r"^dropout_p=0.5 needs the eager backend; got"),
    ],
    ids=str,
)
def test_bad_windows_are_refused(options: dict[str, Any], message: str) -> None:
    order = len(get_group(options.get("group", "z2")))
    x = torch.randn(1, 2, *(() if order == 1 else (order,)), 4, 4)
    with pytest.raises(ValueError, match=message):
        affine_self_conv(x, x, x, None, None, None, None, num_heads=1, **{"kernel_size": 3} | options)


def test_lifting_takes_planar_features() -> None:
    x, psi = torch.randn(1, 2, 4, 5, 5), torch.randn(2, 3, 3)
    with pytest.raises(ValueError, match=r"query: expected \[N, C, h, w\] to be lifted to group 'p4'; got"):
        affine_self_conv(x, x, x, psi, None, psi, None, num_heads=1, group="p4", lifting=True)
    with pytest.raises(ValueError, match=r"psi_k: expected \[2, 3, 3\], or \[2, 2, 3, 3\]"):
        affine_self_conv(
            x[:, :, 0], x[:, :, 0], x[:, :, 0], torch.randn(2, 4, 3, 3), None, psi, None,
            num_heads=1, group="p4", lifting=True,
        )  # fmt: skip


def test_attention_dropout() -> None:
    torch.manual_seed(0)
    case = Case("p4", 2, (2, 2), 2, 3, (6, 6))
    t = case.tensors()
    out, alpha = case.run(t, return_attention=True)
    dropped_out, dropped = case.run(t, return_attention=True, dropout_p=0.25)
    kept = dropped != 0
    assert abs(kept.double().mean().item() - 0.75) < 0.02
    torch.testing.assert_close(dropped[kept], alpha[kept] / 0.75)
    assert not torch.equal(dropped_out, out)
    assert case.run(t, dropout_p=0.25).shape == out.shape
