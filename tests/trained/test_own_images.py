"""A model of one's own images: deep files, other files, other folders, and answers as they come."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tifffile
import torch
from helpers.bombs import png_that_claims
from helpers.tiny_runs import run_cli, tiny_config
from PIL import Image

from selfconv import _text
from selfconv.cli import command_line
from selfconv.data import DataError, load_data
from selfconv.explorer._server import read_upload
from selfconv.train import RunError, train
from selfconv.trained import evaluate, evaluation, export, open_trained, predict

KINDS = ("bytes", "deep", "floats")


def digits_image(number: int) -> Image.Image:
    """A test image of the digits, none of which is in the folders."""
    return Image.fromarray(load_data("digits").test.images[number, 0].numpy())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of 8 bits as PNG, of 12 bits in 16 and of 0 to 1 as TIFF, a run on each, of relative paths."""
    folder = tmp_path_factory.mktemp("own")
    digits = load_data("digits", validation=0).train
    for index in range(160):
        pixels, label = digits.images[index, 0].numpy(), int(digits.labels[index]) % 3
        for name in KINDS:
            (folder / name / f"c{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "bytes" / f"c{label}" / f"{index:03}.png")
        deep = np.rint(pixels * (4095 / 255)).astype(np.uint16)
        tifffile.imwrite(folder / "deep" / f"c{label}" / f"{index:03}.tif", deep)
        shares = (pixels / 255).astype(np.float32)
        tifffile.imwrite(folder / "floats" / f"c{label}" / f"{index:03}.tif", shares)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in KINDS:
            train(tiny_config(Path(name), epochs=1), Path("runs") / name, quiet=True)
    return folder


def test_twelve_bits_are_classified_as_eight(work: Path) -> None:
    deep, shallow = (open_trained(work / "runs" / name) for name in ("deep", "bytes"))
    assert deep.data.pixels.high == 4095
    images = [
        sorted((work / name).rglob(pattern)) for name, pattern in (("deep", "*.tif"), ("bytes", "*.png"))
    ]
    a, b = predict(shallow, images[0], pixel_range="0,4095"), predict(shallow, images[1])
    assert [p.label for p in a] == [p.label for p in b]
    assert max(abs(x.probability - y.probability) for x, y in zip(a, b, strict=True)) < 1e-3
    c = predict(deep, images[0])  # its training saw the same pixels, but for rounding
    assert np.mean([x.label == y.label for x, y in zip(c, b, strict=True)]) > 0.95
    assert deep.data.mean == pytest.approx(shallow.data.mean, rel=1e-3)


def test_the_range_is_part_of_an_export(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = open_trained(work / "runs" / "deep")
    export(trained, tmp_path / "deep.pt2", compile=False)
    file = next((work / "deep").rglob("*.tif"))
    values = torch.from_numpy(tifffile.imread(file).astype(np.float32))[None, None]
    expected = trained.model(trained.normalise(trained.read_image(file)[None]))
    extra = {"classes": "", "range": "", "image_shape": "", "preprocessing": ""}
    outputs = torch.export.load(tmp_path / "deep.pt2", extra_files=extra).module()(values)
    assert [json.loads(extra[name]) for name in ("classes", "range", "image_shape")] == [
        ["c0", "c1", "c2"], [0, 4095], [1, 16, 16]
    ]  # fmt: skip
    assert "low, high = 0.0, 4095.0" in extra["preprocessing"]
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    assert run_cli("export", work / "runs" / "deep", "--to", tmp_path / "again.pt2", "--no-compile") == 0
    assert "values 0..4095 as in the files -> logits [N, 3]" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # of values outside the range, and of torch's exporter
@pytest.mark.parametrize("kind", ["deep", "floats", "by type", "five channels"])
def test_preprocessing_in_the_metadata_gives_the_numbers_of_predict(
    work: Path, tmp_path: Path, kind: str
) -> None:
    """For files of instruments: no square, values outside the range, an .npy file."""
    run = work / "runs" / kind
    random = np.random.default_rng(0)
    if kind == "by type":
        config = tiny_config(work / "deep", epochs=1).replaced("data", pixel_range="dtype")
        train(config, run := tmp_path / "run", quiet=True)
    if kind == "five channels":
        for index in range(20):
            (tmp_path / "five" / f"c{index % 2}").mkdir(parents=True, exist_ok=True)
            values = random.integers(0, 100 + 100 * (index % 2), (9, 9, 5), np.uint8)
            np.save(tmp_path / "five" / f"c{index % 2}" / f"{index}.npy", values)
        train(tiny_config(tmp_path / "five", epochs=1), run := tmp_path / "run", quiet=True)
    trained = open_trained(run)
    channels, size = trained.data.in_channels, trained.data.size
    high = {"deep": 4095, "floats": 1, "by type": 65535, "five channels": 255}[kind]
    dtype = {"floats": np.float32, "five channels": np.uint8}.get(kind, np.uint16)
    shape = (23, 17) if channels == 1 else (23, 17, channels)
    values = (high * random.random(shape)).astype(dtype)
    if kind == "deep":
        values[3, 4] = 5000
    tifffile.imwrite(tmp_path / "image.tif", values, photometric="minisblack", planarconfig="contig")
    np.save(tmp_path / "image.npy", values)
    export(trained, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found: dict[str, Any] = {}
    metadata = session.get_modelmeta().custom_metadata_map
    exec(metadata["preprocessing"], found)
    assert json.loads(metadata["range"]) == [0, high if kind in ("deep", "floats") else 1]
    for prediction in predict(trained, [tmp_path / "image.tif", tmp_path / "image.npy"]):
        images = found["preprocess"](prediction.file, size, channels)
        [logits] = session.run(["logits"], {"images": images})[0]
        shares = np.exp(logits - logits.max())
        assert [*prediction.probabilities.values()] == pytest.approx(shares / shares.sum(), abs=1e-4)


def test_floating_point_is_read_alike_by_every_command(work: Path, tmp_path: Path) -> None:
    place = work / "runs" / "floats"
    trained, shallow = open_trained(place), open_trained(work / "runs" / "bytes")
    assert (trained.data.pixels.low, trained.data.pixels.high) == (0, 1)
    assert trained.data.mean == pytest.approx(shallow.data.mean, rel=1e-4)
    file = sorted((work / "floats").rglob("*.tif"))[0]
    values = torch.from_numpy(tifffile.imread(file))[None, None]
    assert len(values.unique()) > 2
    export(trained, tmp_path / "floats.pt2", compile=False)
    exported = torch.export.load(tmp_path / "floats.pt2").module()(values).softmax(1)[0]
    for text in (None, "0,1", "dtype"):
        [found] = predict(trained, [file], pixel_range=text)
        assert [*found.probabilities.values()] == pytest.approx(exported.tolist(), abs=1e-4)
    shutil.copytree(work / "floats", tmp_path / "floats")
    assert trained.open_data(tmp_path / "floats").digest == trained.open_data().digest
    shown = read_upload(file.read_bytes(), trained.data.size, 1, trained.data.pixels)
    assert np.array_equal(shown[0], np.rint(values[0, 0].numpy() * 255))


def test_a_run_that_counted_integers_in_floating_point_opens(work: Path, tmp_path: Path) -> None:
    """Runs of earlier versions: their digest is of images in two levels."""
    place = tmp_path / "run"
    shutil.copytree(work / "runs" / "floats", place)
    for name in ("data.json", "record.json", "model/record.json"):
        digest = open_trained(work / "runs" / "floats").data.digest
        (place / name).write_text((place / name).read_text().replace(digest, "0" * 64))
    trained = open_trained(place)
    assert len(predict(trained, [next((work / "floats").rglob("*.tif"))])) == 1
    with pytest.raises(RunError, match=r"has changed .*, or an earlier version .* read these images in 2 l"):
        trained.open_data()


def test_a_bad_file_costs_one_line(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = sorted((work / "bytes" / "c0").glob("*.png"))[:3]
    (tmp_path / "a.png").write_text("text")
    deep = next((work / "deep").rglob("*.tif"))
    assert run_cli("predict", work / "runs" / "bytes", good[0], tmp_path / "a.png", deep, *good[1:]) == 1
    printed = capsys.readouterr()
    assert [line.split("\t")[0] for line in printed.out.splitlines()] == [str(file) for file in good]
    first, second = printed.err.splitlines()
    assert first.startswith(f"selfconv: {tmp_path / 'a.png'}: not an image")
    assert second.startswith(
        f"selfconv: {deep}: expected uint8 values, as the training images have; got uint16"
    )
    assert run_cli("predict", work / "runs" / "bytes", deep, "--range", "0,4095") == 0
    for text in ("auto", "x", "5,1"):
        assert run_cli("predict", work / "runs" / "bytes", deep, "--range", text) == 2
        expected = f"selfconv: range: expected dtype, or LOW,HIGH with LOW < HIGH; got {text!r}\n"
        assert capsys.readouterr().err.endswith(expected)


def test_a_name_without_a_file_costs_one_line(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, good = work / "runs" / "bytes", sorted((work / "bytes" / "c0").glob("*.png"))[:2]
    assert run_cli("predict", run, good[0], tmp_path / "none.png", good[1]) == 1
    printed = capsys.readouterr()
    assert [line.split("\t")[0] for line in printed.out.splitlines()] == [str(file) for file in good]
    assert printed.err.startswith(f"selfconv: {tmp_path / 'none.png'}: expected an image, a folder of images")
    assert printed.err.endswith("got no such file\n")
    assert run_cli("predict", run, tmp_path / "none.png") == 2


def test_predict_finds_the_files_that_training_finds(work: Path, tmp_path: Path) -> None:
    good = sorted((work / "bytes" / "c0").glob("*.png"))[:3]
    (tmp_path / "deep" / ".hidden").mkdir(parents=True)
    for file, name in zip(good, ("a.png", "deep/b", "deep/.hidden/c.png"), strict=True):
        shutil.copy(file, tmp_path / name)
    (tmp_path / "._a.png").write_text("x")
    found = predict(open_trained(work / "runs" / "bytes"), [tmp_path])
    assert [p.file for p in found] == [str(tmp_path / "a.png"), str(tmp_path / "deep" / "b")]


def test_values_outside_the_training_range_cause_a_warning(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = work / "runs" / "deep"
    for path in sorted((work / "deep").rglob("*.tif"))[::4]:
        (tmp_path / "bright" / path.parent.name).mkdir(parents=True, exist_ok=True)
        bright = tifffile.imread(path) * 4
        bright[:12] = 40_000  # of 16 rows
        tifffile.imwrite(tmp_path / "bright" / path.parent.name / path.name, bright)
    files = sorted((tmp_path / "bright").rglob("*.tif"))
    assert run_cli("predict", run, *files) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"selfconv: warning: deep: {tmp_path}/bright/.*\.tif: [89]\d% of the values are above the range "
        rf"0 to 4095, and are clipped; so are some of {len(files) - 1} other files; --range .* range",
        line,
    )
    assert run_cli("predict", run, work / "deep", files[0]) == 0  # one of many
    [line] = capsys.readouterr().err.splitlines()
    assert f"deep: {files[0]}: " in line
    assert run_cli("predict", run, *files, "--range", "0,65535") == 0
    assert capsys.readouterr().err == ""
    for pixel_range in (None, "0,4095"):
        with pytest.warns(UserWarning, match=r"bright: [78]\d% of the values are above the range 0 to 4095"):
            open_trained(run).open_data(tmp_path / "bright", pixel_range)
    assert run_cli("predict", run, files[0], "--range", "0,4095") == 0
    assert "are above the range 0 to 4095, and are clipped" in capsys.readouterr().err


@pytest.mark.parametrize("pixel_range", ["auto", "0,15"])
@pytest.mark.parametrize("depth", [4, 12])
def test_data_sets_with_a_name_need_no_range(tmp_path: Path, depth: int, pixel_range: str) -> None:
    """Their bytes 0 and 255 are the pixels 0 and 1, whatever the range of the training images."""
    digits, most = load_data("digits", validation=0).train, 2**depth - 1
    for index in range(200):
        pixels, label = digits.images[index, 0].numpy(), int(digits.labels[index])
        (tmp_path / "own" / str(label)).mkdir(parents=True, exist_ok=True)
        deep = np.rint(pixels * (most / 255)).astype(np.uint8 if depth == 4 else np.uint16)
        tifffile.imwrite(tmp_path / "own" / str(label) / f"{index:03}.tif", deep)
    config = tiny_config(tmp_path / "own", epochs=1).replaced("data", pixel_range=pixel_range)
    train(config, tmp_path / "run", quiet=True)
    trained = open_trained(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = trained.open_data("digits")
    assert torch.equal(data.test.images, load_data("digits").test.images)
    assert data.test.levels == 255
    assert evaluate(trained, data="digits").images == len(data.test)
    with pytest.raises(DataError, match=r"^range: applies to folders, .*; got digits$"):
        trained.open_data("digits", "0,255")


def test_data_sets_with_a_name_and_other_classes(work: Path) -> None:
    trained = open_trained(work / "runs" / "deep")
    with pytest.raises(RunError, match=r"expected images of .*; digits has 10 classes"):
        trained.open_data("digits")


def test_files_of_a_folder_that_cannot_be_read_are_reported(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = next((work / "deep").rglob("*.tif"))
    shutil.copy(good, tmp_path / "good.tif")
    (tmp_path / "dead.tif").symlink_to(tmp_path / "nowhere.tif")
    (tmp_path / "zeros.tif").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    assert run_cli("predict", work / "runs" / "deep", tmp_path) == 1
    said = capsys.readouterr()
    assert "good.tif" in said.out
    assert sorted(re.findall(r"\w+\.\w+(?=: )", said.err)) == ["dead.tif", "pipe.png", "zeros.tif"]


def test_grey_and_colour_are_converted_in_evaluation_as_in_prediction(work: Path, tmp_path: Path) -> None:
    trained = open_trained(work / "runs" / "bytes")
    for path in sorted((work / "bytes").rglob("*.png"))[::4]:
        (tmp_path / "colour" / path.parent.name).mkdir(parents=True, exist_ok=True)
        grey = np.array(Image.open(path))
        coloured = np.stack([grey, grey // 2, 255 - grey], -1)
        Image.fromarray(coloured).save(tmp_path / "colour" / path.parent.name / path.name)
    data = trained.open_data(tmp_path / "colour").everything
    assert data.shape[1] == 1
    for image, name in zip(data.images[:5], data.names[:5], strict=True):
        assert torch.equal(image, trained.read_image(tmp_path / "colour" / name))
    grey_in_colour = load_data(work / "bytes", channels=3)
    assert grey_in_colour.in_channels == 3


def test_results_that_cannot_be_saved_are_printed(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(evaluation, "write_json", refuse)
    monkeypatch.chdir(work)
    assert run_cli("evaluate", work / "runs" / "bytes") == 2
    printed = capsys.readouterr()
    assert "balanced accuracy" in printed.out
    assert "the results cannot be saved (Permission denied): give another folder with --out" in printed.err


def test_training_prints_its_range_and_that_it_stopped_early(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(work / "deep", epochs=9, lr=1e-9, patience=1, keep="best")  # learns nothing
    record = train(config, tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert "values 0 to 4095 (uint16)" in lines
    assert record.epochs < 9
    assert f"after {record.epochs} epochs, stopped early (--patience 1), weights of epoch " in lines[-1]
    assert f"weights of epoch {record.kept_epoch}, " in lines[-1]


def test_formats(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = np.stack(
        [np.array(Image.open(file)) for file in sorted((work / "bytes" / "c1").glob("*.png"))[:2]]
    )
    np.save(tmp_path / "stack.npy", np.repeat(stack, 2, 2)[..., ::2, None])
    place = work / "runs" / "bytes"
    expected = predict(open_trained(place), [tmp_path / "stack.npy"])
    assert [p.file for p in expected] == [f"{tmp_path / 'stack.npy'}[{i}]" for i in range(2)]
    assert run_cli("predict", place, tmp_path / "stack.npy", "--format", "jsonl") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["probabilities"] for line in lines] == [p.probabilities for p in expected]
    assert run_cli("predict", place, tmp_path / "stack.npy", "--format", "csv") == 0
    rows = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert [row["label"] for row in rows] == [p.label for p in expected]
    assert [float(row["p(c2)"]) for row in rows] == [p.probabilities["c2"] for p in expected]
    assert run_cli("predict", place, tmp_path / "stack.npy", "--format", "csv", "--json") == 2


def test_runs_find_their_data_from_any_folder(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli("evaluate", work / "runs" / "bytes") == 0
    assert run_cli("train", "--out", work / "runs" / "bytes", "--resume") == 0
    assert "already finished" in capsys.readouterr().out
    record = json.loads((work / "runs" / "bytes" / "record.json").read_text())
    assert record["config"]["data"]["source"] == "bytes"  # what is shared has no path of this machine
    (work / "runs" / "bytes" / "place.json").write_text("[]")
    assert run_cli("evaluate", work / "runs" / "bytes") == 2
    assert "place.json: expected an object" in capsys.readouterr().err
    (work / "runs" / "bytes" / "place.json").unlink()


def test_evaluate_on_other_images_needs_a_fitting_range(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("evaluate", work / "runs" / "bytes", "--data", work / "deep") == 2
    assert "expected uint8 values, as the training images have" in capsys.readouterr().err
    assert run_cli("evaluate", work / "runs" / "bytes", "--data", work / "deep", "--range", "0,4095") == 0
    assert run_cli("evaluate", work / "runs" / "bytes", "--range", "0,4095") == 2
    assert "--range needs --data" in capsys.readouterr().err
    for command in (["evaluate", "--data"], ["predict"]):
        assert (
            run_cli(command[0], work / "runs" / "bytes", *command[1:], work / "bytes", "--range", "auto") == 2
        )
        assert "range: expected dtype, or LOW,HIGH with LOW < HIGH; got 'auto'" in capsys.readouterr().err


def test_warnings_of_libraries_are_not_printed(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they are about is an error that says so."""
    (tmp_path / "large.png").write_bytes(png_that_claims(10_000, 10_000))
    assert run_cli("predict", work / "runs" / "bytes", tmp_path / "large.png") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "large.png: expected up to 89 million pixels; got 10000×10000, 100 million" in line


def copy_of(work: Path, place: Path, run: str = "bytes") -> Path:
    """A copy of a run's images, elsewhere."""
    return shutil.copytree(work / run, place / "elsewhere")


def test_a_folder_that_has_grown_is_tested_without_the_training_images(work: Path, tmp_path: Path) -> None:
    trained = open_trained(work / "runs" / "bytes")
    counts, own = trained.data.images, trained.open_data(work / "bytes")
    elsewhere = copy_of(work, tmp_path)
    assert trained.test_images(trained.open_data(elsewhere)).names == own.test.names
    new = digits_image(1)
    new.save(elsewhere / "c0" / "new.png")
    seen = counts["train"] + counts["val"]
    with pytest.warns(UserWarning, match=f"elsewhere: {seen} of 161 images are left out: the model was"):
        split = trained.test_images(trained.open_data(elsewhere))
    assert sorted(split.names) == sorted([*own.test.names, "c0/new.png"])
    (elsewhere / "c0" / "new.png").unlink()
    for name in own.test.names:
        (elsewhere / name).unlink()
    with pytest.raises(RunError, match=f"all {seen} of elsewhere are among those that the model was trained"):
        evaluate(trained, elsewhere)


def test_a_run_split_by_groups_knows_its_folder_again(work: Path, tmp_path: Path) -> None:
    config = tiny_config(work / "bytes", epochs=1).replaced("data", group_by=r"/(\d\d)\d")
    train(config, tmp_path / "run", quiet=True)
    trained = open_trained(tmp_path / "run")
    elsewhere = copy_of(work, tmp_path)
    assert trained.open_data(elsewhere).digest == trained.data.digest
    for index, path in enumerate(sorted(elsewhere.rglob("*.png"))):
        path.rename(path.with_name(f"name{index}.png"))  # no group in it
    with pytest.warns(UserWarning, match="images are left out"):
        assert len(trained.test_images(trained.open_data(elsewhere))) == trained.data.images["test"]


def test_runs_without_hashes_of_their_images(work: Path, tmp_path: Path) -> None:
    place = shutil.copytree(work / "runs" / "bytes", tmp_path / "run")
    elsewhere = copy_of(work, tmp_path)
    digits_image(1).save(elsewhere / "c0" / "new.png")
    (place / "seen_images.bin").unlink()
    trained = open_trained(place)
    with pytest.warns(UserWarning, match="an earlier version made this run, without hashes of its images"):
        assert len(trained.test_images(trained.open_data(elsewhere))) == 161
    (place / "seen_images.bin").write_bytes(b"1234567")
    with pytest.raises(RunError, match=r"seen_images.bin: expected 8 bytes for each image; got 7"):
        evaluate(open_trained(place), elsewhere)


def test_every_command_keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(command_line, "keep_memory", lambda: called.append(True))
    assert run_cli("models", "resnet29_asc") == 0
    assert called == [True]


def test_lines_of_progress(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("predict", work / "runs" / "bytes", work / "bytes") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_text, "QUIET_SECONDS", 0.0)
    assert run_cli("predict", work / "runs" / "bytes", work / "bytes") == 0
    assert capsys.readouterr().err.splitlines() == ["80%: 128 of 160 files", "100%: 160 of 160 files"]
    load_data(work / "bytes")
    assert "reading bytes: 160 of 160 images (100%)" in capsys.readouterr().err
