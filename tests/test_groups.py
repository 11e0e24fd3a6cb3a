"""Group axioms and actions, checked for every combination of elements."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from selfconv.groups import GROUPS, IDENTITY, QUARTER_TURN, Group, get_group

HALF_TURN = ((-1, 0), (0, -1))
C2 = Group("c2", (IDENTITY, HALF_TURN))
every_group = pytest.mark.parametrize("group", [*GROUPS.values(), C2], ids=str)


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


@every_group
def test_actions_are_homomorphisms(group: Group) -> None:
    planar, on_group = torch.randn(2, 5, 4), torch.randn(2, len(group), 5, 4)
    for a, b in product(group, repeat=2):
        ab = group.product[a][b]
        assert torch.equal(group.act_planar(group.act_planar(planar, b), a), group.act_planar(planar, ab))
        assert torch.equal(group.act(group.act(on_group, b), a), group.act(on_group, ab))


@every_group
@pytest.mark.parametrize("size", [(3, 3), (4, 4), (2, 5)])
def test_planar_action_is_the_definition(group: Group, size: tuple[int, int]) -> None:
    """L_S[f](y) = f(S⁻¹y), with y measured from the centre of the map, in half cells."""
    f = torch.randn(size)
    for s in group:
        g = group.act_planar(f, s)
        h, w = g.shape
        for i, j in product(range(h), range(w)):
            u, v = group.apply(group.inverse[s], (2 * i - h + 1, 2 * j - w + 1))
            assert g[i, j] == f[(u + size[0] - 1) // 2, (v + size[1] - 1) // 2]


def test_the_quarter_turn_is_rot90_and_a_roll() -> None:
    x = torch.randn(2, 3, 4, 6, 5)
    p4 = GROUPS["p4"]
    assert torch.equal(p4.act(x, 1), torch.rot90(x, 1, (-2, -1)).roll(1, 2))
    assert p4.matrices[1] == QUARTER_TURN


def test_p4m_mirrors_left_to_right() -> None:
    x = torch.randn(3, 4, 5)
    assert torch.equal(GROUPS["p4m"].act_planar(x, 4), x.flip(-1))


@every_group
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_steering_is_the_action_on_filters(group: Group, k: int) -> None:
    on_group, planar = torch.randn(2, len(group), k, k), torch.randn(2, k, k)
    steered, steered_planar = group.steer(on_group), group.steer(planar, planar=True)
    assert steered.shape == (2, len(group), len(group), k, k)
    for p in group:
        assert torch.equal(steered[:, p], group.act(on_group, p))
        assert torch.equal(steered_planar[:, p], group.act_planar(planar, p))


def test_steering_is_differentiable() -> None:
    filters = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(GROUPS["p4"].steer, filters)


def test_what_is_not_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="product of two of its elements is not among them"):
        Group("turn", (IDENTITY, QUARTER_TURN))
    with pytest.raises(ValueError, match="identity first"):
        Group("late", (HALF_TURN, IDENTITY))
    with pytest.raises(ValueError, match="does not map the grid to itself"):
        Group("shear", (IDENTITY, ((1, 1), (0, 1))))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown group 'p6'; expected one of 'z2', 'p4', 'p4m'"):
        get_group("p6")
    with pytest.raises(ValueError, match=r"'p4' acts on maps \[..., 4, h, w\]; got shape \[2, 3, 5, 5\]"):
        GROUPS["p4"].act(torch.zeros(2, 3, 5, 5), 1)
    with pytest.raises(ValueError, match=r"'p4' steers filters \[..., 4, k, k\]; got shape \[4, 3, 5\]"):
        GROUPS["p4"].steer(torch.zeros(4, 3, 5))
