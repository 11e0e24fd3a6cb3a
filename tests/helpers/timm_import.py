"""timm, imported beside any build of torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch


def import_timm() -> ModuleType:
    """timm imports torchvision, which beside a torch of another build lacks two operators of its own."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for schema in (
            "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        ):
            torch.library.define(f"torchvision::{schema.partition('(')[0]}", schema[schema.index("(") :])
        importlib.import_module("torchvision")
    timm = importlib.import_module("timm")
    importlib.import_module("selfconv.timm")
    return timm
