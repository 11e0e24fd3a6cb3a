"""The paper's networks by name: create, save, share, export and convert them, count their FLOPs."""

from typing import TYPE_CHECKING

from selfconv._lazy import lazy
from selfconv.models.table import (
    MODELS,
    SPATIAL_KINDS,
    WEIGHTS,
    ModelFacts,
    at_depth,
    list_models,
    model_facts,
    paper_label,
)

if TYPE_CHECKING:
    from selfconv.models._config import ResNetConfig
    from selfconv.models._sharing import check_finite, mismatches
    from selfconv.models.conversion import Conversion, convert
    from selfconv.models.export import compile_program, export_onnx, export_program
    from selfconv.models.flops import count_flops, count_parameters
    from selfconv.models.inference import fold_batch_norm, optimize_for_inference
    from selfconv.models.registry import ModelInfo, create_model, load_initial, model_info, models_table
    from selfconv.models.resnet import ResNet
else:  # the table alone needs no torch
    __getattr__, __dir__ = lazy(
        __name__,
        _config=["ResNetConfig"],
        _sharing=["check_finite", "mismatches"],
        conversion=["Conversion", "convert"],
        export=["compile_program", "export_onnx", "export_program"],
        flops=["count_flops", "count_parameters"],
        inference=["fold_batch_norm", "optimize_for_inference"],
        registry=["ModelInfo", "create_model", "load_initial", "model_info", "models_table"],
        resnet=["ResNet"],
    )

__all__ = [
    "MODELS",
    "SPATIAL_KINDS",
    "WEIGHTS",
    "Conversion",
    "ModelFacts",
    "ModelInfo",
    "ResNet",
    "ResNetConfig",
    "at_depth",
    "check_finite",
    "compile_program",
    "convert",
    "count_flops",
    "count_parameters",
    "create_model",
    "export_onnx",
    "export_program",
    "fold_batch_norm",
    "list_models",
    "load_initial",
    "mismatches",
    "model_facts",
    "model_info",
    "models_table",
    "optimize_for_inference",
    "paper_label",
]
