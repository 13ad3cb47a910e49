"""The live page before a real server: what it shows, that a restart does not end it, and what viewers cost.

`SGLGRAFT_SCREENSHOTS=docs make soak ARGS=tests/serving/test_page_live.py` takes the documents' pictures.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sgl_graft import models
from sgl_graft.bench.server import ServerProcess, free_port
from sgl_graft.cli.serve import TreeSettings, default_server_args, launch_command

from .chromium import Chromium, needs_chromium

pytestmark = pytest.mark.soak

VIEWERS = 10
POLL_S = 2.0
MOST_EXTRA = 0.02  # CPU-seconds per token
PAIRS = 6
TOKENS = 96
PROMPTS = ("Tell me about rivers.", "Write a list of colours and what they are for.", "Why is the sky blue?")


@pytest.fixture(scope="module")
def flags() -> list[str]:
    """Of a GRAFT server of the embedded model."""
    return default_server_args("GRAFT", target=models.get("smollm2-135m-instruct"),
                               draft=models.path("smollm2-135m-instruct-eagle3"),
                               tree=TreeSettings(steps=2, topk=4, slots=8))  # fmt: skip


@pytest.fixture(scope="module")
def live(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("page", flags, tmp_path_factory.mktemp("page") / "log") as server:
        server.wait_ready(600)
        yield server


def generate(url: str, prompt: str) -> int:
    """One chat answer; returns its tokens."""
    body = {
        "model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240, trust_env=False)
    return int(answer.json()["usage"]["completion_tokens"])


class Load:
    """One request after the other, until the block ends; a server that is away is waited for."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                generate(self._url, PROMPTS[number % len(PROMPTS)] + f" ({number})")
            except (httpx.HTTPError, KeyError):
                time.sleep(0.5)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@needs_chromium
def test_the_page_shows_a_real_server(live: ServerProcess, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SGLGRAFT_SCREENSHOTS", tmp_path)).absolute()
    with Chromium(tmp_path / "profile") as browser, Load(live.url):
        page = browser.page()
        page.look(1280, 900, "light")
        page.open(live.url + "/graft/")
        page.wait("document.querySelectorAll('#tree rect').length > 0", 120)
        page.wait("points.filter(point => point.length !== null).length >= 15", 240)
        assert float(page.run("document.getElementById('since').textContent")) > 1.1
        for name, width in (("desk", 1280), ("phone", 390)):
            for scheme in ("light", "dark"):
                page.look(width, 900, scheme)
                page.run("new Promise(done => setTimeout(done, 500))")
                assert page.run("document.documentElement.scrollWidth") <= width
                page.screenshot(folder / f"page-{name}-{scheme}.png")
        assert page.problems() == []


@needs_chromium
def test_the_page_survives_a_restart(flags: list[str], tmp_path: Path) -> None:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            command = launch_command([*flags, "--host", "127.0.0.1", "--port", port])
            process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health", timeout=30, trust_env=False).status_code == 200:
                    return process
            except httpx.HTTPError:
                time.sleep(1)
        raise AssertionError("not started")

    server = start()
    try:
        with Chromium(tmp_path / "profile") as browser, Load(url):
            page = browser.page()
            page.open(url + "/graft/")
            page.wait("points.filter(point => point.length !== null).length >= 2", 120)
            server.terminate()
            server.wait(60)
            page.wait("document.getElementById('state').textContent.includes('no answer')", 60)
            before = page.run("points.filter(point => point.length !== null).length")
            server = start()
            page.wait("document.getElementById('state').textContent.includes('live')", 60)
            page.wait(f"points.filter(point => point.length !== null).length > {before}", 120)
            assert page.run("starts.length") == 1 and page.problems() == []
    finally:
        server.terminate()
        server.wait(60)


def test_ten_viewers_cost_next_to_nothing(live: ServerProcess) -> None:
    """CPU-seconds of all the server's processes per token, with and without viewers in turn."""
    watching = threading.Event()
    stop = threading.Event()

    def view(number: int) -> None:
        with httpx.Client(base_url=live.url, trust_env=False, timeout=60) as client:
            stop.wait(POLL_S * number / VIEWERS)
            while not stop.wait(POLL_S):
                if watching.is_set():
                    assert client.get("/graft/status").status_code == 200

    viewers = [threading.Thread(target=view, args=(number,)) for number in range(VIEWERS)]
    for viewer in viewers:
        viewer.start()
    costs: dict[bool, list[float]] = {False: [], True: []}
    try:
        for prompt in PROMPTS:
            generate(live.url, prompt)
        for turn in range(2 * PAIRS):
            watched = turn % 2 == 1
            (watching.set if watched else watching.clear)()
            before = live.cpu_seconds()
            tokens = sum(generate(live.url, prompt) for prompt in PROMPTS)
            costs[watched].append((live.cpu_seconds() - before) / tokens)
    finally:
        stop.set()
        for viewer in viewers:
            viewer.join()
    quiet, watched_cost = statistics.median(costs[False]), statistics.median(costs[True])
    print(f"CPU-seconds per token: {quiet:.5f} alone, {watched_cost:.5f} with {VIEWERS} viewers", costs)
    assert watched_cost <= quiet * (1 + MOST_EXTRA)
