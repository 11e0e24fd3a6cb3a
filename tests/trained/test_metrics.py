"""Measures for unbalanced classes, beside scikit-learn's; what evaluate writes; class weights."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from helpers.tiny_runs import run_cli, tiny_config
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from sklearn import metrics as sklearn

from selfconv._files import read_as
from selfconv.data import Split, load_data
from selfconv.models import WEIGHTS
from selfconv.train import Trainer, make_accelerator, open_data, train
from selfconv.trained import Evaluation, evaluate, open_trained
from selfconv.trained.metrics import balanced_interval, measure_quality, roc_auc, wilson_interval
from selfconv.trained.prediction_table import PredictionTable


def answers(seed: int, images: int, classes: int, digits: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    probabilities = random.dirichlet(np.ones(classes), images).round(digits) + 1e-6
    return random.integers(0, classes, images), probabilities / probabilities.sum(1, keepdims=True)


@given(
    st.integers(0, 99),
    st.integers(5, 60),
    st.integers(2, 12),
    st.sampled_from([1, 6]),
    st.sampled_from(["some", "all", "none"]),
)
@example(0, 60, 6, 6, "all")
def test_metrics_agree_with_scikit_learn(
    seed: int, images: int, classes: int, digits: int, right: str
) -> None:
    labels, probabilities = answers(seed, images, classes, digits)  # one digit: with many equal scores
    if right != "some":
        labels = (probabilities.argmax(1) + (right == "none")) % classes
    names = [f"class {c}" for c in range(classes)]
    found = measure_quality(names, labels, probabilities)
    answer, every = probabilities.argmax(1), [*range(classes)]
    precision, recall, f1, count = sklearn.precision_recall_fscore_support(
        labels, answer, labels=every, zero_division=0
    )
    for c, quality in enumerate(found.classes.values()):
        assert quality.images == count[c]
        assert quality.precision is None or quality.precision == pytest.approx(precision[c])
        assert (quality.precision is None) == (not (answer == c).any())
        assert quality.recall is None or quality.recall == pytest.approx(recall[c])
        assert (quality.recall is None) == (count[c] == 0)
        assert quality.f1 is None or quality.f1 == pytest.approx(f1[c])
        if 0 < count[c] < images:
            area = sklearn.roc_auc_score(labels == c, probabilities[:, c])
            assert quality.roc_auc == pytest.approx(area)
        else:
            assert quality.roc_auc is None
    if {*answer} <= {*labels}:
        balanced = sklearn.balanced_accuracy_score(labels, answer)
        assert found.balanced_accuracy == pytest.approx(balanced)
    low, high = found.balanced_accuracy_interval
    assert 0 <= low <= found.balanced_accuracy <= high <= 1
    assert low < high
    assert sum(b.images for b in found.calibration) == images


def test_areas_of_known_scores() -> None:
    assert roc_auc(np.array([True, True, False]), np.array([0.9, 0.8, 0.1])) == 1
    assert roc_auc(np.array([True, False]), np.array([0.5, 0.5])) == 0.5
    assert roc_auc(np.array([True, True]), np.array([0.5, 0.4])) is None


def test_intervals() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # a textbook's
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(10, 10)[1] == 1
    right = np.random.default_rng(0).binomial(100, 0.7, 2000)
    covered = np.mean([low <= 0.7 <= high for low, high in (wilson_interval(int(k), 100) for k in right)])
    assert 0.93 < covered < 0.97


@pytest.mark.parametrize("images", [10, 40])
def test_intervals_of_a_balanced_accuracy(images: int) -> None:
    """They cover the mean recall of five classes, about as often as they say."""
    random, recalls = np.random.default_rng(0), np.array([0.5, 0.7, 0.9, 0.95, 0.99])
    labels = np.repeat(np.arange(5), images)
    found = [balanced_interval(labels, random.random(5 * images) < recalls[labels]) for _ in range(1000)]
    covered = np.mean([low <= recalls.mean() <= high for low, high in found])
    assert 0.92 < covered < 0.99


def test_ends_of_intervals() -> None:
    labels = np.array([0, 0, 1])
    assert balanced_interval(labels, labels < 2)[1] == 1
    assert balanced_interval(labels, labels > 2)[0] == 0
    one = np.zeros(8, np.int64)
    assert balanced_interval(one, np.arange(8) < 6) == pytest.approx(wilson_interval(6, 8))
    for classes in range(1, 200):
        labels = np.arange(classes)
        assert balanced_interval(labels, labels >= 0)[1] == 1


def test_published_intervals_are_those_of_the_recalls() -> None:
    """Every evaluation in the repository has the interval that is computed now."""
    files = [*(ROOT / "results").rglob("evaluation.json"), *WEIGHTS.rglob("evaluation.json")]
    assert len(files) >= 48
    for file in files:
        quality = read_as(Evaluation, file).quality
        assert quality is not None
        labels, right = [], []
        for label, found in enumerate(quality.classes.values()):
            hits = round((found.recall or 0) * found.images)
            labels += [label] * found.images
            right += [True] * hits + [False] * (found.images - hits)
        low, high = quality.balanced_accuracy_interval
        assert (low, high) == pytest.approx(balanced_interval(np.array(labels), np.array(right)), rel=1e-12)
        assert low <= quality.balanced_accuracy <= high


def test_calibration() -> None:
    """Answers of 85% that are right in three of four: off by 10 points."""
    probabilities = np.tile([0.85, 0.15], (4, 1))
    found = measure_quality(["a", "b"], np.array([0, 0, 0, 1]), probabilities)
    assert found.calibration_error == pytest.approx(0.10)
    assert [(b.images, b.accuracy) for b in found.calibration] == [(4, 0.75)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbalanced folder and a run on it."""
    folder = tmp_path_factory.mktemp("unbalanced")
    digits = load_data("digits", validation=0).train
    taken = {0: 60, 1: 30, 2: 10}
    for label, count in taken.items():
        (folder / "data" / f"d{label}").mkdir(parents=True)
        for index in (digits.labels == label).nonzero()[:count, 0].tolist():
            path = folder / "data" / f"d{label}" / f"{index}.png"
            Image.fromarray(digits.images[index, 0].numpy()).save(path)
    train(tiny_config(folder / "data", epochs=1), folder / "run", quiet=True)
    return folder


def test_columns_of_predictions_are_unique() -> None:
    names = ["image", "class", "answer", "probability", "p(image)"]
    split = Split(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([4]))
    table = PredictionTable(split, torch.tensor([[0.1, 0.1, 0.1, 0.3, 0.4]]), names).to_csv()
    [row] = csv.DictReader(io.StringIO(table))
    assert len(row) == 4 + len(names)
    assert (row["class"], row["answer"], row["p(answer)"]) == ("p(image)", "p(image)", row["p(image)"])


def test_what_evaluate_writes(work: Path) -> None:
    trained = open_trained(work / "run")
    found = evaluate(trained)
    assert found.quality is not None
    assert list(found.quality.classes) == ["d0", "d1", "d2"]
    with open(work / "run" / "predictions.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    test = open_data(trained.config).test
    assert [row["image"] for row in rows] == list(test.names)
    assert [row["class"] for row in rows] == [f"d{label}" for label in test.labels.tolist()]
    assert np.mean([row["class"] == row["answer"] for row in rows]) == pytest.approx(found.accuracy)
    for row in rows:
        assert float(row["probability"]) == max(float(row[f"p({name})"]) for name in ("d0", "d1", "d2"))
        assert float(row[f"p({row['answer']})"]) == float(row["probability"])
    assert Image.open(work / "run" / "mistakes.png").size[0] > 500


def test_evaluate_leaves_out_unknown_classes_and_training_images(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    for source, name in (("d2", "d2"), ("d0", "d0"), ("d1", "x")):
        (other / name).mkdir(parents=True)
        for picture in (work / "data" / source).iterdir():
            (other / name / picture.name).write_bytes(picture.read_bytes())
    out = tmp_path / "out"
    assert run_cli("evaluate", work / "run", "--data", other, "--out", out) == 0
    error = capsys.readouterr().err
    assert "other: left out 30 images of 1 class that the model does not know: x" in error
    assert "other: no images of 1 of the model's classes: d1" in error
    with open(out / "predictions.csv", newline="") as table:
        rows = [*csv.DictReader(table)]
    assert "other: 56 of 70 images are left out: the model was trained or validated on them" in error
    assert sorted({row["class"] for row in rows}) == ["d0", "d2"]
    assert len(rows) == 14
    assert all(row["image"].startswith(f"{row['class']}/") for row in rows)
    assert {path.name for path in out.iterdir()} == {
        "evaluation.json", "predictions.csv", "confusion.png", "rotation.png", "mistakes.png"
    }  # fmt: skip


def test_other_images_that_are_not_square(work: Path, tmp_path: Path) -> None:
    names = np.array(["d0", "d1", "d2"])
    images = np.random.default_rng(0).integers(0, 256, (12, 30, 20), np.uint8)
    np.savez(tmp_path / "x.npz", x_train=images, y_train=np.arange(12) % 3, x_test=images,
             y_test=np.arange(12) % 3, class_names=names)  # fmt: skip
    with pytest.warns(UserWarning, match="identical"):
        found = evaluate(open_trained(work / "run"), tmp_path / "x.npz", pictures=False)
    assert found.images == 12


def test_the_most_confident_mistakes_come_first() -> None:
    split = Split(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1, 0]))
    probabilities = torch.tensor([[0.4, 0.6], [0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    found = PredictionTable(split, probabilities, ["a", "b"])
    assert found.mistakes().tolist() == [2, 3, 0]
    assert len(found.mistakes_figure("x").axes[0].images) == 3
    assert found.to_csv().splitlines()[1].startswith("0,a,b,0.6")


def test_class_weights(work: Path) -> None:
    config = tiny_config(work / "data", epochs=1, class_weights="balanced", batch_size=8)
    trainer = Trainer(config, data := open_data(config), make_accelerator(config.hardware))
    counts = torch.bincount(data.train.labels)
    weights = trainer.loss.weight
    assert weights is not None
    assert torch.allclose(weights * counts, torch.full((3,), len(data.train) / 3))
    images, labels = next(trainer.batches.epoch(0))
    trainer.network.eval()
    output = trainer.network(images)
    each = F.cross_entropy(output, labels, reduction="none") * weights[labels]
    assert trainer.loss(output, labels).item() == pytest.approx((each.sum() / weights[labels].sum()).item())
