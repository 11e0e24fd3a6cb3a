"""Windows of every shape: the time per tap beside that of the square windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from selfconv.bench.measure import forward_pass, interleaved, training_pass
from selfconv.bench.ops import TOLERANCE, attention, check
from selfconv.ops import Window

SHAPES = ((16, 32), (64, 8))  # channels and map size of the ResNet's first and last stage
SQUARES = tuple(Window((k, k)) for k in (1, 3, 5, 7))
OTHERS = (
    *(Window(size) for size in ((1, 7), (7, 1), (3, 7))),
    *(Window((k, k), (d, d)) for k in (3, 5, 7) for d in (2, 3)),
    *(Window(size, padding_mode=mode) for size in ((5, 5), (1, 7)) for mode in ("exclude", "circular")),
)


@dataclass(frozen=True)
class WindowRow:
    """One measurement of planar ASC."""

    window: str
    taps: int
    batch: int
    channels: int
    size: int
    direction: str
    milliseconds: float | None  # None if the kernel disagrees with the reference
    ratio: float | None  # to the square windows' time for as many taps, on a line between two of them
    error: float


def describe(window: Window) -> str:
    dilation = "" if window.dilation == (1, 1) else f", dilation {window.dilation[0]}"
    mode = "" if window.padding_mode == "zeros" else f", {window.padding_mode}"
    return f"{window.size[0]}×{window.size[1]}{dilation}{mode}"


def measure_windows(batch: int, seconds: float, device: torch.device) -> Iterator[WindowRow]:
    """Every window at every shape, in CPU time: the caller has set the number of threads to one."""
    windows = (*SQUARES, *OTHERS)
    errors = {window: check("asc", device, window) for window in windows}
    right = [window for window in windows if errors[window] <= TOLERANCE]
    for channels, size in SHAPES:
        layers = {window: attention("asc", None, batch, channels, size, window, device) for window in right}
        for direction in ("forward", "forward+backward"):
            works = {
                window: forward_pass(layer.run, layer.x)
                if direction == "forward"
                else training_pass(layer.run, layer.x, layer.parameters)
                for window, layer in layers.items()
            }
            times = interleaved(works, seconds, device, one_thread=True)
            squares = [window for window in SQUARES if window in times]
            taps, line = [w.taps for w in squares], [times[w] for w in squares]
            for window in windows:
                time = times.get(window)
                ratio = None if time is None or not line else time / float(np.interp(window.taps, taps, line))
                yield WindowRow(
                    describe(window), window.taps, batch, channels, size, direction,
                    None if time is None else 1e3 * time, ratio, errors[window],
                )  # fmt: skip
