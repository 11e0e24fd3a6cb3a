"""Parquet files that name their images by path, and cells and labels that do not fit."""

from __future__ import annotations

import io
import os
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
