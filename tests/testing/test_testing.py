"""The measuring tools themselves: they must see what is broken, and name it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfconv.groups import GROUPS, get_group
from selfconv.nn import (
    AffineSelfConv2d,
    GlobalPool,
    GroupBatchNorm,
    GroupConv2d,
    GroupPool,
    LiftingConv2d,
    LiftingSelfConv2d,
    SpatialPool2d,
    SqueezeExcite,
)
from selfconv.testing import (
    assert_equivariant,
    audit,
    centre_error,
    deviation_error,
    equivariance_error,
    relative_error,
    resampling_error,
    shift_error,
)


def network(group: str = "p4", /, **changes: nn.Module) -> nn.Sequential:
    layers: dict[str, nn.Module] = {
        "stem": LiftingConv2d(3, 4, 3, padding=1, group=group),
        "norm": GroupBatchNorm(4, group=group),
        "act": nn.ReLU(inplace=True),
        "attend": AffineSelfConv2d(4, 4, 5, stride=2, num_heads=2, group=group),
        "conv": GroupConv2d(4, 4, 3, padding=1, group=group),
        "pool": GlobalPool(group=group),
        "head": nn.Linear(4, 5),
    }
    model = nn.Sequential()
    for name, layer in (layers | changes).items():
        model.add_module(name, layer)
    return model


class MirroredHalf(nn.Module):
    """Deliberately broken: flips the map left to right, which does not commute with quarter turns."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.flip(-1).roll(1, -1)


class PositionBias(nn.Module):
    """Deliberately broken: adds something that depends on the place."""

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.arange(x.shape[-1], dtype=x.dtype)
        return x + ramp + ramp.flip(0) * 0.5 + ramp[:, None]


@pytest.mark.parametrize("size", [3, 16])
def test_a_layer_is_shifted_at_every_size(size: int) -> None:
    """A map with too little room for the window is replaced by a larger one."""
    passed = audit(nn.Conv2d(2, 2, 3, padding=1), size)
    assert passed.layers[0].shift is not None
    assert f"equivariant to shifts at {size}x{size}" in passed.summary()
    assert not audit(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), PositionBias()), size).passed


def test_error_is_per_element_and_relative() -> None:
    errors = equivariance_error(nn.Conv2d(1, 1, 3, padding=1), torch.randn(1, 1, 6, 6), "p4")
    assert errors[0] == 0
    assert all(e > 1e-2 for e in errors[1:])
    assert relative_error(torch.tensor([1.0, 11.0]), torch.tensor([1.0, 10.0])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(3)) == math.inf


class Masked(nn.Module):
    """A planar convolution, or a pointwise one, with a constant where the image is negative."""

    def __init__(self, constant: float | None, kernel_size: int, *, added: bool) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 3, kernel_size, kernel_size))
        self.constant, self.added = constant, added

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.filters, padding="same")
        constant = torch.finfo(y.dtype).min if self.constant is None else self.constant
        mask = (x.mean(1, keepdim=True) < 0).expand_as(y)
        return y + constant * mask if self.added else y.masked_fill(mask, constant)


@pytest.mark.parametrize(("constant", "added"), [(None, False), (-1e9, False), (-1e9, True), (-1e5, False)])
def test_masking_constants_hide_no_fault(constant: float | None, added: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    for dtype in (torch.float32, torch.float64):
        broken, exact = (Masked(constant, k, added=added).to(dtype) for k in (3, 1))
        assert min(equivariance_error(broken, x.to(dtype), "p4")[1:]) > 0.1
        assert not audit(broken, 8, "p4").passed
        with pytest.raises(AssertionError):
            assert_equivariant(broken, x.to(dtype), "p4")
        assert_equivariant(exact, x.to(dtype), "p4")
        assert audit(exact, 8, "p4").passed


def test_one_large_entry_is_no_mask() -> None:
    b = torch.tensor([1.0, 2.0, 1e6])
    assert relative_error(b + 1, b) == pytest.approx(1e-6)
    assert relative_error(b.repeat(2) + 1, b.repeat(2)) == pytest.approx(0.5)


def test_assert_equivariant_lists_the_errors() -> None:
    x = torch.randn(1, 1, 6, 6)
    assert_equivariant(nn.AvgPool2d(2), x, "p4m")
    with pytest.raises(
        AssertionError, match=r"not equivariant to p4 within 1e-05; error by element 0: 0.0e\+00, 1: "
    ):
        assert_equivariant(nn.Conv2d(1, 1, 3, padding=1), x, "p4")
    with pytest.raises(AssertionError):
        assert_equivariant(lambda x: x * math.nan, x, "p4")


def test_windows_that_skip_pixels_are_no_fault() -> None:
    """A dilated window can reach over the border without a pixel on it, and depends on it all the same."""
    torch.manual_seed(0)
    dilated = AffineSelfConv2d(4, 4, 3, dilation=2, num_heads=2, group="p4")
    models = [
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=3, dilation=3), nn.ReLU()), "z2"),
        (nn.Conv2d(3, 4, 3, stride=2, padding=2, dilation=2), "z2"),
        (nn.Conv2d(3, 4, (3, 1), padding=(2, 0), dilation=(2, 1)), "z2"),
        (nn.Sequential(LiftingSelfConv2d(3, 4, 3, dilation=3, num_heads=2, group="p4"), dilated), "p4"),
    ]
    for model, group in models:
        found = audit(model, 24, group, in_channels=3)
        assert found.passed, found.summary()
        assert any(layer.shift is not None for layer in found.layers)
    x = torch.randn(1, 3, 24, 24, dtype=torch.float64)
    for model, _ in models[::3]:
        assert shift_error(model.double(), x) == pytest.approx(0, abs=1e-12)
        assert shift_error(nn.Sequential(model, PositionBias()), x) > 1e-2  # type: ignore[operator]
    assert shift_error(models[0][0].double(), x, frame=1) == pytest.approx(0, abs=1e-12)


def test_shift_error_ignores_the_border_and_nothing_else() -> None:
    x = torch.randn(1, 2, 12, 12, dtype=torch.float64)
    conv = nn.Conv2d(2, 2, 5, padding=2, dtype=torch.float64)
    assert shift_error(conv, x, 2) == pytest.approx(0, abs=1e-12)
    assert shift_error(nn.MaxPool2d(2), x, 2, 2) == 0
    assert shift_error(lambda x: x - x.mean((-2, -1), keepdim=True), x) is None
    found = shift_error(PositionBias(), x)
    assert found is not None
    assert found > 0.01
    with pytest.raises(ValueError, match="shift: expected a positive multiple of stride=2; got 3"):
        shift_error(conv, x, 3, 2)


@pytest.mark.parametrize(("group", "size"), [("p4", 16), ("p4", 20), ("c8", 16)])
def test_audit_passes_an_equivariant_network(group: str, size: int) -> None:
    model = network(group)
    report = audit(model, size, group)
    assert report.passed
    assert report.error < 1e-10
    assert [layer.name for layer in report.layers] == [n for n, _ in model.named_children()]
    assert all(layer.error < 1e-10 for layer in report.layers)
    assert report.layers[0].shift is not None
    what = "the exact elements of c8" if group == "c8" else group
    assert report.summary().startswith(f"equivariant to {what} and shifts at {size}x{size}")
    assert (report.between is None) == (group == "p4")


@pytest.mark.parametrize(
    ("name", "layer", "size", "reason", "sizes"),
    [
        ("conv", GroupConv2d(4, 4, 3, 2, 1, group="p4"), 32, "stride 2 on an even-sized map", [30, 34, 26]),
        ("attend", SpatialPool2d(2, group="p4"), 15, "stride 2 on an odd-sized map (15x15)", [14, 16, 12]),
        ("act", MirroredHalf(), 16, "its output does not transform with its input", []),
    ],
    ids=["strided", "pooled", "mirrored"],
)  # fmt: skip
def test_audit_names_the_first_layer_that_breaks(
    name: str, layer: nn.Module, size: int, reason: str, sizes: list[int]
) -> None:
    report = audit(network("p4", **{name: layer}), size, "p4")
    assert not report.passed
    assert report.culprit == name
    assert report.reason is not None
    assert reason in report.reason
    assert sorted(report.sizes) == sorted(sizes)
    for works in report.sizes:
        assert audit(network("p4", **{name: layer}), works, "p4").passed


def test_audit_sees_planar_layers_and_positions() -> None:
    planar = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    report = audit(planar, 8, "p4")
    assert report.culprit == "0"
    assert report.reason == "an ordinary convolution: its filters do not turn with the image"
    assert report.sizes == []
    assert audit(planar, 8).passed  # shifts alone
    report = audit(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), PositionBias()), 10)
    assert report.culprit == "1"
    assert report.reason is not None
    assert "depends on absolute position" in report.reason


class FunctionalBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = LiftingConv2d(3, 4, 3, padding=1, group="p4")
        self.conv = GroupConv2d(4, 4, 3, padding=1, group="p4")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.stem(x).roll(1, -1))


class BreakAfter(FunctionalBreak):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.stem(x)).roll(1, -1)


def test_audit_sees_what_happens_between_layers() -> None:
    report = audit(FunctionalBreak(), 8, "p4")
    assert report.culprit == "conv"
    assert report.reason == (
        "its input does not transform with the image: code between the layers breaks equivariance"
    )
    report = audit(BreakAfter(), 8, "p4")
    assert report.culprit == "the model's output"


# ---- elements between the pixels ----


def smooth(*lead: int, size: int = 33) -> Tensor:
    """Random bumps, wide beside a pixel, that end well inside the round mask: [*lead, size, size]."""
    rows = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    place, height = size / 5 * (2 * torch.rand(2, *lead, 5, 1, 1) - 1), torch.randn(*lead, 5, 1, 1)
    squares = (rows[:, None] - place[0]) ** 2 + (rows - place[1]) ** 2
    return (height * torch.exp(-squares / 8)).sum(-3)


def test_errors_between_the_pixels_are_apart_from_those_of_exact_elements() -> None:
    """A blur that is the same in all directions turns as well as the image can be interpolated."""
    rows = torch.arange(-3, 4, dtype=torch.float64)
    blur = torch.exp(-(rows**2 + rows[:, None] ** 2) / 2)[None, None]
    x, c8 = smooth(3, 1), GROUPS["c8"]
    isotropic = equivariance_error(lambda x: F.conv2d(x, blur, padding=3), x, c8)
    sideways = equivariance_error(lambda x: x.roll(2, -1), x, c8)
    interpolation = resampling_error(x, c8)
    for s in c8:
        assert (interpolation[s] == 0) == c8.exact[s]
        assert interpolation[s] < 0.01
        assert isotropic[s] < (1e-12 if c8.exact[s] else 0.01)
        assert (sideways[s] > 0.3) == (s != 0)
    assert min(e for e in resampling_error(torch.randn(3, 1, 33, 33), c8) if e) > 0.2  # noise is no image


def test_deviation_error_is_of_the_deviation_and_inside_the_mask() -> None:
    b = torch.randn(4, 3, 9, 9, dtype=torch.float64) + 100
    a = b.clone()
    a[..., 0, 0] = 1e6  # a corner, outside
    assert deviation_error(a, b) == 0
    a = b + 0.1 * torch.randn_like(b)
    assert deviation_error(a, b) == pytest.approx(0.1, rel=0.1)
    assert deviation_error(a[0, 0], b[0, 0, :8]) == math.inf
    logits = torch.tensor([[1.0, 3.0]])  # one value in each channel: over all of them
    assert deviation_error(logits + 1, logits) == pytest.approx(1)


def test_assert_equivariant_between_the_pixels_if_asked() -> None:
    lift, x = LiftingConv2d(3, 4, 5, padding=2, group="c8", dtype=torch.float64), smooth(2, 3)
    assert_equivariant(lift, x, "c8", between=0.1)
    assert_equivariant(lift, torch.randn_like(x), "c8")
    with pytest.raises(AssertionError, match=r"to c8 within 1e-10, 0.1 between the pixels; error by element"):
        assert_equivariant(lift, torch.randn_like(x), "c8", between=0.1)
    with pytest.raises(AssertionError, match="between the pixels"):
        assert_equivariant(lambda x: lift(x) * math.nan, x, "c8", between=0.1)


@pytest.mark.parametrize("group", ["c8", "d8"])
def test_centre_error_tells_filters_that_turn_from_those_that_do_not(group: str) -> None:
    g = get_group(group)
    lift = LiftingConv2d(3, 4, 5, padding=2, group=g, dtype=torch.float64)
    planar = nn.Conv2d(3, 4, 5, padding=2, dtype=torch.float64)
    for s, (turning, fixed) in enumerate(
        zip(*(centre_error(module, (16, 3, 7, 7), g) for module in (lift, planar)), strict=True)
    ):
        assert turning < (1e-12 if g.exact[s] else 0.05)
        assert fixed > 0.3 or s == 0
    for shape in ((16, 3, 8, 7), (3, 7, 7), (16, 3, 4, 7, 7)):
        with pytest.raises(ValueError, match=r"shape: expected \[N, C, .*h, w\] on group"):
            centre_error(lift, shape, g)


def test_audit_tells_how_far_off_a_network_is_between_the_pixels() -> None:
    report = audit(network("c8"), 24, "c8")
    planar = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), GlobalPool(), nn.Linear(4, 5))
    fixed = audit(planar, 24, "c8")
    assert report.between is not None
    assert fixed.between is not None
    assert report.between < 0.2 < fixed.between
    assert report.resampling == 0  # its output is no map
    assert f"between the pixels, on smooth images, {report.between:.1%} of its deviation" in report.summary()
    maps = audit(LiftingConv2d(3, 4, 3, padding=1, group="c8"), 24, "c8")
    assert maps.between is not None
    assert 0 < maps.resampling < maps.between < 0.1
    assert f"(interpolation alone {maps.resampling:.1%})" in maps.summary()


def test_audit_leaves_the_model_alone_and_prints() -> None:
    from rich.console import Console

    model = network().train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = audit(model, 16, "p4")
    assert model.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    printed = console.export_text()
    assert "AffineSelfConv2d" in printed
    assert "equivariant to p4 and shifts at 16x16" in printed
    assert str(report).splitlines()[-1] == report.summary()


# ---- correct networks pass, however their rounding grows and their features are arranged ----


def attend_twice(channels: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for c in (channels, out):
        attention = AffineSelfConv2d(c, out, num_heads=2, group="p4")
        attention.reset_parameters(affine_std=1.0)  # the paper's literal reading, with which scores saturate
        layers += [attention, GroupBatchNorm(out, group="p4"), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Of public layers; freshly initialised, its batch norms normalise nothing, and scores saturate."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.lift = LiftingConv2d(3, channels, 3, padding=1, group="p4")
        self.down = nn.ModuleList(attend_twice(channels, channels) for _ in range(2))
        self.pool = SpatialPool2d(2, group="p4")
        self.middle = attend_twice(channels, channels)
        self.twice = nn.Upsample(scale_factor=(1, 2, 2))
        self.up = nn.ModuleList(attend_twice(2 * channels, channels) for _ in range(2))
        self.plane = GroupPool(group="p4")
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skipped = self.lift(x), []
        for layer in self.down:
            x = layer(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([self.twice(x), skipped.pop()], 1))
        return self.head(self.plane(x))


@pytest.mark.parametrize("seed", range(4))
def test_audit_passes_a_fresh_u_net(seed: int) -> None:
    torch.manual_seed(seed)
    report = audit(UNet(), 16, "p4")
    assert report.passed, report.summary()
    assert max(layer.error for layer in report.layers) < 1e-12
    assert [layer.name for layer in report.layers].count("pool (call 2)") == 1


@pytest.mark.parametrize("place", ["down.0.2", "middle.5", "up.1.4"])
def test_audit_names_a_broken_layer_of_a_u_net(place: str) -> None:
    model = UNet()
    model.set_submodule(place, MirroredHalf())
    report = audit(model, 16, "p4")
    assert list(report.faults) == [place]
    assert report.sizes == []


class Sensitive(nn.Module):
    """Pointwise, and so equivariant; it makes a thousand times more of every rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(1000 * x)


def test_audit_tells_accumulated_rounding_from_a_fault() -> None:
    layers: list[nn.Module] = [LiftingConv2d(3, 4, 3, padding=1, group="p4")]
    for _ in range(4):
        layers += [Sensitive(), GroupConv2d(4, 4, 3, padding=1, group="p4")]
    model = nn.Sequential(*layers)
    report = audit(model, 8, "p4")
    assert report.error > 1e-6, "the case is not one"
    assert report.passed
    assert "accumulated rounding: each layer by itself is within" in report.summary()
    assert max(layer.error for layer in report.layers) < 1e-14
    model[4] = nn.Sequential(layers[4], MirroredHalf())
    assert list(audit(model, 8, "p4").faults) == ["4.1"]


def test_audit_names_every_layer_that_breaks_and_gives_sizes_only_where_they_help() -> None:
    strided, mirrored = GroupConv2d(4, 4, 3, 2, 1, group="p4"), MirroredHalf()
    report = audit(network(conv=strided), 32, "p4")
    assert report.sizes
    report = audit(network(conv=strided, act=mirrored), 32, "p4")
    assert list(report.faults) == ["act", "conv"]
    assert report.sizes == []
    # an ordinary convolution is none of the group's on any size
    report = audit(nn.Conv2d(3, 4, 3, stride=2, padding=1), 32, "p4")
    assert report.faults == {"the model": "an ordinary convolution: its filters do not turn with the image"}
    assert report.sizes == []


def test_audit_of_a_layer_that_is_used_twice() -> None:
    """Its second use breaks: 16 is halved well, 8 + 1 is not."""
    pool = SpatialPool2d(2, group="p4")
    pad = nn.ConstantPad3d((1, 0, 1, 0, 0, 0), 0.0)
    model = nn.Sequential(LiftingConv2d(3, 4, 3, padding=1, group="p4"), pool, pad, pool)
    assert list(audit(model, 16, "p4").faults) == ["2", "1 (call 2)"]


class Folded(nn.Module):
    """Group features as planar ones, for a layer that takes those."""

    def __init__(self, layer: nn.Module, fold: str) -> None:
        super().__init__()
        self.layer, self.fold = layer, fold

    def forward(self, x: Tensor) -> Tensor:
        if self.fold == "group last":
            return self.layer(x.flatten(1, 2)).unflatten(1, (-1, 4))
        if self.fold == "group first":
            return self.layer(x.transpose(1, 2).flatten(1, 2)).unflatten(1, (4, -1)).transpose(1, 2)
        return self.layer(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, 4)).transpose(1, 2)


class ChannelsLast(nn.Module):
    """As ConvNeXt does its pointwise maps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(4), nn.Linear(4, 4)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(self.norm(x.movedim(1, -1))).movedim(-1, 1)


class Tokens(nn.Module):
    """Global attention among pixels in a row, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.softmax, self.drop = nn.Linear(4, 4), nn.Softmax(-1), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT  # [N, L, C]
        weights = self.drop(self.softmax(self.query(tokens) @ tokens.mT))[:, None]  # [N, 1, L, L]
        return (weights[:, 0] @ tokens).mT.unflatten(2, x.shape[2:])


class Pair(nn.Module):
    """A layer of two inputs and two outputs."""

    def forward(self, x: Tensor, y: Tensor, *, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        return x + y, {"scaled": x * scale}


class UsesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        y, others = self.pair(x, x.relu(), scale=2.0)
        return y * others["scaled"]


class InPlace(nn.Module):
    """Whose layer works in place, and whose result nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.shortcut = nn.ReLU(inplace=True), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean()
        self.act(y)
        same = self.shortcut(y)
        same += 1
        return y.sqrt()


class Single(nn.Module):
    """Computes in float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() / x.float().abs().sum((-2, -1), keepdim=True)).to(x.dtype).exp()


def _normed(norm: Callable[..., nn.Module]) -> nn.Module:
    return norm(GroupConv2d(4, 4, 3, padding=1, group="p4"))


CORRECT: dict[str, Callable[[], nn.Module]] = {
    "group among channels, last": lambda: Folded(nn.MaxPool2d(2), "group last"),
    "group among channels, first": lambda: Folded(nn.Upsample(scale_factor=2), "group first"),
    "group among images": lambda: Folded(nn.Sequential(nn.Upsample(scale_factor=2), nn.ReLU()), "images"),
    "channels last": ChannelsLast,
    "tokens": Tokens,
    "two inputs, two outputs": UsesPair,
    "in place": InPlace,
    "float32 inside": Single,
    "weight norm": lambda: _normed(nn.utils.parametrizations.weight_norm),
    "spectral norm": lambda: _normed(nn.utils.parametrizations.spectral_norm),
    "frozen": lambda: GroupConv2d(4, 4, 3, padding=1, group="p4").requires_grad_(False),
    "half": lambda: GroupConv2d(4, 4, 3, padding=1, group="p4").half(),
    "squeeze and excite": lambda: SqueezeExcite(4, 2, group="p4"),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.ModuleList([nn.ReLU()])[0]))),
    "checkpointed": lambda: Checkpointed(),
    "hooked": lambda: hooked(),
}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GroupConv2d(4, 4, 3, padding=1, group="p4")

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.conv, x, use_reentrant=False)


def hooked() -> nn.Module:
    conv = GroupConv2d(4, 4, 3, padding=1, group="p4")
    conv.register_forward_hook(lambda module, args, output: output * 2)
    conv.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return conv


@pytest.mark.parametrize("name", CORRECT)
def test_audit_passes_correct_networks(name: str) -> None:
    conv = GroupConv2d(4, 4, 3, padding=1, group="p4")
    middle = CORRECT[name]()
    model = nn.Sequential(LiftingConv2d(3, 4, 3, padding=1, group="p4"), middle, conv)
    model = nn.Sequential(model, SpatialPool2d(2, group="p4"))
    report = audit(model, 8, "p4")
    assert report.passed, report.summary()


class Tail(nn.Module):
    """Returns more than a tensor."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.lift, self.broken = LiftingConv2d(3, 4, 3, padding=1, group="p4"), broken

    def forward(self, x: Tensor) -> Any:
        y = self.lift(x)
        return {
            "maps": (y, y.mean(2)),
            "class": y.mean((2, 3, 4)),
            "n": 3,
            "corner": y[..., 0, 0].mean(2) * self.broken,
        }


def test_audit_of_a_model_that_returns_several_tensors() -> None:
    assert audit(Tail(broken=False), 8, "p4").passed
    assert audit(Tail(broken=True), 8, "p4").culprit == "the model's output"


# ---- broken ones do not ----


class Rolled(Folded):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.roll(1, -1))


class Always(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)


class LearnedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self) -> Tensor:
        return self.table[None, :, None]


class AddsPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.act = LearnedPositions(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.positions())


BROKEN: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "filters of planes folded": (
        lambda: Folded(nn.Conv2d(16, 16, 3, padding=1), "group last"),
        "0.1.layer",
        "an ordinary convolution: its filters do not turn with the image",
    ),
    "rolled, then folded": (
        lambda: Rolled(nn.ReLU(), "group last"),
        "0.1.layer",
        "its input does not transform",
    ),
    "random": (Always, "0.1", "differs between two runs on the same image"),
    "positions": (AddsPositions, "0.1.positions", "its output is the same for every image"),
    "not a number": (lambda: nn.Threshold(math.inf, math.nan), "0.1", "its output is not a number"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_audit_names_what_breaks(name: str) -> None:
    make, culprit, reason = BROKEN[name]
    conv = GroupConv2d(4, 4, 3, padding=1, group="p4")
    model = nn.Sequential(LiftingConv2d(3, 4, 3, padding=1, group="p4"), make(), conv)
    report = audit(nn.Sequential(model, SpatialPool2d(2, group="p4")), 8, "p4")
    assert report.culprit == culprit, report.summary()
    assert report.reason is not None
    assert reason in report.reason
    assert report.sizes == []


def test_shift_error_is_not_fooled_by_saturation() -> None:
    """A softmax that ignores the border but for one pixel in it: outputs near it are not interior."""
    torch.manual_seed(0)
    layer = AffineSelfConv2d(4, 4, num_heads=2, dtype=torch.float64)
    x = 100 * torch.randn(1, 4, 12, 12, dtype=torch.float64)
    assert shift_error(layer, x) == 0


class Scalar(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(x)


@pytest.mark.parametrize(
    ("model", "size", "reason"),
    [
        (network, 0, "input_size: expected a positive number of pixels; got 0"),
        (Scalar, 8, "expected a model that returns a tensor to compare; got int"),
        (
            lambda: torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}),
            8,
            r"in float64, on inputs of shape \[2, 3, 8, 8\] \('planar'\): expected scalar type Float",
        ),
        (lambda: torch.jit.script(nn.Sequential(nn.ReLU())), 8, "not supported on ScriptModules"),
    ],
    ids=["no pixels", "no tensor", "quantised", "scripted"],
)
@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_be_audited(model: Callable[[], nn.Module], size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        audit(model(), size, "p4")
    assert "\n" not in str(error.value)


def test_audit_sees_into_a_compiled_model() -> None:
    broken = torch.compile(network(act=MirroredHalf()), backend="eager")
    assert audit(broken, 16, "p4").culprit == "_orig_mod.act"  # type: ignore[arg-type]
