"""From a run folder or a shipped name to answers: evaluate, predict, export."""

from selfconv.trained.evaluation import (
    VIEWS,
    Evaluation,
    confusion_figure,
    evaluate_model,
    evaluate_run,
    logits,
)
from selfconv.trained.export import export_run
from selfconv.trained.model import Trained, load_model
from selfconv.trained.prediction import Prediction, predict
from selfconv.trained.rotation import RotationCurve, rotation_curve, rotation_figure

__all__ = [
    "VIEWS",
    "Evaluation",
    "Prediction",
    "RotationCurve",
    "Trained",
    "confusion_figure",
    "evaluate_model",
    "evaluate_run",
    "export_run",
    "load_model",
    "logits",
    "predict",
    "rotation_curve",
    "rotation_figure",
]
