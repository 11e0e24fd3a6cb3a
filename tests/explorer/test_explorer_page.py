"""The page in a real browser, and what its server refuses to those who go around it."""

from __future__ import annotations

import http.client
import io
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import PIL.Image
import pytest
from helpers.bombs import png_that_claims
from helpers.tiny_runs import command, environment
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from selfconv.explorer._answers import MAX_UPLOAD
from selfconv.explorer._comparison import Comparison

expect.set_options(timeout=30_000)  # ms: a busy machine is no failure

CHROMIUM = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
)


class Server:
    """``selfconv explore`` in a process of its own, with a folder for its temporary files."""

    def __init__(self, folder: Path, *models: str) -> None:
        self.folder, self.models = folder, models
        self.errors = folder.parent / "errors.txt"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command("explore", "--no-open", "--port", "0", *models),
                cwd=folder,
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
    expect(page.locator("body[data-ready]")).to_be_visible()
    yield page
    page.close()
    assert problems == []
    assert len(requests) > 5
    assert {urlsplit(url).hostname for url in requests} == {"127.0.0.1"}


def pictures(page: Page, where: str) -> list[str]:
    """The pixels of every picture there."""
    return page.locator(f"{where} canvas").evaluate_all("all => all.map(canvas => canvas.toDataURL())")


def upload(page: Page, name: str, content: bytes) -> None:
    page.locator("input[type=file]").set_input_files(
        [{"name": name, "mimeType": "image/png", "buffer": content}]
    )


def as_png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def card(page: Page, where: str, model: int) -> Locator:
    return page.locator(f"#{where} [data-model='{model}']")


def test_a_click_shows_the_filters_of_that_pixel(page: Page) -> None:
    filters = card(page, "filters", 0)
    before = pictures(page, "#filters .filters")
    box = page.locator("#stage").bounding_box()
    assert box is not None
    page.locator("#stage").click(position={"x": box["width"] * 4.5 / 16, "y": box["height"] * 2.5 / 16})
    expect(filters).to_contain_text("row 2, column 4 of the 16×16 map")
    after = pictures(page, "#filters .filters")
    assert len(before) == len(after) == 5 + 4 * 5
    assert after[1] == before[1]  # ψ is the same at every pixel
    assert after[2] != before[2]  # α is not
    assert after[3] != before[3]


def test_the_keyboard_is_enough(page: Page) -> None:
    page.get_by_role("button", name="sample: 3").press("Enter")
    expect(card(page, "decisions", 1)).to_contain_text("answers 3")
    page.locator("#stage").focus()
    place = re.search(r"row (\d+), column (\d+)", card(page, "filters", 0).inner_text())
    assert place
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    expect(card(page, "filters", 0)).to_contain_text(f"row {int(place[1]) + 1}, column {int(place[2]) - 1}")
    page.get_by_role("button", name="turn left by 90°").press("Enter")
    expect(card(page, "decisions", 1)).to_contain_text("same prediction")
    page.get_by_label("Turn it").press("ArrowRight")
    expect(page.locator("#maps")).to_contain_text("turned 91°")


def test_every_control_is_reached_named_and_seen(page: Page) -> None:
    """With the tab key alone; a screen reader has a name for each, and the eye a frame around it."""
    about_focus = """() => {
      const one = document.activeElement, seen = one.type === "file" ? one.labels[0] : one;
      const name = one.ariaLabel || one.labels?.[0]?.textContent || one.textContent
        || document.getElementById(one.getAttribute("aria-labelledby"))?.textContent;
      return [one.id || one.ariaLabel, name.trim(), getComputedStyle(seen).outlineStyle];
    }"""
    reached = {}
    for _ in range(40):
        page.keyboard.press("Tab")
        place, name, outline = page.evaluate(about_focus)
        if place in reached:
            break
        reached[place] = name
        assert name, place
        assert outline == "solid", place
        if place == "training-button":
            break
    buttons = {f"sample: {n}" for n in range(10)} | {"left", "upright", "right", "around", "training-button"}
    choices = {"class", "other", "layer", "head-0", "channel-0", "head-1", "channel-1"}
    assert reached.keys() == buttons | choices | {"file", "stage", "angle"}


def test_answers_are_read_out(page: Page) -> None:
    """By a region that stays in the page: screen readers are silent about regions that are new."""
    region = page.get_by_role("status", name="answers")
    region.evaluate("region => region.dataset.same = 'yes'")
    expect(region).to_contain_text("digits_p4_asc: 3, 99.8% ✓ true class 3", use_inner_text=True)
    page.get_by_role("button", name="turn left by 90°").click()
    expect(region.locator("li").first).to_contain_text("✗ true class 3")
    expect(region.locator("li").last).to_contain_text("✓ true class 3")
    assert region.get_attribute("data-same") == "yes"


def test_turning_leaves_the_p4_answer(page: Page) -> None:
    planar, p4 = (card(page, "decisions", model) for model in (0, 1))
    page.get_by_role("button", name="sample: 6").click()
    expect(planar).to_contain_text("answers 6")
    expect(p4).to_contain_text("✓ true class 6")
    before = pictures(page, "#stage")
    for turned in ("90°", "180°", "−90°"):
        page.get_by_role("button", name="turn left by 90°").click()
        expect(page.locator("#maps")).to_contain_text(f"turned {turned}")
        said = p4.locator(".said").inner_text()
        found = re.fullmatch(r"same prediction, probabilities (are identical|differ by (\de-\d+))", said)
        assert found, said
        assert float(found[2] or 0) < 1e-5
        expect(card(page, "maps", 1)).to_contain_text("the maps turn with the image")
        expect(card(page, "maps", 0)).to_contain_text("the maps do not follow")
    expect(planar).to_contain_text("prediction changed from 6 to")
    expect(planar).to_contain_text("✗ true class 6")
    assert pictures(page, "#stage") != before
    page.get_by_role("button", name="Upright").click()
    expect(page.locator("#maps")).not_to_contain_text("turned")
    assert pictures(page, "#stage") == before


def test_the_curve_is_drawn_all_around(page: Page) -> None:
    """Faintly at once, for all angles; strongly where one has turned to."""
    for n in (0, 1):
        expect(page.locator("#curve .faint").nth(n)).to_have_attribute("points", points(25))
        expect(page.locator("#curve polyline:not(.faint)").nth(n)).to_have_attribute("points", points(1))
    page.get_by_role("button", name="turn left by 90°").click()
    strong = page.locator("#curve polyline:not(.faint)")
    expect(strong.first).to_have_attribute("points", points(7))
    page.get_by_role("button", name="Full turn").click()
    expect(strong.first).to_have_attribute("points", points(24))
    lines = strong.evaluate_all("all => all.map(line => line.getAttribute('points'))")
    planar, p4 = ([float(point.split(",")[1]) for point in line.split()] for line in lines)
    quarters = range(5, 24, 6)  # −90°, 0°, 90°, 180°
    assert max(p4[n] for n in quarters) - min(p4[n] for n in quarters) <= 0.2
    assert max(planar[n] for n in quarters) - min(planar[n] for n in quarters) > 50


def test_a_full_turn_ends_where_it_began_or_where_the_user_turns_to(page: Page) -> None:
    degrees, full = page.locator("#degrees"), page.get_by_role("button", name="Full turn")
    page.get_by_role("button", name="turn left by 90°").click()
    full.dblclick()
    strong = page.locator("#curve polyline:not(.faint)").first
    expect(strong).to_have_attribute("points", points(24))  # it has been at every angle
    expect(degrees).to_have_text("90°")
    page.wait_for_timeout(500)
    expect(degrees).to_have_text("90°")
    full.click()
    expect(degrees).not_to_have_text("90°")
    page.get_by_role("button", name="Upright").click()
    expect(page.locator("#maps")).not_to_contain_text("turned")
    page.wait_for_timeout(500)
    expect(degrees).to_have_text("0°")


def points(count: int) -> re.Pattern[str]:
    return re.compile(rf"^\S+( \S+){{{count - 1}}}$")


def test_the_evidence_adds_up(page: Page) -> None:
    comparison = Comparison.open()
    page.get_by_role("button", name="sample: 8").click()
    page.locator("#other").select_option(label="nothing: the class by itself")
    page.locator("#class").select_option(label="5")
    for model in (0, 1):
        logit = float(comparison.inspect(model, comparison.samples[8].image).output[5])
        shown = card(page, "decisions", model)
        said = f"“5”: the cells add up to {logit:.2f}, the logit of “5”".replace("-", "−")
        expect(shown.locator(".activation")).to_contain_text(said)
        expect(shown.locator(".occlusion canvas[role=img]")).to_be_visible()
    before = pictures(page, ".activation")
    page.locator("#other").select_option(label="the strongest other class")
    expect(card(page, "decisions", 0)).to_contain_text("the difference of their logits")
    assert pictures(page, ".activation") != before


def test_layer_head_and_channel(page: Page) -> None:
    planar = card(page, "filters", 0)
    last = "3 of 3: 8×8 map, pooled to 4×4 after attention (stages.2.0.spatial.conv)"
    page.locator("#layer").select_option(label=last)
    expect(planar).to_contain_text("of the 8×8 map")
    page.locator("#channel-0").select_option(label="3")
    page.locator("#head-0").select_option(label="0")
    expect(planar).to_contain_text("stages.2.0.spatial.conv")
    expect(planar).to_contain_text("head 0, channel 3")
    before, other = pictures(page, "#filters .filters"), card(page, "filters", 1).inner_text()
    page.locator("#head-0").select_option(label="2")
    expect(planar).to_contain_text("head 2, channel 3")
    assert pictures(page, "#filters .filters")[:5] != before[:5]
    assert pictures(page, "#filters .filters")[5:] == before[5:]  # each network has its own
    assert card(page, "filters", 1).inner_text() == other


def offered(page: Page, what: str) -> list[str]:
    return page.locator(f"#{what} option").all_inner_texts()


def test_no_network_is_offered_heads_or_channels_that_it_does_not_have(page: Page) -> None:
    """In the first layer the planar network has 4 channels of a head, the one on p4 has 2."""
    assert offered(page, "channel-0") == ["0", "1", "2", "3"]
    assert offered(page, "channel-1") == ["0", "1"]
    assert offered(page, "head-0") == offered(page, "head-1") == ["0", "1", "2", "3"]
    page.locator("#layer").select_option(index=2)
    expect(card(page, "filters", 0)).to_contain_text("of the 8×8 map")
    for network, count in ((0, 8), (1, 4)):
        assert len(offered(page, f"channel-{network}")) == count
        page.locator(f"#channel-{network}").select_option(index=count - 1)
        expect(card(page, "filters", network)).to_contain_text(f"channel {count - 1}")
    page.locator("#layer").select_option(index=0)  # which has fewer
    for network, last in ((0, "3"), (1, "1")):
        expect(card(page, "filters", network)).to_contain_text(
            re.compile(rf"16×16 map, head \d, channel {last}")
        )
        expect(page.locator(f"#channel-{network}")).to_have_value(last)
        assert len(offered(page, f"channel-{network}")) == int(last) + 1
    page.get_by_role("button", name="sample: 6").click()  # another image changes none of it
    expect(card(page, "decisions", 1)).to_contain_text("✓ true class 6")
    expect(page.locator("#channel-0")).to_have_value("3")
    expect(page.locator("#layer")).to_have_value("0")


def test_a_class_is_not_compared_with_itself(page: Page) -> None:
    other, evidence = page.locator("#other"), card(page, "decisions", 0).locator(".activation figcaption")
    other.select_option(label="5")
    expect(evidence).to_contain_text("for “3” rather than “5”")
    page.locator("#class").select_option(label="5")
    expect(other).to_have_value("-2")  # the strongest other class
    expect(evidence).to_contain_text("for “5” rather than “")
    assert other.locator("option:disabled").all_inner_texts() == ["5"]
    page.locator("#class").select_option(label="the answer of each network")
    assert other.locator("option:disabled").count() == 0
    other.select_option(label="3")
    expect(evidence).to_contain_text("for “3” (which is the answer: not compared with itself)")
    page.get_by_role("button", name="sample: 6").click()
    expect(evidence).to_contain_text("for “6” rather than “3”")


def test_the_equation_has_its_operators(page: Page) -> None:
    for network, rows in ((0, 1), (1, 4)):
        table = card(page, "filters", network).locator(".filters")
        signs = table.locator("tbody .operator").all_inner_texts()
        assert signs == ["Σ", "×", "×", "=", "+ Σ", "="] * rows
        words = "Σ neighbours × (template × attention = filter) + Σ position = output"
        expect(table.locator("caption")).to_have_text(words)


def test_the_curve_says_which_angles_are_exact(page: Page) -> None:
    caption = page.locator("#curve-caption")
    expect(caption).to_contain_text("Only multiples of 90° are exact for p4: in between, as at 45°,")


class Held:
    """Requests to a path that wait until they are released."""

    def __init__(self, page: Page, path: str) -> None:
        self.holding, self.routes = True, list[Route]()
        page.route(f"**{path}", self.handle)

    def handle(self, route: Route) -> None:
        if self.holding:
            self.routes.append(route)
        else:
            route.continue_()

    def release(self) -> None:
        self.holding = False
        for route in self.routes:
            route.continue_()


def click_pixel(page: Page, row: int, column: int) -> None:
    box = page.locator("#stage").bounding_box()
    assert box is not None
    place = {"x": box["width"] * (column + 0.5) / 16, "y": box["height"] * (row + 0.5) / 16}
    page.locator("#stage").click(position=place)


def framed(page: Page) -> tuple[str, str]:
    """The pixel in the frame, and the one whose filters are shown."""
    row, column = (
        round(float(page.locator("#pixel").evaluate(f"one => parseFloat(one.style.{side})")) * 16 / 100)
        for side in ("top", "left")
    )
    found = re.search(r"row \d+, column \d+", card(page, "filters", 0).inner_text())
    assert found
    return f"row {row}, column {column}", found[0]


@pytest.mark.parametrize("change", ["turn", "head", "layer"])
def test_frame_and_filters_are_of_one_pixel(page: Page, change: str) -> None:
    """Also if a pixel is clicked while the answer to another change is on its way."""
    held = Held(page, "/api/look")
    if change == "turn":
        page.get_by_role("button", name="turn left by 90°").click()
    else:
        page.locator("#layer" if change == "layer" else "#head-0").select_option(index=1)
    click_pixel(page, 5, 2)
    page.wait_for_timeout(300)
    assert len(set(framed(page))) == 1
    held.release()
    expected = "row 13, column 5" if change == "turn" else "row 5, column 2"  # of the image that was clicked
    expect(card(page, "filters", 0)).to_contain_text(f"{expected} of the")
    assert framed(page) == (expected, expected)
    expect(page.locator("#place")).to_have_text(f"Now: {expected}.")


def test_the_ends_of_the_slider_stay_where_they_are(page: Page) -> None:
    slider = page.get_by_label("Turn it")
    for key, angle in (("Home", "−180"), ("End", "180")):
        slider.press(key)
        expect(page.locator("#maps")).to_contain_text(f"turned {angle}°")
        assert slider.input_value() == angle.replace("−", "-")


def test_controls_show_what_is_shown_after_an_error(server: Server, browser: Browser) -> None:
    page = browser.new_page()  # its console has the error
    page.goto(server.address)
    expect(page.locator("body[data-ready]")).to_be_visible()
    page.route("**/api/look", lambda route: route.fulfill(status=400, body="no such turn"))
    page.get_by_role("button", name="turn left by 90°").click()
    message = page.locator("#message")
    expect(message).to_have_text("no such turn")
    expect(page.locator("#degrees")).to_have_text("0°")
    before = page.locator("#head-0").input_value()
    page.locator("#head-0").select_option(index=0 if before == "1" else 1)
    expect(page.locator("#head-0")).to_have_value(before)
    page.unroute("**/api/look")
    page.get_by_role("button", name="turn left by 90°").click()
    expect(page.locator("#degrees")).to_have_text("90°")
    expect(message).to_have_text("")
    page.close()


def test_an_upload_does_not_override_a_later_choice(page: Page) -> None:
    held = Held(page, "/api/upload")
    upload(page, "photo.png", as_png(np.full((40, 60), 99, np.uint8)))
    expect(page.locator("#message")).to_have_text("photo.png: reading…")
    page.get_by_role("button", name="sample: 6").click()
    expect(card(page, "decisions", 1)).to_contain_text("✓ true class 6")
    with page.expect_response("**/api/upload"):
        held.release()
    page.wait_for_timeout(300)
    expect(card(page, "decisions", 1)).to_contain_text("✓ true class 6")
    expect(page.locator("#message")).to_have_text("")


def test_uploads(page: Page, server: Server, tmp_path: Path) -> None:
    before, message = pictures(page, "#stage"), page.locator("#message")
    photo = as_png(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
    upload(page, "photo.png", photo)
    expect(message).to_contain_text("photo.png, as 16×16 pixels")
    expect(page.locator(".mark-right, .mark-wrong")).to_have_count(0)  # no true class is known
    shown = pictures(page, "#stage")
    assert shown != before
    page.get_by_role("button", name="turn left by 90°").click()
    expect(page.locator("#maps")).to_contain_text("turned 90°")
    page.get_by_role("button", name="Upright").click()
    expect(page.locator("#maps")).not_to_contain_text("turned")
    assert server.ask("/", "GET")[0] == 200
    assert list(server.folder.glob("selfconv-*")) == []
    with (tmp_path / "large.png").open("wb") as sparse:
        sparse.truncate(MAX_UPLOAD + 1)
    page.locator("input[type=file]").set_input_files(tmp_path / "large.png")
    said = "large.png: expected up to 16 MB; got 16.0 MB; the image before it is still shown"
    expect(message).to_have_text(said)
    page.get_by_role("button", name="sample: 3").click()  # still usable
    expect(card(page, "decisions", 1)).to_contain_text("answers 3")
    expect(message).to_have_text("")


def test_what_training_saw(page: Page) -> None:
    button = page.get_by_role("button", name="What did training see?")
    button.click()
    expect(page.locator("#training .seen canvas")).to_have_count(48)
    expect(page.get_by_role("img", name=re.compile("Accuracy over .* epochs"))).to_have_count(2)
    expect(card(page, "training", 0)).to_contain_text("never turned")
    button.click()
    expect(page.locator("#training")).to_be_hidden()


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_no_width_scrolls_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.get_by_role("button", name="What did training see?").click()
    expect(page.locator("#training .seen").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_mode(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(colour) != light


def test_a_network_without_attention_whose_data_are_not_there(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    server = Server(tmp_path / "temporary", "resnet29.cifar10")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    try:
        page.goto(server.address)
        expect(page.locator("body[data-ready]")).to_be_visible()
        note = "The images of cifar10 are not on this machine; choose an image of your own."
        expect(page.locator("#message")).to_contain_text(note)
        expect(page.locator(".mark-right, .mark-wrong")).to_have_count(0)
        answer = page.locator(".answer b").inner_text()
        expect(page.locator("#curve-caption")).to_contain_text(f"Probability of “{answer}”")
        for hidden in ("#filters-section", "#head-0", "#click-hint", "#pixel", "#window"):
            expect(page.locator(hidden)).to_be_hidden()
        page.locator("#channel-0").select_option(label="3")
        expect(page.locator("#maps")).to_contain_text("channel 3 of 0 to")
        assert page.locator("#class option").first.inner_text() == "the answer"
        name = page.locator("#verdicts .name")
        assert name.evaluate("one => one.scrollWidth <= one.clientWidth")  # not cut off
    finally:
        page.close()
        server.end()


def test_a_uniform_image_has_no_evidence_of_occlusion(page: Page) -> None:
    upload(page, "grey.png", as_png(np.full((16, 16), 99, np.uint8)))
    caption = card(page, "decisions", 0).locator(".occlusion figcaption")
    expect(caption).to_have_text("Occlusion: covering any part changes nothing.")
    label = card(page, "decisions", 0).locator(".occlusion canvas").get_attribute("aria-label") or ""
    assert label.endswith("Occlusion: covering any part changes nothing.")


# ---- what the server refuses ----


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd", "//etc/passwd", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
        "/page.css/../../etc/passwd",
        "/static/page.js", "/..%2f..%2f_server.py", "/_server.py", "/api",
        "/api/file?path=/etc/passwd", "/docs",
        "/openapi.json", "/page.js%00", "/api/start/",
    ],
)  # fmt: skip
def test_files_and_other_services_are_out_of_reach(server: Server, path: str) -> None:
    status, text = server.ask(path)
    assert status in (307, 404)
    assert not server.headers.get("location", "/").startswith("//")
    assert "root:" not in text
    assert "import" not in text


def test_wrong_methods_and_malformed_requests(server: Server) -> None:
    assert server.ask("/api/look")[0] == 405
    assert server.ask("/", "POST", b"")[0] == 405
    for body in (b"", b"{", b"[]", b"null", b'{"image": 0}', b'{"a":1,"a":2}', b"[" * 4000, b"\xff"):
        status, text = server.ask("/api/look", "POST", body)
        assert (status, text.count("\n")) == (400, 0), body
    path = b'{"image":"/etc/passwd","angle":0,"home":[0,0],"layer":0,"heads":[0,0],"channels":[0,0]}'
    status, text = server.ask("/api/look", "POST", path)
    assert (status, text) == (400, "image: expected the number of a sample, or 256 bytes in base64")


def test_only_the_page_itself_may_ask(server: Server) -> None:
    assert server.ask("/")[0] == 200
    policy = server.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert not re.search("http|unsafe|data:|blob:", policy)
    assert server.headers["x-content-type-options"] == "nosniff"
    assert server.ask("/", host="evil.example")[0] == 403
    assert server.ask("/", origin="http://evil.example")[0] == 403
    assert server.ask("/", origin="null")[0] == 403
    assert server.ask("/", origin=server.address)[0] == 200
    assert server.ask("/api/look", "POST", b"{}" + b" " * 2**14)[0] == 413


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


def test_refused_uploads_leave_nothing(server: Server) -> None:
    refusals = {
        b"no image": "not an image: expected BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP or .npy",
        png_that_claims(60000, 60000): "expected up to 40 million pixels",
        as_png(np.zeros((50, 50), np.uint8))[:60]: "",
    }
    for content, reason in refusals.items():
        status, text = server.ask("/api/upload", "POST", content)
        assert status == 400
        assert text.startswith(reason)
        assert str(server.folder) not in text
        assert list(server.folder.glob("selfconv-*")) == []
    status, text = server.ask("/api/upload", "POST", as_png(np.zeros((50, 50), np.uint8)))
    assert status == 200
    assert list(server.folder.glob("selfconv-*")) == []  # one that is used is gone too
    large = {"content-length": str(MAX_UPLOAD + 1)}
    assert server.ask("/api/upload", "POST", b"", **large)[0] == 413
    assert server.ask("/api/upload", "POST", b"", **{"transfer-encoding": "chunked"})[0] in (400, 411)


def raw(server: Server, content: bytes, wait: bool = True) -> bytes:
    """The answer to bytes that are no proper request; unless it is waited for, the connection is cut."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(content)
        return connection.recv(1000) if wait else b""


def test_broken_requests_leave_no_error(server: Server) -> None:
    before = server.errors.read_text()
    host = f"Host: 127.0.0.1:{server.port}\r\n".encode()
    for path in (b"look", b"upload"):
        raw(
            server,
            b"POST /api/" + path + b" HTTP/1.1\r\n" + host + b"Content-Length: 99\r\n\r\n{",
            wait=False,
        )
    for content in (
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + host + host + b"\r\n",
    ):
        assert raw(server, content).startswith(b"HTTP/1.1 400 "), content
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade, close\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert b"101" not in raw(server, b"GET / HTTP/1.1\r\n" + host + upgrade)[:20]
    assert server.ask("/")[0] == 200
    assert server.errors.read_text() == before


def test_many_requests_at_once(server: Server) -> None:
    """Each gets the answer to its own question, although two threads compute them."""
    call = '{"image":%d,"angle":%d,"home":[3,4],"layer":0,"heads":[0,0],"channels":[0,0]}'
    names = ("look", "occlusion", "answer", "pixel")
    questions = [(names[n % 4], (call % (n % 10, 15 * (n % 7))).encode()) for n in range(24)]

    def ask(question: tuple[str, bytes]) -> tuple[int, str]:
        name, body = question
        return server.ask(f"/api/{name}", "POST", body)

    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(ask, questions))
    assert together == [ask(question) for question in questions]
    assert {status for status, _ in together} == {200}


def test_ctrl_c_ends_it_and_leaves_nothing(server: Server, browser: Browser) -> None:
    """The last test: the server is gone after it."""
    page = browser.new_page()
    page.goto(server.address)
    expect(page.locator("body[data-ready]")).to_be_visible()
    before = server.errors.read_text()
    assert server.end() == 0
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("button", name="turn left by 90°").click()
    ended = "The server has ended: start `selfconv explore` again, then reload this page."
    expect(page.locator("#message")).to_have_text(ended)
    expect(page.locator("#degrees")).to_have_text("0°")  # as the image that is shown
    before_more = len(asked)
    page.get_by_role("button", name="Full turn").click()
    page.get_by_role("button", name="sample: 6").click()
    page.wait_for_timeout(300)
    expect(page.get_by_role("button", name="sample: 6")).to_have_attribute("aria-pressed", "false")
    assert len(asked) == before_more
    page.close()
    assert server.errors.read_text() == before
    assert list(server.folder.glob("selfconv-*")) == []
