"""Inference of trained networks in every form that can be deployed, beside the convolutional counterpart."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfconv._extras import require
from selfconv.bench.measure import Work, interleaved
from selfconv.bench.options import PAIRS
from selfconv.models import (
    ResNet,
    compile_program,
    create_model,
    export_onnx,
    export_program,
    optimize_for_inference,
)

BATCHES = (1, 8, 64)
TOLERANCE = 1e-4  # of logits, relative to their largest
AS_TRAINED, OPTIMIZED, ONNX = "as trained", "optimised", "ONNX Runtime"
PROGRAM, COMPILED = "torch.export", "AOTInductor"


@dataclass(frozen=True)
class InferenceRow:
    model: str
    counterpart: str
    form: str  # one of those above
    batch: int
    milliseconds: float | None
    ratio: float | None  # time over the counterpart's in the same form
    error: float  # of the logits, relative to their largest; above the tolerance there is no time


def forms(model: ResNet, folder: Path, threads: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The network as functions of images, in each form; compiled where there is a C++ compiler."""
    from torch._inductor.exc import InvalidCxxCompiler  # slow to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters
        program = export_program(model)
        found: dict[str, Any] = {
            AS_TRAINED: model, OPTIMIZED: optimize_for_inference(model), PROGRAM: program.module()
        }  # fmt: skip
        with suppress(InvalidCxxCompiler):
            compile_program(program, folder / "model.pt2")
            found[COMPILED] = torch._inductor.aoti_load_package(os.fspath(folder / "model.pt2"))
        export_onnx(model, folder / "model.onnx")
    session = onnx_session(folder / "model.onnx", threads)

    def run_onnx(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    found[ONNX] = run_onnx
    return {name: torch.inference_mode()(form) for name, form in found.items()}


def onnx_session(path: str | os.PathLike[str], threads: int) -> Any:
    """A session that leaves the cores to the other contenders once its call has returned."""
    require("bench --sections inference", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])


@torch.no_grad()
def trained_statistics(model: ResNet) -> ResNet:
    """A new network as if trained: batch norm has statistics and no γ is 0, which would hide a block.

    Where γ was 0, at the end of a block, it stays small: random blocks of attention at full strength amplify
    the rounding of some images a thousand times, in every form of the network.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    for norm in norms:
        low, high = (0.5, 1.5) if norm.weight.any() else (0.1, 0.3)
        norm.weight.uniform_(low, high)
        norm.momentum = 1.0
    model.train()(torch.randn(8, model.in_channels, 32, 32))
    return model.eval()


def measure_inference(names: tuple[str, ...], seconds: float) -> Iterator[InferenceRow]:
    """All forms of all networks, interleaved, for each batch size."""
    wanted = [name for name in PAIRS if name in {*names, *(PAIRS[name] for name in names)}]
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes at which a striding network is not exact
        torch.manual_seed(0)
        made: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {}
        for name in wanted:
            found = forms(trained_statistics(create_model(name)), Path(folder), threads)
            made |= {(name, form): run for form, run in found.items()}
        for batch in BATCHES:
            images = torch.randn(batch, 3, 32, 32)
            expected = {name: made[name, AS_TRAINED](images) for name in wanted}
            errors = {
                key: ((run(images) - expected[key[0]]).abs().max() / expected[key[0]].abs().max()).item()
                for key, run in made.items()
            }
            works: dict[tuple[str, str], Work] = {
                key: partial(run, images) for key, run in made.items() if errors[key] <= TOLERANCE
            }
            times = interleaved(works, seconds, torch.device("cpu"))
            for name in names:
                for form in dict.fromkeys(form for _, form in made):
                    time, base = times.get((name, form)), times.get((PAIRS[name], form))
                    ratio = None if time is None or base is None else time / base
                    shown = None if time is None else 1e3 * time
                    yield InferenceRow(name, PAIRS[name], form, batch, shown, ratio, errors[name, form])
