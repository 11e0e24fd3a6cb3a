"""Parquet files that name their images by path, and cells and labels that do not fit."""

from __future__ import annotations

import io
import os
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from selfconv.data import DataError, load_data

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def png(value: int | None = None) -> bytes:
    pixels = RANDOM.integers(0, 256, (8, 8), np.uint8) if value is None else np.full((8, 8), value, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def write(path: Path, cells: Sequence[Any], labels: Sequence[Any], names: list[str] | None = None) -> Path:
    made = datasets.Dataset.from_dict({"image": cells, "label": labels})
    made = made.cast_column("image", datasets.Image())
    if names is not None:
        made = made.cast_column("label", datasets.ClassLabel(names=names))
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(made.data.table.cast(made.features.arrow_schema), path)
    return path


def inside(count: int) -> list[dict[str, Any]]:
    return [{"bytes": png(), "path": None} for _ in range(count)]


def by_path(root: Path, *, relative: bool = True) -> Path:
    """Twenty images beside a Parquet file that names them."""
    cells = []
    for i in range(20):
        file = root / "pictures" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png())
        cells.append({"bytes": None, "path": os.fspath(file.relative_to(root) if relative else file)})
    return write(root / "x.parquet", cells, ["a", "b"] * 10)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("folder", [True, False])
def test_paths_start_at_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool, folder: bool
) -> None:
    path = by_path(tmp_path / "cells", relative=relative)
    monkeypatch.chdir(tmp_path)
    given = path.relative_to(tmp_path)
    data = load_data(given.parent if folder else given)
    for split in (data.train, data.val, data.test):
        for image, name in zip(split.images, split.names, strict=True):
            number = name.split("[")[1].split("]")[0]
            expected = np.array(Image.open(tmp_path / "cells" / "pictures" / f"{number}.png"))
            assert np.array_equal(image[0], expected)


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    path = by_path(tmp_path / "cells", relative=False)
    before = load_data(path, memory=0, cache=tmp_path / "cache")
    assert load_data(path, memory=0, cache=tmp_path / "cache").digest == before.digest
    assert len([*(tmp_path / "cache" / "images").iterdir()]) == 1
    (tmp_path / "cells" / "pictures" / "3.png").write_bytes(png())
    after = load_data(path, memory=0, cache=tmp_path / "cache")
    assert after.digest == load_data(path).digest != before.digest


def test_files_that_are_missing(tmp_path: Path) -> None:
    path = by_path(tmp_path / "cells")
    for i in (4, 7):
        (tmp_path / "cells" / "pictures" / f"{i}.png").unlink()
    with pytest.raises(
        DataError,
        match=r"x.parquet: train\[4\]: no such file: pictures/4.png; 2 of 20 files are missing$",
    ):
        load_data(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    path = by_path(tmp_path / "cells")
    file = tmp_path / "cells" / "pictures" / "4.png"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(
        DataError,
        match=r"1 of 20 images cannot be read: train\[4\] pictures/4.png \(expected a file; got a FIFO\)$",
    ):
        load_data(path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"\(expected a file; got a device\)$"):
        load_data(path)


def test_an_array_of_several_images(tmp_path: Path) -> None:
    cells = inside(20)
    cells[4] = {"bytes": None, "path": "x.npy"}
    path = write(tmp_path / "x.parquet", cells, ["a", "b"] * 10)
    np.save(tmp_path / "x.npy", RANDOM.integers(0, 256, (8, 8), np.uint8))
    assert load_data(path).size == 8
    np.save(tmp_path / "x.npy", np.zeros((5, 8, 8, 1), np.uint8))
    with pytest.raises(DataError, match=r"train\[4\] x.npy: expected one image in a file; got 5$"):
        load_data(path)


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}])
def test_an_empty_cell(tmp_path: Path, cell: Any) -> None:
    cells = inside(20)
    cells[4] = cell
    path = write(tmp_path / "x.parquet", cells, ["a", "b"] * 10)
    with pytest.raises(
        DataError,
        match=r"1 of 20 images cannot be read: train\[4\] \(expected an image; got an empty cell\)$",
    ):
        load_data(path)


@pytest.mark.parametrize("named", ["train", "test"])
@pytest.mark.parametrize("others", [["cat", "dog"] * 5, [0, 1] * 5])
def test_labels_with_names_beside_labels_without(tmp_path: Path, named: str, others: list[Any]) -> None:
    plain = {"train": "test", "test": "train"}[named]
    write(tmp_path / f"{named}.parquet", inside(10), [0, 1] * 5, ["cat", "dog"])
    write(tmp_path / f"{plain}.parquet", inside(10), others)
    with pytest.raises(
        DataError,
        match=f"expected labels of one kind in every file; 'label' has class names in {named}.parquet and "
        f"none in {plain}.parquet$",
    ):
        load_data(tmp_path)


@pytest.mark.parametrize("given", [".", "v1.2/"])
def test_the_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    folder = tmp_path / "v1.2"
    write(folder / "train.parquet", inside(20), ["a", "b"] * 10)
    monkeypatch.chdir(folder if given == "." else tmp_path)
    assert load_data(given).name == "v1.2"


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(
    ("labels", "names"), [([0, 1, None, 1] * 5, ["a", "b"]), ([0.5, 1.5, float("nan"), 1.5] * 5, None)]
)
def test_rows_without_a_label_are_named(
    tmp_path: Path, labels: list[Any], names: list[str] | None, part: str
) -> None:
    """In every part, by number."""
    whole = [label if label == label and label is not None else labels[0] for label in labels]
    write(tmp_path / "x" / "train.parquet", inside(20), labels if part == "train" else whole, names)
    write(tmp_path / "x" / "test.parquet", inside(20), labels if part == "test" else whole, names)
    with pytest.raises(DataError, match=rf"x: expected .*; got (None|nan) in {part}\[2\]$"):
        load_data(tmp_path / "x")


def test_labels_in_two_spellings(tmp_path: Path) -> None:
    one, two = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    data = load_data(write(tmp_path / "x.parquet", inside(20), ([one, "b"] * 6 + [two, "b"] * 4)))
    assert data.class_names == ("b", one)
    named = write(tmp_path / "named.parquet", inside(20), [0, 1] * 10, [two, "b"])
    assert load_data(named).class_names == (one, "b")


def parts(root: Path, *names: str) -> Path:
    """Files of ten images each, and none of one shade."""
    for name in names:
        write(root / name, inside(10), ["a", "b"] * 5)
    return root


@pytest.mark.parametrize(
    ("names", "stranger"),
    [
        (("train-0.parquet", "test.parquet", "holdout.parquet"), "holdout.parquet"),
        (("train.parquet", "dev.PARQUET"), "dev.PARQUET"),
        (("TEST.parquet", "all.parquet", "unlabelled-test.parquet"), "all.parquet"),
    ],
)
def test_files_of_no_part_beside_parts(tmp_path: Path, names: tuple[str, ...], stranger: str) -> None:
    with pytest.raises(DataError, match=f"train, val or test; got {stranger} beside (train|test|TEST)[^ ]*$"):
        load_data(parts(tmp_path / "data", *names))


def test_files_without_parts_are_all_of_the_training_images(tmp_path: Path) -> None:
    root = parts(tmp_path / "data", "a.parquet", "b.parquet", ".train.parquet")
    data = load_data(root)
    assert (len(data.everything), data.has_test_part) == (20, False)
    pictures = tmp_path / "pictures"
    for i in range(20):
        (pictures / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (pictures / "ab"[i % 2] / f"{i}.png").write_bytes(png())
    parts(pictures, "._x.parquet")  # of another system, beside folders of classes
    assert len(load_data(pictures).everything) == 20


@pytest.mark.parametrize("names", [("x.parquet",), ("train.parquet", "test.parquet")])
def test_files_without_rows(tmp_path: Path, names: tuple[str, ...]) -> None:
    root = parts(tmp_path / "data", *names)
    write(root / names[-1], [], [])
    with pytest.raises(DataError, match=rf"data/{names[-1]}: expected a row for each image; got no rows$"):
        load_data(root if len(names) > 1 else root / names[0])


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_pixels_in_lists(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """The library that makes files of them warns of each whose numbers get fewer bits."""

    def store(pixels: np.ndarray) -> Path:
        cells: Any = pyarrow.array(pixels.tolist())
        table = pyarrow.table({"image": cells, "label": ["a", "b"] * 10})
        pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
        return tmp_path / "x.parquet"

    path = store(RANDOM.integers(0, 256, (20, *shape)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load_data(path).everything) == 20
    if len(shape) == 3:
        with pytest.raises(DataError, match=r"train: expected bytes in lists .*; got values from 0 to 400$"):
            load_data(store(np.arange(20 * 192).reshape(20, *shape) % 401))
