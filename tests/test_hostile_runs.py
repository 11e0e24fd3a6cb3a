"""Run folders from elsewhere: whatever is in their files, a command answers rightly or in one line.

A finished run and a half-finished one are made once. Each case copies one, changes one of its files, and
calls a command. ``make test`` tries the same few every time; ``make test-long`` a thousand new ones and more.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from helpers.cases import EFFORT, tried
from helpers.tiny_runs import run_cli, tiny_data
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from selfconv._files import file_sha256
from selfconv.cli import commands
from selfconv.explorer._answers import Answers, Choice
from selfconv.explorer._comparison import Comparison
from selfconv.study import Budget, InProcessEngine, make_plan, reproduce
from selfconv.train import Interrupted, Run, train
from selfconv.train.files.checkpoints import Checkpoint
from selfconv.trained import exporting

BUDGET = {"epochs": 2, "models": "resnet29"}
LONGEST = 300  # seconds of a command, on a busy machine


@dataclass(frozen=True)
class Answer:
    """What a command said, if it said anything but why not."""

    code: int
    result: Any = None


@dataclass(frozen=True)
class Original:
    """A plan's folder with one run, and what every command answers about it."""

    folder: Path
    trial: str
    image: Path
    data: Path

    def copied(self, place: Path) -> Original:
        shutil.copytree(self.folder, place, symlinks=True)
        return Original(place, self.trial, self.image, self.data)

    @property
    def run(self) -> Path:
        return self.folder / self.trial


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    root = tmp_path_factory.mktemp("originals")
    data = tiny_data(root)
    image = root / "image.png"
    PIL.Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save(image)
    plan = make_plan("demo", Budget(data=str(data), seeds=1, **BUDGET))  # type: ignore[arg-type]
    [trial] = plan.trials
    with silence():
        reproduce(plan, root / "finished", InProcessEngine(), command="again")
    shutil.copytree(root / "finished", root / "stopped")
    stopped = root / "stopped" / trial.folder
    shutil.rmtree(stopped)

    sent: list[float] = []

    def stop(share: float, _: str) -> None:
        if share > 0.4 and not sent:
            sent.append(share)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        train(trial.config, stopped, quiet=True, watch=stop)
    assert not Run(stopped).finished
    return {name: Original(root / name, trial.folder, image, data) for name in ("finished", "stopped")}


@contextmanager
def silence() -> Iterator[io.StringIO]:
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        yield errors


# ---- commands, and what they answer ----


def by_command(*args: str | Path) -> Answer:
    """Anything but success, or an error of one line, is a failure of the test."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = run_cli(*args)
    lines = [line for line in errors.getvalue().splitlines() if not line.startswith("selfconv: warning: ")]
    if code:
        assert code in (1, 2), code
        assert len(lines) == 1, errors.getvalue()
        assert lines[0].startswith("selfconv: "), lines
        assert lines[0].isprintable(), lines
        assert len(lines[0]) < 3000
    return Answer(code, output.getvalue() if not code else None)


def predict(case: Original) -> Answer:
    answer = by_command("predict", case.run, case.image, "--json")
    return Answer(answer.code, answer.result and json.loads(answer.result))


def evaluate(case: Original) -> Answer:
    answer = by_command("evaluate", case.run, "--json")
    return Answer(answer.code, answer.result and json.loads(answer.result))


def export(case: Original) -> Answer:
    """Up to the file's writer, which takes seconds, and in whose place the model is run."""
    outputs: list[Any] = []

    def write(model: torch.nn.Module, path: Path, *, input_shape: tuple[int, ...], **_: object) -> str:
        image = torch.linspace(0, 1, math.prod(input_shape)).view(1, *input_shape)
        outputs.append(model.eval()(image).tolist())
        path.touch()
        return "a list"

    writers, exporting.WRITERS = exporting.WRITERS, {".pt2": write}
    try:
        answer = by_command("export", case.run, "--to", case.folder / "model.pt2")
    finally:
        exporting.WRITERS = writers
    return Answer(answer.code, outputs)


def resume(case: Original) -> Answer:
    """What it says of a run that has finished, or the weights that it ends with."""
    finished = Run(case.run).finished
    answer = by_command("train", "--out", case.run, "--resume")
    if answer.code or finished:
        return Answer(answer.code, answer.result and answer.result.removeprefix(f"{case.run}: "))
    return Answer(0, digest_of_weights(case.run))


def digest_of_weights(run: Path) -> str:
    weights = load_file(run / "model" / "model.safetensors")
    bits = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    return hashlib.sha256(bits).hexdigest()


def explore(case: Original) -> Answer:
    """As the page does, without a server."""
    try:
        comparison = Comparison.open(case.run)
        answers, image = Answers(comparison), comparison.samples[0].image
        assert answers.start()
        assert answers.training()
        first = (0,) * len(comparison.models)
        assert answers.look(Choice(image, 0, (8, 8), 0, first, first))
        return Answer(0, None if comparison.note else comparison.probabilities(0, image).tolist())
    except (ValueError, OSError):
        return Answer(2)


def figures(case: Original) -> Answer:
    answer = by_command("figures", case.run, "--out", case.folder / "pictures", "--image", case.image)
    return Answer(answer.code)


def report(case: Original) -> Answer:
    return Answer(by_command("report", case.folder, "--out", case.folder / "report").code)


def again(case: Original) -> Answer:
    """``reproduce``, its runs in this process."""
    processes, commands._processes = commands._processes, lambda jobs, plan: InProcessEngine()  # type: ignore
    try:
        options = [word for key, value in BUDGET.items() for word in (f"--{key}", str(value))]
        answer = by_command(
            "reproduce", "demo", "--out", case.folder, "--data", case.data, "--seeds", "1", *options
        )
    finally:
        commands._processes = processes
    return Answer(answer.code)


COMMANDS: dict[str, Callable[[Original], Answer]] = {
    "predict": predict, "evaluate": evaluate, "export": export, "resume": resume, "explore": explore,
    "figures": figures, "report": report, "reproduce": again,
}  # fmt: skip
QUICK = ("predict", "evaluate", "export", "resume", "explore")


@pytest.fixture(scope="module")
def answers(originals: dict[str, Original], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Answer]:
    root, found = tmp_path_factory.mktemp("answers"), {}
    for name, original in originals.items():
        for number, (command, call) in enumerate(COMMANDS.items()):
            found[name, command] = call(original.copied(root / f"{name}{number}"))
    for command in QUICK:
        earlier = originals["stopped"].copied(root / f"earlier-{command}")
        sorted((earlier.run / "checkpoints").iterdir())[-1].unlink()
        found["earlier", command] = COMMANDS[command](earlier)
    return found


def test_every_command_accepts_untouched_runs(
    originals: dict[str, Original], answers: dict[Any, Answer]
) -> None:
    assert {key: answer.code for key, answer in answers.items()} == dict.fromkeys(answers, 0) | {
        ("stopped", "report"): 2  # nothing has finished
    }
    weights = Answer(0, digest_of_weights(originals["finished"].run))
    assert answers["stopped", "resume"] == answers["earlier", "resume"] == weights
    assert "already finished, with test accuracy " in answers["finished", "resume"].result
    assert answers["finished", "predict"] != answers["stopped", "predict"]


# ---- what is done to files ----

JSON_FILES = ["config.json", "data.json", "metrics.jsonl"]
FINISHED_FILES = ["record.json", "evaluation.json", "model/config.json", "model/record.json"]
VALUES: list[Any] = [
    None, True, -1, 0, 1, 3, 0.5, -1.5, 1e308, 10**30, 2**40, 9999, math.nan, math.inf, "", "x", "\ud800",
    "\x1b[31m\n", "../..", "x" * 5000, [], {}, [[]], [None], {"a": {}}, [0.5] * 3, [1] * 3000,
    json.loads("[" * 300 + "]" * 300),
]  # fmt: skip


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield from places(content[key], (*path, key))


def changed(content: Any, chance: random.Random) -> Any:
    """Something dropped, added, retyped or enlarged, anywhere."""
    content = copy.deepcopy(content)
    path = chance.choice(list(places(content)))
    if not path:
        return chance.choice(VALUES)
    *above, key = path
    holder = content
    for step in above:
        holder = holder[step]
    act = chance.choice(["drop", "add", "retype", "enlarge", "again"])
    value = holder[key]
    if act == "drop":
        del holder[key]
    elif act == "add":
        if isinstance(holder, dict):
            holder[chance.choice(["zzz", "", "\ud800", "name"])] = chance.choice(VALUES)
        else:
            holder.append(chance.choice(VALUES))
    elif act == "retype":
        holder[key] = chance.choice(VALUES)
    elif act == "enlarge" and isinstance(value, str | list):
        holder[key] = value * chance.choice([2, 100])
    elif act == "enlarge" and isinstance(value, int | float):
        holder[key] = value * chance.choice([2, 10, 1e3, 10**9]) + chance.choice([0, 1])
    else:
        holder[key] = [value]
    return content


def change_json(path: Path, chance: random.Random) -> None:
    lines = path.suffix == ".jsonl"
    text = path.read_text()
    content = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    content = changed(content, chance)
    if lines and isinstance(content, list):
        path.write_text("".join(json.dumps(line) + "\n" for line in content))
    else:
        path.write_text(json.dumps(content))


def change_bytes(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    act = chance.choice(["cut", "flip", "empty", "longer", "zeros"])
    if act == "cut":
        content = content[: chance.randrange(len(content))]
    elif act == "flip":
        for _ in range(chance.choice([1, 1, 8])):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    others = {"empty": bytearray(), "longer": content + content, "zeros": bytearray(len(content))}
    path.write_bytes(others.get(act, content))


def change_kind(path: Path, chance: random.Random) -> None:
    """Not a file, or folder, any more, or an endless one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    act = chance.choice(["missing", "fifo", "folder", "device", "hole", "loop"])
    if act == "fifo":
        os.mkfifo(path)
    elif act == "folder":
        path.mkdir()
    elif act == "device":
        path.symlink_to("/dev/zero")
    elif act == "hole":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif act == "loop":
        path.symlink_to(path)


def change_tensors(tensors: dict[str, torch.Tensor], chance: random.Random) -> None:
    name = chance.choice(sorted(tensors))
    tensor = tensors[name]
    act = chance.choice(["drop", "add", "dtype", "shape", "broadcast", "scalar", "empty", "nan"])
    if act == "drop":
        del tensors[name]
    elif act == "add":
        tensors[f"{name.partition('/')[0]}/{chance.choice(['zzz', '999', ''])}"] = torch.zeros(3)
    elif act == "dtype":
        other = chance.choice([torch.float64, torch.float16, torch.bool, torch.int32, torch.float8_e4m3fn])
        tensors[name] = tensor.to(torch.float32).to(other)
    elif act == "shape":
        tensors[name] = torch.cat([tensor.reshape(-1)] * 2)
    elif act == "broadcast":
        tensors[name] = tensor.reshape(-1)[:1].clone()
    elif act == "scalar":
        tensors[name] = torch.zeros((), dtype=tensor.dtype)
    elif act == "empty":
        tensors[name] = tensor.reshape(-1)[:0].clone()
    elif tensor.is_floating_point() and tensor.numel():
        tensors[name] = torch.full_like(tensor, chance.choice([math.nan, math.inf]))
    else:
        tensors[name] = torch.full_like(tensor, 77)


def change_checkpoint(run: Path, chance: random.Random) -> None:
    """The last one, signed anew: its digest is that of what it holds."""
    path = sorted((run / "checkpoints").iterdir())[-1]
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors, state, digest = load_file(path), json.loads(header["state"]), header["run"]
    act = chance.choice(["tensors", "state", "state", "run"])
    if act == "tensors":
        change_tensors(tensors, chance)
    elif act == "state":
        state = changed(state, chance)
    else:
        digest = "0" * 64
    path.write_bytes(Checkpoint(tensors, state, digest).to_bytes())


def change_weights(run: Path, chance: random.Random) -> None:
    """Signed anew too: the records name the digest of what is there."""
    path = run / "model" / "model.safetensors"
    tensors = load_file(path)
    change_tensors(tensors, chance)
    save_file(tensors, path)
    for record in (run / "record.json", run / "model" / "record.json"):
        content = json.loads(record.read_text())
        record.write_text(json.dumps(content | {"weights_sha256": file_sha256(path)}))


def change(case: Original, which: str, chance: random.Random) -> tuple[str, bool]:
    """Changes one file; returns which, and whether by such means as nobody could tell from the truth."""
    run = case.run
    files = [run / name for name in JSON_FILES + (FINISHED_FILES if which == "finished" else [])]
    files += [case.folder / "plan.json"]
    binary = [*sorted((run / "checkpoints").iterdir())]
    binary += [run / "model" / "model.safetensors"] if which == "finished" else []
    act = chance.choice(["json", "json", "json", "bytes", "kind", "signed"])
    if act == "signed":
        if which == "finished":
            change_weights(run, chance)
        else:
            change_checkpoint(run, chance)
        return "signed weights", True
    folders = [run / "checkpoints", run / ".lock", *([run / "model"] if which == "finished" else [])]
    path = chance.choice({"json": files, "bytes": files + binary, "kind": files + binary + folders}[act])
    {"json": change_json, "bytes": change_bytes, "kind": change_kind}[act](path, chance)
    return f"{act} of {path.relative_to(case.folder)}", False


# ---- each of these was once believed, or ended in a traceback ----


def rewritten(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def resigned(run: Path, act: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """The last checkpoint after some act on it, with its digest right again."""
    path = sorted((run / "checkpoints").iterdir())[-1]
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors, state = load_file(path), json.loads(header["state"])
    act(tensors, state)
    path.write_bytes(Checkpoint(tensors, state, Run(run).digest).to_bytes())


FORGERIES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "broadcast momentum": (
        lambda t, s: t.update({"optimizer/0": torch.zeros(1)}),
        r"optimizer/0 is \[1\] instead of \[8, 1, 3, 3\]",
    ),
    "no momentum": (lambda t, s: t.pop("optimizer/3"), "optimizer/3 is missing"),
    "more momentum": (lambda t, s: t.update({"optimizer/999": torch.zeros(1)}), "999 is not expected"),
    "dtype": (
        lambda t, s: t.update({"model/fc.weight": t["model/fc.weight"].double()}),
        "model/fc.weight is torch.float64 instead of torch.float32",
    ),
    "random state": (lambda t, s: t.update({"random/torch": t["random/torch"] * 0 + 255}), "random states: "),
    "no shape": (
        lambda t, s: t.update({"random/python_gauss": torch.tensor(1.0)}),
        r"random/python_gauss is \[\] instead of \[1\]",
    ),
    "no number": (
        lambda t, s: t.update({"random/python_gauss": torch.tensor([math.nan], dtype=torch.float64)}),
        "random states: .*python_gauss is not a finite number",
    ),
    "position": (lambda t, s: t["random/numpy"].__setitem__(624, 10**6), "expected a position of 0 to 624"),
    "epoch": (lambda t, s: s.update(history=[]), "history: expected epochs 1 to 1; got 0 others"),
    "sums": (lambda t, s: s["sums"].update(images=1e9), "sums: expected those of "),
    "threads": (lambda t, s: s.pop("threads"), "threads is missing"),
    "more": (lambda t, s: s.update(colour="red"), "unknown option 'colour'"),
    "text": (lambda t, s: s.update(seconds="1"), "seconds: expected float; got '1'"),
    "steps": (lambda t, s: s.update(step=10**7), r"expected the state of this file name; got that of"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_forged_checkpoints(
    kind: str, originals: dict[str, Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = originals["stopped"].copied(tmp_path / "case")
    act, message = FORGERIES[kind]
    resigned(case.run, act)  # type: ignore[arg-type]
    before = sorted(path.name for path in case.run.iterdir())
    assert run_cli("train", "--out", case.run, "--resume") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert sorted(path.name for path in case.run.iterdir()) == before


def test_an_epoch_beyond_the_run_is_refused(
    originals: dict[str, Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = originals["stopped"].copied(tmp_path / "case")
    folder = case.run / "checkpoints"
    resigned(case.run, lambda t, s: s.update(epoch=999_999, step=0))
    last = sorted(folder.iterdir())[-1]
    last.rename(folder / "999999-00000000.safetensors")
    assert run_cli("train", "--out", case.run, "--resume") == 2
    assert "expected up to 2 epochs of " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict", "resume"])
def test_checkpoints_of_another_run_are_refused(
    command: str, originals: dict[str, Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another seed, whose tensors all fit."""
    case = originals["stopped"].copied(tmp_path / "case")
    config = json.loads((case.run / "config.json").read_text())
    rewritten(case.run / "config.json", seed=config["seed"] + 1)
    assert COMMANDS[command](case).code == 2
    assert run_cli("evaluate", case.run) == 2
    assert "belongs to another run: it was saved with other options or data" in capsys.readouterr().err


def test_checkpoints_that_name_no_run_are_refused(
    originals: dict[str, Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = originals["stopped"].copied(tmp_path / "case")
    for path in (case.run / "checkpoints").iterdir():
        with safe_open(path, "pt") as file:
            header = file.metadata()
        del header["run"]
        save_file(load_file(path), path, header)
    assert run_cli("train", "--out", case.run, "--resume") == 2
    assert "does not say which run it belongs to" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict", "evaluate", "export", "explore", "figures"])
@pytest.mark.parametrize("value", [math.nan, 1e38], ids=str)
def test_nan_and_infinite_weights(
    command: str, value: float, originals: dict[str, Original], tmp_path: Path
) -> None:
    """Also such as are, but whose outputs are not."""
    case = originals["finished"].copied(tmp_path / "case")
    path = case.run / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in tensors if value == 1e38 else ["stem.conv.weight"]:
        if name.endswith(".weight"):
            tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, path)
    for record in (case.run / "record.json", case.run / "model" / "record.json"):
        rewritten(record, weights_sha256=file_sha256(path))
    assert COMMANDS[command](case).code == 2


@pytest.mark.parametrize("which", ["finished", "stopped"])
def test_images_that_do_not_fit_in_memory(
    which: str,
    originals: dict[str, Original],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = originals[which].copied(tmp_path / "case")
    rewritten(case.run / "data.json", size=9000)
    data = json.loads((case.run / "data.json").read_text())
    if which == "finished":
        rewritten(case.run / "record.json", data=data)
    else:
        resigned(case.run, lambda t, s: None)
    monkeypatch.setattr("selfconv.trained.model.machine_memory", lambda: 8e9)
    assert run_cli("predict", case.run, case.image) == 2
    assert "images of 9000×9000 need about " in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["config.json", "data.json", "record.json", "metrics.jsonl", "model/config.json"]
)
def test_fifos_and_devices_are_refused(
    name: str, originals: dict[str, Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = originals["finished"].copied(tmp_path / "case")
    (case.run / name).unlink()
    os.mkfifo(case.run / name)
    assert run_cli("predict", case.run, case.image) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "expected a file; got a FIFO" in line or "got a folder without config.json" in line


# ---- cases ----


@pytest.fixture(scope="module")
def alarm() -> Iterator[None]:
    """A command that waits for ever fails the test."""

    def late(*_: object) -> None:
        raise AssertionError(f"no answer in {LONGEST} s")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@settings(max_examples=25 if EFFORT == 1 else 70 * EFFORT)
@given(seed=st.integers(0, 2**32 - 1), which=st.sampled_from(["finished", "stopped"]), slow=st.integers(0, 9))
def test_corrupted_files_give_a_result_or_one_line(
    originals: dict[str, Original], answers: dict[Any, Answer], seed: int, which: str, slow: int
) -> None:
    tried()
    chance = random.Random(seed)
    command = chance.choice(QUICK if slow else list(COMMANDS))
    with tempfile.TemporaryDirectory() as folder:
        case = originals[which].copied(Path(folder) / "case")
        what, signed = change(case, which, chance)
        signal.alarm(LONGEST)
        try:
            answer = COMMANDS[command](case)
        except Exception as error:
            raise AssertionError(f"{command}, {which}, {what}") from error
        finally:
            signal.alarm(0)
    if answer.code == 0 and answer.result is not None and not signed:
        right = [answers[which, command]]
        if which == "stopped" and "checkpoints/" in what:  # if the last is damaged, the one before serves
            right.append(answers["earlier", command])
        if command == "resume":  # without its record, a run that has finished does so again
            right.append(answers["stopped", command])
        assert answer in right, f"{command}, {which}, {what}"
