"""Archives as Python 2 wrote those of CIFAR, for tests."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TEN = "airplane automobile bird cat deer dog frog horse ship truck".split()  # noqa: SIM905


def py2_pickle(value: Any) -> bytes:
    """The bytes that Python 2's cPickle, protocol 2, gives for a value."""
    out = io.BytesIO()
    puts = 0

    def put() -> None:
        nonlocal puts
        puts += 1
        out.write(b"q" + bytes([puts]) if puts < 256 else b"r" + struct.pack("<I", puts))

    def text(data: bytes) -> None:
        short = len(data) < 256
        out.write((b"U" + bytes([len(data)]) if short else b"T" + struct.pack("<i", len(data))) + data)
        put()

    def integer(number: int) -> None:
        if 0 <= number < 256:
            out.write(b"K" + bytes([number]))
        elif 0 <= number < 65536:
            out.write(b"M" + struct.pack("<H", number))
        else:
            out.write(b"J" + struct.pack("<i", number))

    def array(a: np.ndarray) -> None:
        out.write(b"cnumpy.core.multiarray\n_reconstruct\n")
        put()
        out.write(b"cnumpy\nndarray\n")
        put()
        out.write(b"K\x00\x85")
        put()
        text(b"b")
        out.write(b"\x87R(K\x01")
        for side in a.shape:
            integer(side)
        out.write({1: b"\x85", 2: b"\x86", 3: b"\x87"}[a.ndim])
        out.write(b"cnumpy\ndtype\n")
        put()
        text(a.dtype.str[1:].encode())
        out.write(b"K\x00K\x01\x87R(K\x03")
        text(b"|")
        out.write(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
        text(a.tobytes())
        out.write(b"tb")

    def save(item: Any) -> None:
        if isinstance(item, str):
            text(item.encode("latin-1"))
        elif isinstance(item, int):
            integer(item)
        elif isinstance(item, list):
            out.write(b"]")
            put()
            out.write(b"(")
            for element in item:
                save(element)
            out.write(b"e")
        elif isinstance(item, dict):
            out.write(b"}")
            put()
            out.write(b"(")
            for key, element in item.items():
                save(key)
                save(element)
            out.write(b"u")
        elif isinstance(item, np.ndarray):
            array(item)
        else:
            raise TypeError(type(item))

    out.write(b"\x80\x02")
    save(value)
    out.write(b".")
    return out.getvalue()


def cifar10_members(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    """The files of CIFAR-10's archive, for images [N, 32, 32, 3] of which the last sixth is the test."""
    members = {}
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name, x, y in zip(names, np.split(images, 6), np.split(labels, 6), strict=True):
        rows = np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(len(x), -1)
        files = [f"image_{i:06}.png" for i in range(len(x))]
        batch = {"batch_label": name, "labels": y.tolist(), "data": rows, "filenames": files}
        members[name] = py2_pickle(batch)
    meta = {"num_cases_per_batch": len(images) // 6, "label_names": TEN, "num_vis": 3072}
    return members | {"batches.meta": py2_pickle(meta), "readme.html": b"<html>"}


def write_archive(path: Path, folder: str, members: Mapping[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    """A .tar.gz of the members in a folder, and of further members without contents."""
    with gzip.open(path, "wb", 1) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        root = tarfile.TarInfo(folder)
        root.type = tarfile.DIRTYPE
        tar.addfile(root)
        for name, data in members.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return path.read_bytes()
