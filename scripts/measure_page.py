"""Measures the page of `selfconv explore` in Chromium: python scripts/measure_page.py [MODEL ...]

Prints how long the page takes to open once the server is up, to answer a click on a pixel and a turn of the
image (median and slowest of 30), and the memory of the server before and after. A time ends with the second
frame after the answer is drawn. Run it on a machine without other work.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

REPEATS = 30
SETTLE = 500  # ms between two measurements; occlusion and the curve are computed meanwhile, as for a user

# Starts an action and resolves to the milliseconds until its answer can be seen.
MEASURE = """async (act) => {
  const frame = () => new Promise(requestAnimationFrame), start = performance.now();
  new Function(act)();
  while (document.body.classList.contains("waiting")) await new Promise((done) => setTimeout(done, 1));
  await frame();
  await frame();
  return performance.now() - start;
}"""
CLICK = """const stage = document.getElementById("stage"), box = stage.getBoundingClientRect();
stage.dispatchEvent(new MouseEvent("click", {bubbles: true,
  clientX: box.left + box.width * %f, clientY: box.top + box.height * %f}));"""
TURN = """const angle = document.getElementById("angle");
angle.value = %d;
angle.dispatchEvent(new Event("input", {bubbles: true}));"""


def measure(page: Page, name: str, actions: list[str]) -> None:
    times = []
    for action in actions:
        times.append(page.evaluate(MEASURE, action))
        page.wait_for_timeout(SETTLE)
    print(f"{name}: median {statistics.median(times):.0f} ms, slowest {max(times):.0f} ms of {len(times)}")


def resident(process: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1]) // 1000


def main(models: list[str]) -> None:
    command = [sys.executable, "-m", "selfconv", "explore", "--no-open", "--port", "0", *models]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address, "expected the server to print its address"
        with sync_playwright() as playwright:
            flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            problems: list[str] = []
            page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: problems.append(str(error)))
            start = time.perf_counter()
            page.goto(address[0])
            page.wait_for_selector("body[data-ready]")
            print(f"opens in {time.perf_counter() - start:.2f} s; the server has {resident(server.pid)} MB")
            page.wait_for_timeout(4000)  # until occlusion and the curve are there
            places = [((5 + 7 * n) % 16, (3 + 5 * n) % 16) for n in range(REPEATS)]
            measure(page, "click", [CLICK % ((x + 0.5) / 16, (y + 0.5) / 16) for x, y in places])
            measure(page, "turn", [TURN % (13 * n % 180 + 1) for n in range(REPEATS)])
            print(f"the server has {resident(server.pid)} MB; errors in the console: {problems or 'none'}")
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
