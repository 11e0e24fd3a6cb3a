"""The ways in which people run a PyTorch model: exported, folded, in half precision, in channels_last."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from helpers.cases import more
from helpers.tiny_models import (
    TINY,
    after_sgd_steps,
    channels_last,
    error_over_spread,
    tiny,
    tiny_options,
    with_active_norms,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import selfconv
from selfconv.examples import Autoencoder, UNet
from selfconv.groups import IDENTITY, MIRROR, Group
from selfconv.models import (
    compile_program,
    create_model,
    export_onnx,
    export_program,
    fold_batch_norm,
    list_models,
)
from selfconv.nn import (
    AffineSelfConv1d,
    AffineSelfConv2d,
    ConvNorm,
    GroupBatchNorm,
    GroupConv2d,
    LiftingConv2d,
    SimpleAffineSelfConv2d,
    SpatialPool2d,
    StandAloneSelfAttention2d,
    Upsample2d,
    set_backend,
)
from selfconv.nn.fixed.layers import fix_filters


@pytest.mark.parametrize(
    ("name", "size", "overrides"),
    [
        ("p4resnet29_asc_se", 32, TINY),
        ("p4mresnet29", 16, tiny_options("p4mresnet29", downsample="pool", in_channels=1)),
        ("c8resnet29", 8, tiny_options("c8resnet29")),
        *more(("c8resnet29_asc", 8, TINY)),
    ],
)
def test_exported_programs_agree_at_any_batch_size(
    name: str, size: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = after_sgd_steps(create_model(name, **overrides), size=size)
    shape = (model.in_channels, size, size)
    export_program(model, tmp_path / "model.pt2", input_shape=shape)
    program = torch.export.load(tmp_path / "model.pt2").module()
    for batch in (1, 7):
        images = torch.randn(batch, *shape)
        with torch.no_grad():
            assert (program(images) - model(images)).abs().max() < 1e-5


ONNX_ERROR = 1e-5  # of the spread of the logits


@pytest.mark.parametrize(
    ("name", "options"),
    [("c8resnet29_asc", TINY), *more(("resnet29_asc_se", {"depth": 11}), ("p4resnet29_asc", {"depth": 11}))],
)
def test_onnx_agrees_at_any_batch_size(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = after_sgd_steps(create_model(name, **options))
    export_onnx(model, tmp_path / "model.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]  # the weights are inside
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch in (1, 7):
        images = torch.randn(batch, 3, 32, 32)
        (from_onnx,) = session.run(["logits"], {"images": images.numpy()})
        with torch.no_grad():
            logits = model(images)
        assert error_over_spread(torch.from_numpy(from_onnx), logits) < ONNX_ERROR
        assert logits.std() > 1e-2


RANDOM = [
    ("resnet29_asc_se", {}),
    ("resnet29_asc", {"num_heads": 4, "kernel_size": 5, "psi": "dense"}),
    ("resnet29_asc", {"scale": "head", "kernel_size": 5}),
    ("resnet29_sasa", {"num_heads": 1}),
    ("p4resnet29_asc", {}),
    ("p4resnet29_simple_asc", {"kernel_size": 5}),
    ("p4mresnet29_asc", {}),
    ("c8resnet29_asc", {}),
]


@pytest.mark.parametrize(("name", "options"), RANDOM, ids=[f"{n} {o}" for n, o in RANDOM])
@pytest.mark.filterwarnings("ignore:.*only approximately")
def test_optimised_networks_are_the_same_functions(name: str, options: dict[str, Any]) -> None:
    model = tiny(name, **options | {"downsample": "pool"}).train()
    before = copy.deepcopy(model.state_dict())
    optimized = selfconv.optimize_for_inference(model)
    assert model.training
    assert not optimized.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.eval()
    for shape in ((1, 3, 8, 8), (3, 3, 9, 7), (2, 3, 13, 5), (0, 3, 8, 8)):
        images = torch.randn(*shape)
        with torch.inference_mode():
            expected, kept = model(images), images.clone()
            for layout in (torch.contiguous_format, torch.channels_last):
                got = optimized(images.contiguous(memory_format=layout))
                assert got.shape == expected.shape
                assert len(images) == 0 or error_over_spread(got, expected) < 1e-4
        assert torch.equal(images, kept)


def test_an_optimised_network_under_autograd_copies_threads_and_dtypes() -> None:
    model = tiny("p4resnet29_asc")
    optimized = selfconv.optimize_for_inference(model)
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    expected = torch.autograd.grad(model(images).square().sum(), images)[0]
    assert (
        error_over_spread(torch.autograd.grad(optimized(images).square().sum(), images)[0], expected) < 1e-4
    )
    with torch.inference_mode():
        logits = model(images)
        again = pickle.loads(pickle.dumps(optimized))
        assert error_over_spread(again(images), logits) < 1e-4
        assert error_over_spread(copy.deepcopy(optimized).double()(images.double()), logits.double()) < 1e-4
        batches = [torch.randn(1 + i % 3, 3, 8, 8) for i in range(24)]
        alone = [optimized(batch) for batch in batches]

    def run(batch: Tensor) -> Tensor:
        with torch.inference_mode():
            return optimized(batch)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, batches))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("name", ["resnet29", "p4resnet29_asc"])
def test_an_optimised_network_has_a_state_and_refuses_training(name: str) -> None:
    optimized, other = (selfconv.optimize_for_inference(tiny(name)) for _ in range(2))
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(optimized(images), other(images))
    other.load_state_dict(optimized.state_dict())
    assert torch.equal(optimized(images), other(images))
    with pytest.raises(RuntimeError, match="expected evaluation mode; its filters are fixed copies"):
        optimized.train()
    assert torch.equal(optimized.eval()(images), other(images))


@pytest.mark.parametrize("name", ["resnet29_asc_se", *more("p4mresnet29_asc")])
@pytest.mark.filterwarnings("ignore:.*only approximately")
def test_one_onnx_file_takes_any_batch_and_size(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    export_onnx(model, tmp_path / "model.onnx", input_shape=(3, 8, 8), metadata={"note": "ψ"})
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_modelmeta().custom_metadata_map["note"] == "ψ"
    for shape in ((1, 3, 8, 8), (3, 3, 9, 11), (2, 3, 13, 17)):
        images = torch.randn(*shape)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.no_grad():
            assert error_over_spread(torch.from_numpy(logits), model(images)) < ONNX_ERROR


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["selfconv"] = None
import torch
compiled, program = torch._inductor.aoti_load_package("model.pt2"), torch.export.load("model.pt2").module()
for images, expected in torch.load("expected.pt"):
    for form in (compiled, program):
        assert (form(images) - expected).abs().max() <= 1e-4 * expected.abs().max()
"""


@pytest.mark.parametrize("group", ["z2", *more("p4")])
def test_one_file_holds_the_program_and_its_compiled_form(group: str, tmp_path: Path) -> None:
    layers = (
        LiftingConv2d(3, 4, 3, padding=1, group=group),
        ConvNorm(AffineSelfConv2d(4, 4, 3, num_heads=2, group=group), 4, group),
    )
    model = nn.Sequential(*layers).eval()  # a whole network takes minutes; the command's test compiles one
    compile_program(export_program(model, input_shape=(3, 8, 8), any_size=True), tmp_path / "model.pt2")
    cases = [torch.randn(*shape) for shape in ((1, 3, 8, 8), (3, 3, 9, 11), (2, 3, 13, 17))]
    with torch.no_grad():
        torch.save([(images, model(images)) for images in cases], tmp_path / "expected.pt")
    subprocess.run([sys.executable, "-c", WITHOUT_THE_PACKAGE], cwd=tmp_path, check=True)


def test_no_exported_tensor_is_an_unfolded_window() -> None:
    model = tiny("p4resnet29_asc", kernel_size=5)
    program = export_program(model, input_shape=(3, 16, 16))
    widest, planes, k = 4 * max(TINY["widths"]), 4, 5
    values = [node.meta.get("val") for node in program.graph.nodes]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    maps = [shape for shape in shapes if len(shape) >= 4]
    assert max(len(shape) for shape in shapes) <= 5
    assert max(int(shape[1]) for shape in maps if len(shape) == 4) <= max(k * 8, widest) * planes


CONV = partial(GroupConv2d, 4, 6)
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "conv": partial(CONV, 3, padding="same"),
    "conv, stride": partial(CONV, 3, 2, 1, bias=False),
    "conv, even": partial(CONV, 2),
    "conv, pool": partial(CONV, 3, 2, 1, downsample="pool"),
    "pointwise, pool": partial(CONV, 1, 2, downsample="pool"),
    "asc": partial(AffineSelfConv2d, 4, 8, 3, num_heads=2, bias=True),
    "asc, stride": partial(AffineSelfConv2d, 4, 8, 5, 2, num_heads=4, key_channels=4),
    "asc, dense": partial(AffineSelfConv2d, 4, 8, 3, num_heads=2, psi="dense"),
    "asc, beta": partial(AffineSelfConv2d, 4, 8, 3, num_heads=1, affine="beta", qkv_bias=False),
    "simple asc": partial(SimpleAffineSelfConv2d, 4, 8, 3, num_heads=2),
    "sasa": partial(StandAloneSelfAttention2d, 4, 8, 3, num_heads=2),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (group, name)
        for group in ("z2", "p4", "p4m", "c8")
        for name in LAYERS
        if group != "c8" or name not in ("sasa", "conv, even")
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
def test_layers_with_fixed_filters_are_the_same_functions(
    name: str, group: str, dtype: torch.dtype, native: bool
) -> None:
    lifting = LiftingConv2d(2, 4, 3, padding=1, group=group, dtype=dtype)
    layers = nn.Sequential(lifting, LAYERS[name](group=group, dtype=dtype))
    for bias in (p for n, p in layers.named_parameters() if n.endswith(("bias", "b_in", "b_out"))):
        nn.init.normal_(bias)
    images = torch.randn(3, 2, 8, 6, dtype=dtype)
    with torch.no_grad():
        expected = layers(images)
        fixed = fix_filters(copy.deepcopy(layers), native=native)
        assert not [m for m in fixed.modules() if isinstance(m, type(lifting) | type(layers[1]))]
        got = fixed(images)
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert error_over_spread(got.double(), expected.double()) < (1e-12 if dtype == torch.float64 else 0.05)


class Residual(AffineSelfConv2d):
    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor:
        return x + super().forward(x)


class Entropy(nn.Module):
    """Asks a layer for more than its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = AffineSelfConv2d(3, 4, 3, num_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.layer.attention_weights(x)
        return self.layer(x).mean((2, 3)) - (alpha * alpha.log()).sum((2, 3)).mean((2, 3)).repeat(1, 2)


def layer_used_twice() -> nn.Module:
    layer = AffineSelfConv2d(3, 3, 3, num_heads=1)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    layer = GroupConv2d(3, 4, 3)
    layer.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return nn.Sequential(layer)


def own_forward() -> nn.Module:
    layer = GroupConv2d(3, 4, 3)
    layer.forward = lambda x: 2 * GroupConv2d.forward(layer, x)  # type: ignore[method-assign]
    return nn.Sequential(layer)


def hooked_norm() -> nn.Module:
    model = tiny("resnet29")
    model.stem.norm.register_forward_hook(lambda norm, inputs, output: output - 1)
    return model


def convolution_of_two_norms() -> nn.Module:
    model = tiny("resnet29")
    block: Any = model.get_submodule("stages.0.0")
    block.reduce.conv = block.expand.conv = GroupConv2d(4, 4, 1, bias=False)
    block.expand.norm = GroupBatchNorm(4)
    block.shortcut = nn.Identity()
    return nn.Sequential(model.stem, block)


def parametrized() -> nn.Module:
    model = tiny("resnet29_asc")
    weight_norm(model.stem.conv)
    return model


def wrapped() -> nn.Module:
    model = tiny("p4resnet29_asc")
    model.stem.conv = nn.Sequential(model.stem.conv, nn.Identity())
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(Residual(3, 3, 3, num_heads=1)),
        lambda: AffineSelfConv2d(3, 4, 3, num_heads=2),
        Entropy,
        layer_used_twice,
        hooked,
        own_forward,
        hooked_norm,
        convolution_of_two_norms,
        parametrized,
        wrapped,
    ],
    ids=[
        "subclass",
        "layer",
        "asked",
        "twice",
        "hook",
        "forward",
        "hooked norm",
        "shared",
        "parametrized",
        "wrapped",
    ],
)
def test_networks_of_others_are_exported_as_they_are(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    state = torch.get_rng_state()
    program = export_program(model, input_shape=(3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert not [n for n in program.graph.nodes if "selfconv" in str(n.target)]
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        assert error_over_spread(program.module()(images), model(images)) < 1e-5


def test_exporting_leaves_the_model_alone(tmp_path: Path) -> None:
    model = set_backend(tiny("resnet29_asc").train(), "reference")
    before = copy.deepcopy(model.state_dict())
    program = export_program(model, input_shape=(3, 8, 8))
    assert model.training
    assert model.get_submodule("stages.0.0.spatial.conv").backend == "reference"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not [n for n in program.graph.nodes if "selfconv" in str(n.target)]  # plain operators only


REVERSAL = Group("reversal", (IDENTITY, MIRROR))

ANY_SIZE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "pooled and up": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), SpatialPool2d(2), Upsample2d(2)),
        (4, 16, 16), (3, 4, 12, 10),
    ),
    "bilinear": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), SpatialPool2d(2), Upsample2d(3, "bilinear")),
        (4, 16, 16), (3, 4, 12, 10),
    ),
    "pooled and normed": (
        lambda: nn.Sequential(
            LiftingConv2d(4, 4, 3, padding=1, group="p4"), SpatialPool2d(2, group="p4"),
            GroupBatchNorm(4, group="p4"),
        ),
        (4, 16, 16), (3, 4, 12, 10),
    ),
    "on p4": (lambda: GroupConv2d(4, 4, 3, padding=1, group="p4"), (4, 4, 16, 16), (3, 4, 4, 12, 10)),
    "on p4m": (
        lambda: AffineSelfConv2d(4, 4, 3, num_heads=2, group="p4m"), (4, 8, 16, 16), (3, 4, 8, 12, 9)
    ),
    "sequence": (lambda: AffineSelfConv1d(4, 4, 3, num_heads=2), (4, 16), (3, 4, 21)),
    "sequence on a group": (
        lambda: AffineSelfConv1d(4, 4, 3, num_heads=2, group=REVERSAL), (4, 2, 16), (3, 4, 2, 21)
    ),
    "no parameters": (lambda: SpatialPool2d(2), (4, 16, 16), (3, 4, 12, 10)),
    "u-net": (lambda: UNet(3, 2, (4, 8)), (3, 16, 16), (3, 3, 12, 18)),
    "autoencoder": (lambda: Autoencoder(3, width=4), (3, 16, 16), (3, 3, 12, 20)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["resnet29_asc", "p4resnet29_asc", "resnet29_sasa"])
def test_an_optimised_network_that_is_cast(name: str, dtype: torch.dtype) -> None:
    """Its tables are cast with it; the kernels take float32 and float64 tables only. Its rounding is that of
    the network, cast in the same way."""
    model = tiny(name, **({"num_heads": 1} if name == "resnet29_sasa" else {}))
    optimized = selfconv.optimize_for_inference(model)
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    rounded = copy.deepcopy(model).to(dtype)(x.to(dtype))
    with torch.inference_mode():
        optimized(x)
        found = optimized.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    rounding = error_over_spread(rounded.float(), expected)
    assert error_over_spread(found.float(), expected) < max(1e-5, 3 * rounding)


def test_refused_training_changes_nothing() -> None:
    model = nn.Sequential(nn.Dropout(0.5), AffineSelfConv2d(3, 8, 3, num_heads=2)).eval()
    x = torch.randn(2, 3, 8, 8)
    optimized = selfconv.optimize_for_inference(model)
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        with pytest.raises(RuntimeError, match="NativeAttention2d: expected evaluation mode"):
            one.train()
        assert not any(layer.training for layer in one.modules())
        torch.testing.assert_close(one.eval()(x), model(x))
    with pytest.raises(TypeError, match=r"expects an nn.Module, .*; got str"):
        selfconv.optimize_for_inference("digits_asc")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ANY_SIZE)
def test_programs_of_building_blocks_take_any_size(name: str) -> None:
    make, exported, given = ANY_SIZE[name]
    model = make().eval()
    program = export_program(model, input_shape=exported, any_size=True).module()
    for batch in (given[0], 1):
        x = torch.randn(batch, *given[1:])
        torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


def test_onnx_of_pooled_and_enlarged_features_takes_any_size(tmp_path: Path) -> None:
    model = nn.Sequential(
        LiftingConv2d(3, 4, 3, padding=1, group="p4"), SpatialPool2d(2, group="p4"),
        GroupBatchNorm(4, group="p4"), Upsample2d(2, "bilinear", group="p4"),
    ).eval()  # fmt: skip
    export_onnx(model, tmp_path / "model.onnx", input_shape=(3, 16, 16), any_size=True)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    x = torch.randn(3, 3, 12, 10)
    (found,) = session.run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-5, atol=1e-5)


class WithCell(nn.Module):
    """Whose attribute is a layer, not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)


def test_export_ignores_a_layer_named_cell() -> None:
    model, x = WithCell(), torch.randn(3, 3, 9, 11)
    program = export_program(model, input_shape=(3, 16, 16), any_size=True).module()
    torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize("group", ["p4", *more("z2")])
def test_any_size_of_networks_that_downsample_further(group: str) -> None:
    """Sides from 32 on, below which the last map has one pixel; of images too small for that, one line."""
    model = create_model("resnet29_asc", **TINY, stem="pool4", group=group).eval()
    program = export_program(model, input_shape=(3, 64, 64), any_size=True).module()
    for shape in ((1, 3, 64, 64), (3, 3, 32, 48)):
        x = torch.randn(shape)
        assert error_over_spread(program(x), model(x)) < 1e-5
    with pytest.raises(ValueError, match=r"any_size: expected an input_shape .*; got \(3, 16, 16\)"):
        export_program(model, input_shape=(3, 16, 16), any_size=True)


def test_export_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"expected \(channels, height, width\), or .*; got \(3,\)"):
        export_program(nn.Linear(3, 3), input_shape=(3,), any_size=True)
    assert export_program(nn.Linear(3, 3), input_shape=(3,)).module()(torch.zeros(5, 3)).shape == (5, 3)


def test_export_needs_a_shape_for_a_network_of_others() -> None:
    with pytest.raises(
        ValueError, match=r"input_shape: expected \(channels, h, w\) for a Sequential; got None"
    ):
        export_program(nn.Sequential(nn.Conv2d(3, 8, 3)))


def test_onnx_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"^ONNX export needs onnxscript: pip install 'selfconv\[onnx\]'$"
    ):
        export_onnx(tiny("resnet29"), tmp_path / "model.onnx", input_shape=(3, 8, 8))


@pytest.mark.parametrize("name", list_models("*29*"))
def test_folded_batch_norm_is_the_same_function(name: str) -> None:
    overrides = {"num_heads": 1} if "sasa" in name else {}
    model = with_active_norms(
        create_model(name, **tiny_options(name, **overrides, downsample="pool")).double()
    )
    folded = fold_batch_norm(model)
    images = torch.randn(3, 3, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        assert error_over_spread(folded(images), model(images)) < 1e-9
    assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [m for m in model.modules() if isinstance(m, GroupBatchNorm)]


class UsesConvTwice(ConvNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


def test_folding_keeps_a_subclass_that_uses_the_convolution_itself() -> None:
    pair = UsesConvTwice(nn.Conv2d(3, 4, 1), 4).eval()
    nn.init.uniform_(pair.norm.weight, 0.5, 1.5)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(fold_batch_norm(nn.Sequential(pair))(x), pair(x))


def test_folding_again_changes_nothing() -> None:
    folded = fold_batch_norm(tiny("p4resnet29_asc"))
    images = torch.randn(1, 3, 8, 8)
    assert torch.equal(fold_batch_norm(folded)(images), folded(images))


@pytest.mark.parametrize(
    "name", ["resnet29_asc_se", "p4resnet29_asc", "p4mresnet29_simple_asc", "resnet29_sasa"]
)
def test_bfloat16_autocast(name: str) -> None:
    model = create_model(name, depth=11)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    after_sgd_steps(model, size=16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    assert logits.dtype == torch.bfloat16
    assert error_over_spread(logits.float(), model(images)) < 0.1
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(images), labels).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("name", ["resnet29_asc_se", "p4resnet29_asc_se", "p4mresnet29", "resnet29_sasa"])
def test_channels_last_is_the_same_function(name: str) -> None:
    model = with_active_norms(create_model(name, depth=11, downsample="pool").double(), size=16)
    last = channels_last(copy.deepcopy(model))
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    features = last.forward_features(images.to(memory_format=torch.channels_last))
    if model.config["spatial"] == "conv":  # what attention returns is its backend's to choose
        assert features.stride(1) == 1  # channels stayed innermost through the whole network
    assert error_over_spread(features, model.forward_features(images)) < 1e-9
    assert error_over_spread(last(images), model(images)) < 1e-9  # an image in the other format is no matter
    model.train(), last.train()
    (model(images) ** 2).sum().backward()
    (last(images.to(memory_format=torch.channels_last)) ** 2).sum().backward()
    for ours, theirs in zip(last.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)  # type: ignore[arg-type]


def saved_elements(model: nn.Module, images: Tensor) -> int:
    """How much a forward pass keeps for the backward pass."""
    total = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal total
        total += t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(images)
    return total


@pytest.mark.parametrize("name", ["resnet29_asc", "p4resnet29_se"])
def test_gradient_checkpointing_changes_nothing_but_memory(name: str) -> None:
    plain = with_active_norms(create_model(name, **tiny_options(name)).double()).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    images = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    for model in (plain, saving):
        (model(images) ** 2).sum().backward()
    for ours, theirs in zip(saving.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
    for key, value in plain.state_dict().items():  # the second pass has not moved the statistics again
        assert torch.equal(saving.state_dict()[key], value), key
    kept = [saved_elements(model, images) for model in (plain, saving)]
    assert kept[1] < kept[0] / 3
    saving.set_grad_checkpointing(False)
    assert torch.equal(saving.eval()(images), plain.eval()(images))
