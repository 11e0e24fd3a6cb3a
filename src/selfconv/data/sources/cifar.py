"""CIFAR-10 and CIFAR-100 from their official archives, which are read as they are: nothing is extracted."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from selfconv.data.dataset import Dataset, MissingDataError, SourcePart, build
from selfconv.data.pixels import DataError
from selfconv.data.sources.download import check, download
from selfconv.data.sources.unpickle import read_pickle
from selfconv.data.stored import Images

MEMBER_LIMIT = 200_000_000  # bytes; the largest, CIFAR-100's train, has 155 million
ARCHIVE_LIMIT = 400_000_000  # bytes, unpacked; the archives have 186 million


@dataclass(frozen=True)
class Archive:
    """The address of an archive, its checksum, and the names of its members and fields."""

    url: str
    size: int
    md5: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    names: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


ARCHIVES = {
    "cifar10": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        size=170_498_071,
        md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test=("test_batch",),
        meta="batches.meta",
        labels="labels",
        names="label_names",
    ),
    "cifar100": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        size=169_001_437,
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        train=("train",),
        test=("test",),
        meta="meta",
        labels="fine_labels",
        names="fine_label_names",
    ),
}


def load_cifar(
    name: str, *, cache: Path, download: bool, image_size: int | None, seed: int, validation: float
) -> Dataset:
    archive = ARCHIVES[name]
    path = _fetch(name, archive, cache, download)
    members = read_members(path, archive.folder, {*archive.train, *archive.test, archive.meta})
    fields = {member: read_pickle(members.pop(member), f"{path}: {member}") for member in [*members]}
    names = _field(fields[archive.meta], archive.names, list, f"{path}: {archive.meta}")
    if any(type(label) is not str for label in names):
        raise DataError(f"{path}: {archive.meta}: expected strings in {archive.names!r}")

    def part(batches: tuple[str, ...]) -> SourcePart:
        pairs = [_batch(fields[batch], archive.labels, f"{path}: {batch}") for batch in batches]
        images, labels = zip(*pairs, strict=True)
        return SourcePart(np.concatenate(images), np.concatenate(labels))

    arrays = {"train": part(archive.train), "test": part(archive.test)}
    return build(name, arrays, names, image_size=image_size, seed=seed, validation=validation)


def imitation(name: str, *, image_size: int | None, seed: int, validation: float) -> Dataset:
    """Random images, as many and as large as those of an archive: for measuring. It has no digest."""
    options: Any = {"image_size": image_size, "seed": seed, "validation": validation}
    classes = {"cifar10": 10, "cifar100": 100}[name]
    random = np.random.default_rng(0)
    arrays = {
        part: SourcePart(random.integers(0, 256, (count, 32, 32, 3), np.uint8), np.arange(count) % classes)
        for part, count in (("train", 50_000), ("test", 10_000))
    }
    return replace(build(name, arrays, **options), digest="")


def _fetch(name: str, archive: Archive, cache: Path, may_download: bool) -> Path:
    path = cache / archive.file
    if not path.exists():
        if not may_download:
            raise MissingDataError(
                f"{name}: expected {path}, or permission to download {archive.url}; got neither",
                f"{archive.url} ({archive.size / 1e6:.0f} MB)",
            )
        download(archive.url, path, size=archive.size, md5=archive.md5)
    elif wrong := check(path, archive.md5):
        raise DataError(
            f"{path}: damaged, or not the expected file ({wrong}); remove it to download it again"
        )
    return path


def read_members(path: Path, folder: str, wanted: set[str]) -> dict[str, bytes]:
    """Contents of the wanted files in a .tar.gz, by name, which must all be plain files in one folder.

    Raises:
        DataError: a member that is a link or a device or lies elsewhere, one that is too large, a missing
            or repeated one, or an archive that is cut off.
    """
    members: dict[str, bytes] = {}
    try:
        with _Unzipped(path) as unzipped, tarfile.open(fileobj=unzipped, mode="r|") as tar:
            for member in tar:
                what = f"{path}: refused: member {member.name[:80]!r}"
                place = PurePosixPath(member.name)
                if place.parts[:1] != (folder,) or ".." in place.parts:
                    raise DataError(f"{what} lies outside of {folder}/")
                if member.isdir():
                    continue
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise DataError(f"{what} is not a plain file")
                if member.size > MEMBER_LIMIT:
                    raise DataError(f"{what} has {member.size} bytes; the limit is {MEMBER_LIMIT}")
                name = "/".join(place.parts[1:])
                if name in members:
                    raise DataError(f"{what} occurs twice")
                file = tar.extractfile(member)
                if name in wanted and file is not None:
                    members[name] = file.read()
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged archive ({error})") from error
    missing = sorted(wanted - members.keys())
    if missing:
        raise DataError(
            f"{path}: expected {', '.join(sorted(wanted))} in {folder}/; missing {', '.join(missing)}"
        )
    return members


class _Unzipped(gzip.GzipFile):
    """Raises DataError once more than ARCHIVE_LIMIT bytes were decompressed, headers included."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > ARCHIVE_LIMIT:
            raise DataError(f"{self.name}: refused: more than {ARCHIVE_LIMIT} bytes when unpacked")
        return data


Kind = TypeVar("Kind")


def _field(fields: Any, key: str, kind: type[Kind], source: str) -> Kind:
    if type(fields) is not dict or type(fields.get(key)) is not kind:
        raise DataError(f"{source}: expected a dict with {key!r} of type {kind.__name__}")
    return fields[key]


def _batch(fields: Any, labels_key: str, source: str) -> tuple[Images, NDArray]:
    rows = _field(fields, "data", np.ndarray, source)
    labels = _field(fields, labels_key, list, source)
    if rows.ndim != 2 or rows.shape[1] != 3 * 32 * 32:
        raise DataError(f"{source}: expected rows of 3·32·32 bytes; got shape {list(rows.shape)}")
    if any(type(label) is not int for label in labels) or len(labels) != len(rows):
        raise DataError(
            f"{source}: expected {len(rows)} integers in {labels_key!r}; got {len(labels)} values"
        )
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.asarray(labels)
