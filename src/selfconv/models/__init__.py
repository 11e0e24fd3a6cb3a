"""The paper's networks by name, and what one does with them: save, share, export, count, convert."""

from selfconv.models._config import ResNetConfig
from selfconv.models.convert import Conversion, convert
from selfconv.models.export import export_onnx, export_program, fold_batch_norm
from selfconv.models.flops import count_flops, count_parameters
from selfconv.models.registry import (
    MODELS,
    WEIGHTS,
    ModelInfo,
    create_model,
    list_models,
    list_pretrained,
    model_info,
    models_table,
)
from selfconv.models.resnet import ResNet

__all__ = [
    "MODELS",
    "WEIGHTS",
    "Conversion",
    "ModelInfo",
    "ResNet",
    "ResNetConfig",
    "convert",
    "count_flops",
    "count_parameters",
    "create_model",
    "export_onnx",
    "export_program",
    "fold_batch_norm",
    "list_models",
    "list_pretrained",
    "model_info",
    "models_table",
]
