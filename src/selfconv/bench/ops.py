"""The operation beside what it replaces: the convolution, and attention that unfolds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selfconv.bench.measure import forward_pass, interleaved, peak_memory, training_pass
from selfconv.groups import get_group
from selfconv.nn import GroupConv2d
from selfconv.ops import Window, affine_self_conv_flops, affine_self_conv_packed

HEADS, KERNEL = 8, 5
STAGES = ((16, 32), (32, 16), (64, 8))  # channels and map size of the ResNet's three stages
LARGE = ((16, 64), (16, 128))
UNFOLD_LIMIT = 6e9  # bytes beyond which an unfolding contender is not run
TOLERANCE = 2e-4
OPERATION, KEPT = "op", "op, freed memory kept"  # sections of the results


@dataclass(frozen=True)
class Row:
    """One measurement: ``None`` where a contender was not run, with the reason in ``note``."""

    section: str
    contender: str
    batch: int
    channels: int
    size: int
    kernel: int
    direction: str  # "forward" or "forward+backward"
    milliseconds: float | None
    megabytes: float | None
    gflops: float | None  # per second
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Layer:
    """A contender: a function of features, its parameters, its input, and its operations per forward pass."""

    run: Callable[[Tensor], Tensor]
    parameters: list[Tensor]
    x: Tensor
    flops: int
    unfolds: bool = False


def attention(
    kind: str,
    backend: str | None,
    batch: int,
    channels: int,
    size: int,
    window: int | Window,
    device: torch.device,
) -> Layer:
    """The operation itself, without its 1×1 maps, on features that lie packed as the layers make them.

    Args:
        kind: "asc", "sasa" or "p4 asc" (which has half the channels, on four planes).
        channels: of the planar layer.
        window: or k, for k×k.
    """
    window = Window((window, window)) if isinstance(window, int) else window
    group = get_group("p4" if kind.startswith("p4") else "z2")
    c = channels // 2 if len(group) > 1 else channels
    planes = () if len(group) == 1 else (len(group),)
    x = torch.randn(batch, size, size, *planes, 3 * c, device=device).movedim(-1, 1)
    x = x.movedim(-1, 2) if planes else x  # channels innermost

    def parameter(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    beta_k = parameter(c, *window.size)
    if kind == "sasa":
        filters = (None, beta_k, None, None)
    else:
        psi = (c, *planes, *window.size)
        filters = (parameter(*psi), beta_k, parameter(*psi), parameter(c, *window.size))  # type: ignore[assignment]

    def run(x: Tensor) -> Tensor:
        return affine_self_conv_packed(
            x, (c, c, c), *filters, num_heads=HEADS, group=group, kernel_size=window.size,
            dilation=window.dilation, padding_mode=window.padding_mode, backend=backend,
        )  # fmt: skip

    features = (batch, c, *planes, size, size)
    shapes = [None if f is None else tuple(f.shape) for f in filters]
    flops = affine_self_conv_flops(features, features, features, *shapes, kernel_size=window.size)
    return Layer(run, [f for f in filters if f is not None], x, flops, unfolds=backend == "eager")


def textbook(batch: int, channels: int, size: int, kernel: int, device: torch.device) -> Layer:
    """Planar ASC as local attention is commonly written: ``F.unfold`` lays out k² copies of keys and values.

    Our own eager form makes its copies with fewer passes over memory; both are measured.
    """
    layer = attention("asc", "eager", batch, channels, size, kernel, device)
    psi_k, beta_k, psi_v, beta_v = (f.flatten(1)[..., None] for f in layer.parameters)  # [C, k·k, 1]

    def neighbours(f: Tensor, psi: Tensor, beta: Tensor) -> Tensor:
        copies = F.unfold(f, kernel, padding=kernel // 2).unflatten(1, (channels, -1))  # [N, C, k·k, h·w]
        return (copies * psi + beta).unflatten(1, (HEADS, -1))

    def run(x: Tensor) -> Tensor:
        q, k, v = x.split(channels, 1)
        query = q.flatten(2).unflatten(1, (HEADS, -1)).unsqueeze(3)  # [N, heads, d, 1, h·w]
        scores = (query * neighbours(k, psi_k, beta_k)).sum(2, keepdim=True) / channels
        return (scores.softmax(3) * neighbours(v, psi_v, beta_v)).sum(3).reshape(v.shape)

    return Layer(run, layer.parameters, layer.x, layer.flops, unfolds=True)


def convolution(group: str, batch: int, channels: int, size: int, device: torch.device) -> Layer:
    """The 3×3 (group) convolution that the operation stands in for."""
    order = len(get_group(group))
    c = channels // 2 if order > 1 else channels
    conv = GroupConv2d(c, c, 3, padding=1, bias=False, group=group, device=device)
    conv = conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    planes = () if order == 1 else (order,)
    x = torch.randn(batch, size, size, *planes, c, device=device).movedim(-1, 1)
    x = x.movedim(-1, 2) if planes else x
    return Layer(conv, list(conv.parameters()), x, 2 * batch * size * size * (c * order) ** 2 * 9)


def contenders(batch: int, channels: int, size: int, device: torch.device) -> dict[str, Layer]:
    shape = (batch, channels, size, KERNEL, device)
    return {
        "ASC": attention("asc", None, *shape),
        "SASA": attention("sasa", None, *shape),
        "p4 ASC": attention("p4 asc", None, *shape),
        "ASC, unfold": attention("asc", "eager", *shape),
        "ASC, F.unfold": textbook(*shape),
        "ASC, unfold compiled": compiled(attention("asc", "eager", *shape)),
        "p4 ASC, unfold": attention("p4 asc", "eager", *shape),
        "3x3 convolution": convolution("z2", batch, channels, size, device),
        "p4 3x3 convolution": convolution("p4", batch, channels, size, device),
    }


def compiled(layer: Layer) -> Layer:
    return Layer(
        torch.compile(layer.run, dynamic=False), layer.parameters, layer.x, layer.flops, unfolds=True
    )


def unfold_bytes(layer: Layer, direction: str) -> float:
    """About what an unfolding contender holds: keys and values k² times, their products, and gradients."""
    copies = 4 if direction == "forward" else 10
    planes = layer.x.shape[2] if layer.x.dim() == 5 else 1
    return copies * KERNEL**2 * layer.x.numel() / 3 * 4 * max(1, planes / 2)


def check(kind: str, device: torch.device, window: int | Window = KERNEL) -> float:
    """The largest relative error of the chosen kernel against the reference, in outputs and all gradients."""
    found = []
    for backend in (None, "reference"):
        torch.manual_seed(0)
        layer = attention(kind, backend, 1, 16, 5, window, device)
        x = layer.x.detach().requires_grad_()
        out = layer.run(x)
        grad = torch.arange(out.numel(), device=device).reshape(out.shape).sin().to(out.dtype)
        found.append([out, *torch.autograd.grad(out, [x, *layer.parameters], grad)])
    errors = [
        (actual - expected).abs().max() / expected.abs().max().clamp(min=1)
        for actual, expected in zip(*found, strict=True)
    ]
    return torch.stack(errors).max().item()  # which is NaN if one is


def measure_ops(
    batches: tuple[int, ...],
    shapes: tuple[tuple[int, int], ...],
    seconds: float,
    device: torch.device,
    section: str = OPERATION,
) -> Iterator[Row]:
    """Every contender at every shape, forward and with its backward pass; repetitions are interleaved."""
    errors = {kind: check(kind, device) for kind in ("asc", "sasa", "p4 asc")}
    wrong = {
        name: f"disagrees with the reference by {errors[kind]:.1e}: no figure"
        for name, kind in (("ASC", "asc"), ("SASA", "sasa"), ("p4 ASC", "p4 asc"))
        if not errors[kind] <= TOLERANCE
    }
    for batch in batches:
        for channels, size in shapes:
            torch.compiler.reset()  # a fresh start for every shape: it gives up after eight of them
            layers = contenders(batch, channels, size, device)
            for direction in ("forward", "forward+backward"):
                notes = dict(wrong)
                works = {}
                for name, layer in layers.items():
                    if layer.unfolds and unfold_bytes(layer, direction) > UNFOLD_LIMIT:
                        gigabytes = unfold_bytes(layer, direction) / 1e9
                        notes[name] = f"not run: would take about {gigabytes:.0f} GB"
                    if name in notes:
                        continue
                    if direction == "forward":
                        works[name] = forward_pass(layer.run, layer.x)
                    else:
                        works[name] = training_pass(layer.run, layer.x, layer.parameters)
                times = interleaved(works, seconds, device)
                for name, layer in layers.items():
                    time = times.get(name)
                    flops = layer.flops * (1 if direction == "forward" else 3)
                    yield Row(
                        section, name, batch, channels, size, KERNEL, direction,
                        None if time is None else 1e3 * time,
                        None if time is None else peak_memory(works[name], device) / 1e6,
                        None if time is None else flops / time / 1e9,
                        errors.get(name.lower()),
                        notes.get(name, ""),
                    )  # fmt: skip


def measure_growth(seconds: float, device: torch.device) -> Iterator[Row]:
    """How time and memory grow with the map, the window and the channels, all else as in the first stage."""
    batch, channels, size = 16, 16, 32
    series = {
        "h·w": [(channels, n, KERNEL) for n in (8, 16, 32, 64, 128)],
        "k": [(channels, size, k) for k in (3, 5, 7, 9, 11)],
        "C": [(c, size, KERNEL) for c in (8, 16, 32, 64, 128)],
    }
    for name, points in series.items():
        for c, n, k in points:
            layers = {"ASC": attention("asc", None, batch, c, n, k, device)}
            unfold = attention("asc", "eager", batch, c, n, k, device)
            if 10 * k * k * unfold.x.numel() / 3 * 4 <= UNFOLD_LIMIT:
                layers["ASC, unfold"] = unfold
            works = {m: training_pass(layer.run, layer.x, layer.parameters) for m, layer in layers.items()}
            for contender, time in interleaved(works, seconds, device).items():
                megabytes = peak_memory(works[contender], device) / 1e6
                rate = 3 * layers[contender].flops / time / 1e9
                yield Row(f"growth with {name}", contender, batch, c, n, k, "forward+backward",
                          1e3 * time, megabytes, rate)  # fmt: skip
