"""The paper's equations on cases small enough to work out by hand."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from selfconv.groups import GROUPS, P4, P4M, Z2, Group
from selfconv.ops import reference as ref


def tensor(*values: object) -> Tensor:
    """One argument is the tensor's contents, several are its entries."""
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def row(*values: float) -> Tensor:
    """A planar function of one channel on a map of one row."""
    return tensor(*values).reshape(1, 1, -1)


def middle(*values: float) -> Tensor:
    """A 3×3 filter of one channel that is zero but in its middle row."""
    window = torch.zeros(1, 3, 3, dtype=torch.float64)
    window[0, 1] = tensor(*values)
    return window


def test_translation_moves_the_filter_to_x() -> None:
    psi = torch.arange(9.0).reshape(1, 3, 3)
    assert ref.translated(psi, (5, 5), (4, 6)).item() == psi[0, 0, 2].item()


def test_eq1_convolution() -> None:
    # at x=1: 1·10 + 2·100 + 4·1000; outside the image f is zero
    out = ref.convolution(row(1, 2, 4), middle(10, 100, 1000)[None])
    assert out.flatten().tolist() == [2100, 4210, 420]


def test_eq3_group_convolution_of_one_position() -> None:
    """On a 1×1 map with k=1: out(P) = Σ_R f(R) ψ(P⁻¹R), a circular correlation over C4."""
    f, psi = tensor(1, 2, 3, 4).reshape(1, 4, 1, 1), tensor(1, 10, 100, 1000).reshape(1, 1, 4, 1, 1)
    out = ref.group_convolution(f, psi, P4)
    assert out.flatten().tolist() == [4321, 1432, 2143, 3214]


def test_lifting_turns_the_filter() -> None:
    """One pixel seen through a filter with one entry, right of its centre: each quarter turn moves it."""
    f = torch.zeros(1, 3, 3, dtype=torch.float64)
    f[0, 1, 1] = 1
    out = ref.lifting_convolution(f, middle(0, 0, 1)[None], P4)
    # [f ⋆ ψ](P, x) = Σ_y f(y) ψ(P⁻¹(y − x)) is one where y = (1, 1) is P·(0, 1) away from x
    found = [tuple(map(int, torch.nonzero(out[0, p])[0])) for p in P4]
    assert found == [(1, 0), (2, 1), (1, 2), (0, 1)]


def test_eq4_simple_attention() -> None:
    out = ref.simple_attention(row(1, 2), 3, 1, 1.0)
    total = math.e**1 + math.e**2 + 7  # y=0, y=1, and seven positions outside, where f = 0
    assert out[0, 0, 0].item() == pytest.approx((math.e + 2 * math.e**2) / total)


def test_eq5_attention_uses_each_of_q_k_v() -> None:
    out = ref.attention(row(2), row(3), row(5), 1, 1, 1.0)
    assert out.item() == 5  # a window of one: α = 1
    out = ref.attention(row(1), row(0.5), row(6), 3, 1, 2.0)
    assert out.item() == pytest.approx(6 * math.e / (math.e + 8))


def test_eq6_affine_map() -> None:
    assert ref.affine_map(row(3, 5), middle(1, 2, 10), middle(0, 0, 7), (0, 0), (0, 1)).item() == 57
    # outside the image f is zero and β still acts
    assert ref.affine_map(row(3, 5), middle(1, 2, 10), middle(4, 0, 7), (0, 0), (0, -1)).item() == 4


def test_eq7_simple_asc() -> None:
    psi, beta = tensor(2).reshape(1, 1, 1), tensor(1).reshape(1, 1, 1)
    assert ref.simple_asc(row(3), psi, beta, 1, 1.0).item() == 7  # α = 1 in a window of one
    # two positions: A = (2·3+1 at x, 0·10+5 to the right, outside), scores 7·7 and 7·5
    psi, beta = middle(0, 2, 10), middle(0, 1, 5)
    weights = [math.exp(7 * a / 7) for a in (7, 5, *[0] * 7)]
    expected = (weights[0] * 7 + weights[1] * 5) / sum(weights)
    assert ref.simple_asc(row(3), psi, beta, 1, 1 / 7).item() == pytest.approx(expected)


def test_eq8_linear_map() -> None:
    f = tensor([[[1, 2]], [[10, 20]]])
    assert ref.linear_map(f, tensor([[1, 1], [0, 3]]), tensor(0.5, 0)).tolist() == [
        [[11.5, 22.5]],
        [[30, 60]],
    ]


def test_eq9_query_map_acts_at_the_centre() -> None:
    q = tensor([[[1, 2]], [[3, 4]]])
    assert ref.asc_query(q, tensor(2, 10), tensor(1, 0)).tolist() == [[[3, 5]], [[30, 40]]]


def test_eq10_scores_are_a_softmax_in_each_head() -> None:
    query, key = tensor([[[1]], [[2]]]), tensor([[[3]], [[4]]])
    psi, beta = torch.ones(2, 3, 3, dtype=torch.float64), torch.zeros(2, 3, 3, dtype=torch.float64)
    alpha = ref.asc_score(query, key, psi, beta, (0, 0), 2, 1.0)
    assert alpha[0, 0].tolist() == pytest.approx([math.e**3 / (math.e**3 + 8), math.e**8 / (math.e**8 + 8)])
    assert torch.stack(list(alpha.values())).sum(0).tolist() == pytest.approx([1, 1])


def test_eq11_asc() -> None:
    one, none = torch.ones(1, 3, 3, dtype=torch.float64), torch.zeros(1, 3, 3, dtype=torch.float64)
    out = ref.asc(row(1), row(1), row(2), one, none, 3 * one, 4 * one, 1, 1.0)
    weight = math.e / (math.e + 8)
    assert out.item() == pytest.approx(weight * (2 * 3 + 4) + (1 - weight) * 4)


def test_eq12_group_affine_map_indexes_by_p_inverse_r() -> None:
    f = tensor(1, 2, 3, 4).reshape(1, 4, 1, 1)
    psi, beta = tensor(1, 10, 100, 1000).reshape(1, 4, 1, 1), tensor(0, 0, 0, 5).reshape(1, 4, 1, 1)
    assert ref.group_affine_map(f, psi, beta, P4, 1, (0, 0), 2, (0, 0)).item() == 3 * 10
    assert ref.group_affine_map(f, psi, beta, P4, 1, (0, 0), 0, (0, 0)).item() == 1 * 1000 + 5


@pytest.mark.parametrize("group", [P4, P4M], ids=str)
def test_eq24_beta_summed_over_the_group_is_a_function_on_the_plane(group: Group) -> None:
    g = group
    f, psi = torch.randn(2, len(g), 3, 3), torch.randn(2, len(g), 3, 3)
    beta = torch.randn(2, len(g), 3, 3)
    for p in g:
        summed = ref.sum_(ref.group_affine_map(f, psi, beta, g, p, (1, 1), r, (0, 1)) for r in g)
        planar = ref.summed_affine_map(f, psi, beta.sum(1), g, p, (1, 1), (0, 1))
        torch.testing.assert_close(summed, planar)


def test_eq22_eq23_the_affine_map_commutes_with_shifts() -> None:
    """A_(x)[L_t f](y) = A_(x−t)[f](y−t) at the neighbours, among them the centre y = x."""
    f, (psi, beta) = torch.randn(2, 6, 6), torch.randn(2, 2, 3, 3)
    shifted, x = f.roll((1, 2), (-2, -1)), (3, 3)
    for y in ref.neighbours(x, 3):
        expected = ref.affine_map(f, psi, beta, (x[0] - 1, x[1] - 2), (y[0] - 1, y[1] - 2))
        assert torch.equal(ref.affine_map(shifted, psi, beta, x, y), expected)


@pytest.mark.parametrize("group", [P4, P4M], ids=str)
def test_eq26_eq27_the_affine_map_commutes_with_the_group(group: Group) -> None:
    """A_(P,x)[L_S f](R, y) = A_(S⁻¹P,S⁻¹x)[f](S⁻¹R, S⁻¹y), at the centre y = x and at neighbours."""
    g, x = group, (1, 2)
    f, (psi, beta) = torch.randn(2, len(g), 5, 5), torch.randn(2, 2, len(g), 3, 3)

    def back(y: tuple[int, int], s: int) -> tuple[int, int]:
        i, j = map(int, g.apply(g.inverse[s], (y[0] - 2, y[1] - 2)))
        return i + 2, j + 2

    for s, p, r in product(g, g, (0, len(g) - 1)):
        moved = g.act(f, s)
        for y in (x, (2, 2), (1, 3), (0, 1)):
            s_p, s_r = g.product[g.inverse[s]][p], g.product[g.inverse[s]][r]
            expected = ref.group_affine_map(f, psi, beta, g, s_p, back(x, s), s_r, back(y, s))
            assert torch.equal(ref.group_affine_map(moved, psi, beta, g, p, x, r, y), expected)


FOUR_TURNS = [4321.5, 1432.5, 2143.5, 3214.5]  # Σ_R f(R) ψ(P⁻¹R) + ½ for f = 1, 2, 3, 4, ψ = 1, 10, 100, 1000


def test_eq13_eq14_simple_group_asc_of_one_position() -> None:
    """On a 1×1 map with k=1 there is one neighbour, α = 1, and out(P) = Σ_R f(R) ψ(P⁻¹R) + β."""
    f, psi = tensor(1, 2, 3, 4).reshape(1, 4, 1, 1), tensor(1, 10, 100, 1000).reshape(1, 4, 1, 1)
    beta = tensor(0.5).reshape(1, 1, 1)
    assert ref.simple_group_score(f, psi, beta, P4, 0, (0, 0), 1, 1.0)[0, 0].tolist() == [1]
    assert ref.simple_group_asc(f, psi, beta, P4, 1, 1.0).flatten().tolist() == FOUR_TURNS


def test_eq13_scores_compare_the_sums_over_the_group() -> None:
    f = tensor(1, 2, 3, 4).reshape(1, 4, 1, 1)
    psi, beta = torch.zeros(1, 4, 3, 3, dtype=torch.float64), torch.zeros(1, 3, 3, dtype=torch.float64)
    psi[..., 1, 1], beta[0, 1, 2] = 0.1, 2  # at the centre Σ_R = 1; one neighbour has β = 2
    alpha = ref.simple_group_score(f, psi, beta, P4, 0, (0, 0), 1, 1.0)
    total = math.e + math.e**2 + 7
    assert alpha[0, 0].item() == pytest.approx(math.e / total)
    assert alpha[0, 1].item() == pytest.approx(math.e**2 / total)


def test_eq15_eq16_squeeze_and_excite() -> None:
    f = tensor([[[1, 3]], [[2, 2]]])  # both channels have mean 2
    w_2, b_2, w_1, b_1 = tensor([[1, 1]]), tensor([-3]), tensor([[0], [math.log(3)]]), tensor(0, 0)
    assert ref.squeeze(f, w_1, b_1, w_2, b_2).tolist() == pytest.approx([0.5, 0.75])
    assert ref.excite(f, w_1, b_1, w_2, b_2)[1].flatten().tolist() == pytest.approx([1.5, 1.5])
    on_group = f[:, None].expand(2, 4, 1, 2)  # |G| counts the rotations too: the mean is the same
    assert ref.squeeze(on_group, w_1, b_1, w_2, b_2).tolist() == pytest.approx([0.5, 0.75])


def test_eq17_group_linear_map() -> None:
    f, w = tensor(1, 2, 3, 4).reshape(1, 4, 1, 1), tensor(1, 10, 100, 1000).reshape(1, 1, 4)
    assert ref.group_linear_map(f, w, tensor([0.5]), P4).flatten().tolist() == FOUR_TURNS


def test_eq18_group_query() -> None:
    q = tensor(1, 2, 3, 4).reshape(1, 4, 1, 1)
    out = ref.group_query(q, tensor([[1, 10, 100, 1000]]), tensor([7]), P4)
    assert out.flatten().tolist() == [4328, 1439, 2150, 3221]


def test_eq19_eq20_group_asc_weighs_by_query_and_key() -> None:
    query, key = tensor(1, 0, 0, 0).reshape(1, 4, 1, 1), tensor(1, 0, 0, 0).reshape(1, 4, 1, 1)
    value = tensor(6, 0, 0, 0).reshape(1, 4, 1, 1)
    psi = torch.zeros(1, 4, 3, 3, dtype=torch.float64)
    psi[:, 0] = 1  # plane P sees R = P alone
    none = torch.zeros(1, 3, 3, dtype=torch.float64)
    alpha = ref.group_score(query, key, psi, none, P4, 0, (0, 0), 1, 1.0)
    assert alpha[0, 0].item() == pytest.approx(math.e / (math.e + 8))
    out = ref.group_asc(query, key, value, psi, none, psi, none, P4, 1, 1.0)
    assert out.flatten().tolist() == pytest.approx([6 * math.e / (math.e + 8), 0, 0, 0])


def test_no_psi_is_the_identity_on_planes() -> None:
    q, k, v = torch.randn(3, 2, 4, 3, 2, dtype=torch.float64)
    beta_k, beta_v = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    one = torch.zeros(2, 4, 3, 3, dtype=torch.float64)
    one[:, 0] = 1
    written = ref.group_asc(q, k, v, one, beta_k, one, beta_v, P4, 2, 0.5)
    torch.testing.assert_close(ref.group_asc(q, k, v, None, beta_k, None, beta_v, P4, 2, 0.5), written)


def test_between_the_pixels_a_filter_is_its_sum_of_functions() -> None:
    """cos φ on a ring, turned by 45°, is (cos φ + sin φ) / √2 on that ring."""
    c8, x = GROUPS["c8"], (0, 0)
    basis = c8.basis(3)
    assert basis is not None
    cosine, sine = basis[2], basis[3]
    for y in ref.neighbours(x, 3):
        turned = ref.transformed(cosine, c8, 1, x, y)
        expected = (ref.translated(cosine, x, y) + ref.translated(sine, x, y)) / math.sqrt(2)
        assert turned.item() == pytest.approx(expected.item(), abs=1e-12)


def test_a_group_of_one_element_is_the_plane() -> None:
    q, k, v = torch.randn(3, 2, 3, 4, dtype=torch.float64)
    psi_k, psi_v = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    beta_k, beta_v = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    planar = ref.asc(q, k, v, psi_k, beta_k, psi_v, beta_v, 2, 0.5)
    lifted = (q[:, None], k[:, None], v[:, None], psi_k[:, None], beta_k, psi_v[:, None], beta_v)
    torch.testing.assert_close(ref.group_asc(*lifted, Z2, 2, 0.5)[:, 0], planar, rtol=0, atol=1e-14)
    simple = ref.simple_asc(q, psi_k, beta_k, 1, 0.5)
    on_group = ref.simple_group_asc(q[:, None], psi_k[:, None], beta_k, Z2, 1, 0.5)
    torch.testing.assert_close(on_group[:, 0], simple, rtol=0, atol=1e-14)
