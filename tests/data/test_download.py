"""Downloads from a server on this machine that behaves, and from one that does not."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from helpers.cifar_files import TEN, cifar10_members, write_archive

from selfconv.data import DataError, load_data
from selfconv.data.sources import cifar
from selfconv.data.sources import download as module
from selfconv.data.sources.download import download

CONTENT = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8).tobytes()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server:
    """Answers each request by the next of ``answers``, then by all it was asked for; notes the ranges."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.answers: list[Callable[[Handler], None]] = []
        self.ranges: list[str | None] = []
        self.sent = 0  # of an endless file
        self.closing = threading.Event()
        server = self

        class Bound(Handler):
            owner = server

        self.http = Quiet(("127.0.0.1", 0), Bound)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/file.tar.gz"


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Clients that hang up early are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    owner: Server

    def do_GET(self) -> None:
        self.owner.ranges.append(self.headers.get("Range"))
        (self.owner.answers.pop(0) if self.owner.answers else full)(self)

    def start(self) -> int:
        """Head of an answer that honours Range; where its body starts."""
        wanted = self.headers.get("Range")
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        total = len(self.owner.content)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - first))
        self.end_headers()
        return first

    def log_message(self, *_: object) -> None:
        pass


def full(handler: Handler) -> None:
    handler.wfile.write(handler.owner.content[handler.start() :])


def cut_after(count: int) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        first = handler.start()
        handler.wfile.write(handler.owner.content[first : first + count])
        handler.close_connection = True

    return answer


def stall_after(count: int) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        first = handler.start()
        handler.wfile.write(handler.owner.content[first : first + count])
        handler.wfile.flush()
        handler.owner.closing.wait(20)

    return answer


def status(code: int, **headers: str) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def ignoring_range(handler: Handler) -> None:
    del handler.headers["Range"]
    full(handler)


def wrong_range(handler: Handler) -> None:
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}")
    handler.send_header("Content-Length", str(len(CONTENT)))
    handler.end_headers()
    handler.wfile.write(CONTENT)


def without_length(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(CONTENT)


def endless(handler: Handler) -> None:
    """100 MB, that is, unless the client hangs up."""
    without_length(handler)
    for _ in range(99):
        handler.wfile.write(CONTENT)
        handler.owner.sent += len(CONTENT)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module, "PAUSE", 0.0)
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.closing.set()
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "file.tar.gz"


def fetch(server: Server, path: Path) -> None:
    download(server.url, path, size=len(CONTENT), md5=MD5)


def fails(server: Server, path: Path, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        fetch(server, path)
    assert "\n" not in str(caught.value)
    assert not path.exists()


def kept(path: Path) -> int:
    part = path.with_name("file.tar.gz.part")
    return part.stat().st_size if part.exists() else 0


def test_complete_download(server: Server, path: Path, capsys: pytest.CaptureFixture) -> None:
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None]
    assert kept(path) == 0
    assert capsys.readouterr().err == f"downloading {server.url} (1.0 MB) to {path}\n"
    fetch(server, path)
    assert server.ranges == [None]  # it is there


def test_cut_off_and_resumed(server: Server, path: Path) -> None:
    server.answers = [cut_after(300_000), cut_after(0), cut_after(123_456)]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=300000-", "bytes=300000-", "bytes=423456-"]


def test_given_up_and_resumed_by_the_next_call(server: Server, path: Path) -> None:
    server.answers = [cut_after(100_000)] * module.ATTEMPTS
    fails(server, path, r"failed after 5 attempts \(the connection was closed\); 0.5 of 1.0 MB are kept")
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=500000-"


def test_stalled(server: Server, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.5)
    server.answers = [stall_after(400_000), stall_after(0)]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=400000-", "bytes=400000-"]


def test_stalled_for_good(server: Server, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.5)
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    server.answers = [stall_after(400_000), stall_after(0)]
    fails(server, path, r"\(timed out\); 0.4 of 1.0 MB are kept")


@pytest.mark.parametrize("first", [full, cut_after(600_000)])
def test_wrong_checksum(server: Server, path: Path, first: Callable) -> None:
    server.content = bytes(len(CONTENT))
    server.answers = [first]
    fails(server, path, rf"wrong checksum: expected MD5 {MD5}; got \w+; nothing was kept")
    assert kept(path) == 0


def test_a_part_of_another_file_is_dropped(server: Server, path: Path) -> None:
    path.parent.mkdir()
    path.with_name("file.tar.gz.part").write_bytes(bytes(1000))
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-", None]


@pytest.mark.parametrize("have", [len(CONTENT), len(CONTENT) + 5])
def test_complete_partial_file(server: Server, path: Path, have: int) -> None:
    path.parent.mkdir()
    path.with_name("file.tar.gz.part").write_bytes((CONTENT + bytes(5))[:have])
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert len(server.ranges) == (have > len(CONTENT))


def test_a_file_of_another_size(server: Server, path: Path) -> None:
    server.content = CONTENT + b"x"
    fails(server, path, "expected a file of 1000000 bytes; got one of 1000001")
    assert kept(path) == 0


def test_an_endless_file(server: Server, path: Path) -> None:
    server.answers = [endless]
    fails(server, path, "wrong checksum")
    assert kept(path) == 0
    assert server.sent < 50_000_000


def test_no_length_given(server: Server, path: Path) -> None:
    server.answers = [without_length]
    fetch(server, path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("answer", [ignoring_range, wrong_range, status(416), status(503), status(429)])
def test_servers_that_cannot_resume_just_then(server: Server, path: Path, answer: Callable) -> None:
    server.answers = [cut_after(300_000), answer]
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_redirected(server: Server, path: Path) -> None:
    moved = status(302, Location=server.url.replace("file", "elsewhere"))
    server.answers = [moved, cut_after(200_000), moved]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, None, "bytes=200000-", "bytes=200000-"]


def test_redirected_to_a_local_file(server: Server, path: Path) -> None:
    server.answers = [status(302, Location="file:///etc/hostname")]
    fails(server, path, "HTTP 302")


@pytest.mark.parametrize("code", [404, 403, 410])
def test_http_404(server: Server, path: Path, code: int) -> None:
    server.answers = [status(code)]
    fails(server, path, rf"^{server.url}: HTTP {code} \w+")
    assert len(server.ranges) == 1


def test_server_errors(server: Server, path: Path) -> None:
    server.answers = [status(500)] * module.ATTEMPTS
    fails(server, path, r"failed after 5 attempts \(HTTP 500 Internal Server Error\)$")


def test_no_server(path: Path, server: Server) -> None:
    with pytest.raises(DataError, match=r"^http://127.0.0.1:1/x: download failed .*refused"):
        download("http://127.0.0.1:1/x", path, size=1, md5="")


def test_concurrent_processes_download_once(server: Server, path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch(server, path), range(4)))
    assert path.read_bytes() == CONTENT
    assert len(server.ranges) == 1


def test_unwritable_cache(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written \(Not a directory\)"):
        fetch(server, tmp_path / "file" / "cache" / "file.tar.gz")
    assert server.ranges == []


def test_full_disk(server: Server, path: Path) -> None:
    path.parent.mkdir()
    path.with_name("file.tar.gz.part").symlink_to("/dev/full")
    fails(server, path, r"cannot be written \(No space left on device\)")


def test_cifar10_from_the_network(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).integers(0, 256, (360, 32, 32, 3), np.uint8)
    members = cifar10_members(x, np.arange(360) % 10)
    server.content = write_archive(tmp_path / "made.tar.gz", "cifar-10-batches-py", members)
    server.answers = [cut_after(500_000)]
    md5 = hashlib.md5(server.content).hexdigest()
    known = replace(cifar.ARCHIVES["cifar10"], url=server.url, size=len(server.content), md5=md5)
    monkeypatch.setitem(cifar.ARCHIVES, "cifar10", known)
    monkeypatch.setenv("SELFCONV_DATA", str(tmp_path / "env"))
    data = load_data("cifar10")
    assert (len(data.train), len(data.val), len(data.test)) == (270, 30, 60)
    assert data.class_names == tuple(TEN)
    assert (tmp_path / "env" / "file.tar.gz").read_bytes() == server.content
    assert load_data("cifar10").digest == data.digest
    assert server.ranges == [None, "bytes=500000-"]
