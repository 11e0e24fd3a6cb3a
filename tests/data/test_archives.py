"""CIFAR's archives: read right, and nothing in a hostile one runs or is written."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cifar_files import TEN, cifar10_members, py2_pickle, write_archive
from hypothesis import given
from hypothesis import strategies as st

from selfconv.data import DataError, load_data
from selfconv.data.sources import cifar
from selfconv.data.sources.unpickle import read_pickle

FOLDER = "cifar-10-batches-py"
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


@given(plain, st.sampled_from([0, 1, 2]))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "test") == value


@pytest.mark.filterwarnings("ignore:numpy.core:DeprecationWarning")
def test_a_batch_is_read_as_pickle_reads_it() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (300, 7), np.uint8)
    data = py2_pickle({"data": rows, "labels": list(range(-3, 400)), "filenames": ["ü" * 300, "b"]})
    expected = pickle.loads(data, encoding="latin-1")
    found = read_pickle(data, "test")
    assert found.keys() == expected.keys()
    assert np.array_equal(found["data"], expected["data"])
    assert found["data"].dtype == np.uint8
    assert (found["labels"], found["filenames"]) == (expected["labels"], expected["filenames"])


def test_arrays_in_column_order() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data = (
        py2_pickle(rows.T.copy()).replace(b"K\x04K\x03\x86", b"K\x03K\x04\x86").replace(b"tb\x89", b"tb\x88")
    )
    assert np.array_equal(read_pickle(data, "test"), rows)


class Runs:
    """Touches a file when unpickled."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


def hostile(marker: Path) -> dict[str, bytes]:
    """Pickles that create the marker when loaded by pickle."""
    command = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w').close()"
    return {
        "text": f"cos\nsystem\n(S'{command}'\ntR.".encode(),
        "inst": f"(S'{command}'\nios\nsystem\n.".encode(),
        "obj": b"(cos\nsystem\nU" + bytes([len(command)]) + command.encode() + b"o.",
        "in a batch": b"\x80\x02}(U\x04dataU\x01x" + f"U\x06labelscos\nsystem\n(S'{command}'\ntRu.".encode(),
        **{f"eval {p}": pickle.dumps(Runs(eval, code), p) for p in range(6)},
        **{f"exec {p}": pickle.dumps({"labels": [Runs(exec, code)]}, p) for p in range(6)},
        "after an array": py2_pickle(np.zeros(3, np.uint8))[:-1]
        + pickle.dumps(Runs(os.system, command), 2)[2:],
    }


events: list[str] = []
watching = False


def watch(event: str, _: Any) -> None:
    if watching:
        events.append(event)


sys.addaudithook(watch)


@pytest.mark.parametrize("kind", hostile(Path("x")))
def test_no_code_in_a_pickle_runs(kind: str, tmp_path: Path) -> None:
    global watching
    marker = tmp_path / "ran"
    data = hostile(marker)[kind]
    pickle.loads(data)
    assert marker.exists()  # the pickle is as hostile as it looks
    marker.unlink()

    events.clear()
    watching = True
    try:
        with pytest.raises(DataError) as caught:
            read_pickle(data, "batch")
    finally:
        watching = False
    assert not marker.exists()
    assert not {"exec", "compile", "open", "os.system", "import", "pickle.find_class"} & set(events), events
    assert str(caught.value).startswith("batch: refused")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.",  # a type other than bytes
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.",  # of another class
        b"cnumpy\nndarray\n(I100000000000\ntR.",  # a call of a class
        b"cnumpy.core.multiarray\n_reconstruct\n}U\x0c__defaults__NNtsb.",  # state for a function
        b"cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"Pid\n.",  # a persistent id
        b"\x82\x01.",  # an extension
    ],
)
def test_calls_other_than_those_of_an_array_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^x: (refused|damaged)"):
        read_pickle(data, "x")


BATCH = py2_pickle({"data": np.arange(40, dtype=np.uint8).reshape(4, 10), "labels": [1, 2, 3, 300]})


def is_plain(value: object) -> bool:
    """Whether it holds only what the archives do: no function, class or object of another kind."""
    if isinstance(value, dict):
        return all(is_plain(x) for item in value.items() for x in item)
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return value is None or isinstance(value, bool | int | float | str | bytes)


@given(st.integers(0, len(BATCH) - 1), st.integers(0, 255), st.booleans())
def test_a_damaged_pickle_is_a_data_error_or_other_values(place: int, byte: int, cut: bool) -> None:
    data = BATCH[:place] if cut else BATCH[:place] + bytes([byte]) + BATCH[place + 1 :]
    with suppress(DataError):
        assert is_plain(read_pickle(data, "x"))


@given(st.binary(max_size=60))
def test_noise_is_a_data_error_or_a_value(data: bytes) -> None:
    with suppress(DataError):
        assert is_plain(read_pickle(data, "x"))


@pytest.fixture
def images() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).integers(0, 256, (360, 32, 32, 3), np.uint8), np.arange(360) % 10


def register(monkeypatch: pytest.MonkeyPatch, name: str, data: bytes) -> None:
    """Let load_data take these bytes for the archive."""
    known = replace(cifar.ARCHIVES[name], size=len(data), md5=hashlib.md5(data).hexdigest())
    monkeypatch.setitem(cifar.ARCHIVES, name, known)


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: tuple) -> None:
    x, y = images
    path = tmp_path / "cifar-10-python.tar.gz"
    register(monkeypatch, "cifar10", write_archive(path, FOLDER, cifar10_members(x, y)))
    data = load_data("cifar10", cache=tmp_path, download=False)
    assert data.class_names == tuple(TEN)
    assert (len(data.train), len(data.val), len(data.test)) == (270, 30, 60)
    assert np.array_equal(data.test.images.permute(0, 2, 3, 1), x[300:])
    assert np.array_equal(data.test.labels, y[300:])
    assert data.val.labels.bincount().tolist() == [3] * 10
    known = {image.tobytes(): label for image, label in zip(x[:300], y[:300], strict=True)}
    for split in (data.train, data.val):
        for image, label in zip(split.images.permute(0, 2, 3, 1).numpy(), split.labels, strict=True):
            assert known.pop(image.tobytes()) == label
    assert not known
    assert list(tmp_path.iterdir()) == [path]  # nothing was extracted


def test_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).integers(0, 256, (400, 3072), np.uint8)
    fine = [i % 100 for i in range(400)]
    members = {
        part: py2_pickle({"data": rows, "fine_labels": fine[: len(rows)], "coarse_labels": [0] * len(rows)})
        for part, rows in (("train", x[:300]), ("test", x[300:]))
    }
    names = [f"kind_{i}" for i in range(100)]
    members["meta"] = py2_pickle({"fine_label_names": names, "coarse_label_names": ["all"]})
    path = tmp_path / "cifar-100-python.tar.gz"
    register(monkeypatch, "cifar100", write_archive(path, "cifar-100-python", members))
    data = load_data("cifar100", cache=tmp_path, download=False, validation=1 / 3)
    assert data.class_names == tuple(names)
    assert np.array_equal(data.test.images.reshape(100, -1), x[300:])
    assert sorted(data.val.labels.tolist()) == list(range(100))


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (member("../evil"), "outside"),
        (member(f"{FOLDER}/../../evil"), "outside"),
        (member("/etc/evil"), "outside"),
        (member("elsewhere/data_batch_1"), "outside"),
        (member(f"{FOLDER}/link", tarfile.SYMTYPE, "/etc/passwd"), "not a plain file"),
        (member(f"{FOLDER}/link", tarfile.LNKTYPE, "../../etc/passwd"), "not a plain file"),
        (member(f"{FOLDER}/device", tarfile.CHRTYPE), "not a plain file"),
        (member(f"{FOLDER}/pipe", tarfile.FIFOTYPE), "not a plain file"),
        (member(f"{FOLDER}/test_batch"), "twice"),
        (member(f"{FOLDER}/./test_batch"), "twice"),
    ],
    ids=lambda value: value.name if isinstance(value, tarfile.TarInfo) else value,
)
def test_members_that_do_not_belong_are_refused(extra: tarfile.TarInfo, why: str, tmp_path: Path) -> None:
    path = tmp_path / "archive.tar.gz"
    write_archive(path, FOLDER, {"test_batch": b"data"}, extra)
    with pytest.raises(DataError, match=f"refused: member .*{why}") as caught:
        cifar.read_members(path, FOLDER, {"test_batch"})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_large_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "archive.tar.gz"
    write_archive(path, FOLDER, {"test_batch": bytes(5000)})
    monkeypatch.setattr(cifar, "MEMBER_LIMIT", 4999)
    with pytest.raises(DataError, match="has 5000 bytes; the limit is 4999"):
        cifar.read_members(path, FOLDER, {"test_batch"})


@pytest.mark.parametrize("name", ["test_batch", "readme.html"])
def test_bombs_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "archive.tar.gz"
    write_archive(path, FOLDER, {name: bytes(3_000_000), "last": b""})
    assert path.stat().st_size < 30_000
    monkeypatch.setattr(cifar, "ARCHIVE_LIMIT", 2_000_000)
    with pytest.raises(DataError, match="refused: more than 2000000 bytes"):
        cifar.read_members(path, FOLDER, {"test_batch"})


def test_a_header_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "archive.tar.gz"
    info = member(f"{FOLDER}/test_batch")
    info.pax_headers = {"comment": "x" * 3_000_000}
    write_archive(path, FOLDER, {}, info)
    monkeypatch.setattr(cifar, "ARCHIVE_LIMIT", 2_000_000)
    with pytest.raises(DataError, match="refused: more than 2000000 bytes"):
        cifar.read_members(path, FOLDER, {"test_batch"})


@pytest.mark.parametrize("kept", [0, 1, 10, 200, 0.5, 0.99])
def test_a_truncated_archive(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "archive.tar.gz"
    noise = np.random.default_rng(0).integers(0, 256, 50_000, np.uint8).tobytes()
    data = write_archive(path, FOLDER, {"test_batch": noise, "readme.html": noise})
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(DataError, match="damaged archive") as caught:
        cifar.read_members(path, FOLDER, {"test_batch"})
    assert "\n" not in str(caught.value)


def test_not_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "archive.tar.gz"
    path.write_text("<html>come back later</html>")
    with pytest.raises(DataError, match="damaged archive"):
        cifar.read_members(path, FOLDER, {"test_batch"})


def test_a_missing_member(tmp_path: Path) -> None:
    path = tmp_path / "archive.tar.gz"
    write_archive(path, FOLDER, {"test_batch": b""})
    with pytest.raises(DataError, match=r"expected meta, test_batch in .*; missing meta$"):
        cifar.read_members(path, FOLDER, {"test_batch", "meta"})


def altered(members: dict[str, bytes], **fields: Any) -> dict[str, bytes]:
    batch = {"data": np.zeros((60, 3072), np.uint8), "labels": [i % 10 for i in range(60)]} | fields
    return members | {"data_batch_2": py2_pickle({k: v for k, v in batch.items() if v is not None})}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"data": None}, "data_batch_2: expected a dict with 'data' of type ndarray"),
        ({"data": "abc"}, "data_batch_2: expected a dict with 'data' of type ndarray"),
        ({"labels": None}, "data_batch_2: expected a dict with 'labels' of type list"),
        ({"labels": [0] * 59}, "data_batch_2: expected 60 integers in 'labels'; got 59"),
        ({"labels": ["0"] * 60}, "data_batch_2: expected 60 integers in 'labels'"),
        ({"labels": [10] * 60}, r"y_train: expected labels 0\.\.9 for 10 class names; got 10"),
        ({"labels": [-1] * 60}, r"y_train: expected labels 0\.\.9 for 10 class names; got -1"),
        ({"data": np.zeros((60, 3071), np.uint8)}, r"expected rows of 3·32·32 bytes; got shape \[60, 3071\]"),
        ({"data": np.zeros(60, np.uint8)}, r"expected rows of 3·32·32 bytes; got shape \[60\]"),
        ({"data": np.zeros((60, 3072), np.int16)}, "data_batch_2: refused"),
    ],
)
def test_batches_with_other_contents(
    fields: dict, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: tuple
) -> None:
    members = altered(cifar10_members(*images), **fields)
    register(monkeypatch, "cifar10", write_archive(tmp_path / "cifar-10-python.tar.gz", FOLDER, members))
    with pytest.raises(DataError, match=why) as caught:
        load_data("cifar10", cache=tmp_path, download=False)
    assert "\n" not in str(caught.value)


def test_a_hostile_archive_with_the_right_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: tuple
) -> None:
    marker = tmp_path / "ran"
    members = cifar10_members(*images) | {"data_batch_3": hostile(marker)["exec 2"]}
    register(monkeypatch, "cifar10", write_archive(tmp_path / "cifar-10-python.tar.gz", FOLDER, members))
    with pytest.raises(DataError, match="data_batch_3: refused"):
        load_data("cifar10", cache=tmp_path, download=False)
    assert not marker.exists()


def test_an_archive_with_another_checksum_is_not_opened(tmp_path: Path, images: tuple) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    write_archive(path, FOLDER, cifar10_members(*images))
    message = r"damaged, or not the expected file \(expected MD5 c58f.*; got .*remove it"
    with pytest.raises(DataError, match=message):
        load_data("cifar10", cache=tmp_path)


def test_missing_archive_without_download(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^cifar100: expected .*cifar-100-python.tar.gz, or permission to download"
    ):
        load_data("cifar100", cache=tmp_path, download=False)
    assert list(tmp_path.iterdir()) == []
