"""Commands that write files, where they cannot: one line, and nothing is replaced, not even in part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers.made_runs import make_run
from helpers.tiny_runs import run_cli
from PIL import Image

from selfconv._files import check_writable

COMMANDS = {
    "figures": (["figures", "digits_conv", "--out"], "out", "equivariance.svg"),
    "predict": (["predict", "digits_conv", "image.png", "--explain"], "out", None),
    "evaluate": (["evaluate", "digits_conv", "--out"], "out", "mistakes.png"),
    "export": (["export", "digits_conv", "--to"], "out/model.onnx", "model.onnx"),
    "report": (["report", "runs", "--out"], "out", "report.md"),
}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Image.new("L", (16, 16)).save(tmp_path / "image.png")
    make_run(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes | None]:
    """What is below a folder, and in its files."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def refused(capfd: Any, work: Path, *args: str) -> str:
    """The one line of a command that fails and changes nothing."""
    before = everything(work)
    assert run_cli(*args) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("selfconv: ")
    assert printed.err.count("\n") == 1
    assert everything(work) == before
    return printed.err.removeprefix("selfconv: ").rstrip("\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_in_place_of_the_folder(command: str, work: Path, capfd: Any) -> None:
    args, place, _ = COMMANDS[command]
    (work / "out").write_text("mine")
    line = refused(capfd, work, *args, place)
    at = " at out" if command == "report" else ""  # which writes to a folder inside, too
    folder = "out/figures" if command == "report" else "out"
    assert line == f"{folder}: expected a folder to write to; got a file{at}"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "export"])
def test_a_file_in_place_of_a_folder_above(command: str, work: Path, capfd: Any) -> None:
    args, _, _ = COMMANDS[command]
    (work / "file").write_text("mine")
    line = refused(capfd, work, *args, "file/below/out")
    assert line.startswith("file/below/out")
    assert line.endswith(": expected a folder to write to; got a file at file")


@pytest.mark.parametrize("command", [name for name, (_, _, file) in COMMANDS.items() if file])
def test_a_folder_in_place_of_a_file(command: str, work: Path, capfd: Any) -> None:
    """Of the last one to be written: the others stay as they are."""
    args, place, file = COMMANDS[command]
    assert file is not None
    (work / "out" / file).mkdir(parents=True)
    for other in ("equivariance.png", "evaluation.json", "report.html"):
        (work / "out" / other).write_text("earlier")
    assert refused(capfd, work, *args, place) == f"out/{file}: expected a file to write; got a folder"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_written(
    command: str, work: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file system that is read-only: permissions do not stop everybody, as root."""
    args, place, _ = COMMANDS[command]
    (work / "out").mkdir()
    really = os.open

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY and str(work / "out") in os.path.abspath(path):
            raise OSError(30, "Read-only file system", path)
        return really(path, flags, *rest, **options)

    mkdir = os.mkdir

    def no_mkdir(path: Any, *rest: Any, **options: Any) -> None:
        if str(work / "out") in os.path.abspath(path):
            raise OSError(30, "Read-only file system", path)
        mkdir(path, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "mkdir", no_mkdir)
    line = refused(capfd, work, *args, place)
    folder = "out/figures" if command == "report" else "out"
    expected = "expected a folder to write to; got one that cannot be written (Read-only file system)"
    assert line == f"{folder}: {expected}"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "export"])
def test_a_place_where_no_folder_can_be(command: str, work: Path, capfd: Any) -> None:
    args, _, _ = COMMANDS[command]
    if Path("/proc/self").exists():
        line = refused(capfd, work, *args, "/proc/self/out")
        assert line.startswith("/proc/self/out")
        assert ": expected a folder to write to; got one that cannot be written (" in line


def test_asking_leaves_no_trace(work: Path) -> None:
    before = everything(work)
    check_writable(work / "a" / "b" / "c", "file.txt")
    check_writable(work, "image.png")  # may be replaced
    check_writable(Path("a/b"))
    assert everything(work) == before
    os.symlink("nowhere", "link")
    with pytest.raises(OSError, match="expected a folder to write to; got a broken link"):
        check_writable(work / "link")
    os.mkfifo("pipe")
    with pytest.raises(OSError, match="expected a folder to write to; got a FIFO"):
        check_writable(work / "pipe")
