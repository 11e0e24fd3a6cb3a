"""Opens a trained model (from a run, a saved model or the package) to evaluate, predict and export."""

from selfconv.trained.attention import attention_entropy
from selfconv.trained.evaluation import (
    TURNS,
    VIEWS,
    Evaluation,
    EvaluationNotSaved,
    confusion_figure,
    evaluate,
    evaluate_model,
    images_evaluated,
)
from selfconv.trained.exporting import Exported, export, own_range
from selfconv.trained.metrics import CalibrationBin, ClassQuality, Quality
from selfconv.trained.model import TrainedModel, open_trained
from selfconv.trained.outputs import logits
from selfconv.trained.prediction import Prediction, given_range, predict, predict_each
from selfconv.trained.prediction_table import probability_columns
from selfconv.trained.rotation import RotationCurve, rotation_curve, rotation_figure

__all__ = [
    "TURNS",
    "VIEWS",
    "CalibrationBin",
    "ClassQuality",
    "Evaluation",
    "EvaluationNotSaved",
    "Exported",
    "Prediction",
    "Quality",
    "RotationCurve",
    "TrainedModel",
    "attention_entropy",
    "confusion_figure",
    "evaluate",
    "evaluate_model",
    "export",
    "given_range",
    "images_evaluated",
    "logits",
    "open_trained",
    "own_range",
    "predict",
    "predict_each",
    "probability_columns",
    "rotation_curve",
    "rotation_figure",
]
