"""One trained model, wherever it is: a run, a saved model, a shipped name; every command takes each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from helpers.cases import EFFORT
from helpers.tiny_runs import run_cli, tiny_config, tiny_data
from PIL import Image

from selfconv.data import normalise
from selfconv.explorer._comparison import Comparison
from selfconv.models import ResNet, create_model, list_models
from selfconv.train import RunError, train
from selfconv.trained import TrainedModel, evaluate, export, open_trained, predict

PLACES = ["run", "run/model", "digits_asc"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, an image of a digit, and a model that was saved by itself."""
    folder = tmp_path_factory.mktemp("work")
    train(tiny_config(tiny_data(folder), "resnet29_asc", epochs=1), folder / "run", quiet=True)
    Image.new("L", (16, 16), 128).save(folder / "image.png")
    create_model("resnet29_asc", depth=11, in_channels=1).save_pretrained(folder / "bare")
    return folder


@pytest.mark.parametrize("place", PLACES)
def test_every_command_opens_every_kind_of_trained_model(
    place: str,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(work)
    assert run_cli("evaluate", place, "--json") == 0
    accuracy = json.loads(capsys.readouterr().out.splitlines()[-1])["accuracy"]
    record = open_trained(place).record
    assert record is not None
    assert accuracy == pytest.approx(record.test_accuracy)
    assert run_cli("predict", place, "image.png") == 0
    assert run_cli("export", place, "--to", tmp_path / "model.pt2", "--no-compile") == 0
    assert run_cli("audit", place, "--size", "16") == 0
    assert run_cli("figures", place, "--image", "image.png", "--out", tmp_path / "figures") == 0
    assert len(list((tmp_path / "figures").glob("*.png"))) == 7
    assert Comparison.open(place).models[0].name == Path(place).name


@pytest.mark.parametrize("place", PLACES)
def test_opens_under_any_default_dtype(place: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        trained = open_trained(place)
    finally:
        torch.set_default_dtype(default)
    assert {weight.dtype for weight in trained.model.parameters()} == {torch.float32}


# an export takes as long as twenty other tests: `make test-long` exports all that are shipped
SHIPPED = (
    list_models(pretrained=True)
    if EFFORT > 1
    else ["digits_asc", "digits_p4_asc", "digits_p4m_asc", "resnet29.cifar10"]
)


@pytest.fixture(scope="module", params=SHIPPED)
def shipped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainedModel, Any]:
    """A shipped model, and its exported form in ONNX Runtime."""
    trained, path = open_trained(request.param), tmp_path_factory.mktemp("shipped") / "model.onnx"
    export(trained, path)
    return trained, onnxruntime.InferenceSession(path)


def test_an_onnx_file_has_what_its_user_needs(shipped: tuple[TrainedModel, Any], tmp_path: Path) -> None:
    """Class names, and preprocessing that gives the numbers of predict: EXIF, transparency, crop, grey."""
    trained, session = shipped
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == trained.data.class_names
    channels, size, _ = json.loads(metadata["image_shape"])
    found: dict[str, Any] = {}
    exec(metadata["preprocessing"], found)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 33, 4), np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.png")
    Image.fromarray(pixels[..., :3]).quantize(16).save(tmp_path / "palette.gif")
    Image.fromarray(pixels[..., :3]).quantize(16).save(tmp_path / "palette.png", transparency=3)
    Image.fromarray(pixels[:, :20, :3]).convert("CMYK").save(tmp_path / "wide.jpg")
    Image.fromarray(pixels[..., :3].repeat(5, 0).repeat(5, 1)).save(tmp_path / "turned.jpg", exif=turned)
    files = ["clear.png", "grey.png", "palette.gif", "palette.png", "wide.jpg", "turned.jpg"]
    predictions = predict(trained, [tmp_path / file for file in files])
    for file, prediction in zip(files, predictions, strict=True):
        images = found["preprocess"](tmp_path / file, size, channels)
        expected = trained.read_image(tmp_path / file).float() / 255
        assert torch.equal(torch.from_numpy(images[0]), expected)
        (logits,) = session.run(["logits"], {"images": images})
        probabilities = torch.from_numpy(logits).softmax(1)[0]
        assert torch.allclose(probabilities, torch.tensor([*prediction.probabilities.values()]), atol=1e-4)


def test_all_forms_of_a_shipped_model_agree(shipped: tuple[TrainedModel, Any], tmp_path: Path) -> None:
    """On the size it was trained on, and on odd ones."""
    trained, session = shipped
    export(trained, tmp_path / "model.pt2", compile=False)
    program = torch.export.load(tmp_path / "model.pt2").module()
    for n, size in enumerate([(8, 8), (9, 11), (13, 8)], 1):
        pixels = torch.rand(n, trained.data.in_channels, *size)
        normalised = normalise(pixels, trained.data.mean, trained.data.std, levels=1)
        with torch.no_grad():
            expected = trained.model(normalised)
            forms = trained.optimized(normalised), program(pixels)
        (from_onnx,) = session.run(["logits"], {"images": pixels.numpy()})
        for logits in (*forms, torch.from_numpy(from_onnx)):
            assert (logits - expected).abs().max() < 1e-4


def test_results_are_kept_in_the_folder_of_a_run_alone(work: Path) -> None:
    assert {path.name for path in (work / "run" / "model").iterdir()} == {
        "README.md", "config.json", "model.safetensors", "record.json"
    }  # fmt: skip
    assert open_trained(work / "run").run_folder == work / "run"
    assert open_trained(work / "run" / "model").run_folder is None
    assert open_trained("digits_asc").run_folder is None


def test_evaluating_draws_the_confusion_and_the_rotation_curve(work: Path) -> None:
    evaluation = evaluate(open_trained(work / "run"))
    assert evaluation.rotation.images == 40
    written = json.loads((work / "run" / "evaluation.json").read_text())
    assert written["rotation"]["accuracy"] == evaluation.rotation.accuracy
    for name in ("confusion.png", "rotation.png"):
        assert Image.open(work / "run" / name).size > (300, 300)


def test_other_data_with_the_same_classes(work: Path, tmp_path: Path) -> None:
    """They are measured, resized to the model's images, and do not replace the run's own evaluation."""
    arrays = dict(np.load(work / "tiny.npz"))
    arrays["x_test"], arrays["y_test"] = arrays["x_test"][:7], arrays["y_test"][:7]
    np.savez(tmp_path / "fewer.npz", **arrays)
    np.savez(
        tmp_path / "larger.npz",
        **{k: v.repeat(2, 1).repeat(2, 2) if k[0] == "x" else v for k, v in arrays.items()},
    )
    own = evaluate(open_trained(work / "run"))
    assert evaluate(open_trained(work / "run"), tmp_path / "fewer.npz").images == 7
    assert evaluate(open_trained(work / "run"), tmp_path / "larger.npz").images == 7
    assert evaluate(open_trained(work / "run"), work / "tiny.npz") == own
    assert json.loads((work / "run" / "evaluation.json").read_text())["images"] == own.images


def test_all_images_of_another_folder_are_tested(work: Path, tmp_path: Path) -> None:
    """A folder without a test part has nothing that the model was trained on; the result names the folder."""
    arrays = np.load(work / "tiny.npz")
    for number, (image, label) in enumerate(zip(arrays["x_test"], arrays["y_test"], strict=True)):
        folder = tmp_path / "scans" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(folder / f"{number}.png")
    evaluation = evaluate(open_trained(work / "run"), tmp_path / "scans")
    assert (evaluation.data, evaluation.images) == ("scans", len(arrays["y_test"]))
    assert evaluation.accuracy == evaluate(open_trained(work / "run")).accuracy


def test_data_of_other_classes_or_channels_is_refused(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = dict(np.load(work / "tiny.npz"))
    np.savez(tmp_path / "colour.npz", **{k: v.repeat(3, 3) if k[0] == "x" else v for k, v in arrays.items()})
    np.savez(tmp_path / "named.npz", class_names=[f"class {i}" for i in range(10)], **arrays)
    for name, said in (
        ("colour", "expected images in grey; .*/colour.npz has images in colour$"),
        (
            "named",
            r"expected images of 10 classes \(0, 1, 2, …\); .*/named.npz has 10 classes \(class 0, .*\)$",
        ),
    ):
        assert run_cli("evaluate", work / "run", "--data", tmp_path / f"{name}.npz") == 2
        [line] = capsys.readouterr().err.splitlines()
        assert re.search(said, line), line


def test_a_run_and_its_model_folder_are_the_same_model(work: Path) -> None:
    run, saved = open_trained(work / "run"), open_trained(work / "run" / "model")
    assert (run.data, run.config, run.record) == (saved.data, saved.config, saved.record)
    x = torch.randn(2, 1, 16, 16)
    assert torch.equal(run.model(x), saved.model(x))


def test_a_model_that_was_saved_by_itself(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its architecture can be audited; what it was trained on is not known, and it says so in a line."""
    trained = open_trained(work / "bare")
    assert isinstance(trained.model, ResNet)
    assert not trained.model.training
    assert run_cli("audit", work / "bare", "--size", "16") == 0
    capsys.readouterr()
    for command in (["evaluate"], ["predict", str(work / "image.png")], ["export", "--to", "a.onnx"]):
        assert run_cli(command[0], work / "bare", *command[1:]) == 2
        said = capsys.readouterr().err
        assert said.startswith("selfconv: bare: a saved model without record.json")
        assert said.count("\n") == 1


def test_a_damaged_record(work: Path, tmp_path: Path) -> None:
    create_model("resnet29_asc", depth=11, in_channels=1).save_pretrained(tmp_path)
    for content in ("{", "[]", "{}", '{"data": {}, "config": {}}', '{"data": 3, "config": {}}'):
        (tmp_path / "record.json").write_text(content)
        with pytest.raises(RunError, match=r"record.json: expected (JSON|an object|model, parameters, )"):
            open_trained(tmp_path)


def test_options_that_a_trained_model_does_not_have(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("audit", work / "run", "--downsample", "pool") == 2
    assert "need the name of a model" in capsys.readouterr().err
