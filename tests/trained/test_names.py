"""Names of files and classes that are spelt in another way, or are not text, in what commands write."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_runs import OPTIONS, run_cli, tiny_config
from PIL import Image

from selfconv import _text
from selfconv._files import read_as, write_json
from selfconv.data import DataInfo
from selfconv.train import train
from selfconv.trained import open_trained

INVALID = os.fsdecode(b"\xff\xfe.png")
NFC, NFD = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))


def write(path: Path, content: object) -> Path:
    write_json(path, content)
    return path


def shades(folder: Path, count: int, start: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shade in range(start, start + count):
        Image.fromarray(np.arange(shade, shade + 64, dtype=np.uint8).reshape(8, 8)).save(
            folder / f"{shade}.png"
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a folder in which some names of test images are not UTF-8."""
    root = tmp_path_factory.mktemp("names") / "data"
    for start, name in ((0, NFC), (100, "b")):
        shades(root / "train" / name, 20, start)
        shades(root / "test" / name, 2, start + 40)
        shade = next((root / "test" / name).iterdir())
        shade.rename(shade.with_name(INVALID))
    train(tiny_config(root, epochs=1), root.parent / "run", quiet=True)
    return root.parent / "run"


def test_files_whose_names_are_not_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("evaluate", run) == 0
    assert (run / "mistakes.png").exists()
    rows = [*csv.DictReader((run / "predictions.csv").read_text("utf-8").splitlines())]
    assert sum(Path(row["image"]).name == r"\udcff\udcfe.png" for row in rows) == 2
    [file] = (run.parent / "data" / "test" / "b").glob(INVALID)
    capsys.readouterr()
    shown = str(file).replace("\udcff", r"\udcff").replace("\udcfe", r"\udcfe")
    assert run_cli("predict", run, file) == 0
    assert capsys.readouterr().out.split("\t")[0] == shown
    assert run_cli("predict", run, file, "--format", "csv") == 0
    assert next(csv.DictReader(io.StringIO(capsys.readouterr().out)))["file"] == shown
    for option in ("--json", "--format=jsonl"):
        assert run_cli("predict", run, file, option) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found[0] if option == "--json" else found)["file"] == shown


def test_folders_whose_names_are_not_text(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options of a run are text; a data set that is only tested on may have any name."""
    folder = tmp_path / os.fsdecode(b"data\xff")
    shutil.copytree(run.parent / "data", folder)
    assert run_cli("evaluate", run, "--data", folder, "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["data"] == r"data\udcff"
    capsys.readouterr()
    assert run_cli("train", "--data", folder, "--out", tmp_path / "new", *OPTIONS) == 2
    assert re.fullmatch(
        r'selfconv: .*config.json: expected names in UTF-8; got "source": ".*/data\\udcff"\n',
        capsys.readouterr().err,
    )


@pytest.mark.filterwarnings("error")
def test_classes_are_matched_in_any_spelling(run: Path, tmp_path: Path) -> None:
    """macOS writes é as two characters in archives."""
    trained, folder = open_trained(run), tmp_path / "other"
    for number, name in enumerate((NFD, "b")):
        noise = np.random.default_rng(number).integers(0, 256, (20, 8, 8), np.uint8)
        (folder / name).mkdir(parents=True)
        for index, image in enumerate(noise):
            Image.fromarray(image).save(folder / name / f"{index}.png")
    assert len(trained.open_data(folder).everything) == 40
    earlier = json.loads((run / "data.json").read_text()) | {"class_names": ["b", NFD]}
    assert read_as(DataInfo, write(tmp_path / "data.json", earlier)).class_names == ["b", NFC]


def test_two_names_are_never_written_alike() -> None:
    names = [r"\udcff.png", "\udcff.png", r"\\udcff.png", "\\\udcff.png", r"a\b.png", r"a\\b.png", "é.png"]
    written = [_text.in_utf8(name) for name in names]
    assert len({*written}) == len(names)
    assert written[-3:] == names[-3:]
    for name in written:
        name.encode()
