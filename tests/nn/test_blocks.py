"""Upsampling, pooling, norms, dropout, restriction: equal to torch's plane by plane, exact on any shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from helpers.cases import EXACT_GROUPS, LAYOUTS, Layout, channels_last
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from selfconv.groups import IDENTITY, MIRROR, P4, P4M, Z2, Group, get_group
from selfconv.nn import (
    AffineSelfConv1d,
    AffineSelfConv2d,
    Bottleneck,
    GlobalPool,
    GroupBatchNorm,
    GroupConv2d,
    GroupDropout,
    GroupLayerNorm,
    LiftingConv2d,
    RestrictGroup,
    SpatialPool2d,
    Upsample2d,
)
from selfconv.testing import assert_equivariant, equivariance_error

HALF_TURN = ((-1, 0), (0, -1))
FLIP = ((-1, 0), (0, 1))  # top to bottom
DIAGONAL = ((0, 1), (1, 0))
ALL = [
    *map(get_group, (*EXACT_GROUPS, "c8")),
    Group("p2", (IDENTITY, HALF_TURN)),
    Group("pm", (IDENTITY, FLIP)),
    Group("cm", (IDENTITY, DIAGONAL)),
    Group("pmm", (IDENTITY, MIRROR, HALF_TURN, FLIP)),  # not in the order of p4m
]

sides = st.integers(1, 9)
sizes = st.tuples(sides, sides)
layouts = st.sampled_from(LAYOUTS)
groups = st.sampled_from(ALL)


def features(
    group: Group, size: tuple[int, int], dtype: torch.dtype = torch.float64, channels: int = 3
) -> Tensor:
    axis = () if len(group) == 1 else (len(group),)
    return torch.randn(2, channels, *axis, *size, dtype=torch.float64).to(dtype)


def plane_by_plane(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x) if x.dim() == 4 else torch.stack([function(plane) for plane in x.unbind(2)], 2)


def assert_turns(layer: nn.Module, x: Tensor, group: Group) -> None:
    """On z2 nothing turns."""
    if len(group) > 1:
        assert_equivariant(layer, x, group)


# ---- upsampling ----


@given(group=groups, size=sizes, factor=st.integers(1, 5), layout=layouts)
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsampling_is_torchs_on_each_plane_and_equivariant(
    mode: Any, group: Group, size: tuple[int, int], factor: int, layout: Layout
) -> None:
    layer = Upsample2d(factor, mode, group=group)
    x = layout(features(group, size))
    torchs = plane_by_plane(lambda maps: F.interpolate(maps, scale_factor=float(factor), mode=mode), x)
    torch.testing.assert_close(layer(x), torchs, rtol=0, atol=1e-12)
    assert_turns(layer, x, group)


def test_interpolate_with_one_factor_enlarges_the_group_axis() -> None:
    """What the layer is there to prevent; three factors are right, and agree."""
    x = features(P4, (3, 5))
    assert F.interpolate(x, scale_factor=2).shape == (2, 3, 8, 6, 10)
    for mode, torchs in (("nearest", "nearest"), ("bilinear", "trilinear")):
        layer: nn.Module = Upsample2d(2, mode, group="p4")  # type: ignore[arg-type]
        expected = F.interpolate(x, scale_factor=(1, 2, 2), mode=torchs)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [2, 3, 5])
def test_mirrored_upsampling_has_the_same_bits_on_large_maps(factor: int, dtype: torch.dtype) -> None:
    """torch computes positions as it goes along, and for factor 3 loses a digit with every tenfold size."""
    x = features(Z2, (2, 1000), dtype)
    layer = Upsample2d(factor, "bilinear")
    assert torch.equal(layer(x.flip(-1)), layer(x).flip(-1))
    if factor == 3 and dtype == torch.float32:
        torchs = nn.Upsample(scale_factor=3, mode="bilinear")
        assert (torchs(x.flip(-1)) - torchs(x).flip(-1)).abs().max() > 1e-5


def test_upsampling_then_pooling_is_the_identity() -> None:
    x = features(P4M, (3, 4))
    torch.testing.assert_close(SpatialPool2d(3, group="p4m")(Upsample2d(3, group="p4m")(x)), x)


# ---- pooling ----


@given(
    group=groups, size=sizes, window=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)),
    layout=layouts,
)  # fmt: skip
@pytest.mark.parametrize("mode", ["mean", "max"])
def test_pooling_is_torchs_on_each_plane(
    mode: Any, group: Group, size: tuple[int, int], window: tuple[int, int, int], layout: Layout
) -> None:
    """And equivariant wherever its windows lie symmetrically."""
    kernel_size, stride, padding = window[0], window[1], min(window[2], window[0] // 2)
    layer = SpatialPool2d(kernel_size, mode, stride=stride, padding=padding, group=group)
    x = layout(features(group, size))
    torchs = F.avg_pool2d if mode == "mean" else F.max_pool2d
    if min(size) + 2 * padding < kernel_size:
        with pytest.raises(ValueError, match="SpatialPool2d expects maps of"):
            layer(x)
        return
    expected = plane_by_plane(lambda maps: torchs(maps, kernel_size, stride, padding), x)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    if all((n + 2 * padding - kernel_size) % stride == 0 for n in size):
        assert_turns(layer, x, group)


def test_the_pooling_of_a_resnets_stem_is_exact_on_odd_sizes_only() -> None:
    layer = SpatialPool2d(3, "max", stride=2, padding=1, group="p4")
    assert max(equivariance_error(layer, features(P4, (9, 9)), "p4")) == 0
    assert max(equivariance_error(layer, features(P4, (8, 8)), "p4")) > 0.1


# ---- dropout ----


@given(group=groups, size=sizes, layout=layouts)
def test_dropout_has_one_mask_for_all_planes(group: Group, size: tuple[int, int], layout: Layout) -> None:
    x = layout(features(group, size))
    ones = torch.ones_like(x)
    for mode in ("channel", "point"):
        layer = GroupDropout(0.25, mode, group=group)
        torch.manual_seed(0)
        mask = layer(ones)
        assert set(mask.unique().tolist()) <= {0.0, 1 / 0.75}
        shared = mask if len(group) == 1 else mask[:, :, 0]
        if mode == "channel":
            shared = shared[..., :1, :1].expand_as(shared)
        assert torch.equal(mask, shared if len(group) == 1 else shared.unsqueeze(2).expand_as(mask))
        torch.manual_seed(0)
        assert torch.equal(layer(x), x * mask)
        # the mask turned with the image is one that is as probable; a channel's is the same
        for s in (s for s in group if group.exact[s]):
            turned = group.act_planar(mask, s) if x.dim() == 4 else group.act(mask, s)
            assert torch.equal((turned == 0).sum((-2, -1)), (mask == 0).sum((-2, -1)))
            if mode == "channel":
                assert torch.equal(turned[..., 0, 0], mask[..., 0, 0])
        assert layer.eval()(x) is x


@pytest.mark.parametrize("mode", ["channel", "point"])
def test_dropout_keeps_means(mode: Any) -> None:
    kept = GroupDropout(0.3, mode, group="p4")(torch.ones(200, 100, 4, 1, 1))
    assert (kept == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert kept.mean().item() == pytest.approx(1, abs=0.02)
    assert GroupDropout(0, mode, group="p4")(kept) is kept
    assert not GroupDropout(1, mode, group="p4")(kept).any()


def test_torchs_dropout_treats_planes_differently() -> None:
    x = torch.ones(8, 8, 4, 3, 3)
    assert not torch.equal(*nn.Dropout()(x)[:, :, :2].unbind(2))
    torch.manual_seed(0)
    torchs = nn.Dropout3d()(x)  # whole channels: the same function as "channel"
    torch.manual_seed(0)
    assert torch.equal(GroupDropout(group="p4")(x), torchs)


# ---- restriction ----

PAIRS = [(g, k) for g in ALL for k in ALL if {*k.matrices} <= {*g.matrices}]


def test_restriction_pairs_include_permuted_planes() -> None:
    assert (P4M, P4) in PAIRS
    assert (P4, Z2) in PAIRS
    orders = [RestrictGroup(k, group=g)._planes for g, k in PAIRS]
    assert None in orders
    assert any(orders)
    for g in ALL:
        for k in ALL:
            if (g, k) not in PAIRS:
                with pytest.raises(ValueError, match=f"group '{k}' is not a subgroup of '{g}'"):
                    RestrictGroup(k, group=g)


@given(pair=st.sampled_from(PAIRS), size=sizes, layout=layouts)
def test_restriction_is_equivariant_to_the_subgroup(
    pair: tuple[Group, Group], size: tuple[int, int], layout: Layout
) -> None:
    group, subgroup = pair
    layer = RestrictGroup(subgroup, group=group)
    x = layout(features(group, size))
    y = layer(x)
    index = len(group) // len(subgroup)
    assert y.shape == (2, 3 * index, *(() if len(subgroup) == 1 else (len(subgroup),)), *size)
    assert torch.equal(y.flatten().sort().values, x.flatten().sort().values)  # no plane is lost
    for k, matrix in enumerate(subgroup.matrices):
        s = group.matrices.index(matrix)
        turned = layer(group.act_planar(x, s) if len(group) == 1 else group.act(x, s))
        assert torch.equal(turned, subgroup.act_planar(y, k) if len(subgroup) == 1 else subgroup.act(y, k))
    planes, out = x.reshape(2, 3, len(group), *size), y.reshape(2, 3, index, len(subgroup), *size)
    for k, matrix in enumerate(subgroup.matrices):  # the first coset is the subgroup itself
        assert torch.equal(out[:, :, 0, k], planes[:, :, group.matrices.index(matrix)])


@pytest.mark.parametrize(("group", "subgroup"), PAIRS, ids=str)
def test_restriction_keeps_memory_formats_and_gradients(group: Group, subgroup: Group) -> None:
    layer = RestrictGroup(subgroup, group=group)
    x = features(group, (4, 5))
    assert layer(x).is_contiguous()
    last = layer(channels_last(x))
    assert last.stride(1) == 1
    assert torch.equal(last, layer(x))
    assert last.shape == channels_last(last).shape
    assert last.stride() == channels_last(last).stride()
    assert torch.autograd.gradcheck(layer, features(group, (2, 2)).requires_grad_(), fast_mode=True)


def test_restriction_copies_nothing_where_planes_are_in_order() -> None:
    x = features(P4M, (4, 5))
    for subgroup in ("p4", "z2", "p4m"):
        assert RestrictGroup(subgroup, group="p4m")(x).data_ptr() == x.data_ptr()
    in_two_steps = nn.Sequential(RestrictGroup("p4", group="p4m"), RestrictGroup("z2", group="p4"))
    assert torch.equal(in_two_steps(x), RestrictGroup("z2", group="p4m")(x))


def test_a_network_gives_up_mirrors_half_way() -> None:
    network = nn.Sequential(
        LiftingConv2d(2, 3, 3, padding=1, group="p4m"),
        RestrictGroup("p4", group="p4m"),
        GroupConv2d(6, 2, 3, padding=1, group="p4"),
    ).double()
    x = features(Z2, (5, 5), channels=2)
    assert_equivariant(network, x, "p4")
    assert len(equivariance_error(network, x, "p4")) == 4
    turned = P4M.act_planar(network(x), 4)
    planes_mirrored = torch.stack([turned[:, :, P4.inverse[r]] for r in P4], 2)
    assert (network(P4M.act_planar(x, 4)) - planes_mirrored).abs().max() > 0.1


# ---- norms ----


class Folded(nn.Module):
    """A layer for planar maps on group features whose planes became channels."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


LAYERS_PAGE = (ROOT / "docs" / "layers.md").read_text("utf-8")
NORMS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LAYERS_PAGE.splitlines()
    if re.match(r"\| `.*Norm", line)
]


def worst_error(layer: nn.Module, x: Tensor) -> float:
    """Over training and evaluation, every call with the same running statistics."""
    state = {name: value.clone() for name, value in layer.state_dict().items()}

    def call(x: Tensor) -> Tensor:
        layer.load_state_dict(state)
        return layer(x)

    return max(
        error for mode in (True, False) for error in equivariance_error(layer.train(mode) and call, x, "p4")
    )


@pytest.mark.parametrize("row", NORMS, ids=lambda row: row[0].strip("`"))
def test_the_table_of_norms_is_true(row: list[str]) -> None:
    """Each norm as the page writes it; "trained" means that all it has learned or counted is random."""
    code, _, fresh, trained = row
    names: dict[str, Any] = {"nn": nn, "Folded": Folded, "C": 4, "h": 6, "w": 6}
    names |= {"GroupBatchNorm": GroupBatchNorm, "GroupLayerNorm": GroupLayerNorm}
    layer = eval(code.strip("`"), names).double()
    x = features(P4, (6, 6), channels=4)
    errors = [worst_error(layer, x)]
    for value in layer.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.5, 2)
    errors.append(worst_error(layer, x))
    for error, verdict in zip(errors, (fresh, trained), strict=True):
        assert verdict in ("exact", "broken")
        assert error < 1e-10 if verdict == "exact" else error > 1e-2


def test_the_table_has_every_kind_of_norm() -> None:
    text = "".join(row[0] for row in NORMS)
    for kind in (
        "BatchNorm3d",
        "BatchNorm2d",
        "InstanceNorm3d",
        "GroupNorm(",
        "LayerNorm(",
        "GroupLayerNorm",
    ):
        assert kind in text, kind


@given(group=groups, size=sizes, layout=layouts)
def test_layer_norm_is_torchs_at_each_point(group: Group, size: tuple[int, int], layout: Layout) -> None:
    layer = GroupLayerNorm(3, eps=1e-3, group=group, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = layout(features(group, size))
    torchs = nn.LayerNorm(3, eps=1e-3, dtype=torch.float64)
    torchs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), torchs(x.movedim(1, -1)).movedim(-1, 1), rtol=0, atol=1e-12)
    assert_turns(layer, x, group)


def test_instance_norm_is_a_group_norm_for_any_rank() -> None:
    for x, torchs in (
        (features(P4, (3, 4)), nn.InstanceNorm3d(3)),
        (features(Z2, (3, 4)), nn.InstanceNorm2d(3)),
    ):
        torch.testing.assert_close(nn.GroupNorm(3, 3).double()(x), torchs.double()(x), rtol=0, atol=1e-10)


# ---- concatenation ----


def test_concatenation_is_torchs() -> None:
    """torch.cat along channels is equivariant, and refuses other groups by itself: no helper is needed."""
    a, b = features(P4, (4, 4)), features(P4, (4, 4))
    joined = torch.cat([a, b], 1)
    for s in P4:
        assert torch.equal(torch.cat([P4.act(a, s), P4.act(b, s)], 1), P4.act(joined, s))
    for other in (features(P4M, (4, 4)), features(Z2, (4, 4))):
        with pytest.raises(RuntimeError, match=r"must (match|have same number of dimensions)"):
            torch.cat([a, other], 1)


# ---- dtypes and compilers ----

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "nearest": lambda: Upsample2d(2, group="p4m"),
    "bilinear": lambda: Upsample2d(3, "bilinear", group="p4m"),
    "max_pool": lambda: SpatialPool2d(3, "max", stride=2, padding=1, group="p4m"),
    "layer_norm": lambda: GroupLayerNorm(3, group="p4m"),
    "dropout_channel": lambda: GroupDropout(0.5, "channel", group="p4m"),
    "dropout_point": lambda: GroupDropout(0.5, "point", group="p4m"),
    "restrict_p4": lambda: RestrictGroup("p4", group="p4m"),
    "restrict_pmm": lambda: RestrictGroup(ALL[-1], group="p4m"),
    "restrict_z2": lambda: RestrictGroup("z2", group="p4m"),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


@every_block
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    layer = BLOCKS[name]().to(dtype)
    x = features(P4M, (5, 4), dtype)
    torch.manual_seed(0)
    y = layer(x)
    assert y.dtype == dtype
    torch.manual_seed(0)
    exact = layer.double()(x.double())
    limit = 4 * torch.finfo(dtype).eps * exact.abs().max().item()
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=limit)


def test_one_graph_for_any_size() -> None:
    """All of them in a row, since a compiler takes its time."""
    torch._dynamo.reset()
    names = [name for name in BLOCKS if name not in ("max_pool", "restrict_p4", "restrict_z2")]
    network = nn.Sequential(*(BLOCKS[name]() for name in names), RestrictGroup("z2", group=ALL[-1]))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    for size in ((4, 4), (5, 7)):  # the second makes sizes symbols
        x = features(P4M, size, torch.float32).requires_grad_()
        torch.manual_seed(0)
        y = compiled(x)
        torch.manual_seed(0)
        expected = network(x)
        torch.testing.assert_close(y, expected)
        weights = torch.randn_like(y)
        (found,), (grad,) = (torch.autograd.grad(out, x, weights) for out in (y, expected))
        torch.testing.assert_close(found, grad)


@every_block
def test_exported_with_any_batch_and_size(name: str) -> None:
    layer = BLOCKS[name]().eval()
    dynamic = torch.export.Dim.DYNAMIC
    example = features(P4M, (6, 5), torch.float32)
    shapes = ({0: dynamic, 3: dynamic, 4: dynamic},)
    program = torch.export.export(layer, (example,), dynamic_shapes=shapes).module()
    for size in ((6, 5), (4, 9)):
        x = features(P4M, size, torch.float32)[:1].repeat(3, 1, 1, 1, 1)
        torch.testing.assert_close(program(x), layer(x))


def test_arrays_of_numpy_are_refused_in_one_line() -> None:
    x = torch.zeros(1, 4, 4, 4).numpy()
    attention = AffineSelfConv2d(4, 4, 3, num_heads=2), AffineSelfConv1d(4, 4, num_heads=2)
    for layer in (*attention, GlobalPool(), SpatialPool2d(2), GroupBatchNorm(4)):
        with pytest.raises(TypeError, match=r"expects a torch.Tensor; got ndarray"):
            layer(x)


def test_a_compiled_block_checks_its_spatial_layer_too() -> None:
    """Maps of one cell would be broadcast to the size of the shortcut."""
    block = Bottleneck(4, 2, spatial=lambda width, stride: nn.AdaptiveAvgPool2d(1)).eval()
    x = torch.randn(2, 4, 5, 5)
    for form in (block, torch.compile(block, backend="eager")):
        with pytest.raises(ValueError, match=r"an output of \[5, 5\] cells, as stride=1 .* got \[1, 1\]$"):
            form(x)
