"""Features to and from escnn, with the real one where it can be imported and otherwise ``escnn_stub``.

Both have passed this file, the real one as version 1.0.11 (its wheel beside an empty ``lie_learn``, without
``py3nj``; in the plane it needs neither). The first two tests are the facts the module rests on.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT, escnn_stub
from torch import Tensor, nn

try:
    import escnn
except ModuleNotFoundError:
    escnn_stub.install()
    import escnn
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from selfconv.escnn import AsEscnn, FromEscnn, from_escnn, group_of, to_escnn
from selfconv.groups import GROUPS, IDENTITY, MIRROR, Group
from selfconv.nn import AffineSelfConv2d, GroupPool, LiftingConv2d, Upsample2d
from selfconv.testing import audit, equivariance_error, transform

SPACES: dict[str, tuple[Any, str]] = {
    "C1": (lambda: gspaces.trivialOnR2(), "z2"),
    "C4": (lambda: gspaces.rot2dOnR2(4), "p4"),
    "D4": (lambda: gspaces.flipRot2dOnR2(4), "p4m"),
    "D4, horizontal axis": (lambda: gspaces.flipRot2dOnR2(4, axis=0.0), "p4m"),
    "D4, diagonal axis": (lambda: gspaces.flipRot2dOnR2(4, axis=math.pi / 4), "p4m"),
    "C2": (lambda: gspaces.rot2dOnR2(2), "C2_on_R2[(None, 2)]"),
    "D2": (lambda: gspaces.flipRot2dOnR2(2), f"D2_on_R2[({math.pi}, 2)]"),
}
# escnn makes its filters in float32 and shares them between networks, which double() then changes for all
STUB = escnn.nn.R2Conv is escnn_stub.R2Conv
DTYPE, EXACT = (torch.float64, 1e-10) if STUB else (torch.float32, 1e-5)
KNOWN = ("z2", "p4", "p4m", "c8")
every_space = pytest.mark.parametrize("name", SPACES)


@pytest.fixture(autouse=True)
def _known_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that somebody registers may have the elements of one of the spaces."""
    for name in set(GROUPS) - set(KNOWN):
        monkeypatch.delitem(GROUPS, name)


def types(space: Any, fields: int = 4) -> tuple[Any, Any]:
    return FieldType(space, 3 * [space.trivial_repr]), FieldType(space, fields * [space.regular_repr])


def features(group: Group, channels: int = 4, size: int = 5) -> Tensor:
    return torch.randn(2, channels, *([] if len(group) == 1 else [len(group)]), size, size)


# ---- the facts ----


def test_escnn_orders_elements_and_planes_like_this() -> None:
    """The elements' matrices on (x, y), in order, and where each moves the planes of a regular field."""
    turns = [[[1, 0], [0, 1]], [[0, -1], [1, 0]], [[-1, 0], [0, -1]], [[0, 1], [-1, 0]]]
    mirrors = [[[-1, 0], [0, 1]], [[0, -1], [-1, 0]], [[1, 0], [0, -1]], [[0, 1], [1, 0]]]
    moved = {
        "C4": [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]],
        "D4": [
            [0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 0, 5, 6, 7, 4], [2, 3, 0, 1, 6, 7, 4, 5],
            [3, 0, 1, 2, 7, 4, 5, 6], [4, 7, 6, 5, 0, 3, 2, 1], [5, 4, 7, 6, 1, 0, 3, 2],
            [6, 5, 4, 7, 2, 1, 0, 3], [7, 6, 5, 4, 3, 2, 1, 0],
        ],
    }  # fmt: skip
    for name, matrices in (
        ("C4", turns),
        ("D4", turns + mirrors),
        ("D4, horizontal axis", turns + mirrors[2:] + mirrors[:2]),
        ("D4, diagonal axis", turns + mirrors[3:] + mirrors[:3]),
    ):
        space = SPACES[name][0]()
        elements = space.fibergroup.elements
        assert np.abs(np.array([space.basespace_action(e) for e in elements]) - matrices).max() < 1e-9
        planes = [np.asarray(space.regular_repr(e)).round().argmax(0).tolist() for e in elements]
        assert planes == moved[name[:2]]


def test_escnn_turns_maps_counter_clockwise() -> None:
    space = gspaces.rot2dOnR2(4)
    image, regular = types(space, 1)
    quarter = space.fibergroup.elements[1]
    x = torch.arange(27.0).reshape(1, 3, 3, 3)
    turned = torch.as_tensor(GeometricTensor(x, image).transform(quarter).tensor)
    torch.testing.assert_close(turned, torch.rot90(x, 1, (-2, -1)))
    planes = torch.arange(36.0).reshape(1, 4, 3, 3)
    turned = torch.as_tensor(GeometricTensor(planes, regular).transform(quarter).tensor)
    torch.testing.assert_close(turned, torch.rot90(planes, 1, (-2, -1)).roll(1, 1))
    mirror = gspaces.flipRot2dOnR2(4)
    mirrored = GeometricTensor(x, types(mirror)[0]).transform(mirror.fibergroup.elements[4]).tensor
    torch.testing.assert_close(torch.as_tensor(mirrored), x.flip(-1))


# ---- conversion ----


@every_space
def test_round_trip_through_escnn(name: str) -> None:
    space, group_name = SPACES[name][0](), SPACES[name][1]
    group = group_of(space)
    assert group.name == group_name
    image, regular = types(space)
    x, planar = features(group), torch.randn(2, 3, 5, 4)
    assert torch.equal(from_escnn(to_escnn(x, regular)), x)
    assert to_escnn(x, regular).shape == (2, 4 * len(group), 5, 5)
    assert to_escnn(planar, image).tensor is planar
    assert from_escnn(GeometricTensor(planar, image)) is planar
    fields = torch.randn(2, 4 * len(group), 5, 5)
    assert torch.equal(to_escnn(from_escnn(GeometricTensor(fields, regular)), regular).tensor, fields)
    if name in ("C4", "D4"):  # planes in the same order: nothing is copied, channels come first
        assert to_escnn(x, regular).tensor.data_ptr() == x.data_ptr()
        assert torch.equal(to_escnn(x, regular).tensor, x.flatten(1, 2))


@every_space
def test_actions_agree_with_escnn(name: str) -> None:
    """Every element, by escnn's own transform: of planes and of places."""
    space = SPACES[name][0]()
    group = group_of(space)
    image, regular = types(space)
    x, planar = features(group), torch.randn(2, 3, 5, 5)
    seen = set()
    for element in space.fibergroup.elements:
        there = from_escnn(to_escnn(planar, image).transform(element))
        (s,) = [
            s for s in group if torch.allclose(torch.as_tensor(there), group.act_planar(planar, s), atol=1e-5)
        ]
        seen.add(s)
        turned = torch.as_tensor(to_escnn(x, regular).transform(element).tensor)
        here = from_escnn(GeometricTensor(turned, regular))
        torch.testing.assert_close(here, transform(x, s, group), rtol=0, atol=1e-5)
    assert seen == {*group}


def test_group_elements_in_another_order() -> None:
    group = Group("pmm", (IDENTITY, MIRROR, ((-1, 0), (0, 1)), ((-1, 0), (0, -1))))
    space = gspaces.flipRot2dOnR2(2)
    _, regular = types(space)
    assert group.matrices != group_of(space).matrices
    x = features(group)
    fields = to_escnn(x, regular, group)
    assert not torch.equal(fields.tensor, x.flatten(1, 2))
    assert torch.equal(from_escnn(fields, group), x)
    for element in space.fibergroup.elements:
        here = from_escnn(GeometricTensor(torch.as_tensor(fields.transform(element).tensor), regular), group)
        assert any(torch.allclose(here, group.act(x, s), atol=1e-5) for s in group)


# ---- networks of both ----


@every_space
def test_our_layers_in_a_network_of_escnn(name: str) -> None:
    space = SPACES[name][0]()
    group = group_of(space)
    image, regular = types(space)
    network = escnn.nn.SequentialModule(
        escnn.nn.R2Conv(image, regular, 3, padding=1),
        AsEscnn(AffineSelfConv2d(4, 4, 3, num_heads=2, group=group), regular, regular),
        escnn.nn.ReLU(regular),
        AsEscnn(nn.Sequential(Upsample2d(2, group=group), GroupPool(group=group)), regular, trivial(space)),
    ).to(DTYPE)
    x = torch.randn(2, 3, 5, 5, dtype=DTYPE)
    out = network(GeometricTensor(x, image))
    assert tuple(out.shape) == tuple(network.evaluate_output_shape((2, 3, 5, 5))) == (2, 4, 10, 10)
    with torch.no_grad():
        for element in space.fibergroup.elements:
            turned = torch.as_tensor(GeometricTensor(x, image).transform(element).tensor)
            moved = network(GeometricTensor(turned, image)).tensor
            expected = torch.as_tensor(
                GeometricTensor(out.tensor.detach(), out.type).transform(element).tensor
            )
            assert (moved - expected).abs().max() < EXACT * out.tensor.abs().max()
    out.tensor.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def trivial(space: Any) -> Any:
    return FieldType(space, 4 * [space.trivial_repr])


@every_space
def test_a_layer_of_escnn_in_a_network_of_ours(name: str) -> None:
    space = SPACES[name][0]()
    group = group_of(space)
    _, regular = types(space)
    network = nn.Sequential(
        LiftingConv2d(3, 4, 3, padding=1, group=group),
        FromEscnn(escnn.nn.R2Conv(regular, regular, 3, padding=1)),
        AffineSelfConv2d(4, 4, 3, num_heads=2, group=group),
    ).to(DTYPE)
    x = torch.randn(2, 3, 5, 5, dtype=DTYPE)
    if len(group) > 1:
        assert max(equivariance_error(network, x, group)) < EXACT
    network(x).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


# ---- audits of networks of both ----


class Images(nn.Module):
    """A network of escnn as one of images: [N, 3, h, w] to the tensor of its fields."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.group, self.in_channels = network, group_of(network.in_type.gspace), 3

    def forward(self, x: Tensor) -> Tensor:
        return self.network(GeometricTensor(x, self.network.in_type)).tensor


class PlanesSwapped(escnn.nn.EquivariantModule):
    """Deliberately broken: exchanges the first two planes of each field."""

    def __init__(self, in_type: Any, order: int) -> None:
        super().__init__()
        self.in_type = self.out_type = in_type
        self.order = order

    def forward(self, x: Any) -> Any:
        planes = x.tensor.unflatten(1, (-1, self.order))
        swapped = torch.cat([planes[:, :, [1, 0]], planes[:, :, 2:]], 2).flatten(1, 2)
        return GeometricTensor(swapped, x.type)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape


def of_escnn(space: Any, *, broken: bool) -> Any:
    image, regular = types(space)
    group = group_of(space)
    swap = [PlanesSwapped(regular, len(group))] if broken else []
    return escnn.nn.SequentialModule(
        escnn.nn.R2Conv(image, regular, 3, padding=1),
        *swap,
        escnn.nn.ReLU(regular),
        AsEscnn(AffineSelfConv2d(4, 4, 3, num_heads=2, group=group), regular, regular),
        AsEscnn(GroupPool(group=group), regular, trivial(space)),
    )


SHORT = ("C4", "D4", "D4, diagonal axis", "D2")


@pytest.mark.parametrize("name", SHORT)
def test_audit_of_a_network_of_escnn(name: str) -> None:
    """Its fields, in whatever order their planes are, turn by their representations."""
    torch.manual_seed(0)
    space = SPACES[name][0]()
    found = audit(Images(of_escnn(space, broken=False)), 7)
    assert found.passed, found.summary()
    assert found.uncompared == []
    names = [layer.kind for layer in found.layers]
    assert names == ["R2Conv", "ReLU", "AffineSelfConv2d", "GroupPool"]
    assert max(layer.error for layer in found.layers) < EXACT
    assert "; passed with tolerance 1e-05: float32 in " in found.summary()


@pytest.mark.parametrize("name", SHORT)
def test_audit_names_the_broken_layer_of_escnn(name: str) -> None:
    torch.manual_seed(0)
    space = SPACES[name][0]()
    group = group_of(space)
    found = audit(Images(of_escnn(space, broken=True)), 7)
    assert [layer.kind for layer in found.layers if layer.name in found.faults] == ["PlanesSwapped"]
    assert found.reason == "its output does not transform with its input"
    culprit = next(layer for layer in found.layers if layer.name == found.culprit)
    assert (
        f"{found.reason} (error {culprit.error:.1e}; rounding in float64 is about 2e-15)" in found.summary()
    )
    assert culprit.error > 0.1

    _, regular = types(space)
    mixed = nn.Sequential(
        LiftingConv2d(3, 4, 3, padding=1, group=group),
        FromEscnn(escnn.nn.R2Conv(regular, regular, 3, padding=1)),
        FromEscnn(PlanesSwapped(regular, len(group))),
        AffineSelfConv2d(4, 4, 3, num_heads=2, group=group),
    )
    found = audit(mixed, 7)
    assert list(found.faults) == ["2.module"], found.faults
    assert "not equivariant to " in found.summary()
    assert "2.module: its output does not transform with its input (error " in found.summary()
    del mixed[2]
    assert audit(mixed, 7).passed, audit(mixed, 7).summary()


def test_errors_of_what_returns_fields() -> None:
    space = gspaces.rot2dOnR2(4)
    image, regular = types(space)
    conv = escnn.nn.R2Conv(image, regular, 3, padding=1).to(DTYPE)
    x = torch.randn(2, 3, 5, 5, dtype=DTYPE)

    def fields(x: Tensor) -> Any:
        return conv(GeometricTensor(x, image))

    assert max(equivariance_error(fields, x, "p4")) > 0.1  # as planar features, which they are not
    assert max(equivariance_error(lambda x: from_escnn(fields(x)), x, "p4")) < EXACT


def test_measuring_shapes_moves_no_statistics() -> None:
    _, regular = types(gspaces.rot2dOnR2(4))
    norm = nn.BatchNorm3d(4)
    assert AsEscnn(norm, regular, regular).double().evaluate_output_shape((1, 16, 3, 3)) == (1, 16, 3, 3)
    assert norm.num_batches_tracked == 0
    assert norm.running_mean is not None
    assert norm.running_mean.device.type == "cpu"


# ---- bad input ----


def test_groups_between_the_pixels_are_found_by_their_elements() -> None:
    assert group_of(gspaces.rot2dOnR2(8)) is GROUPS["c8"]
    assert group_of(gspaces.rot2dOnR2(3)).exact == (True, False, False)


def test_incompatible_types_are_refused() -> None:
    c4 = gspaces.rot2dOnR2(4)
    image, regular = types(c4)
    mixed = FieldType(c4, [c4.regular_repr, c4.trivial_repr])
    cases: list[tuple[Any, str]] = [
        (lambda: group_of(gspaces.rot2dOnR2(-1)), r"with a finite group; got escnn's SO\(2\)"),
        (
            lambda: to_escnn(torch.zeros(2, 4, 8, 3, 3), regular),
            r"\[N, 4, 4, h, w\] for .*; got shape \[2, 4, 8,",
        ),
        (
            lambda: to_escnn(torch.zeros(2, 16, 3, 3), regular),
            r"\[N, 4, 4, h, w\] for .*; got shape \[2, 16, 3",
        ),
        (lambda: to_escnn(torch.zeros(2, 3), image), r"\[N, 3, h, w\] for .*; got shape \[2, 3\]"),
        (lambda: to_escnn(torch.zeros(2, 4, 8, 3, 3), regular, "p4m"), "group 'p4m' has other elements than"),
        (
            lambda: AsEscnn(nn.ReLU(), mixed, mixed),
            "expected regular fields alone, or trivial fields alone; got",
        ),
        (
            lambda: FromEscnn(escnn.nn.ReLU(regular), "z2"),
            "group 'z2' has other elements than escnn's space C4",
        ),
        (
            lambda: AsEscnn(nn.ReLU(), regular, regular)(GeometricTensor(torch.zeros(1, 3, 2, 2), image)),
            "AsEscnn expects features of type .*; got",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_without_escnn_one_line_says_so() -> None:
    code = "import sys; sys.modules['escnn'] = None; import selfconv.nn; import selfconv.escnn"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = run.stderr.splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: selfconv.escnn needs escnn, which does not import here: no module"
    )
    assert "docs/layers.md" in last


def test_the_documented_example() -> None:
    text = (ROOT / "docs" / "layers.md").read_text("utf-8")
    (block,) = [b for b in re.findall(r"```py\n(.*?)```", text, re.DOTALL) if "import escnn" in b]
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["features"].shape == (2, 8, 4, 16, 16)
    assert names["again"].shape == (2, 32, 16, 16)
