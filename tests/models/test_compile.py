"""``torch.compile(fullgraph=True)``: the whole network as one graph, and the same numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import cast

import pytest
import torch
from helpers.cases import more
from helpers.tiny_models import error_over_spread, tiny, tiny_options, with_active_norms
from torch import nn

from selfconv import _harmonics
from selfconv.groups import GROUPS, IDENTITY, Group, _planes, _steering
from selfconv.models import create_model
from selfconv.nn import AffineSelfConv2d, GroupBatchNorm, LiftingConv2d, LiftingSelfConv2d, set_backend
from selfconv.ops import _backends


@pytest.mark.parametrize(
    ("name", "overrides", "sizes"),
    [
        ("p4resnet29_asc_se", {}, (8, 12)),  # the second makes the graph one for any size
        ("resnet29_sasa", {"num_heads": 1}, (8,)),
        ("p4mresnet29", {"downsample": "pool"}, (8,)),
        ("c8resnet29_asc", {}, (8,)),
        ("c8resnet29", {}, (8,)),
    ],
)
def test_the_graph_has_no_breaks(name: str, overrides: dict[str, object], sizes: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    model = tiny(name, **overrides)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for size in sizes:
        images = torch.randn(2, 3, size, size)
        assert error_over_spread(compiled(images), model(images)) < 1e-5


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("p4resnet29_asc", False), ("resnet29_asc", True), *more(("c8resnet29_asc", False))],
)
def test_training_through_the_graph(name: str, checkpointing: bool) -> None:
    torch._dynamo.reset()
    model = with_active_norms(create_model(name, **tiny_options(name)).double()).train()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing(checkpointing)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    (model(images) ** 2).sum().backward()
    (compiled(images) ** 2).sum().backward()
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)  # type: ignore[arg-type]
    for key, value in model.state_dict().items():  # the running statistics moved, and moved once
        assert torch.allclose(other.state_dict()[key], value), key


def test_compiled_to_machine_code() -> None:
    """A block that halves the map: a whole network takes a C++ compiler half a minute."""
    torch._dynamo.reset()
    block = tiny("resnet29_asc", widths=(2, 2, 2)).get_submodule("stages.1.0")
    features = torch.randn(2, 8, 8, 8)
    with torch.no_grad():
        assert error_over_spread(torch.compile(block, fullgraph=True)(features), block(features)) < 1e-5


@pytest.mark.parametrize(
    ("group", "training"), [("z2", True), ("p4", False), *more(("p4", True), ("z2", False))]
)
def test_any_batch_height_and_width_through_inductor(
    group: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers on the plane and on p4, whose backend is first used while it is traced.

    Inference has one graph for all sizes. In training Inductor makes one for each height and width,
    as it does for torch's own convolutions.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(_backends, "_FAILURES", {})
    network = nn.Sequential(
        LiftingConv2d(2, 2, 1, group=group),
        GroupBatchNorm(2, group=group),
        AffineSelfConv2d(2, 2, 3, num_heads=2, group=group),
    ).double()
    network.train(training)
    other = copy.deepcopy(network)
    compiled = cast(nn.Module, torch.compile(other, fullgraph=True, dynamic=True))

    def results(module: nn.Module, shape: tuple[int, ...]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=training)
        out = module(x)
        leaves = [x, *module.parameters()]
        return [out, *(torch.autograd.grad(out.square().sum(), leaves) if training else ())]

    with torch.set_grad_enabled(training), torch._dynamo.config.patch(error_on_recompile=not training):
        for shape in ((3, 2, 5, 6), (4, 2, 7, 5)):  # torch takes a batch as large as the channels for fixed
            for found, expected in zip(results(compiled, shape), results(network, shape), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_size_that_is_not_exact_does_not_stop_the_compiler() -> None:
    torch._dynamo.reset()
    model = tiny("p4resnet29_asc")
    images = torch.randn(1, 3, 10, 10)
    compiled = torch.compile(model, fullgraph=True, backend="eager")(images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert error_over_spread(compiled, model(images)) < 1e-5


@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize(("group", "k"), [("p4m", 1), ("p4m", 2), ("p4m", 3), ("c8", 1), ("c8", 3)])
def test_filters_are_steered_alike_when_compiled(planar: bool, group: str, k: int) -> None:
    torch._dynamo.reset()
    filters = torch.randn(3, *(() if planar else (8,)), k, k)
    steer = torch.compile(lambda f: GROUPS[group].steer(f, planar=planar), fullgraph=True, backend="eager")
    assert torch.equal(steer(filters), GROUPS[group].steer(filters, planar=planar))


class TwoLayers(nn.Module):
    """Layers that lift to groups of their own: one object in two places, where these are the same."""

    def __init__(self, *groups: str | Group) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LiftingConv2d(2, 2, 3, group=group) for group in groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).flatten(1).square().sum(1) for layer in self.layers])


HALF_TURN = Group("c2", (IDENTITY, ((-1, 0), (0, -1))))
LAYERS: dict[str, Callable[[str | Group], nn.Module]] = {
    "lifting convolution": lambda group: LiftingConv2d(2, 2, 3, padding=1, group=group),
    "lifting attention": lambda group: LiftingSelfConv2d(2, 2, 3, num_heads=2, group=group),
    "the second of two": lambda group: TwoLayers("p4", group),
    "the first of two": lambda group: TwoLayers(group, "z2"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_program_serves_one_group(layer: str) -> None:
    """Layers that are compiled one after another in a process, and differ in the group alone."""
    torch._dynamo.reset()
    x = torch.randn(2, 2, 6, 6)
    for group in ("z2", "p4", HALF_TURN, "p4m", "z2"):
        module = LAYERS[layer](group)
        compiled = cast(nn.Module, torch.compile(module, backend="eager"))
        torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("group", ["c8", "d8"])
@pytest.mark.parametrize("layer", [LiftingConv2d, AffineSelfConv2d])
def test_the_first_call_may_be_a_compiled_one(layer: type[nn.Module], group: str) -> None:
    """Constants of the group are then computed while torch traces, and its tensors have no numbers."""
    torch._dynamo.reset()
    for constant in (_steering, _planes, _harmonics.basis, _harmonics.expansion):
        getattr(constant, "cache_clear", lambda: None)()
    module = layer(2, 2, 3, group=group, **({} if layer is LiftingConv2d else {"num_heads": 2}))
    set_backend(module, "eager")
    x = torch.randn(1, 2, *(() if layer is LiftingConv2d else (len(GROUPS[group]),)), 5, 5)
    compiled = cast(nn.Module, torch.compile(module, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(compiled(x), module(x))
    _steering.cache_clear()
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))


@pytest.mark.parametrize("strict", [False, True])
def test_filters_between_the_pixels_in_an_exported_program(strict: bool) -> None:
    """A layer as it is, its filters steered inside the program: the constants become part of it."""
    layer = AffineSelfConv2d(4, 4, 3, num_heads=2, group="c8", backend="eager")
    x = torch.randn(2, 4, 8, 5, 5)
    program = torch.export.export(layer, (x,), strict=strict).module()
    assert error_over_spread(program(x), layer(x)) < 1e-5
