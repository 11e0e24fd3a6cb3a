"""Data larger than memory: decoded once into a memory-mapped file, with the same bits as in memory."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from helpers.tiny_runs import PATIENCE
from PIL import Image

from selfconv.data import Augment, Batches, DataError, Dataset, load_data
from selfconv.data import decoding as decoding_module
from selfconv.data.images import Item

RANDOM = np.random.default_rng(0)


def gallery(root: Path, kind: str, count: int = 30) -> Path:
    for label in "ab":
        (root / label).mkdir(parents=True)
        for i in range(count):
            if kind in ("deep", "shallow"):
                high = 3000 if kind == "deep" else 200  # which fits in a byte
                tifffile.imwrite(root / label / f"{i:03}.tif", RANDOM.integers(0, high, (9, 9), np.uint16))
            else:
                shape = (9, 9, 3) if kind == "colour" else (9, 9)
                pixels = RANDOM.integers(0, 256, shape, np.uint8)
                pixels = np.stack([pixels] * 3, -1) if kind == "grey" else pixels
                Image.fromarray(pixels).save(root / label / f"{i:03}.png")
    return root


def batches(data: Dataset) -> list[torch.Tensor]:
    made = Batches(
        data.train, 8, mean=data.mean, std=data.std, augment=Augment(flip=True, pad=1), shuffle=True, seed=3
    )
    return [part for epoch in (0, 1) for batch in made.epoch(epoch) for part in batch]


def same(a: Dataset, b: Dataset) -> bool:
    assert (a.digest, a.mean, a.std, a.pixels) == (b.digest, b.mean, b.std, b.pixels)
    assert a.val.names == b.val.names
    for part in ("train", "val", "test"):
        left, right = getattr(a, part), getattr(b, part)
        assert left.images.dtype == right.images.dtype
        assert torch.equal(left.images, right.images)
        assert torch.equal(left.labels, right.labels)
    return all(torch.equal(x, y) for x, y in zip(batches(a), batches(b), strict=True))


@pytest.mark.parametrize("kind", ["grey", "plain", "colour", "deep"])
def test_same_bits_as_in_memory(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_module, "CHUNK", 2000)  # so that there are several chunks
    root = gallery(tmp_path / "cells", kind)
    inside = load_data(root, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    outside = load_data(root, memory=1000, cache=tmp_path / "cache")
    assert outside.train._stored.mapped  # type: ignore[union-attr]
    assert same(inside, outside)
    assert same(inside.subset(20, 0), outside.subset(20, 0))
    assert outside.everything._stored.mapped  # type: ignore[union-attr]
    assert torch.equal(inside.everything.images, outside.everything.images)
    assert inside.everything.names == outside.everything.names
    monkeypatch.setattr(decoding_module, "decode", None)  # no image is decoded again
    assert same(inside, load_data(root, memory=1000, cache=tmp_path / "cache"))
    assert same(inside, load_data(root, cache=tmp_path / "cache"))


def test_a_changed_file_or_option_is_decoded_again(tmp_path: Path) -> None:
    root = gallery(tmp_path / "cells", "plain")

    def load(**options: Any) -> Dataset:
        return load_data(root, memory=0, cache=tmp_path / "cache", **options)

    before = load()
    assert load(image_size=5).size == 5
    assert load(pixel_range="0,100").train.levels == 100
    path = root / "a" / "000.png"
    stat = path.stat()
    Image.fromarray(RANDOM.integers(0, 256, (9, 9), np.uint8)).save(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load().digest != before.digest
    assert len([*(tmp_path / "cache" / "images").iterdir()]) == 4


def test_resumes_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_module, "CHUNK", 1000)
    root = gallery(tmp_path / "cells", "plain")
    inside, decode, decoded = load_data(root), decoding_module.decode, []

    def until(limit: int) -> Any:
        def one(item: Any, *args: Any) -> Any:
            decoded.append(item.name)
            if len(decoded) > limit:
                raise KeyboardInterrupt
            return decode(item, *args)

        return one

    monkeypatch.setattr(decoding_module, "decode", until(40))
    with pytest.raises(KeyboardInterrupt):
        load_data(root, memory=0, cache=tmp_path / "cache")
    (journal,) = (tmp_path / "cache").rglob("chunks.jsonl")
    with open(journal, "a") as file:
        file.write('{"number": 7, "gr')  # a line that was cut off
    first = len(decoded)
    decoded.clear()
    monkeypatch.setattr(decoding_module, "decode", until(1000))
    assert same(inside, load_data(root, memory=0, cache=tmp_path / "cache"))
    assert first + len(decoded) < 80  # of 60 images: some were not decoded again


def test_concurrent_processes_share_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, decode, decoded = gallery(tmp_path / "cells", "plain"), decoding_module.decode, []

    def count(item: Any, *args: Any) -> Any:
        decoded.append(item.name)
        time.sleep(0.002)
        return decode(item, *args)

    monkeypatch.setattr(decoding_module, "decode", count)
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda _: load_data(root, memory=0, cache=tmp_path / "cache"), range(3))]
    assert len({data.digest for data in found}) == 1
    assert sorted(decoded) == sorted({*decoded})  # each image once


def test_killed_decoding_continues_with_the_same_bits(tmp_path: Path) -> None:
    """A process that is killed leaves nothing that another one takes for complete."""
    root = gallery(tmp_path / "cells", "plain")
    script = (
        "import sys, time; from selfconv.data import load_data, decoding;"
        "decoding.CHUNK = 1000; real = decoding.decode;"
        "decoding.decode = lambda *a: (time.sleep(0.02), real(*a))[1];"
        f"load_data({str(root)!r}, memory=0, cache={str(tmp_path / 'cache')!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + PATIENCE
    while not [*(tmp_path / "cache").rglob("chunks.jsonl")] and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not [*(tmp_path / "cache").rglob("done.json")]
    assert same(load_data(root), load_data(root, memory=0, cache=tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["grey", "shallow"])
def test_killed_before_the_cache_is_declared_complete(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array has been copied with fewer channels or bits, and ``done.json`` has not been written."""
    root = gallery(tmp_path / "cells", kind)
    write = decoding_module.write_json

    def until_done(path: Path, content: Any) -> None:
        if path.name == "done.json":
            raise KeyboardInterrupt
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(decoding_module, "write_json", until_done)
        with pytest.raises(KeyboardInterrupt):
            load_data(root, memory=0, cache=tmp_path / "cache")
    assert [*(tmp_path / "cache").rglob("images.final")]
    assert same(load_data(root), load_data(root, memory=0, cache=tmp_path / "cache"))


def test_killed_before_the_first_array_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``done.json`` has been written; the larger array would stay on the disk for good."""
    root = gallery(tmp_path / "cells", "grey")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(decoding_module, "_open_cache", killed)
        with pytest.raises(KeyboardInterrupt):
            load_data(root, memory=0, cache=tmp_path / "cache")
    (done,) = (tmp_path / "cache").rglob("done.json")
    assert (done.parent / "images").exists()
    assert same(load_data(root), load_data(root, memory=0, cache=tmp_path / "cache"))
    assert not (done.parent / "images").exists()


def test_a_full_disk_counts_what_is_decoded_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = gallery(tmp_path / "cells", "plain")
    stat = os.statvfs

    def full(path: Any) -> Any:
        return os.statvfs_result((*stat(path)[:4], 0, *stat(path)[5:]))

    decode_chunks = decoding_module._Reader.decode_chunks

    def stopped(*args: Any) -> None:
        decode_chunks(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(decoding_module._Reader, "decode_chunks", stopped)
        with pytest.raises(KeyboardInterrupt):
            load_data(root, memory=0, cache=tmp_path / "cache")
    monkeypatch.setattr(os, "statvfs", full)
    assert same(load_data(root), load_data(root, memory=0, cache=tmp_path / "cache"))
    with pytest.raises(DataError, match=r"60 images of 5×5 need \d+\.\d kB, .* has room for 0\.0 kB"):
        load_data(root, memory=0, image_size=5, cache=tmp_path / "cache")


def flip_a_byte(path: Path, place: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("memory", [0, 1e9])
@pytest.mark.parametrize("kind", ["plain", "deep", "grey"])
def test_damaged_caches_are_decoded_again(tmp_path: Path, kind: str, memory: float) -> None:
    """One byte of the images, their end, or the description; what is read is what the files have."""
    root = gallery(tmp_path / "cells", kind)
    expected = load_data(root)
    load_data(root, memory=0, cache=tmp_path / "cache")
    (done,) = (tmp_path / "cache").rglob("done.json")
    images = done.parent / ("images.final" if kind == "grey" else "images")
    assert images.exists()
    for damage, reason in (
        (lambda: flip_a_byte(images), "some have changed"),
        (lambda: images.write_bytes(b"short"), "expected decoded images"),
        (lambda: images.unlink(), "expected decoded images"),
        (lambda: done.write_text("{}"), "expected decoded images"),
        (lambda: edit(done, '"low": 0', '"low": 1'), "some have changed"),
        (lambda: edit(done, '"values": ', '"values": 9'), "some have changed"),
    ):
        load_data(root, memory=0, cache=tmp_path / "cache")
        damage()
        with pytest.warns(UserWarning, match=f"{reason}.*; decoding the files again"):
            assert same(expected, load_data(root, memory=memory, cache=tmp_path / "cache"))


def decode_until_killed(monkeypatch: pytest.MonkeyPatch, root: Path, cache: Path) -> None:
    """Leaves a cache that is not complete, with every chunk on disk."""

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(decoding_module, "final_layout", killed)
        with pytest.raises(KeyboardInterrupt):
            load_data(root, memory=0, cache=cache)


def test_chunks_that_changed_before_a_resume_are_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = gallery(tmp_path / "cells", "plain")
    monkeypatch.setattr(decoding_module, "CHUNK", 9 * 9 * 4)

    decode_until_killed(monkeypatch, root, tmp_path / "cache")
    (images,) = (tmp_path / "cache").rglob("images/*/images")
    flip_a_byte(images)
    decoded: list[str] = []
    original = decoding_module.decode

    def counted(item: Item, *args: Any) -> Any:
        decoded.append(item.name)
        return original(item, *args)

    with monkeypatch.context() as patched:
        patched.setattr(decoding_module, "decode", counted)
        found = load_data(root, memory=0, cache=tmp_path / "cache")
    assert sorted(decoded) == [f"a/{i:03}.png" for i in range(4)]  # of one chunk
    assert same(load_data(root), found)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("deep", '"highest": 2', '"highest": 6'),
        ("deep", '"highest": ', '"highest": "x", "y": '),
        ("deep", '"number": 3', '"number": -1'),
        ("deep", '"number": 3', '"number": "x"'),
        ("deep", '"number": 3', '"number": 2'),
        ("grey", '"grey": true', '"grey": false'),
        ("deep", '"values": 0', '"values": 7'),
    ],
)
def test_descriptions_that_changed_before_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, old: str, new: str
) -> None:
    root = gallery(tmp_path / "cells", kind)
    monkeypatch.setattr(decoding_module, "CHUNK", 9 * 9 * 2 * 4)

    decode_until_killed(monkeypatch, root, tmp_path / "cache")
    (journal,) = (tmp_path / "cache").rglob("chunks.jsonl")
    edit(journal, old, new)
    found = load_data(root, memory=0, cache=tmp_path / "cache")
    expected = load_data(root)
    assert same(expected, found)
    assert found.clipping == expected.clipping


@pytest.mark.parametrize("damage", ["[", None])
def test_a_damaged_layout_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    root = gallery(tmp_path / "cells", "plain")

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(decoding_module, "_write_cache", killed)
        with pytest.raises(KeyboardInterrupt):
            load_data(root, memory=0, cache=tmp_path / "cache")
    (layout,) = (tmp_path / "cache").rglob("layout.json")
    if damage is None:
        edit(layout, '"high": 255', '"high": 9999')
    else:
        layout.write_text(damage)
    assert same(load_data(root), load_data(root, memory=0, cache=tmp_path / "cache"))


def refused(*args: object, **kwargs: object) -> None:
    raise PermissionError(13, "Permission denied")


def with_damaged_cache(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of images, and the folder of its cache, in whose images a byte has changed."""
    root = gallery(tmp_path / "cells", "plain")
    load_data(root, memory=0, cache=tmp_path / "cache")
    (images,) = (tmp_path / "cache").rglob("images/*/images")
    flip_a_byte(images)
    return root, images.parent


def test_a_damaged_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = with_damaged_cache(tmp_path)
    monkeypatch.setattr(decoding_module, "FileLock", refused)
    with pytest.warns(UserWarning, match="ignored, since its images have changed"):
        assert same(load_data(root), load_data(root, memory=1e9, cache=tmp_path / "cache"))
    with (
        pytest.warns(UserWarning, match="ignored, since its images have changed"),
        pytest.raises(DataError, match=r"cannot be written \(Permission denied\): name another folder"),
    ):
        load_data(root, memory=0, cache=tmp_path / "cache")


def test_a_damaged_cache_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = with_damaged_cache(tmp_path)
    monkeypatch.setattr(Path, "unlink", refused)
    advice = rf"^{re.escape(str(folder))}: .*; some have changed: delete this folder$"
    with pytest.warns(UserWarning, match="changed"), pytest.raises(DataError, match=advice):
        load_data(root, memory=0, cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        DataError, match=r"cells: .* cannot be written \(.*\): name another folder in \$SELFCONV_DATA"
    ):
        load_data(gallery(tmp_path / "cells", "plain"), memory=0, cache=tmp_path / "file")


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    root = gallery(tmp_path / "cells", "plain")
    (root / "a" / "003.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"1 of 60 images cannot be read: a/003.png \(not an image"):
        load_data(root, memory=0, cache=tmp_path / "cache")


def test_memory_is_a_number_of_bytes() -> None:
    with pytest.raises(DataError, match="memory: expected a number of bytes ≥ 0; got -1"):
        load_data("digits", memory=-1)


def test_a_disk_that_fills_while_images_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = gallery(tmp_path / "cells", "plain")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(
            DataError,
            match=rf"{tmp_path}/cache/images/\w+: the decoded images of cells cannot be written \(No",
        ):
            load_data(root, memory=0, cache=tmp_path / "cache")
    assert same(load_data(root), load_data(root, memory=0, cache=tmp_path / "cache"))


class TestParquet:
    """Through Hugging Face datasets, from files: nothing is downloaded."""

    def write(self, root: Path, path: Path, start: int, label: str = "label", **extra: Any) -> None:
        import datasets

        files = [file for file in sorted(root.rglob("*.png")) if start <= int(file.stem) < start + 10]
        columns: dict[str, Any] = {
            "image": [{"bytes": file.read_bytes(), "path": None} for file in files],
            label: [file.parent.name for file in files],
        } | {name: [f(file) for file in files] for name, f in extra.items()}
        made = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
        made.to_parquet(path)

    def test_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
        root = gallery(tmp_path / "cells", "colour")
        folder = tmp_path / "parquet"
        folder.mkdir()
        self.write(root, folder / "train-0.parquet", 0)
        self.write(root, folder / "train-1.parquet", 10)
        self.write(root, folder / "test.parquet", 20)
        data = load_data(folder)
        assert (data.class_names, len(data.test), len(data.train) + len(data.val)) == (("a", "b"), 20, 40)
        expected = np.stack(
            [np.array(Image.open(root / "ab"[i // 10] / f"{20 + i % 10:03}.png")) for i in range(20)]
        )
        assert np.array_equal(data.test.images.permute(0, 2, 3, 1), expected)
        mapped = load_data(folder, memory=0, cache=tmp_path / "cache")
        assert same(data, mapped)

    def test_one_file_with_groups(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
        root = gallery(tmp_path / "cells", "plain", 10)
        self.write(root, tmp_path / "x.parquet", 0, slide=lambda file: int(file.stem) // 2)
        data = load_data(tmp_path / "x.parquet", group_by="slide")
        assert (len(data.train), len(data.val), len(data.test)) == (12, 4, 4)
        with pytest.raises(DataError, match="expected one of the columns image, label, slide; got 'patient'"):
            load_data(tmp_path / "x.parquet", group_by="patient")
        self.write(root, tmp_path / "y.parquet", 0, label="kind")
        with pytest.raises(DataError, match="expected a column 'label'; got image, kind"):
            load_data(tmp_path / "y.parquet")
        (tmp_path / "z.parquet").write_bytes(b"PAR1")
        with pytest.raises(DataError, match=r"z.parquet: cannot be loaded by datasets"):
            load_data(tmp_path / "z.parquet")
        with pytest.raises(DataError, match="expected hf:NAME; got 'hf:'"):
            load_data("hf:")

    @pytest.mark.parametrize("files", [("train-0", "train-1"), ("train", "test")])
    def test_class_names_in_another_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, str]
    ) -> None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
        root, folder = gallery(tmp_path / "cells", "plain"), tmp_path / "parquet"
        folder.mkdir()
        for name, start, names in zip(files, (0, 10), (["a", "b"], ["b", "a"]), strict=True):
            path = folder / f"{name}.parquet"
            self.write(root, path, start)
            made = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "hf"))
            made.cast_column("label", datasets.ClassLabel(names=names)).to_parquet(path)
        with pytest.raises(
            DataError,
            match=r"same class names in every file; 0 in 'label' is '[ab]' in \S+t and '[ab]' in \S+t$",
        ):
            load_data(folder)

    @pytest.mark.parametrize(
        ("label", "why"),
        [
            (lambda file: None if file.stem == "003" else file.parent.name, r"got None in train\[3\]"),
            (lambda file: [int(file.stem)], r"got \[0\] in train\[0\]"),
        ],
    )
    def test_labels_that_are_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: Any, why: str
    ) -> None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
        root = gallery(tmp_path / "cells", "plain", 10)
        self.write(root, tmp_path / "x.parquet", 0, label="other", kind=label)
        renamed = datasets.Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "hf"))
        renamed.rename_column("kind", "label").to_parquet(tmp_path / "x.parquet")
        with pytest.raises(DataError, match=f"expected a text or a number, of one type, in .*; {why}$"):
            load_data(tmp_path / "x.parquet")
