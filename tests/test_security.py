"""Hostile files and names: one clear line, nothing run, nothing written elsewhere, no terminal obeyed.

Archives are tried in test_data_archives, downloads in test_data_download.
"""

from __future__ import annotations

import ast
import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT
from helpers.bombs import png_that_claims
from helpers.tiny_models import tiny
from helpers.tiny_runs import run_cli, tiny_data
from PIL import Image
from rich.console import Console

from selfconv import cli
from selfconv._files import JSON_LIMIT, parse_json, write_figure, write_json
from selfconv._text import escape_for_terminal
from selfconv.data import IMAGE_FORMATS, MAX_PIXELS, DataError, load_data, read_image
from selfconv.data.sources import npz as npz_module
from selfconv.models import ResNet
from selfconv.train import Run, RunConfig, RunError
from selfconv.train.progress import Progress
from selfconv.trained import VIEWS, Evaluation, RotationCurve, confusion_figure


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text.isprintable(), text
    assert len(text) < 3000
    return text


# ---- no pickle ----

FORBIDDEN = {
    "pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "jsonpickle",
}  # fmt: skip


def calls_that_run_what_they_read(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            plain_load = name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False"
            if name in ("eval", "exec", "compile", "torch.load", "torch.save", "__import__") or plain_load:
                found.append(name)
    return found


def test_loading_executes_no_code() -> None:
    files = [*(ROOT / "src").rglob("*.py")]
    assert len(files) > 40
    assert {str(p): c for p in files if (c := calls_that_run_what_they_read(p))} == {}


def test_the_scan_finds_unsafe_calls(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import pickle\nnp.load(x)\ntorch.load(x, weights_only=True)\neval(x)\n")
    assert len(calls_that_run_what_they_read(tmp_path / "x.py")) == 4


class Touches:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_objects_in_an_npz_are_refused(tmp_path: Path) -> None:
    hostile = np.empty(1, object)
    hostile[0] = Touches(tmp_path / "ran")
    y = np.zeros(1, np.int64)
    np.savez(tmp_path / "x.npz", x_train=hostile, y_train=y, x_test=hostile, y_test=y)
    with pytest.raises(DataError, match="allow_pickle=False") as caught:
        load_data(tmp_path / "x.npz")
    one_line(caught.value)
    assert not (tmp_path / "ran").exists()


# ---- what a file is called says nothing ----

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_never_reaches_ghostscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was called"))
    root = paint(tmp_path / "pets", ["cat", "dog"])
    (root / "cat" / "x.png").write_bytes(POSTSCRIPT)
    with pytest.raises(DataError, match=r"1 of 9 .*: cat/x.png \(not an image: expected BMP"):
        load_data(root)
    with pytest.raises(DataError, match=r"x.png: not an image: expected BMP"):
        read_image(root / "cat" / "x.png", 8, 3)


def test_one_place_opens_images_and_names_the_formats() -> None:
    calls = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Image.open"):
                calls[path.name] = [keyword.arg for keyword in node.keywords]
    # one reads images, the other the pictures that it wrote
    assert calls == {"images.py": ["formats"], "_write.py": ["formats"]}
    text = (ROOT / "docs" / "data.md").read_text().replace("PPM (and PGM)", "PPM")
    assert ", ".join(IMAGE_FORMATS) in text
    assert f"{MAX_PIXELS // 10**6} million pixels" in text


def test_one_place_decodes_json() -> None:
    found = {
        path.name
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("json.load", "json.loads", "json.JSONDecoder")
    }
    assert found == {"_files.py"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 900 + "]" * 900, "at most 32 levels"),
        ("[" * 90_000, "expected JSON; got something else"),
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ("NaN", "NaN is not a finite number"),
        ("[1e999]", "1e999 is not a finite number"),
        ("9" * 5000, "expected JSON; got something else"),
        (b"\xff", "expected JSON; got something else"),
        ("", "expected JSON; got something else"),
    ],
    ids=range(8),
)
def test_json_that_is_refused(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_json(text)
    one_line(caught.value)


def test_write_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "hole"])
def test_files_that_are_not_images(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
    with pytest.raises(DataError, match=r"x\.png: expected (a file; got|at most)"):
        read_image(path, 8, 3)


@pytest.mark.parametrize(
    "names",
    [["a", "b", "a"], [b"\xff", b"\xfe", b"c"], ["a", "a\0", "b"], ["\u00e9", "e\u0301", "b"]],
    ids=["same", "decoded", "padded", "composed"],
)
def test_classes_of_one_name(names: list[Any], tmp_path: Path) -> None:
    """As keys of an answer, one of them would be lost, or nobody could tell them apart."""
    x, y = np.zeros((6, 8, 8), np.uint8), np.array([0, 1, 2] * 2)
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y, class_names=np.array(names))
    with pytest.raises(DataError, match=r"expected a name of its own for each class; got .* more than once"):
        load_data(tmp_path / "x.npz")


def test_names_that_differ_in_case_or_accent_are_two(tmp_path: Path) -> None:
    x, y = np.zeros((8, 8, 8), np.uint8), np.array([0, 1, 2, 3] * 2)
    names = ["e", "E", "\u00e9", "\u00c9"]
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y, class_names=np.array(names))
    assert load_data(tmp_path / "x.npz").class_names == tuple(names)


# ---- bombs ----


def write_npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def npy(shape: tuple[int, ...], data: bytes) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue() + data


def test_an_npz_that_declares_more_than_it_holds(tmp_path: Path) -> None:
    huge = npy((10**7, 10**3, 10**3, 3), b"tiny")
    path = write_npz(tmp_path / "x.npz", x_train=huge, y_train=huge, x_test=huge, y_test=huge)
    with pytest.raises(DataError, match=r"x\.npz: cannot be read") as caught:
        load_data(path)
    one_line(caught.value)


def test_an_npz_that_unpacks_to_more_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = npy((3000, 32, 32), bytes(3000 * 32 * 32))
    path = write_npz(tmp_path / "x.npz", x_train=images, y_train=images, x_test=images, y_test=images)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(npz_module, "machine_memory", lambda: 4e6)
    with pytest.raises(DataError, match="bytes when unpacked; this machine has 4000000 of memory"):
        load_data(path)


@pytest.mark.parametrize("side", [60_000, 2**31 - 1, 11_000])
def test_images_above_the_pixel_limit(side: int, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png_that_claims(side, side))
    with pytest.raises(DataError, match=r"x\.png: ") as caught:
        read_image(tmp_path / "x.png", 32, 3)
    one_line(caught.value)


def test_jpegs_above_the_pixel_limit(tmp_path: Path) -> None:
    Image.new("L", (64, 64)).save(tmp_path / "x.jpg")
    data = (tmp_path / "x.jpg").read_bytes()
    at = data.index(b"\xff\xc0") + 5
    (tmp_path / "x.jpg").write_bytes(data[:at] + struct.pack(">HH", 65_000, 65_000) + data[at + 4 :])
    with pytest.raises(DataError, match="expected up to 89 million pixels; got far more") as caught:
        read_image(tmp_path / "x.jpg", 32, 3)
    one_line(caught.value)


JSON_BOMBS: dict[str, str | bytes] = {
    "nested": "[" * 200_000,
    "objects": '{"a":' * 100_000,
    "digits": '{"seed": ' + "9" * 10_000 + "}",
    "not a number": '{"recipe": {"lr": NaN}}',
    "infinity": '{"recipe": {"weight_decay": Infinity}}',
    "wrong type": '{"seed": "\\u001b[31m"}',
    "bytes": b"\xff\xfe\x00",
    "list": "[1]",
}


@pytest.mark.parametrize("kind", JSON_BOMBS)
def test_options_from_a_hostile_file(kind: str, tmp_path: Path, capfd: Any) -> None:
    content = JSON_BOMBS[kind]
    path = tmp_path / "config.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--config", str(path), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.isprintable()
    assert "config.json: " in line
    assert os.listdir(tmp_path) == ["config.json"]
    for read in (lambda: Run(tmp_path).config, lambda: ResNet.from_pretrained(tmp_path)):
        with pytest.raises((ValueError, TypeError, FileNotFoundError)):
            read()


def test_json_files_above_the_size_limit(tmp_path: Path) -> None:
    for name in ("config.json", "data.json"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(2**30)  # a hole: takes no space
    with pytest.raises(ValueError, match=f"at most {JSON_LIMIT} bytes; got {2**30}"):
        RunConfig.load(tmp_path)
    with pytest.raises(RunError, match="at most 16000000 bytes"):
        _ = Run(tmp_path).data
    with pytest.raises(ValueError, match="at most 16000000 bytes"):
        ResNet.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 10**9}, {"size": "16"}, {"size": 0}, {"in_channels": 10**9}, {"mean": "abc"},
        {"mean": [0.5] * 9}, {"std": [0.0]}, {"std": [float("nan")]}, {"class_names": [1, 2]},
        {"class_names": None}, {"name": []}, {"class_names": ["a", "a"]},
        {"size": 16384}, {"images": {}}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_description_of_the_data(change: dict[str, Any], tmp_path: Path) -> None:
    good = {
        "name": "x", "digest": "0", "class_names": ["a", "b"], "in_channels": 1, "size": 16, "mean": [0.5],
        "std": [0.5], "images": {"train": 1, "val": 0, "test": 1},
    }  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps(good))
    assert Run(tmp_path).data.size == 16
    (tmp_path / "data.json").write_text(json.dumps(good | change))
    with pytest.raises(RunError, match=r"data\.json: .*(expected|unknown)"):
        _ = Run(tmp_path).data


@pytest.mark.parametrize(
    "change",
    [{"kernel_size": 10**9 + 1}, {"widths": [10**12] * 3}, {"num_classes": 10**15}, {"in_channels": 10**15}],
    ids=str,
)
def test_models_too_large_to_describe(change: dict[str, Any], tmp_path: Path) -> None:
    model = tiny("resnet29_asc")
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.config | change))
    with pytest.raises(ValueError, match=r"expected (an integer ≤|at most)"):
        ResNet.from_pretrained(tmp_path)


def safetensors_file(header: bytes, data: bytes = bytes(64), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(start: int, end: int, shape: int = 8) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [shape], "data_offsets": [start, end]}


SAFETENSORS = {
    "huge header": safetensors_file(b"{}", length=2**62),
    "header of 200 MB": safetensors_file(b"{}", length=200_000_000),
    "overlapping": safetensors_file(json.dumps({"a": entry(0, 32), "b": entry(16, 48)}).encode()),
    "out of range": safetensors_file(json.dumps({"a": entry(0, 32), "b": entry(32, 2**40)}).encode()),
    "backwards": safetensors_file(json.dumps({"a": entry(32, 0)}).encode()),
    "huge shape": safetensors_file(json.dumps({"a": entry(0, 64, 2**60)}).encode()),
    "hole": safetensors_file(json.dumps({"a": entry(32, 64)}).encode()),
    "twice": safetensors_file(b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 32)).encode(),) * 2)),
    "nested": safetensors_file(b'{"a":' * 50_000),
    "a pickle": b"\x80\x04\x95" + bytes(100),
}


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_hostile_weights(kind: str, tmp_path: Path) -> None:
    tiny("resnet29").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS[kind])
    with pytest.raises(ValueError, match=r"not a safetensors file|another architecture") as caught:
        ResNet.from_pretrained(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


# ---- names ----

NAMES = [
    "a\x1b[31mred", "b\nselfconv: all is well", "c\r\x1b]0;title\x07", "[red]d[/red]", "[link=file:///x]e",
    "[/]f", "-rf", "g..", "h" * 200, "i\u202egnp", "j\x9b31m", "$\\frac{k", "l\t%s{0}", "[bold",
    "'; rm -rf ~; '",
]  # fmt: skip


def paint(root: Path, names: list[str] | list[bytes]) -> Path:
    buffer = io.BytesIO()
    Image.new("L", (8, 8), 5).save(buffer, "png")
    for name in names:
        folder = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(folder)
        for i in range(4):
            with open(os.path.join(folder, b"%d.png" % i), "wb") as file:
                file.write(buffer.getvalue())
    return root


def test_classes_with_hostile_names(tmp_path: Path) -> None:
    folders = [name for name in NAMES if "/" not in name]
    data = load_data(paint(tmp_path / "pets", folders))
    assert sorted(data.class_names) == sorted(folders)  # as they are; only what is printed is escaped
    count = len(NAMES)
    evaluation = Evaluation(
        data="\x1b[31m[red]pets", images=count**2, loss=0.0, accuracy=1 / count,
        accuracy_under=dict.fromkeys(VIEWS, 1 / count), class_accuracy=dict.fromkeys(NAMES, 1 / count),
        confusion=np.ones((count, count), int).tolist(),
        equivariance_error=0.0, rotation=RotationCurve([*range(0, 360, 15)], [0.5] * 24, 4),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=300, force_terminal=True, color_system="truecolor")
    console.print(evaluation.table())
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for name in NAMES:
        assert escape_for_terminal(name) in printed
    for hostile in ("\x1b[31m", "\x1b]0", "\x9b", "\u202e", "\x07", "\x1b]8"):
        assert hostile not in printed
    write_figure(tmp_path / "x.png", confusion_figure(evaluation))


def test_progress_reads_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with Progress(3, visible=True) as progress:
        progress.say("[red]x[/red] \x1b[31m\x9b [/]")
    printed = capsys.readouterr().out
    assert "[red]x[/red] \\x1b[31m\\x9b [/]" in printed


def test_class_names_that_are_not_utf8(tmp_path: Path) -> None:
    root = paint(tmp_path / "pets", [b"good", b"bad\xff\xfe"])
    with pytest.raises(DataError, match=r"class names that are text in UTF-8; got 'bad\\udcff") as caught:
        load_data(root)
    one_line(caught.value)


@pytest.mark.parametrize("name", [b"\xff\x1b[31m.png", b"a\nselfconv: fine.png", b"[red].png", b"-x.png"])
def test_files_with_hostile_names(name: bytes, tmp_path: Path, capsys: Any) -> None:
    root = paint(tmp_path / "pets", ["cat", "dog"])
    with open(os.path.join(os.fsencode(root), b"cat", name), "wb") as file:
        file.write(b"no image")
    assert run_cli("train", "--data", root, "--out", tmp_path / "out") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("selfconv: ")
    assert "1 of 9 images cannot be read" in line
    assert line.isprintable()
    assert not (tmp_path / "out").exists()


def test_links_out_of_a_folder_of_images(tmp_path: Path) -> None:
    """A link is read as the image it leads to, or it is not an image; it is never written to."""
    root = paint(tmp_path / "pets", ["cat", "dog"])
    (tmp_path / "secret").write_text("secret")
    (root / "cat" / "x.png").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"cat/x.png \(not an image: expected BMP, ") as caught:
        load_data(root)
    assert "secret" not in one_line(caught.value).replace(str(tmp_path), "")
    (root / "cat" / "x.png").unlink()
    os.mkfifo(root / "cat" / "x.png")  # to read it would wait for ever
    with pytest.raises(
        DataError, match=r"1 of \d+ images cannot be read: cat/x.png \(expected a file; got a FIFO"
    ):
        load_data(root)


def test_escape_for_terminal() -> None:
    assert (
        escape_for_terminal("a\nb\x1b[0m\x9b\u202e\udcff é 日本") == "a\\nb\\x1b[0m\\x9b\\u202e\\udcff é 日本"
    )
    assert len(escape_for_terminal("x" * 10**7)) < 3000


def test_tiny_data_is_fine(tmp_path: Path) -> None:
    """What all of this refuses is not what people have."""
    assert load_data(tiny_data(tmp_path)).num_classes == 10


# ---- licences ----


def test_licences_of_dependencies() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "licences.py"), "--check"]
    run = subprocess.run(script, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
