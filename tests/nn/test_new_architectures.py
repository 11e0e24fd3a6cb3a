"""Layers for new architectures: windows, borders, lifting, sequences, dropout, weights, blocks, examples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from helpers.cases import C2, MODES, TESTED_GROUPS, more
from torch import Tensor, nn

import selfconv.examples
from selfconv.examples import Autoencoder, UNet
from selfconv.groups import IDENTITY, MIRROR, Group, get_group
from selfconv.models import count_flops, export_onnx, export_program, optimize_for_inference
from selfconv.nn import (
    AffineSelfConv1d,
    AffineSelfConv2d,
    Bottleneck,
    ConvNorm,
    GroupBatchNorm,
    GroupConv2d,
    GroupLayerNorm,
    LiftingConv2d,
    LiftingSelfConv2d,
    RestrictGroup,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
    concatenate,
    fix_filters,
    set_backend,
)
from selfconv.ops import affine_self_conv, affine_self_conv_flops
from selfconv.testing import assert_equivariant, audit, equivariance_error, shift_error
from selfconv.visualize import look

REFLECTION = Group("mirror", (IDENTITY, MIRROR))


def features(group: str | Group, *, channels: int = 4, size: int = 8, lifted: bool = True) -> Tensor:
    torch.manual_seed(1)
    axis = () if len(get_group(group)) == 1 or not lifted else (len(get_group(group)),)
    return torch.randn(2, channels, *axis, size, size, dtype=torch.float64)


@pytest.mark.parametrize("group", [g for g in TESTED_GROUPS if g != "z2"], ids=str)
@pytest.mark.parametrize("kind", [AffineSelfConv2d, LiftingSelfConv2d, SimpleAffineSelfConv2d])
def test_layers_with_windows_are_equivariant(kind: type[AffineSelfConv2d], group: str | Group) -> None:
    torch.manual_seed(0)
    x = features(group, lifted=kind is not LiftingSelfConv2d)
    for mode, dilation, stride in (("zeros", 2, 1), ("circular", 3, 2), ("exclude", 1, 2)):
        layer = kind(
            4, 4, 3, stride, dilation=dilation, padding_mode=mode, num_heads=2, group=group  # type: ignore[arg-type]
        ).double()  # fmt: skip
        assert_equivariant(layer, x, group, 1e-10)
        assert layer(x).shape[-2:] == (8 // stride, 8 // stride)


def test_a_lifting_layer_is_the_equations() -> None:
    """Q, K, V by 1×1 maps, ψ^Q and β^Q at the centre, the operation, W^O: step by step."""
    torch.manual_seed(0)
    layer, x = (
        LiftingSelfConv2d(3, 4, 3, num_heads=2, group="p4").double(),
        features("z2", channels=3, size=4),
    )
    w, b = layer.w_in[..., 0, 0], layer.b_in
    assert b is not None
    assert layer.psi_q is not None
    assert layer.beta_q is not None
    q, k, v = (torch.einsum("nihw,oi->nohw", x, w) + b[:, None, None]).chunk(3, 1)
    query = q * layer.psi_q[:, 0, None, None] + layer.beta_q[:, None, None]
    values = affine_self_conv(
        query, k, v, layer.psi_k, layer.beta_k, layer.psi_v, layer.beta_v,
        num_heads=2, scale=layer.scale, group="p4", lifting=True, backend="reference",
    )  # fmt: skip
    output = GroupConv2d(4, 4, 1, bias=False, group="p4").double()
    output.weight = layer.w_out
    torch.testing.assert_close(layer(x), output(values))
    assert layer.psi_k is not None
    assert layer.psi_k.shape == (4, 3, 3)


def test_on_the_plane_lifting_is_the_planar_layer() -> None:
    lifting, planar = LiftingSelfConv2d(4, 4, 3, num_heads=2), AffineSelfConv2d(4, 4, 3, num_heads=2)
    planar.load_state_dict(lifting.state_dict())
    x = torch.randn(1, 4, 5, 5)
    torch.testing.assert_close(lifting(x), planar(x))


@pytest.mark.parametrize("mode", MODES)
def test_sequences(mode: Any) -> None:
    torch.manual_seed(0)
    layer = AffineSelfConv1d(3, 4, 7, dilation=2, num_heads=2, padding_mode=mode).double()
    plane = AffineSelfConv2d(3, 4, (1, 7), dilation=(1, 2), num_heads=2, padding_mode=mode).double()
    plane.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plane(x.unsqueeze(2)).squeeze(2))
    y, alpha = layer(x, need_weights=True)
    torch.testing.assert_close(y, layer(x))
    assert alpha.shape == (2, 2, 7, 9)
    assert AffineSelfConv1d(3, 4, 3, 3, num_heads=2)(x.float()).shape == (2, 4, 3)
    if mode == "circular":
        torch.testing.assert_close(layer(x.roll(2, -1)), layer(x).roll(2, -1))


def test_sequences_with_reflection() -> None:
    layer = AffineSelfConv1d(3, 4, 5, num_heads=2, group=REFLECTION).double()
    x = torch.randn(2, 3, 2, 9, dtype=torch.float64)
    back = (2, 3)  # planes swapped, positions reversed
    torch.testing.assert_close(layer(x.flip(back)), layer(x).flip(back))


@pytest.mark.parametrize("kind", [GroupBatchNorm, GroupLayerNorm])
@pytest.mark.parametrize("group", ["z2", REFLECTION], ids=str)
def test_norms_of_sequences(kind: Any, group: str | Group) -> None:
    """As of maps of one row, in training too; a group that turns rows into columns has no sequences."""
    norm, x = kind(3, group=group), torch.randn(2, 3, *(() if group == "z2" else (2,)), 9)
    torch.testing.assert_close(norm(x), norm(x.unsqueeze(-2)).squeeze(-2))
    with pytest.raises(
        ValueError, match=r"on group 'p4' expects \[N, 3, 4, h, w\]; got shape \[2, 3, 4, 9\]"
    ):
        kind(3, group="p4")(torch.randn(2, 3, 4, 9))


@pytest.mark.parametrize("group", ["z2", "p4"])
def test_need_weights(group: str) -> None:
    layer, x = AffineSelfConv2d(4, 4, 3, num_heads=2, group=group).double(), features(group)
    y, alpha = layer(x, need_weights=True)
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(alpha, layer.attention_weights(x))
    torch.testing.assert_close(alpha.sum((-4, -3)), torch.ones_like(alpha[..., 0, 0, :, :]))
    y.sum().backward()  # through the weights too
    assert layer.beta_k is not None
    assert layer.beta_k.grad is not None


def test_attention_dropout() -> None:
    layer = AffineSelfConv2d(4, 4, 3, num_heads=2, dropout=0.5, backend="numba").double()
    x = features("z2")
    assert not torch.equal(layer(x), layer(x))
    _, alpha = layer(x, need_weights=True)
    assert 0.4 < (alpha == 0).double().mean() < 0.6
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)
    assert "dropout=0.5" in repr(layer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [AffineSelfConv2d, LiftingSelfConv2d])
def test_fixed_filters_are_the_same_function(kind: type[AffineSelfConv2d], mode: Any) -> None:
    layer = kind(4, 4, 3, 2, dilation=2, padding_mode=mode, num_heads=2, group="p4").double().eval()
    x = features("p4", lifted=kind is AffineSelfConv2d)
    torch.testing.assert_close(fix_filters(layer)(x), layer(x))


def test_new_options_under_export_and_compile() -> None:
    model = nn.Sequential(
        LiftingSelfConv2d(1, 4, 3, dilation=2, padding_mode="circular", num_heads=2, group="p4"),
        AffineSelfConv2d(4, 4, 3, padding_mode="exclude", num_heads=2, group="p4"),
    ).eval()
    x = torch.randn(3, 1, 6, 6)
    program = export_program(model, input_shape=(1, 8, 8), any_size=True).module()
    for size in ((8, 8), (9, 12)):
        images = torch.randn(3, 1, *size)
        torch.testing.assert_close(program(images), model(images))
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_flops_of_rectangles_and_lifting() -> None:
    row = AffineSelfConv2d(4, 4, (1, 7), num_heads=2)
    one = 2 * (4 * 7 + 4 * 7) * 2  # ψ, and the score or aggregation, of keys and values
    maps = 2 * (4 * 12 + 4 * 4)
    assert count_flops(row, (4, 5, 6)) == 30 * (one + maps)
    lifted = LiftingSelfConv2d(4, 4, 3, num_heads=2, group="p4")
    expected = affine_self_conv_flops(
        (1, 4, 4, 5, 5), (1, 4, 1, 5, 5), (1, 4, 1, 5, 5), (4, 3, 3), None, (4, 3, 3), None
    )
    assert count_flops(lifted, (4, 5, 5)) == expected + 25 * 2 * (4 * 12 + 16 * 16)


@pytest.mark.parametrize("mode", MODES)
def test_inspection_shows_the_window(mode: Any) -> None:
    """output = Σ effective · neighbourhood + Σ positional, whatever the window."""
    torch.manual_seed(0)
    model = nn.Sequential(
        LiftingSelfConv2d(2, 4, 3, dilation=2, padding_mode=mode, num_heads=2, group="p4")
    ).double()
    view = look(model, torch.randn(2, 6, 6, dtype=torch.float64), "0", (0, 1), 1)
    seen = (view.effective * view.neighbourhood).sum((1, -2, -1)) + view.positional.sum((-2, -1))
    torch.testing.assert_close(seen, view.output)
    assert view.window == (-2, -1, 3, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AffineSelfConv2d(4, 4, (1, 3), group="p4"), "AffineSelfConv2d: group 'p4' turns rows into"),
        (lambda: AffineSelfConv2d(8, 8, 4), r"AffineSelfConv2d: kernel_size: expected an odd .*; got 4"),
        (lambda: AffineSelfConv2d(8, 8, 3, dilation=-1), r"dilation: expected an integer ≥ 1.*; got -1"),
        (lambda: AffineSelfConv2d(8, 8, 3, padding_mode="same"), "padding_mode: expected one of 'zeros'"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv2d(8, 8, 3, dropout=1.1), "AffineSelfConv2d: dropout: expected a probab.*1.1"),
        (lambda: AffineSelfConv2d(8, 8, 3, dropout=None), "dropout: expected a probability.*; got None"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv2d(8, 8, 3, scale="a"), "scale: expected a finite number; got 'a'"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv2d(8, 8, True), r"kernel_size: expected an odd integer ≥ 1.*; got True"),
        (lambda: AffineSelfConv1d(8, 8, 1, group="p4"), "AffineSelfConv1d: group 'p4' turns rows into"),
        (lambda: LiftingConv2d(8, 8, 1, group="p4")(torch.zeros(1, 8, 4, 3, 3)), "lifts planar .* 'p4'"),
        (lambda: UNet(1, 2, (4, 8, 16))(torch.zeros(1, 1, 6, 6)), "UNet expects .*multiples of 4"),
        (lambda: UNet(3, 2, ()), r"UNet expects one width and one class or more; got widths=\(\)"),
        (lambda: UNet(3, 0), r"UNet expects one width and one class or more; got widths=.*, num_classes=0"),
        (
            lambda: Bottleneck(8, 4, 2, spatial=lambda c, _: nn.Conv2d(c, c, 1))(torch.zeros(1, 8, 6, 6)),
            r"Bottleneck expects a spatial layer with an output of \[3, 3\] cells, .*; got \[6, 6\]",
        ),
        (lambda: Bottleneck(8, 4, spatial=lambda *_: None), "spatial: expected a function .*; got None"),  # type: ignore[arg-type]
        (lambda: ConvNorm(None, 4), "ConvNorm: conv: expected an nn.Module; got None"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv2d(8, 8, dtype=torch.int64), "dtype: expected one of floating-.*torch.int64"),
        (lambda: GroupConv2d(8, 8, 3, dtype=torch.int64), "dtype: expected one of floating-.*torch.int64"),
        (lambda: GroupConv2d(8, 8, 3, bias="a"), "GroupConv2d: bias: expected True or False; got 'a'"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv2d(8, 8, qkv_bias=2), "qkv_bias: expected True or False; got 2"),  # type: ignore[arg-type]
        (lambda: Autoencoder(1)(torch.zeros(1, 1, 30, 30)), "expects sides that are multiples of 4"),
        (lambda: Group("a", (IDENTITY, (1, 2))), "group 'a': expected 2×2 matrices of finite numbers; got"),  # type: ignore[arg-type]
        (lambda: Group("a", (IDENTITY, ((math.nan, 0), (0, 1)))), "of finite numbers; got .*nan"),
        (lambda: Group("a", (IDENTITY, ((math.inf, 0), (0, 1)))), "of finite numbers; got .*inf"),
        (lambda: AffineSelfConv1d(8, 8, (3, 3)), r"kernel_size: expected one odd integer ≥ 1; got \(3, 3\)"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv1d(8, 8, 4), "kernel_size: expected one odd integer ≥ 1; got 4"),
        (lambda: AffineSelfConv1d(8, 8, dilation=0), "dilation: expected one integer ≥ 1; got 0"),
        (lambda: AffineSelfConv1d(8, 8)(torch.zeros(1, 7, 9)), r"expects \[N, 8, L\]; got shape \[1, 7, 9\]"),
        (lambda: AffineSelfConv1d(8, 8, 3, 3)(torch.zeros(1, 8, 2)), "stride=3 expects so many positions"),
        (lambda: Bottleneck(8, 4, 0), "Bottleneck: expected sizes that are integers ≥ 1; got .*stride=0"),
        (lambda: Bottleneck(8, 4, 2, downsample="odd"), "downsample: expected 'stride' or 'pool'; got 'odd'"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv1d(8, 8, 3, group="p4"), "group 'p4' turns rows into columns"),
        (lambda: StandAloneSelfAttention2d(16, 16, (1, 3)), r"as many rows as columns.*; got \(1, 3\)"),  # type: ignore[arg-type]
        (lambda: AffineSelfConv1d(8, 8)(torch.zeros(1, 8, 3, 3)), r"expects \[N, 8, L\]; got shape"),
        (lambda: LiftingSelfConv2d(8, 8, group="p4")(torch.zeros(1, 8, 4, 3, 3)), r"expects \[N, 8, h, w\]"),
        (lambda: Bottleneck(0, 4), "Bottleneck: expected sizes that are integers ≥ 1; got in_channels=0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_arguments_of_the_wrong_type_are_refused() -> None:
    x = torch.zeros(1, 2, 3, 3)
    with pytest.raises(TypeError, match=r"concatenate expects tensors as arguments, .*; got list"):
        concatenate([x, x])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got torch.int64 of shape \[1, 4, 5\]"):
        AffineSelfConv1d(4, 4, num_heads=2)(torch.zeros(1, 4, 5, dtype=torch.int64))
    for model, given, kind in ((UNet(3, 2), "a", "str"), (Autoencoder(3), [1], "list")):
        with pytest.raises(TypeError, match=f"LiftingSelfConv2d expects a torch.Tensor; got {kind}"):
            model(given)
    with pytest.raises(
        TypeError, match=r"expects dense features; got torch.sparse_coo of shape \[1, 2, 3, 3\]"
    ):
        GroupConv2d(2, 4, 3)(x.to_sparse())
    with pytest.raises(TypeError, match="name of a group: expected a string; got 1"):
        Group(1, (IDENTITY,))  # type: ignore[arg-type]


# ---- concatenation, restriction, blocks ----


def test_concatenate() -> None:
    x, image = features("p4"), features("z2", channels=1)
    y = concatenate(x, image, group="p4")
    assert y.shape == (2, 5, 4, 8, 8)
    assert torch.equal(y[:, 4], image.expand(-1, 4, -1, -1))
    last = x.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    assert torch.equal(concatenate(last, image, group="p4"), y)
    assert concatenate(last, image, group="p4").stride(1) == 1
    errors = equivariance_error(lambda a, b: concatenate(a, b, group="p4"), (x, image), "p4")
    assert max(errors) == 0
    with pytest.raises(ValueError, match=r"expects \[N, C, 4, h, w\] or \[N, C, h, w\]; got shapes"):
        concatenate(x[:, :, :3], image, group="p4")
    with pytest.raises(ValueError, match="maps of one batch and size; got shapes"):
        concatenate(x, image[..., 1:], group="p4")
    with pytest.raises(ValueError, match="got nothing"):
        concatenate(group="p4")


@pytest.mark.parametrize("group", ["z2", "p4", C2], ids=str)
def test_bottleneck(group: str | Group) -> None:
    torch.manual_seed(0)
    x = features(group)
    for block in (
        Bottleneck(4, 4, 2, zero_gamma=False, squeeze_excite=True, group=group),
        Bottleneck(
            4, 1, zero_gamma=False, group=group,
            spatial=lambda width, stride: GroupConv2d(width, width, 3, stride, padding=1, group=group),
        ),
    ):  # fmt: skip
        if group == "z2":
            assert shift_error(block.double().eval(), x, 2, 2) in (0, None)
        else:
            assert_equivariant(block.double().eval(), x, group)
    fresh = Bottleneck(4, 1, group=group).double()
    torch.testing.assert_close(fresh(x), x.relu())  # begins as its shortcut


def test_an_audit_passes_through_a_restriction() -> None:
    def net(after: str) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            LiftingSelfConv2d(3, 4, 3, num_heads=2, group="p4m"),
            RestrictGroup("p4", group="p4m"),
            AffineSelfConv2d(8, 4, 3, num_heads=2, group=after),
        )

    found = audit(net("p4"), 8, "p4")
    assert found.passed, found.summary()
    assert not audit(net("p4"), 8, "p4m").passed  # reflections are gone
    lifting, restricting, _ = net("p4").children()
    broken = nn.Sequential(lifting, restricting, nn.Flatten(1, 2), nn.Conv2d(32, 2, 3, padding=1))
    assert audit(broken, 8, "p4").culprit == "3"


# ---- examples ----


def trained(model: nn.Module, x: Tensor, loss: Any) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = last = None
    for _ in range(8):
        last = loss(model(x))
        first = last.item() if first is None else first
        optimizer.zero_grad()
        last.backward()
        optimizer.step()
    assert first is not None
    assert last is not None
    assert last.item() < first
    return model


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_examples_are_equivariant_fresh_and_trained(group: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 8, 8)
    labels = (x[:, 0] > 0).long()
    unet = UNet(1, 2, (4, 8), kernel_size=3, group=group)
    autoencoder = Autoencoder(1, 2, 4, group=group)
    cases = ((unet, lambda y: F.cross_entropy(y, labels)), (autoencoder, lambda y: F.mse_loss(y, x)))
    for model, loss in cases:
        for state in (model, trained(model, x, loss)):
            found = audit(state, 8, outputs="planar", tolerance=1e-10)
            assert found.passed, found.summary()
            assert found.error < 1e-10


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: UNet(1, 2, (4, 8)), id="unet"),
        *more(pytest.param(lambda: Autoencoder(1, 2, 4), id="autoencoder")),
    ],
)
def test_examples_can_be_deployed(make: Any, tmp_path: Path) -> None:
    """Exported for any batch, optimised, compiled and traced, as a network from the registry is."""
    model = make().eval()
    x = torch.randn(3, 1, 8, 8)
    forms: dict[str, Any] = {
        "optimised": optimize_for_inference(model),
        "compiled": torch.compile(model, backend="aot_eager"),
        "traced": torch.jit.trace(model, x),
    }
    with torch.no_grad():  # the graph of the backward pass takes as long to trace as all else together
        for name, form in forms.items():
            assert (form(x) - model(x)).abs().max() < 1e-5, name
    export_onnx(model, tmp_path / "model.onnx", input_shape=(1, 8, 8))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {"images": x.numpy()})
    assert abs(found - model(x).detach().numpy()).max() < 1e-4


def test_examples_are_short() -> None:
    folder = Path(selfconv.examples.__file__).parent
    for name in ("unet.py", "autoencoder.py"):
        assert len((folder / name).read_text("utf-8").splitlines()) < 60


def test_planar_examples_run_on_the_cpu_kernels() -> None:
    model = set_backend(UNet(1, 2, (4, 8), group="z2"), "numba")
    assert model(torch.randn(1, 1, 8, 8)).shape == (1, 2, 8, 8)
