"""The command: from training to an exported model, and what it says to bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_runs import OPTIONS, run_cli, selfconv
from PIL import Image

from selfconv import __version__, cli
from selfconv.data import load_data
from selfconv.models import load_initial
from selfconv.train import Run
from selfconv.trained import evaluate_model, exporting, open_trained


def test_broken_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [sys.executable, "-m", "selfconv", "--help"], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert run.returncode != 0
    assert run.stderr == ""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run that the command made, of a p4 network trained upright."""
    out = tmp_path_factory.mktemp("runs") / "p4"
    assert run_cli("train", "--data", data, "--model", "p4resnet29_asc", "--out", out, *OPTIONS) == 0
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run of a network that is quick to export."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    assert run_cli("train", "--data", data, "--model", "resnet29", "--out", out, *OPTIONS) == 0
    return out


# ---- what a user does ----


def test_train_prints_progress(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("train", "--data", data, "--model", "resnet29", "--out", tmp_path / "r", *OPTIONS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("resnet29, ")
    assert [line.split(":")[0] for line in lines[2:5]] == ["epoch   1/3", "epoch   2/3", "epoch   3/3"]
    for word in ("loss", "accuracy", "validation", "images/s", "s left"):
        assert word in lines[2]
    assert lines[5].startswith("test accuracy ")


def test_a_run_can_be_repeated_from_its_config(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    assert run_cli("train", "--config", run / "config.json", "--out", out, "--epochs", "1") == 0
    first, second = Run.open(run).config, Run.open(out).config
    assert second == first.replaced("recipe", epochs=1)


def test_evaluate(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("evaluate", run, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    record = Run.open(run).record
    assert result["accuracy"] == record.test_accuracy
    assert result["accuracy_under"]["0°"] == result["accuracy"]
    labels = load_data(data).test.labels
    assert np.array(result["confusion"]).sum(1).tolist() == torch.bincount(labels, minlength=10).tolist()
    assert np.trace(np.array(result["confusion"])) == round(result["accuracy"] * 40)
    assert json.loads((run / "evaluation.json").read_text()) == result
    with Image.open(run / "confusion.png") as picture:
        assert min(picture.size) > 200
    assert run_cli("evaluate", run) == 0
    printed = capsys.readouterr().out
    assert "270°" in printed
    assert "taken for" in printed


def test_a_p4_network_keeps_its_accuracy_under_quarter_turns(run: Path, data: Path) -> None:
    opened = open_trained(run)
    model, split = opened.model, load_data(data).test
    upright = evaluate_model(model, split, opened.data)
    turns = [upright.accuracy_under[name] for name in ("0°", "90°", "180°", "270°")]
    assert turns == [upright.accuracy] * 4


def test_predict(run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = load_data(data).test
    folder = tmp_path / "images" / "deep"
    folder.mkdir(parents=True)
    for index in range(5):
        Image.fromarray(split.images[index, 0].numpy()).save(folder / f"{index}.png")
    capsys.readouterr()
    assert run_cli("predict", run, tmp_path / "images") == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [Path(line[0]).name for line in lines] == [f"{i}.png" for i in range(5)]
    assert run_cli("predict", run, str(folder / "[01].png"), folder / "4.png", "--json") == 0
    answers = json.loads(capsys.readouterr().out)
    assert [Path(a["file"]).name for a in answers] == ["0.png", "1.png", "4.png"]
    for answer, line in zip(answers, [lines[0], lines[1], lines[4]], strict=True):
        assert answer["label"] == line[1]
        assert answer["probability"] == max(answer["probabilities"].values())
        assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-5)


PROGRAM = "a torch.export program"


@pytest.mark.parametrize(
    ("suffix", "options", "compiler", "form"),
    [
        ("onnx", [], "g++", "ONNX"),
        ("pt2", [], "g++", f"{PROGRAM}, and the same compiled for processors like this one (AOTInductor)"),
        ("pt2", [], "nowhere/g++", f"{PROGRAM}; not compiled: no C++ compiler was found"),
        ("pt2", [], "false", f"{PROGRAM}; not compiled: no C++ compiler was found"),
        ("pt2", ["--no-compile"], "g++", PROGRAM),
    ],
)
def test_export(
    plain: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
    options: list[str],
    compiler: str,
    form: str,
) -> None:
    from torch._inductor import aoti_load_package, config

    from selfconv.data import normalise

    path = tmp_path / f"model.{suffix}"
    with config.patch({"cpp.cxx": (compiler,)}):
        assert run_cli("export", plain, "--to", path, *options) == 0
    assert f"form: {form}\n" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    opened = open_trained(plain)
    images = load_data(data).test.images[:7]
    expected = opened.model(normalise(images, opened.data.mean, opened.data.std)).detach()
    pixels = images.float() / 255
    if suffix == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        outputs = torch.from_numpy(session.run(None, {"images": pixels.numpy()})[0])
    else:
        outputs = torch.export.load(path).module()(pixels)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    if "compiled for" in form:
        torch.testing.assert_close(aoti_load_package(str(path))(pixels), expected, rtol=1e-4, atol=1e-4)


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("models", "*29_asc") == 0
    printed = capsys.readouterr().out
    assert "p4resnet29_asc" in printed
    assert "267,754" in printed
    assert "resnet83" not in printed


def test_audit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("audit", run, "--size", "16") == 0
    assert run_cli("audit", run, "--size", "6") == 1  # too near the least size for all those below
    assert run_cli("audit", "p4resnet29", "--size", "16") == 1
    printed = capsys.readouterr()
    assert "not equivariant to p4" in " ".join(printed.out.split())
    assert printed.err == ""
    assert run_cli("audit", "p4resnet29", "--size", "16", "--downsample", "pool") == 0
    planar = ("audit", "digits_asc", "--size", "8", "--group", "p4")  # which the network is not on
    assert run_cli(*planar) == 1
    assert run_cli(*planar, "--tolerance", "10") == 0


def test_a_name_wins_over_a_folder_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folders of a plan have the names of models; those of runs and saved models win over a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("resnet29_asc", "digits_asc"):
        Path(name, "seed-0").mkdir(parents=True)
    shipped = open_trained("digits_asc").model
    assert load_initial("digits_asc").config == shipped.config
    assert run_cli("audit", "digits_asc", "--size", "16") == 0
    assert run_cli("audit", "resnet29_asc", "--size", "16") == 0
    assert run_cli("train", "--data", "digits", "--init", "resnet29_asc", "--out", "run") == 2
    assert "expected the folder of a finished run or of a saved model" in capsys.readouterr().err
    assert run_cli("audit", "missing/", "--size", "16") == 2
    assert "unknown model 'missing/'" in capsys.readouterr().err
    Path("empty").mkdir()
    assert run_cli("audit", "empty", "--size", "16") == 2
    assert "expected the folder of a run or of a saved model" in capsys.readouterr().err

    shipped.save_pretrained("resnet29_asc")
    for model in (open_trained("resnet29_asc").model, load_initial("resnet29_asc")):
        assert model.config == shipped.config
    assert run_cli("audit", "resnet29_asc", "--size", "16", "--stem", "conv") == 2
    assert "got the trained model resnet29_asc" in capsys.readouterr().err


def test_help_names_every_command_and_option() -> None:
    top = selfconv("--help")
    assert top.returncode == 0
    for name in ("train", *cli.COMMANDS):
        assert name in top.stdout
    shown = selfconv("train", "--help", "--data", "cifar10").stdout
    for option in (
        "--data",
        "--model",
        "--epochs",
        "--out",
        "--resume",
        "--config",
        "--recipe",
        "--precision",
    ):
        assert option in shown
    assert "(default: 100)" in shown  # the paper's epochs


def test_help_is_quick_to_import() -> None:
    code = (
        "import sys, selfconv.cli; print([m for m in ('torch', 'accelerate', 'numba') if m in sys.modules])"
    )
    import subprocess
    import sys

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# ---- bad input: one line, exit code 2, nothing written ----


def small_npz(path: Path, **changes: Any) -> Path:
    arrays = {
        "x_train": np.zeros((8, 16, 16), np.uint8),
        "y_train": np.arange(8) % 2,
        "x_test": np.zeros((4, 16, 16), np.uint8),
        "y_test": np.arange(4) % 2,
    }
    np.savez(path, **arrays | changes)  # type: ignore[arg-type]
    return path


BAD_TRAIN: dict[str, tuple[list[str], str]] = {
    "missing": (["--data", "nowhere"], "got 'nowhere': no such file or folder"),
    "empty folder": (["--data", "empty"], "empty: expected a folder of images for each class"),
    "one class": (["--data", "one.npz"], "one: expected at least two classes"),
    "labels": (["--data", "labels.npz"], "y_test: expected labels 0..1 as in y_train; got 9"),
    "lengths": (["--data", "lengths.npz"], "expected a label for each image; got 8 in x_train, 5 in y_train"),
    "truncated": (["--data", "cut.npz"], "cut.npz: "),
    "tiny images": (["--data", "tiny.npz"], "4×4 or more; got shape [1, 1, 2, 2]"),
    "unknown option": (["--epohcs", "3"], "Unrecognized options: --epohcs, 3; Perhaps you meant: --epochs"),
    "epochs 0": (["--epochs", "0"], "epochs: expected an integer ≥ 1; got 0"),
    "epochs -1": (["--epochs", "-1"], "epochs: expected an integer ≥ 1; got -1"),
    "epochs word": (["--epochs", "many"], "--epochs"),
    "no value": (["--epochs"], "--epochs"),
    "model": (["--model", "resnet30"], "unknown model 'resnet30'; the nearest are "),
    "heads": (["--num-heads", "7"], "num_heads=7"),
    "depth": (["--depth", "30"], "depth: expected 9n+2"),
    "recipe": (["--recipe", "slow"], "--recipe"),
    "accumulate": (["--accumulate", "0"], "accumulate: expected an integer ≥ 1; got 0"),
    "uneven": (["--accumulate", "5"], "batch_size: expected a multiple of accumulate × processes = 5"),
    "validation": (["--validation", "1"], "validation: expected a fraction"),
    "seed": (["--seed", "-1"], "seed: expected 0 ≤ seed"),
    "no config": (["--config", "nowhere.json"], "nowhere.json: No such file or directory"),
    "bad config": (["--config", "bad.json"], "bad.json: "),
    "no text": (["--config", "cut.npz"], "cut.npz: expected JSON; got bytes that are not UTF-8 text"),
    "other config": (["--config", "other.json"], "other.json: unknown option 'epochs'"),
    "fp16": (["--precision", "fp16", "--device", "cpu"], "precision: fp16 needs a GPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TRAIN)
def test_train_on_bad_input(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    small_npz(Path("one.npz"), y_train=np.zeros(8, int), y_test=np.zeros(4, int))
    small_npz(Path("labels.npz"), y_test=np.array([0, 1, 9, 0]))
    small_npz(Path("lengths.npz"), y_train=np.arange(5) % 2)
    noise = np.random.default_rng(0).integers(0, 256, (44, 2, 2), np.uint8)
    small_npz(Path("tiny.npz"), x_train=noise[:40], y_train=np.arange(40) % 2, x_test=noise[40:])
    Path("cut.npz").write_bytes(small_npz(Path("whole.npz")).read_bytes()[:300])
    Path("bad.json").write_text("{")
    Path("other.json").write_text('{"epochs": 3}')
    before = sorted(os.listdir())
    args, message = BAD_TRAIN[case]
    assert run_cli("train", *args, "--out", "out") == 2
    check_one_line(capfd, message)
    assert sorted(os.listdir()) == before


def check_one_line(capfd: pytest.CaptureFixture[str], message: str) -> None:
    captured = capfd.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("selfconv: ")
    assert message in lines[0]


def test_an_output_folder_that_cannot_be_written(data: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "file").write_text("")
    assert run_cli("train", "--data", data, "--out", tmp_path / "file", *OPTIONS) == 2
    check_one_line(capfd, "expected a folder to write to; got a file")
    assert run_cli("train", "--data", data, "--out", tmp_path / "file" / "sub", *OPTIONS) == 2
    check_one_line(capfd, "Not a directory")
    if Path("/proc/self").exists():
        assert run_cli("train", "--data", data, "--out", "/proc/self/run", *OPTIONS) == 2
        check_one_line(capfd, "/proc/self/run: ")


def test_an_output_folder_that_holds_other_things(data: Path, run: Path, tmp_path: Path, capfd: Any) -> None:
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert run_cli("train", "--data", data, "--out", run, *OPTIONS) == 2
    check_one_line(capfd, "already contains a run; give another --out, or --resume to continue it")
    assert run_cli("train", "--out", run, "--resume", "--epochs", "50") == 2
    check_one_line(capfd, "cannot resume with other options: recipe.epochs: 50, not 3")
    assert run_cli("train", "--out", run, "--resume") == 0
    assert "already finished" in capfd.readouterr().out
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    (tmp_path / "thesis.tex").write_text("mine")
    assert run_cli("train", "--data", data, "--out", tmp_path, *OPTIONS) == 2
    check_one_line(capfd, "expected a new or empty folder; it holds thesis.tex")
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["evaluate", "nowhere"], "; got no such folder or name"),
        (["evaluate", "."], "; got a folder without config.json or model.safetensors"),
        (["evaluate", "empty"], "; got an empty folder"),
        (["evaluate", "broken.png"], "; got a file"),
        (["evaluate"], "Missing"),
        (["evaluate", "RUN", "--jsn"], "Unrecognized options: --jsn"),
        (["train", "--lr-range", "--resume"], "expected --lr-range or --resume; got both"),
        (["predict", "RUN", "nowhere.png"], "nowhere.png: expected an image"),
        (["predict", "RUN", "no*.png"], "no*.png: expected an image"),
        (["predict", "RUN", "empty"], "a folder of images or a wildcard; got no images"),
        (["predict", "RUN", ""], "expected a value; got an empty one in: selfconv predict "),
        (["evaluate", ""], "expected a value; got an empty one in: selfconv evaluate ''"),
        (["predict", "RUN", "broken.png"], "broken.png: not an image: expected BMP, GIF, JPEG, PNG, PPM"),
        (["predict", "RUN"], "predict: expected at least one image"),
        (["export", "RUN", "--to", "model.tflite"], "expected a name that ends in .onnx or .pt2"),
        (["export", "RUN", "--to", "nowhere/model.onnx"], "got no folder 'nowhere'"),
        (["export", "RUN", "--to", "folder.pt2"], "folder.pt2: expected a file to write; got a folder"),
        (["export", "RUN", "--to", "/proc/model.onnx"], "/proc: expected a folder to write to"),
        (["export", "RUN", "--to", "/proc/model.pt2"], "/proc: expected a folder to write to"),
        (["export", "RUN"], "--to"),
        (["models", "vgg*"], "no model matches 'vgg*'"),
        (["models", "--size", "0"], "size: expected a positive number"),
        (["audit", "resnet30"], "unknown model 'resnet30'"),
        (["audit", "p4resnet29_asc", "--size", "2"], "4×4 or more"),
        (["audit", "digits_asc", "--tolerance", "-1"], "tolerance: expected a finite number of 0 or more"),
        (["audit", "digits_asc", "--tolerance", "nan"], "tolerance: expected a finite number of 0 or more"),
        (["audit", "digits_asc", "--tolerance", "small"], "Error parsing --tolerance"),
        (["trian"], "trian"),
        ([], "train"),
    ],
)  # fmt: skip
def test_commands_on_bad_input(
    args: list[str], message: str, run: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("folder.pt2").mkdir()
    Path("broken.png").write_bytes(b"no image")
    before = sorted(os.listdir())
    some_failed = args == ["predict", "RUN", "broken.png"]  # the command was right, and others are answered
    assert run_cli(*(str(run) if arg == "RUN" else arg for arg in args)) == (1 if some_failed else 2)
    check_one_line(capfd, message)
    assert sorted(os.listdir()) == before


def test_version(capfd: Any) -> None:
    assert run_cli("--version") == 0
    assert capfd.readouterr().out == f"selfconv {__version__}\n"


def test_ctrl_c(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "wait", pressed)  # also: a new command is a function and an entry
    assert run_cli("wait") == 130
    check_one_line(capfd, "interrupted")


def test_sigterm_leaves_nothing_behind(capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an export."""

    def received(model: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(exporting.WRITERS, ".onnx", received)
    assert run_cli("export", "digits_asc", "--to", tmp_path / "model.onnx") == 143
    check_one_line(capfd, "terminated")
    assert not [*tmp_path.iterdir()]
    assert signal.getsignal(signal.SIGTERM) is before


def test_missing_extras_are_named(
    run: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    assert run_cli("train", "--out", tmp_path / "r") == 2
    check_one_line(capfd, "training needs accelerate: pip install 'selfconv[train]'")
    assert not (tmp_path / "r").exists()


def test_data_that_has_changed(data: Path, tmp_path: Path, capfd: Any) -> None:
    own = tmp_path / "own.npz"
    own.write_bytes(data.read_bytes())
    assert run_cli("train", "--data", own, "--model", "resnet29", "--out", tmp_path / "r", *OPTIONS) == 0
    with np.load(own) as arrays:
        changed = dict(arrays)
    changed["x_test"] = 255 - changed["x_test"]
    np.savez(own, **changed)
    capfd.readouterr()
    assert run_cli("evaluate", tmp_path / "r") == 2
    check_one_line(capfd, "the data set own has changed since this model was trained")
