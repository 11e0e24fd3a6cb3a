"""Group axioms and actions, checked for every combination of elements."""

from __future__ import annotations

import math
import re
from itertools import product
from typing import Any

import pytest
import torch
from helpers import ROOT
from helpers.cases import D3, TILTED, C, S
from torch import Tensor

from selfconv._harmonics import Matrix
from selfconv.groups import GROUPS, IDENTITY, QUARTER_TURN, Group, cyclic, dihedral, get_group
from selfconv.testing import transform

HALF_TURN = ((-1, 0), (0, -1))
C2 = Group("c2", (IDENTITY, HALF_TURN))
EVERY = [*GROUPS.values(), C2, cyclic("c3", 3), D3, TILTED]
every_group = pytest.mark.parametrize("group", EVERY, ids=str)
exact_group = pytest.mark.parametrize("group", [g for g in EVERY if not g.band_limited], ids=str)
band_limited_group = pytest.mark.parametrize("group", [g for g in EVERY if g.band_limited], ids=str)


@every_group
def test_axioms(group: Group) -> None:
    for a, b, c in product(group, repeat=3):
        assert group.product[group.product[a][b]][c] == group.product[a][group.product[b][c]]
    for a in group:
        assert group.product[a][0] == a == group.product[0][a]
        assert group.product[a][group.inverse[a]] == 0 == group.product[group.inverse[a]][a]
        assert sorted(group.product[a]) == list(group)  # a Latin square


@every_group
def test_quotient_indexes_filters(group: Group) -> None:
    for p, r in product(group, repeat=2):
        assert group.product[p][group.quotient[p][r]] == r


@exact_group
def test_actions_are_homomorphisms(group: Group) -> None:
    planar, on_group = torch.randn(2, 5, 4), torch.randn(2, len(group), 5, 4)
    for a, b in product(group, repeat=2):
        ab = group.product[a][b]
        assert torch.equal(group.act_planar(group.act_planar(planar, b), a), group.act_planar(planar, ab))
        assert torch.equal(group.act(group.act(on_group, b), a), group.act(on_group, ab))


@exact_group
@pytest.mark.parametrize("size", [(3, 3), (4, 4), (2, 5)])
def test_planar_action_is_the_definition(group: Group, size: tuple[int, int]) -> None:
    """L_S[f](y) = f(S⁻¹y), with y measured from the centre of the map, in half cells."""
    f = torch.randn(size)
    for s in group:
        g = group.act_planar(f, s)
        h, w = g.shape
        for i, j in product(range(h), range(w)):
            u, v = map(int, group.apply(group.inverse[s], (2 * i - h + 1, 2 * j - w + 1)))
            assert g[i, j] == f[(u + size[0] - 1) // 2, (v + size[1] - 1) // 2]


def test_the_quarter_turn_is_rot90_and_a_roll() -> None:
    x = torch.randn(2, 3, 4, 6, 5)
    p4 = GROUPS["p4"]
    assert torch.equal(p4.act(x, 1), torch.rot90(x, 1, (-2, -1)).roll(1, 2))
    assert p4.matrices[1] == QUARTER_TURN


def test_p4m_mirrors_left_to_right() -> None:
    x = torch.randn(3, 4, 5)
    assert torch.equal(GROUPS["p4m"].act_planar(x, 4), x.flip(-1))


@exact_group
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_steering_is_the_action_on_filters(group: Group, k: int) -> None:
    on_group, planar = torch.randn(2, len(group), k, k), torch.randn(2, k, k)
    steered, steered_planar = group.steer(on_group), group.steer(planar, planar=True)
    assert steered.shape == (2, len(group), len(group), k, k)
    for p in group:
        assert torch.equal(steered[:, p], group.act(on_group, p))
        assert torch.equal(steered_planar[:, p], group.act_planar(planar, p))


@pytest.mark.parametrize("name", ["p4", "c8"])
def test_steering_is_differentiable(name: str) -> None:
    group = GROUPS[name]
    filters = torch.randn(2, len(group), 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(group.steer, filters)
    learned = torch.randn(2, *group.parameter_shape(3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: group.steer(group.window_values(c, 3), planar=True), learned)


# ---- between the pixels ----


def test_which_elements_are_exact() -> None:
    assert GROUPS["c8"].exact == (True, False) * 4
    assert GROUPS["c12"].exact == (True, False, False) * 4
    assert GROUPS["d8"].exact == (True, False) * 8
    assert D3.exact == (True, False, False, True, False, False)
    assert all(GROUPS["p4m"].exact)
    turns = [((math.cos(a), -math.sin(a)), (math.sin(a), math.cos(a))) for a in (0, math.pi / 2, math.pi)]
    rounded = Group("p4", (*turns, ((0, 1), (-1, 0))))  # cos(π/2) is 6e-17
    assert rounded == GROUPS["p4"]


@band_limited_group
@pytest.mark.parametrize("k", [1, 3, 5])
def test_rotations_of_filters_compose(group: Group, k: int) -> None:
    """Steering is a homomorphism, as the basis turned is a sum of the basis."""
    shape = (2, len(group), *group.parameter_shape(k))
    filters = group.window_values(torch.randn(shape, dtype=torch.float64), k)
    steered, planar = group.steer(filters), group.steer(filters[:, 0], planar=True)
    assert steered.shape == (2, len(group), len(group), k, k)
    for b in (1, len(group) - 1):
        again, planar_again = group.steer(steered[:, b]), group.steer(planar[:, b], planar=True)
        for a in group:
            ab = group.product[a][b]
            torch.testing.assert_close(planar_again[:, a], planar[:, ab], rtol=0, atol=1e-12)
            torch.testing.assert_close(again[:, a], steered[:, ab], rtol=0, atol=1e-12)


@band_limited_group
@pytest.mark.parametrize("k", [1, 3, 5])
def test_exact_elements_permute_the_filters_pixels(group: Group, k: int) -> None:
    shape = (2, len(group), *group.parameter_shape(k))
    filters = group.window_values(torch.randn(shape, dtype=torch.float64), k)
    steered, planar = group.steer(filters), group.steer(filters[:, 0], planar=True)
    for p in group:
        if group.exact[p]:
            torch.testing.assert_close(steered[:, p], group.act(filters, p), rtol=0, atol=1e-12)
            expected = group.act_planar(filters[:, 0], p)
            torch.testing.assert_close(planar[:, p], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 5, 7, 9])
def test_the_basis_has_variance_one_and_tells_its_functions_apart(k: int) -> None:
    basis = GROUPS["c8"].basis(k)
    assert basis is not None
    assert basis.shape == (GROUPS["c8"].parameter_shape(k)[0], k, k)
    assert basis.square().sum(0).mean().item() == pytest.approx(1)
    assert torch.linalg.cond(basis.flatten(1)).item() < 5
    assert GROUPS["p4"].basis(k) is None


def test_basis_sizes() -> None:
    assert [GROUPS["c8"].parameter_shape(k) for k in (1, 3, 5, 7)] == [(1,), (6,), (13,), (22,)]
    assert GROUPS["p4"].parameter_shape(3) == (3, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_keep_their_dtype_in_autocast(dtype: torch.dtype) -> None:
    """They are made in float32, whatever autocast does to products of matrices."""
    c8 = GROUPS["c8"]
    coefficients = torch.randn(2, 8, 6, dtype=dtype)
    filters = c8.steer(c8.window_values(coefficients, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(c8.steer(c8.window_values(coefficients, 3)), filters)
    assert filters.dtype == dtype


def test_filters_made_in_inference_mode_train_afterwards() -> None:
    group = cyclic("c20", 20)  # whose constants nobody has made yet
    with torch.inference_mode():
        group.steer(torch.randn(3, 3), planar=True)
    filters = torch.randn(3, 3, requires_grad=True)
    group.steer(filters, planar=True).sum().backward()
    assert filters.grad is not None


@band_limited_group
def test_images_between_the_pixels(group: Group) -> None:
    """A smooth blob turned by interpolation is the blob at its turned place; exact elements move pixels."""
    rows, columns = torch.meshgrid(*[torch.arange(21.0, dtype=torch.float64) - 10] * 2, indexing="ij")

    def blob(row: float, column: float) -> Tensor:
        return torch.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 8)

    upright = blob(3, 1)
    for s in group:
        turned = group.act_planar(upright, s)
        torch.testing.assert_close(turned, blob(*group.apply(s, (3, 1))), rtol=0, atol=5e-3)
        q, r = group.factors[s]
        assert torch.equal(turned, group.act_planar(group.act_planar(upright, r), q))


def test_oblong_and_small_maps_are_turned() -> None:
    c8 = GROUPS["c8"]
    for size in ((1, 1), (2, 7), (3, 3)):
        assert c8.act(torch.ones(2, 8, *size), 1).shape == (2, 8, *size)
        assert c8.act(torch.ones(2, 8, *size), 3).shape == (2, 8, *size[::-1])
    inside = c8.act_planar(torch.ones(21, 21), 1)
    assert inside[10, 10].item() == pytest.approx(1)
    assert inside[0, 0] == 0  # from outside


def test_matrices_may_be_a_tensor_or_an_array() -> None:
    matrices: Any = torch.tensor(GROUPS["c8"].matrices, dtype=torch.float64)
    assert Group("c8", matrices) == Group("c8", matrices.numpy()) == GROUPS["c8"]
    with pytest.raises(ValueError, match=r"^group 'a': expected 2×2 matrices of finite numbers; got Tensor$"):
        Group("a", matrices[0])


def test_what_is_not_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="product of two of its elements is not among them"):
        Group("turn", (IDENTITY, QUARTER_TURN))
    with pytest.raises(ValueError, match="identity first"):
        Group("late", (HALF_TURN, IDENTITY))
    with pytest.raises(ValueError, match="is neither a rotation nor a reflection"):
        Group("shear", (IDENTITY, ((1, 1), (0, 1))))


def rounded(group: Group, decimals: int) -> tuple[Any, ...]:
    return tuple(tuple(tuple(round(e, decimals) for e in row) for row in matrix) for matrix in group.matrices)


def rotation(angle: float) -> Matrix:
    return ((math.cos(angle), -math.sin(angle)), (math.sin(angle), math.cos(angle)))


def in_float32(order: int) -> Any:
    angles = torch.arange(order, dtype=torch.float32) * (math.tau / order)
    return torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], 1).reshape(-1, 2, 2)


def test_elements_that_rounding_has_moved_are_exact() -> None:
    """Those of float32 too, whose entries are off by 1e-7: quarter turns, and a mirror by itself."""
    turns = Group("turns", tuple(in_float32(4).tolist()))
    assert turns.matrices == GROUPS["p4"].matrices
    assert not turns.band_limited
    assert Group("flip", (IDENTITY, ((1, -8.7e-8), (-8.7e-8, -1)))).matrices[1] == ((1, 0), (0, -1))
    assert Group("c8", rounded(GROUPS["c8"], 14)) == GROUPS["c8"]  # the table's own, bit for bit
    c, s = math.cos(8e-4), math.sin(8e-4)  # c is 1 − 3e-7
    assert Group("oblique", (IDENTITY, ((c, s), (s, -c)))).exact == (True, False)


NO_ROTATION = "is neither a rotation nor a reflection"
NO_PRODUCT = "the product of two of its elements is not among them"


@pytest.mark.parametrize(
    ("name", "matrices", "fault", "deviation"),
    [
        ("c8", rounded(GROUPS["c8"], 7), NO_ROTATION, "e-0[78]"),
        ("c8", in_float32(8).tolist(), NO_ROTATION, "e-08"),
        ("c12", in_float32(12).tolist(), NO_ROTATION, "e-08"),
        ("drifting", tuple(rotation(angle) for angle in (0, 2.0943952, 4.1887903)), NO_PRODUCT, "e-0[78]"),
    ],
    ids=["decimals", "c8 in float32", "c12 in float32", "angles"],
)  # fmt: skip
def test_matrices_that_are_not_precise_are_refused(
    name: str, matrices: Any, fault: str, deviation: str
) -> None:
    """So that rotations of filters compose exactly in every group."""
    expected = "expected a precision of 1e-12, which matrices computed in float64 have; got a deviation of"
    with pytest.raises(ValueError, match=rf"^group '{name}': .*{fault}: {expected} \d\.\d{deviation}$"):
        Group(name, tuple(matrices))


@pytest.mark.parametrize(
    ("matrices", "fault"),
    [((IDENTITY, ((C, -S), (S, C))), NO_PRODUCT), ((IDENTITY, ((1, 0), (0, 2))), NO_ROTATION)],
)
def test_of_what_is_no_group_no_precision_is_said(matrices: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"^group 'far': .*{fault}$"):
        Group("far", matrices)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown group 'p6'; expected one of 'z2', 'p4', 'p4m'"):
        get_group("p6")
    with pytest.raises(ValueError, match=r"'p4' acts on maps \[..., 4, h, w\]; got shape \[2, 3, 5, 5\]"):
        GROUPS["p4"].act(torch.zeros(2, 3, 5, 5), 1)
    with pytest.raises(ValueError, match=r"'p4' steers filters \[..., 4, k, k\]; got shape \[4, 3, 5\]"):
        GROUPS["p4"].steer(torch.zeros(4, 3, 5))
    for bad in (lambda: GROUPS["c8"].steer(torch.zeros(8, 4, 4)), lambda: GROUPS["c8"].parameter_shape(4)):
        with pytest.raises(ValueError, match=r"'c8' turns .*: expected a window of odd size; got 4×4"):
            bad()


@pytest.mark.parametrize("k", [-3, 0, 5.0, True, "3", (3, 5.0), (3, 3, 3)])
@pytest.mark.parametrize("name", ["p4", "c8"])
def test_a_window_is_an_integer_or_two(name: str, k: Any) -> None:
    for refuse in (GROUPS[name].basis, GROUPS[name].parameter_shape):
        with pytest.raises(ValueError, match=r"^k: expected an integer ≥ 1, or two, \(rows, columns\); got "):
            refuse(k)


def test_windows_that_the_group_does_not_map_to_themselves_are_refused() -> None:
    c8: Any = GROUPS["c8"]
    message = "^group 'c8' does not map rows to rows: expected a square window; got 3×5$"
    for refuse in (c8.basis, c8.parameter_shape, lambda k: c8.window_values(torch.randn(2, 6), k)):
        with pytest.raises(ValueError, match=message):
            refuse((3, 5))
    assert c8.basis((3, 3)).shape == (6, 3, 3)
    assert C2.parameter_shape((3, 5)) == (3, 5)


def test_filters_and_coefficients_have_the_shape_of_the_window() -> None:
    c8 = GROUPS["c8"]
    message = r"^group 'c8' has 13 functions for 5×5 filters: expected coefficients \[..., 13\]; got shape "
    with pytest.raises(ValueError, match=message + r"\[2, 6\]$"):
        c8.window_values(torch.randn(2, 6), 5)
    for shape, planar, lead in (([5], True, ""), ([], True, ""), ([3, 3], False, "8, ")):
        message = rf"^group 'c8' steers filters \[..., {lead}k, k\]; got shape {re.escape(str(shape))}$"
        with pytest.raises(ValueError, match=message):
            c8.steer(torch.randn(shape), planar=planar)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_integer_filters_have_no_values_between_the_pixels(dtype: torch.dtype) -> None:
    """Rotated by 45° they are no integers; a permutation of pixels takes any dtype."""
    c8 = GROUPS["c8"]
    message = "^group 'c8' computes values between the pixels: expected {} of a floating dtype; got " + str(
        dtype
    )
    with pytest.raises(TypeError, match=message.format("filters")):
        c8.steer(torch.ones(3, 3, dtype=dtype), planar=True)
    with pytest.raises(TypeError, match=message.format("filters")):
        c8.steer(torch.ones(8, 3, 3, dtype=dtype))
    with pytest.raises(TypeError, match=message.format("coefficients")):
        c8.window_values(torch.ones(6, dtype=dtype), 3)
    assert GROUPS["p4"].steer(torch.ones(3, 3, dtype=dtype), planar=True).dtype == dtype


def test_ring_0_of_the_basis_has_one_function_as_the_documentation_says() -> None:
    basis = GROUPS["c8"].basis(5)
    assert basis is not None
    at_the_centre = [f for f, value in enumerate(basis[:, 2, 2]) if value]
    assert at_the_centre == [0, 1, 6]  # m = 0 on the rings 0, 1 and 2, which have 1, 5 and 7 functions
    assert "m = 0 alone on ring 0" in (ROOT / "docs" / "angles.md").read_text("utf-8")


def test_orders_are_integers_and_names_of_the_table_are_taken() -> None:
    for make, order in ((cyclic, 2.5), (cyclic, 0), (dihedral, "4"), (dihedral, True)):
        with pytest.raises(ValueError, match=f"^group 'a': order: expected an integer ≥ 1; got {order!r}$"):
            make("a", order)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^group 'p4': expected the 4 elements that this name has in GROUPS"
    ):
        Group("p4", (IDENTITY, ((-1, 0), (0, -1))))
    assert Group("p4", GROUPS["p4"].matrices) == GROUPS["p4"]
    for element in (1.0, True, "1", 4):
        with pytest.raises(ValueError, match=r"^s: expected an element of 'p4', 0 to 3; got"):
            transform(torch.ones(1, 1, 2, 2), element, "p4")  # type: ignore[arg-type]
