"""The page in a real browser, and what its server refuses to those who go around it."""

from __future__ import annotations

import http.client
import io
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import PIL.Image
import pytest
from helpers.bombs import png_that_claims
from helpers.tiny_runs import command, environment
from playwright.sync_api import Browser, Page, expect, sync_playwright

from selfconv.explorer import _uploads

expect.set_options(timeout=30_000)  # ms: a busy machine is no failure

CHROMIUM = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
)


class Server:
    """``selfconv explore`` in a process of its own, with a folder for its temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors = folder.parent / "errors.txt"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command("explore", "--no-open", "--port", "0"),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(TMPDIR=str(folder)),
            )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.fullmatch(r"The page is at (http://127\.0\.0\.1:(\d+)) \(Ctrl-C ends it\)\.\n", said)
        assert found, (said, self.errors.read_text())
        self.address, self.port = found[1], int(found[2])

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        self.headers = answer.headers
        connection.close()
        return answer.status, text

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server") / "temporary"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("chromium is not installed: `make browser` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=[*CHROMIUM.split(), "--no-first-run"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(server: Server, browser: Browser) -> Iterator[Page]:
    """The page, opened. Whatever a test does, nothing may leave the machine, and the console no error."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    requests: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.address)
    expect(page.locator(".sc-stage .sc-px")).to_be_visible()
    yield page
    page.close()
    assert problems == []
    assert len(requests) > 10
    assert {urlsplit(url).hostname for url in requests if not url.startswith("data:")} == {"127.0.0.1"}


def sources(page: Page, where: str) -> list[str | None]:
    return [image.get_attribute("src") for image in page.locator(f"{where} img").all()]


def upload(page: Page, name: str, content: bytes) -> None:
    page.locator("input[type=file]").set_input_files(
        [{"name": name, "mimeType": "image/png", "buffer": content}]
    )


def as_png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def test_a_click_shows_the_filters_of_that_pixel(page: Page) -> None:
    filters = page.locator("#filters")
    expect(filters).to_contain_text("row 8, column 8 of the 16×16 map")
    before = sources(page, "#filters .sc-filters")
    box = page.locator(".sc-stage").bounding_box()
    assert box is not None
    position = {"x": box["width"] * 4.5 / 16, "y": box["height"] * 2.5 / 16}
    page.locator(".sc-stage").click(position=position)
    expect(filters).to_contain_text("row 2, column 4 of the 16×16 map")
    after = sources(page, "#filters .sc-filters")
    assert len(before) == len(after) == 5 + 17
    assert after[1] == before[1]  # ψ is the same at every pixel
    assert after[2] != before[2]  # α is not
    assert after[3] != before[3]


def test_the_keyboard_is_enough(page: Page) -> None:
    filters = page.locator("#filters")
    page.locator(".sc-focus").focus()
    page.keyboard.press("ArrowDown")
    expect(filters).to_contain_text("row 9, column 8")
    page.keyboard.press("ArrowLeft")
    expect(filters).to_contain_text("row 9, column 7")
    page.get_by_role("button", name="↺ 90°").press("Enter")
    expect(page.locator("#predictions")).to_contain_text("p4: same prediction")
    page.get_by_label("range slider for Turn").press("ArrowRight")
    expect(page.locator("#maps")).to_contain_text("turned 91°")
    page.get_by_role("button", name="sample: 3").press("Enter")
    expect(page.locator("#predictions")).to_contain_text("p4: predicts 3")


def test_turning_leaves_the_p4_prediction(page: Page) -> None:
    predictions = page.locator("#predictions")
    page.get_by_role("button", name="sample: 6").click()
    expect(predictions).to_contain_text("planar: predicts 6")
    expect(predictions).to_contain_text("p4: predicts 6")
    before = sources(page, "#stage")
    for turned in ("90°", "180°", "−90°"):
        page.get_by_role("button", name="↺ 90°").click()
        expect(page.locator("#maps")).to_contain_text(f"turned {turned}")
        p4 = predictions.locator("[data-model=p4] [role=status]").inner_text()
        said = re.fullmatch(r"p4: same prediction, probabilities (are identical|differ by (\de-\d+))", p4)
        assert said, p4
        assert float(said[2] or 0) < 1e-5
        expect(page.locator("#maps [data-model=p4]")).to_contain_text("the maps turn with the image")
        expect(page.locator("#maps [data-model=planar]")).to_contain_text("the maps do not follow")
    expect(predictions).to_contain_text("planar: prediction changed from 6 to")
    assert sources(page, "#stage") != before
    page.get_by_role("button", name="Upright").click()
    expect(predictions).to_contain_text("p4: predicts 6")
    assert sources(page, "#stage") == before


def test_layer_head_and_channel(page: Page) -> None:
    def choose(label: str, option: str) -> None:
        page.get_by_label(label, exact=True).click()
        page.get_by_role("option", name=option, exact=True).click()
        expect(page.get_by_role("option")).to_have_count(0)  # the list has closed

    planar = page.locator("#filters [data-model=planar]")
    choose("Layer", "stage 3, block 1: 8×8 map")
    expect(planar).to_contain_text("stage 3, block 1: row 4, column 4 of the 8×8 map, head 1, channel 1")
    choose("Channel", "3")
    expect(planar).to_contain_text("head 1, channel 3")
    before = sources(page, "#filters [data-model=planar] .sc-filters")
    choose("Head", "2")
    expect(planar).to_contain_text("head 2, channel 3")
    assert sources(page, "#filters [data-model=planar] .sc-filters") != before


def test_uploads(page: Page, server: Server, tmp_path: Path) -> None:
    before = sources(page, "#stage")
    photo = as_png(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
    upload(page, "photo.png", photo)
    expect(page.get_by_text("photo.png, 16×16")).to_be_visible()
    shown = sources(page, "#stage")
    assert shown != before
    upload(page, "broken <b>.png", photo[: len(photo) // 2])
    expect(page.get_by_role("alert")).to_contain_text("broken")
    upload(page, "bomb.png", png_that_claims(60000, 60000))
    expect(page.get_by_role("alert")).to_contain_text("bomb.png: expected up to 40 million pixels")
    assert sources(page, "#stage") == shown
    with (tmp_path / "large.png").open("wb") as sparse:
        sparse.truncate(_uploads.MAX_BYTES + 1)
    page.locator("input[type=file]").set_input_files(tmp_path / "large.png")
    expect(page.get_by_text("exceed the maximum allowed size")).to_be_visible()
    page.get_by_role("button", name="sample: 3").click()  # still usable
    expect(page.locator("#predictions")).to_contain_text("p4: predicts 3")
    assert [path for path in server.folder.rglob("*.png") if path.is_file()] == []


def test_the_other_tabs(page: Page) -> None:
    page.get_by_role("tab", name="Curves").click()
    expect(page.get_by_role("img", name=re.compile("Accuracy over .* epochs"))).to_have_count(2)
    page.get_by_role("tab", name="Explained").click()
    expect(page.get_by_text("The template reweighted by the scores")).to_be_visible()


def test_a_narrow_screen_scrolls_one_way(page: Page) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    for tab in ("Explore", "Curves", "Explained"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


# ---- what the server refuses ----


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=../../../../etc/passwd",
        "/gradio_api/file=%2fetc%2fpasswd",
        "/file=/etc/passwd",
        "/file/etc/passwd",
        "/gradio_api/file=http://example.com/",
        "/gradio_api/proxy=http://example.com/",
        "/gradio_api/stream/x",
        "/assets/../../../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/static/..%2f..%2f..%2f..%2f..%2f..%2fetc/passwd",
        "/static//etc/passwd",
        "//etc/passwd",
        "/../../etc/passwd",
        "/gradio_api/info",
        "/gradio_api/queue/join",
        "/docs",
        "/openapi.json",
        "/monitoring",
    ],
)
def test_files_and_other_services_are_out_of_reach(server: Server, path: str) -> None:
    status, text = server.ask(path)
    assert status in (403, 404)
    assert "root:" not in text


def test_a_request_cannot_name_what_was_not_uploaded(server: Server, tmp_path: Path) -> None:
    """The call that the upload button makes, with a file of the machine or an address instead."""
    PIL.Image.new("L", (9, 9)).save(tmp_path / "secret.png")
    config = json.loads(server.ask("/config")[1])
    number = next(call["id"] for call in config["dependencies"] if call["targets"][0][1] == "upload")
    refusals = {
        str(tmp_path / "secret.png"): "it was not uploaded by a user",
        "http://127.0.0.1:9/secret.png": "expected an uploaded file; got the address",
    }
    for path, reason in refusals.items():
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        body = {"data": [file, None, None, 0, 0, 0, 0], "fn_index": number, "session_hash": "abc"}
        kind = {"content-type": "application/json"}
        status, answer = server.ask("/gradio_api/run/predict", "POST", json.dumps(body).encode(), **kind)
        assert status == 500
        assert reason in answer


def test_only_the_page_itself_may_ask(server: Server) -> None:
    assert server.ask("/")[0] == 200
    policy = server.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert server.headers["x-content-type-options"] == "nosniff"
    assert server.ask("/", host="evil.example")[0] == 403
    assert server.ask("/", origin="http://evil.example")[0] == 403
    assert server.ask("/", origin="null")[0] == 403
    assert server.ask("/", origin=server.address)[0] == 200
    assert server.ask("/gradio_api/run/predict", "POST", b"{}" + b" " * 2**20)[0] == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "[::1"}, {"host": "a b"}, {"host": "127.0.0.1:x"}, {"host": "127.0.0.1/x"},
        {"host": "me@127.0.0.1"}, {"host": "[127.0.0.1"}, {"origin": "http://[::1"},
        {"origin": "http://["}, {"origin": "127.0.0.1"}, {"origin": "http://127.0.0.1:1/x"},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_headers(server: Server, headers: dict[str, str]) -> None:
    before = server.errors.read_text()
    assert server.ask("/", "GET", None, **headers)[0] == 400
    assert server.errors.read_text() == before


def post_upload(server: Server, content: bytes, name: str = "x.png") -> tuple[int, str]:
    form = b'--A\r\nContent-Disposition: form-data; name="files"; filename="%s"\r\n\r\n%s\r\n--A--\r\n'
    body = form % (name.encode(), content)
    kind = {"content-type": "multipart/form-data; boundary=A"}
    return server.ask("/gradio_api/upload", "POST", body, **kind)


def kept(server: Server) -> list[Path]:
    return [path for path in server.folder.rglob("selfconv-explore-*/**/*") if path.is_file()]


def wait_until_kept(server: Server, number: int) -> None:
    """Files are removed just after a request is answered."""
    deadline = time.monotonic() + 30  # less than an upload is kept
    while len(kept(server)) != number:
        assert time.monotonic() < deadline, kept(server)
        time.sleep(0.05)


def test_uploads_that_are_refused_or_never_used(server: Server) -> None:
    status, answer = post_upload(server, b"no image")
    assert status == 200
    assert [str(path) for path in kept(server)] == json.loads(answer)  # it may be used yet
    file = {"path": json.loads(answer)[0], "meta": {"_type": "gradio.FileData"}}
    body = {"data": [file], "fn_index": 10**6, "session_hash": "abc"}  # a call that gradio refuses
    kind = {"content-type": "application/json"}
    assert server.ask("/gradio_api/run/predict", "POST", json.dumps(body).encode(), **kind)[0] >= 400
    wait_until_kept(server, 0)
    for number in range(_uploads.MOST + 3):
        assert post_upload(server, b"%d" % number)[0] == 200
    wait_until_kept(server, _uploads.MOST)
    assert server.ask("/gradio_api/upload", "POST", b"not a form")[0] >= 400
    wait_until_kept(server, _uploads.MOST)


def test_ctrl_c_ends_it_and_leaves_nothing(server: Server, browser: Browser) -> None:
    """The last test: the server is gone after it."""
    page = browser.new_page()
    page.goto(server.address)
    expect(page.locator(".sc-stage")).to_be_visible()
    assert len(list(server.folder.glob("selfconv-*"))) == 1  # the folder for uploads
    before = server.errors.read_text()
    assert server.end() == 0
    page.close()
    assert server.errors.read_text() == before
    assert list(server.folder.glob("selfconv-*")) == []
