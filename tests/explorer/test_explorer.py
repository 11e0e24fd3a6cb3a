"""The page: what it computes and draws, and what it refuses."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import PIL.Image
import pytest
import torch
from helpers.bombs import png_that_claims
from helpers.tiny_runs import tiny_config, tiny_data
from hypothesis import given
from hypothesis import strategies as st

from selfconv import cli
from selfconv.data import DataError
from selfconv.explorer import _pictures as pictures
from selfconv.explorer import _server, _uploads
from selfconv.explorer._comparison import (
    Comparison,
    SampleImage,
    change_in_words,
    nearest_pixel,
    turn,
    turn_place,
    wrap,
)
from selfconv.explorer._curves import curves
from selfconv.explorer._uploads import read_upload
from selfconv.explorer._view import View
from selfconv.train import train


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison.open(None)


# ---- turning ----


@given(st.integers(2, 9), st.integers(-5, 5), st.data())
def test_a_place_goes_where_its_pixel_goes(size: int, quarters: int, data: st.DataObject) -> None:
    row, column = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    image = np.zeros((1, size, size), np.uint8)
    image[0, row, column] = 255
    place = nearest_pixel(turn_place((row, column), 90 * quarters, size), size)
    assert np.argwhere(turn(image, 90 * quarters)[0]).tolist() == [list(place)]


@given(st.floats(-360, 360), st.integers(0, 255))
def test_turning_an_even_image_leaves_it(degrees: float, grey: int) -> None:
    image = np.full((3, 8, 8), grey, np.uint8)
    assert np.array_equal(turn(image, degrees), image)


def test_any_angle_turns_counter_clockwise() -> None:
    image = np.zeros((1, 21, 21), np.uint8)
    image[0, 9:12, 17:20] = 200  # right of the centre
    for degrees in (30, 60, 120, -45):
        weights = turn(image, degrees)[0] / 200
        rows, columns = np.indices(weights.shape)
        found = (weights * rows).sum() / weights.sum(), (weights * columns).sum() / weights.sum()
        assert found == pytest.approx(turn_place((10, 18), degrees, 21), abs=0.3)


@given(st.integers(-1000, 1000))
def test_wrapped_angles_are_the_same_turn(degrees: int) -> None:
    assert -180 < wrap(degrees) <= 180
    assert (wrap(degrees) - degrees) % 360 == 0


def test_changes_in_words() -> None:
    before = np.array([0.9, 0.1], np.float32)
    names = ["six", "nine"]
    assert change_in_words(before, before, names) == "same prediction, probabilities are identical"
    after = np.array([0.9 - 3e-7, 0.1 + 3e-7], np.float32)
    assert re.fullmatch(
        r"same prediction, probabilities differ by [23]e-7", change_in_words(before, after, names)
    )
    changed = change_in_words(before, before[::-1], names)
    assert changed == "prediction changed from six to nine, probabilities differ by 0.80"


# ---- the models ----


def test_turning_changes_no_p4_prediction(comparison: Comparison) -> None:
    planar, p4 = comparison.models
    assert (planar.model.group.name, p4.model.group.name) == ("z2", "p4")
    changed = 0
    for sample in comparison.samples:
        for quarters in (1, 2, 3):
            turned = turn(sample.image, 90 * quarters)
            difference = comparison.probabilities(1, turned) - comparison.probabilities(1, sample.image)
            assert np.abs(difference).max() < 1e-5
            errors = [comparison.map_error(m, sample.image, quarters, comparison.layer(m, 2)) for m in (0, 1)]
            assert errors[1] is not None
            assert errors[1] < 1e-4
            assert errors[0] is not None
            assert errors[0] > 0.1
            changed += (
                comparison.probabilities(0, turned).argmax()
                != comparison.probabilities(0, sample.image).argmax()
            )
    assert changed > len(comparison.samples)


def test_samples_are_of_every_class_and_known_to_the_models(comparison: Comparison) -> None:
    assert [sample.label for sample in comparison.samples] == comparison.class_names
    right = [
        comparison.class_names[int(comparison.probabilities(model, sample.image).argmax())] == sample.label
        for model in (0, 1)
        for sample in comparison.samples
    ]
    assert sum(right) >= 18


def test_inspections_are_remembered(comparison: Comparison) -> None:
    image = comparison.samples[0].image
    assert comparison.inspect(0, image) is comparison.inspect(0, image.copy())
    assert comparison.inspect(0, image) is not comparison.inspect(1, image)
    for n in range(40):
        comparison.inspect(0, np.full_like(image, n))
    assert len(comparison._inspections) <= 32


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a convolutional and a p4 network on the digits, and of one that knows other classes."""
    folder = tmp_path_factory.mktemp("runs")
    data = tiny_data(folder)
    train(tiny_config(data, "resnet29"), folder / "conv")
    train(tiny_config(data, "p4resnet29_asc"), folder / "p4")
    with np.load(data) as arrays:
        two = dict(arrays)
    for part in ("train", "test"):
        keep = two[f"y_{part}"] < 2
        two[f"x_{part}"], two[f"y_{part}"] = two[f"x_{part}"][keep], two[f"y_{part}"][keep]
    np.savez(folder / "two.npz", **two)
    train(tiny_config(folder / "two.npz", "p4resnet29_asc"), folder / "two")
    return folder


def test_a_run_is_shown_beside_its_counterpart(runs: Path) -> None:
    assert [t.name for t in Comparison.open(runs / "conv").models] == ["conv", "digits_p4_asc"]
    assert [t.name for t in Comparison.open(runs / "p4").models] == ["p4", "digits_asc"]


def test_a_run_with_other_classes_is_shown_alone(runs: Path) -> None:
    comparison = Comparison.open(runs / "two")
    assert [t.name for t in comparison.models] == ["two"]
    assert {sample.label for sample in comparison.samples} == {"0", "1"}
    assert 2 < len(comparison.samples) <= 12


def test_digits_stand_in_for_data_that_is_gone(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "two", tmp_path / "two")
    config, record = (tmp_path / "two" / f"{name}.json" for name in ("config", "record"))
    content = json.loads(config.read_text())
    content["data"]["source"] = str(tmp_path / "gone.npz")
    config.write_text(json.dumps(content))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"config": content}))
    comparison = Comparison.open(tmp_path / "two")
    assert comparison.note.startswith("These digits stand in for the run's data, which cannot be read")
    assert comparison.samples[0].image.shape == (1, 16, 16)


@pytest.mark.parametrize("name", ["conv", "p4", "two"])
def test_every_part_of_the_page_for_every_kind_of_run(runs: Path, name: str) -> None:
    comparison = Comparison.open(runs / name)
    view = View(comparison)
    image = comparison.samples[0].image
    for _, layer in view.layer_choices():
        for angle in (0, 90, 33):
            for part in view.everything(image, (3, 4), angle, layer, 3, 1):
                ElementTree.fromstring(f"<div>{closed(part)}</div>")  # well-formed
    filters = view.filters(image, (3, 4), 0, 0, 0, 0)
    assert ("the same everywhere" in filters) == (name == "conv")
    assert "validation" in view.curves()


def closed(html: str) -> str:
    """HTML as XML: empty elements closed, attributes quoted."""
    return re.sub(r"(<(?:img|br)[^>]*)>", r"\1/>", html).replace("class=sc-best", 'class="sc-best"')


# ---- the pictures ----


def decode(address: str) -> np.ndarray:
    return np.array(PIL.Image.open(io.BytesIO(base64.b64decode(address.partition("base64,")[2]))))


def test_the_filters_shown_are_those_of_the_layer(comparison: Comparison) -> None:
    """Every picture, decoded again, has the colours of the numbers that the layer computed with."""
    image, pixel = comparison.samples[3].image, (5, 9)
    for model in (0, 1):
        found = comparison.inspect(model, image)
        name = comparison.layer(model, 0)
        view = found.look(name, pixel, 2)
        assert view.alpha.sum((1, 2)).numpy() == pytest.approx(1, abs=1e-5)
        assert torch.allclose(view.response(), view.output, atol=1e-4)
        html = pictures.filters(view, 0)
        shown = re.findall(r'src="([^"]+)" alt="(\S+)', html)
        planes = len(view.group)
        assert [title.rstrip(":") for _, title in shown] == ["V", "ψ", "α", "α·ψ", "α·β"] + (planes - 1) * [
            "ψ", "α", "α·ψ", "α·β",
        ]  # fmt: skip
        scores = [decode(address) for address, title in shown if title == "α"]
        expected = pictures.paint(view.alpha.numpy(), float(view.alpha.max()), pictures.POSITIVE)
        assert np.array_equal(np.stack(scores), expected)
        filters = [decode(address) for address, title in shown if title == "α·ψ"]
        effective = view.effective[:, :, 0].numpy()
        for p in range(planes):
            painted = pictures.paint(effective[p], float(np.abs(effective).max()), pictures.SIGNED)
            assert np.array_equal(filters[p], pictures.tile(painted))


def test_colours() -> None:
    signed = pictures.paint(np.array([[-2.0, 0.0, 2.0, np.nan]]), 2.0, pictures.SIGNED)[0].astype(int)
    assert signed[0, 0] > signed[0, 2] + 50  # orange
    assert signed[2, 2] > signed[2, 1] + 30  # violet
    assert signed[1, :3].min() > 235  # white
    assert signed[3].tolist() == [0, 0, 0, 0]
    grey = pictures.paint(np.linspace(0, 1, 20)[None], 1.0, pictures.POSITIVE)[0].astype(float)
    assert (np.diff(grey[:, :3] @ [0.3, 0.6, 0.1]) > 0).all()  # lighter, whatever one's eyes
    assert pictures.paint(np.zeros((2, 2)), 0.0, pictures.SIGNED).shape == (2, 2, 4)


@given(st.integers(1, 9), st.integers(1, 6))
def test_tiles_keep_every_pixel(count: int, k: int) -> None:
    tiles = np.random.default_rng(0).integers(1, 256, (count, k, k, 4), np.uint8)
    whole = pictures.tile(tiles)
    assert sorted(whole[whole[..., 3] > 0].tolist()) == sorted(tiles.reshape(-1, 4).tolist())


def test_names_cannot_be_html() -> None:
    name = '<script>alert("1")</script>'
    image = np.zeros((3, 4, 4), np.uint8)
    html = pictures.strip([SampleImage(image, name)], 0) + pictures.bars(np.ones(1), np.ones(1), [name])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 3


def test_the_most_probable_of_many_classes_are_shown() -> None:
    probabilities = np.arange(100) / 4950
    html = pictures.bars(probabilities, probabilities[::-1], [f"class {n}" for n in range(100)])
    assert html.count("<li") == 10
    assert "class 99<" in html
    assert "class 0<" in html  # which was the most probable upright
    assert "class 50<" not in html


def test_curves_of_a_run() -> None:
    rows: list[dict[str, Any]] = [
        {"epoch": n, "train_loss": 2 / n, "val_loss": 3 / n, "train_accuracy": 1 - 1 / n, "val_accuracy": 0.5}
        for n in range(1, 13)
    ]
    svgs = ElementTree.fromstring(curves(rows)).findall(".//svg")
    assert [len(svg.findall("polyline")) for svg in svgs] == [2, 2]
    loss = svgs[0].findall("polyline")[0].attrib["points"].split()
    assert len(loss) == 12
    heights = [float(point.split(",")[1]) for point in loss]
    assert heights == sorted(heights)  # falls, that is goes down the picture
    without = [row | {"val_loss": None, "val_accuracy": None, "train_loss": float("nan")} for row in rows[:1]]
    assert "validation" not in curves(without)
    assert "no epoch of it has ended" in curves([])


# ---- uploads ----


def test_uploads_are_prepared_as_training_images_are(tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    PIL.Image.fromarray(np.full((50, 80, 3), (255, 0, 0), np.uint8)).save(photo)
    colour, grey = read_upload(photo, 16, 3), read_upload(photo, 16, 1)
    assert colour.shape == (3, 16, 16)
    assert colour[:, 0, 0].tolist() == [255, 0, 0]
    assert grey.shape == (1, 16, 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no image", "bad.png: not an image: expected BMP, GIF, JPEG, PNG, PPM, TIFF or WEBP"),
        (b"", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image"),
        (png_that_claims(9000, 9000), "expected up to 40 million pixels; got 9000×9000, 81 million"),
        (png_that_claims(90000, 90000), "expected up to 40 million pixels; got far more"),
        (png_that_claims(600, 600), "bad.png: "),  # damaged: ends early
    ],
)
def test_bad_uploads_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.png"
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_upload(file, 16, 1)
    assert message in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_too_many_bytes_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "long.png"
    with file.open("wb") as sparse:
        sparse.truncate(_uploads.MAX_BYTES + 1)
    monkeypatch.setattr(PIL.Image, "open", lambda *_, **__: pytest.fail("was opened"))
    with pytest.raises(DataError, match=r"expected up to 16 MB; got 16\.0 MB"):
        read_upload(file, 16, 1)


# ---- the command ----


header = st.one_of(
    st.binary(max_size=12),
    st.from_regex(_server.HOST, fullmatch=True).map(str.encode),
    st.text("[]:.@/a1 null", max_size=12).map(lambda text: f"http://{text}".encode("latin-1")),
)


@given(
    st.lists(st.tuples(st.sampled_from([b"host", b"origin", b"content-length"]), header), max_size=4),
    st.sampled_from(["GET", "POST"]),
)
def test_any_header_is_let_in_or_refused(headers: list[tuple[bytes, bytes]], method: str) -> None:
    """And let in only if it names this server, and no other site asks."""
    guard = _server.Guard(None, hosts={"localhost"}, max_upload=9, uploads=None)  # type: ignore[arg-type]
    refusal = guard._refusal({"headers": headers, "path": "/", "method": method})
    if refusal is None:
        [host] = [value for name, value in headers if name == b"host"]
        assert re.fullmatch(rb"localhost(:\d+)?", host, re.IGNORECASE)
        assert all(value.endswith(b"//" + host) for name, value in headers if name == b"origin")


@pytest.mark.parametrize("host", ["[::::]", "[1.2.3]", "[::1%]", "a:99999999", "localhost, x", ""])
def test_hosts_that_are_none(host: str) -> None:
    guard = _server.Guard(None, hosts={"localhost"}, max_upload=9, uploads=None)  # type: ignore[arg-type]
    scope = {"path": "/", "method": "GET", "headers": [(b"host", host.encode())]}
    assert (guard._refusal(scope) or [200])[0] in (400, 403)
    scope["headers"] = [(b"host", b"localhost"), (b"origin", f"http://{host}".encode())]
    assert (guard._refusal(scope) or [200])[0] in (400, 403)
    scope["headers"] = [(b"host", b"localhost"), (b"origin", b"http://localhost")]
    assert guard._refusal(scope) is None


def test_an_upload_that_nobody_uses_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_uploads, "PATIENCE", 0.05)
    uploads = _uploads.Uploads(tmp_path)
    for name in ("aa", "bb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(b"x")

    async def arrive() -> None:
        with uploads.request():
            uploads.arrived(json.dumps([str(tmp_path / "aa" / "x.png")]).encode())
        assert [p.name for p in tmp_path.iterdir()] == ["aa"]  # the other was never answered for
        while (tmp_path / "aa").exists():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(arrive(), 60))
    assert list(tmp_path.iterdir()) == []


def stopped(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["explore", "--no-open", *args])
    return int(stop.value.code or 0), capsys.readouterr().err


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for itself is undone after the test."""
    for name in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("own_environment")
def test_what_the_command_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = stopped(capsys, "--port", str(port))
    assert code == 2
    assert said == (
        f"selfconv: cannot listen on 127.0.0.1, port {port} (Address already in use); "
        "give another --port, 0 for any\n"
    )
    assert stopped(capsys, "--port", "70000") == (2, "selfconv: port: expected 0 to 65535; got 70000\n")
    code, said = stopped(capsys, "--port", "0", str(tmp_path))
    assert code == 2
    assert said.startswith(
        f"selfconv: {tmp_path}: expected the folder of a run or of a saved model, or one of"
    )
    assert said.endswith("digits_p4_asc; got an empty folder\n")


@pytest.mark.usefixtures("own_environment")
def test_without_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert stopped(capsys) == (2, "selfconv: explore needs gradio: pip install 'selfconv[app]'\n")


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
def test_others_are_let_in_only_with_a_warning(
    host: str, warned: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    allowed: list[Any] = []
    monkeypatch.setattr(_server, "make_app", lambda run, host, port, hosts, uploads: allowed.append(hosts))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    before = signal.getsignal(signal.SIGTERM)
    cli.main(["explore", "--no-open", "--port", "0", "--host", host])
    out, err = capsys.readouterr()
    assert re.match(rf"The page is at http://{host}:\d+ ", out)
    expected = f"selfconv: warning: --host {host}: everybody who can reach this machine can use the page\n"
    assert err == (expected if warned else "")
    assert (allowed == [None]) == warned
    assert signal.getsignal(signal.SIGTERM) is before


def test_addresses_are_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradio import processing_utils

    monkeypatch.setattr(processing_utils, "async_ssrf_protected_get", None)
    _server.fetch_nothing()
    with pytest.raises(ValueError, match="expected an uploaded file; got the address"):
        asyncio.run(processing_utils.async_ssrf_protected_download("http://8.8.8.8/a.png", str(tmp_path)))
