"""What the server lets in, and how the command starts it; the page in a browser is another file."""

from __future__ import annotations

import asyncio
import gc
import io
import re
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from helpers.bombs import png_that_claims
from hypothesis import given
from hypothesis import strategies as st

from selfconv import cli
from selfconv.data import DataError
from selfconv.explorer import _server
from selfconv.explorer._comparison import Comparison
from selfconv.explorer._server import Urgent, read_upload
from selfconv.visualize import occlusion_maps

# ---- uploads ----


def as_png(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(values).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_uploads_are_prepared_as_training_images_are(temporary: Path) -> None:
    photo = as_png(np.full((50, 80, 3), (255, 0, 0), np.uint8))
    colour, grey = read_upload(photo, 16, 3), read_upload(photo, 16, 1)
    assert colour.shape == (3, 16, 16)
    assert colour[:, 0, 0].tolist() == [255, 0, 0]
    assert grey.shape == (1, 16, 16)
    assert list(temporary.iterdir()) == []


def test_uploads_of_arrays(temporary: Path) -> None:
    values, buffer = np.arange(256, dtype=np.uint8).reshape(16, 16), io.BytesIO()
    np.save(buffer, values)
    assert np.array_equal(read_upload(buffer.getvalue(), 16, 1), values[None])
    assert list(temporary.iterdir()) == []


def test_the_advised_range_is_never_empty(temporary: Path) -> None:
    for values, advice in (
        (np.full((9, 9), 0.5), "dtype, which is 0 to 1"),
        (np.eye(9) - 2, "LOW,HIGH, the least and greatest value of all files"),
    ):
        buffer = io.BytesIO()
        np.save(buffer, values)
        with pytest.raises(DataError, match=f"such as --range {advice}$"):
            read_upload(buffer.getvalue(), 9, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no image", "not an image: expected BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP or .npy"),
        (b"", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image"),
        (png_that_claims(9000, 9000), "expected up to 40 million pixels; got 9000×9000, 81 million"),
        (png_that_claims(90000, 90000), "expected up to 40 million pixels; got far more"),
        (png_that_claims(600, 600), ""),  # damaged: ends early
    ],
)
def test_bad_uploads_are_refused(temporary: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_upload(content, 16, 1)
    assert str(caught.value).startswith(message)
    assert str(temporary) not in str(caught.value)
    assert list(temporary.iterdir()) == []


# ---- the guard ----


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
    status = refusal({"headers": headers, "path": "/", "method": method})
    if status is None:
        [host] = [value for name, value in headers if name == b"host"]
        assert re.fullmatch(rb"localhost(:\d+)?", host, re.IGNORECASE)
        assert all(value.endswith(b"//" + host) for name, value in headers if name == b"origin")


def refusal(scope: dict[str, Any]) -> int | None:
    guard = _server.Guard(None, hosts={"localhost"}, max_call=9)  # type: ignore[arg-type]
    try:
        guard.check(scope)
    except _server.Refused as refused:
        return refused.status
    return None


@pytest.mark.parametrize("host", ["[::::]", "[1.2.3]", "[::1%]", "a:99999999", "localhost, x", ""])
def test_invalid_hosts(host: str) -> None:
    scope = {"path": "/", "method": "GET", "headers": [(b"host", host.encode())]}
    assert refusal(scope) in (400, 403)
    scope["headers"] = [(b"host", b"localhost"), (b"origin", f"http://{host}".encode())]
    assert refusal(scope) in (400, 403)
    scope["headers"] = [(b"host", b"localhost"), (b"origin", b"http://localhost")]
    assert refusal(scope) is None


def test_a_body_is_bounded_whatever_its_header_says() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            await receive()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"12345", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-length", b"5")]
    scope = {"type": "http", "path": "/api/look", "method": "POST", "headers": headers}
    asyncio.run(_server.Guard(app, hosts={"localhost"}, max_call=9)(scope, receive, send))
    assert sent[0]["status"] == 413


def test_a_body_has_to_arrive_in_time() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-length", b"5")]
    scope = {"type": "http", "path": "/api/look", "method": "POST", "headers": headers}
    asyncio.run(_server.Guard(app, hosts=None, max_call=9, max_seconds=0.01)(scope, receive, send))
    assert sent[0]["status"] == 408
    assert sent[1]["body"] == b"expected the whole request within 0.01 seconds"


def test_a_chunked_body_is_refused() -> None:
    headers = [(b"host", b"localhost"), (b"content-length", b"5"), (b"transfer-encoding", b"chunked")]
    assert refusal({"path": "/", "method": "POST", "headers": headers}) == 411


LOADING = "selfconv: loading the models; kernels are compiled when first used\n"


def stopped(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["explore", "--no-open", *args])
    return int(stop.value.code or 0), capsys.readouterr().err


# ---- the command ----


def test_what_the_command_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = stopped(capsys, "--port", str(port))
    assert code == 2
    assert said == (
        f"selfconv: cannot listen on 127.0.0.1, port {port} (Address already in use); "
        "give another --port, 0 for any\n"
    )
    code, said = stopped(capsys, "--host", "8.8.8.8", "--port", "0")
    assert code == 2
    assert said.startswith("selfconv: host: expected an address of this machine; got '8.8.8.8' (")
    assert stopped(capsys, "--port", "70000") == (2, "selfconv: port: expected 0 to 65535; got 70000\n")
    code, said = stopped(capsys, "--port", "0", str(tmp_path))
    assert code == 2
    said = said.removeprefix(LOADING)
    assert said.startswith(
        f"selfconv: {tmp_path}: expected the folder of a run or of a saved model, or one of"
    )
    assert said.endswith("; got an empty folder\n")


def test_without_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert stopped(capsys) == (2, "selfconv: explore needs starlette: pip install 'selfconv[app]'\n")


def test_a_page_that_is_not_ready_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    refused: list[bool] = []

    def connect() -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        refused.append(True)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(_server, "open_guarded", lambda places, hosts, pixel_range: connect())
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda self, sockets: socket.create_connection(("127.0.0.1", port), 5).close()
    )
    cli.main(["explore", "--no-open", "--port", str(port)])
    assert refused == [True]


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
def test_non_loopback_host_prints_a_warning(
    host: str, warned: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    allowed: list[Any] = []
    monkeypatch.setattr(_server, "open_guarded", lambda places, hosts, pixel_range: allowed.append(hosts))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    at_exit: list[Any] = []
    monkeypatch.setattr(_server.atexit, "register", at_exit.append)
    before = signal.getsignal(signal.SIGTERM)
    cli.main(["explore", "--no-open", "--port", "0", "--host", host])
    out, err = capsys.readouterr()
    shown = r"127\.0\.0\.1:\d+, for others at the name of this machine" if warned else rf"{host}:\d+"
    assert re.match(rf"The page is at http://{shown} \(Ctrl-C", out)
    expected = f"selfconv: warning: --host {host}: everybody who can reach this machine can use the page\n"
    assert err == (expected if warned else "") + LOADING
    assert (allowed == [None]) == warned
    assert at_exit == [gc.freeze]
    assert signal.getsignal(signal.SIGTERM) is before


# ---- background work ----


def test_urgent_requests_go_first() -> None:
    urgent, order = Urgent(), list[str]()

    def other() -> None:
        urgent.let_pass(30)
        order.append("other")

    with urgent():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("urgent")
    thread.join(30)
    assert order == ["urgent", "other"]
    urgent.let_pass(30)  # at once
    with urgent():
        urgent.let_pass(0.01)  # not for ever


def test_occlusion_pauses_between_its_parts() -> None:
    comparison = Comparison.open()
    image, calls = comparison.samples[3].image, list[int]()
    whole = occlusion_maps(comparison.models[1].optimized, comparison._normalised(1, image[None]))
    comparison.pause = lambda: calls.append(1)
    assert torch.allclose(comparison.occlusion(1, image), whole, atol=1e-4)
    assert len(calls) == 5  # 49 windows, 12 at a time
