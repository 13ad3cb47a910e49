"""The live page in a real Chromium and canned answers: every algorithm, restarts, small screens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from sgl_graft.bench.server import free_port
from sgl_graft.serving.route_models import RankStatus, Status

from .chromium import Chromium, Page, needs_chromium

pytestmark = needs_chromium

TREE = {
    "parents": [-1, 0, 0, 1, 1, 3], "sources": [0, 1, 2, 3, 2, 1],
    "accepted": [True, True, False, True, False, False],
}  # fmt: skip
EVENTS = [
    {"time": 1_700_000_000.0, "kind": "update", "version": 1, "note": "arm deep"},
    {"time": 1_700_000_060.0, "kind": "rollback", "version": 0, "note": "accept length fell"},
]
RANKS: dict[str, dict[str, Any]] = {
    "GRAFT": {
        "accepted_at": {"draft": [0, 60, 20], "table": [0, 20, 10], "both": [0, 10, 0]},
        "proposed_at": {"draft": [0, 90, 90], "table": [0, 50, 60], "both": [0, 10, 0]},
        "stages": [10, 30, 60],
        "table": {"scope": "shared", "bytes": 6_000_000, "hit_rate": 0.8},
        "calibration": {"counting": True, "rounds_counted": 3, "rounds_wanted": 9, "fitted_on": 0},
    },
    "BLOCKPILOT": {"accepted_at": {"all": [0, 70, 30, 20]}, "block_sizes": {"1": 20, "4": 50, "10": 30}},
    "SPECBLOCK": {
        "accepted_at": {"all": [0, 70, 30, 20]},
        "adaptation": {"version": 1, "paused": False, "rollbacks": 1, "arms": {"deep": 4}, "events": EVENTS},
    },
}


class Canned:
    """A server of the page at one port, which can be stopped and started again."""

    def __init__(self, algorithm: str | None) -> None:
        self.algorithm = algorithm
        self.port = free_port()
        self.polls = 0
        self.start()

    def start(self) -> None:
        canned, started = self, time.time()
        rounds = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                nonlocal rounds
                if self.path == "/graft/":
                    body = files("sgl_graft").joinpath("serving/page.html").read_bytes()
                elif self.path == "/graft/status":
                    canned.polls += 1
                    rounds += 100
                    body = canned.status(started, rounds).model_dump_json().encode()
                elif self.path == "/graft/tree":
                    words = {"tokens": list(range(6)), "texts": ["The", " b", "<b>", "\n", '"', "é"]}
                    body = json.dumps(TREE | words | {"bonus": "."}).encode()
                else:
                    return self.send_error(404)
                self.send_response(200)
                self.send_header(
                    "Content-Type", "text/html" if self.path == "/graft/" else "application/json"
                )
                self.end_headers()
                self.wfile.write(body)
                return None

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def status(self, started: float, rounds: int) -> Status:
        ranks = []
        if self.algorithm is not None:
            common = {
                "rounds": rounds,
                "committed_tokens": int(2.2 * rounds),
                "accept_length": 2.2,
                "tree": TREE,
            }
            own = scaled(RANKS[self.algorithm], rounds // 100)
            ranks = [RankStatus.model_validate(common | own)]
        return Status(algorithm=self.algorithm, version="0", started=started, time=time.time(), ranks=ranks)


def scaled(rank: dict[str, Any], times: int) -> dict[str, Any]:
    """A rank's counts of a hundred rounds, that many times."""
    lists = {
        name: {source: [times * count for count in counts] for source, counts in rank[name].items()}
        for name in ("accepted_at", "proposed_at")
        if name in rank
    }
    stages = {"stages": [times * count for count in rank["stages"]]} if "stages" in rank else {}
    return rank | lists | stages


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser.page()


@pytest.fixture
def canned(request: pytest.FixtureRequest) -> Iterator[Canned]:
    server = Canned(getattr(request, "param", "GRAFT"))
    yield server
    server.stop()


def text(page: Page, name: str) -> str:
    return str(page.run(f"document.getElementById('{name}').textContent"))


LIVE = "document.getElementById('state').textContent.includes('live')"


@pytest.mark.parametrize("canned", [*RANKS, None], indirect=True)
def test_every_algorithm_is_shown(page: Page, canned: Canned) -> None:
    page.look(1280, 900, "light")
    page.open(f"http://127.0.0.1:{canned.port}/graft/")
    page.wait(LIVE)
    if canned.algorithm is None:
        assert "no speculation" in text(page, "algorithm")
    else:
        page.wait("document.querySelectorAll('#history polyline').length", 20)
        assert text(page, "now") == text(page, "since") == "2.20"
        shapes = page.run("document.querySelectorAll('#tree circle, #tree rect').length")
        assert shapes == len(TREE["parents"])
        assert "2 of the draft, 2 retrieved, 1 of both; 2 accepted" in text(page, "tree-note")
    assert ("Gate" in page.run("document.body.innerText")) == (canned.algorithm == "GRAFT")
    assert ("Block sizes" in page.run("document.body.innerText")) == (canned.algorithm == "BLOCKPILOT")
    assert ("rollback" in text(page, "events")) == (canned.algorithm == "SPECBLOCK")
    assert page.problems() == []


def test_sources_and_acceptance_differ_by_more_than_colour(page: Page, canned: Canned) -> None:
    page.open(f"http://127.0.0.1:{canned.port}/graft/")
    page.wait("document.querySelectorAll('#tree rect').length")
    kinds = page.run(
        "[...document.querySelectorAll('#tree > g')].map(g => [g.firstChild.tagName,"
        " g.firstChild.hasAttribute('transform'), g.querySelectorAll('path').length])"
    )
    # circle, circle with a tick; square; turned square with a tick; square; circle
    assert kinds == [
        ["circle", False, 1], ["circle", False, 1], ["rect", False, 0],
        ["rect", True, 1], ["rect", False, 0], ["circle", False, 0],
    ]  # fmt: skip
    titles = page.run("[...document.querySelectorAll('#tree title')].map(title => title.textContent)")
    assert titles[1] == "draft, accepted" and titles[2] == "table, not accepted"


def test_words_are_shown_when_asked_for_and_never_as_markup(page: Page, canned: Canned) -> None:
    page.open(f"http://127.0.0.1:{canned.port}/graft/")
    page.wait(LIVE)
    assert page.run("document.querySelectorAll('#tree text').length") == 0
    page.run("document.getElementById('words').click()")
    page.wait("document.querySelectorAll('#tree text').length == 6")
    assert page.run("[...document.querySelectorAll('#tree text')].map(t => t.textContent)")[2:4] == [
        "<b>",
        "\\n",
    ]
    assert page.run("document.querySelectorAll('#tree b').length") == 0


def test_it_survives_a_restart_of_the_server(page: Page, canned: Canned) -> None:
    page.open(f"http://127.0.0.1:{canned.port}/graft/")
    page.wait("document.querySelectorAll('#history polyline').length", 20)
    canned.stop()
    page.wait("document.getElementById('state').textContent.includes('no answer')", 30)
    before = page.run("points.length")
    canned.start()
    page.wait(LIVE, 30)
    page.wait(f"points.length > {before}", 30)
    assert page.run("starts.length") == 1
    assert page.run("document.querySelectorAll('#history [stroke-dasharray]').length") == 1
    assert float(text(page, "now")) == 2.2, "counters that began anew are not a negative rate"
    assert page.problems() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_a_phone_and_a_desk_in_both_schemes(
    page: Page, canned: Canned, width: int, scheme: str, tmp_path: Path
) -> None:
    page.look(width, 800, scheme)
    page.open(f"http://127.0.0.1:{canned.port}/graft/")
    page.wait("document.querySelectorAll('#tree rect').length")
    assert page.run("document.documentElement.scrollWidth") <= width
    label = page.wait(
        "(document.querySelector('#history .axis') || document.body).getBoundingClientRect().height"
    )
    assert label > 8, "an axis that nobody can read"
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    for name in ("--ink", "--soft", "--draft", "--table", "--both", "--good", "--bad"):
        assert contrast(page, name, "--card") >= 4.5, name
    luminance = page.run("getComputedStyle(document.body).backgroundColor")
    assert (luminance == "rgb(13, 17, 23)") == (scheme == "dark")


def contrast(page: Page, ink: str, paper: str) -> float:
    """WCAG 2's ratio of two of the page's colours."""

    def luminance(name: str) -> float:
        value = page.run(f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()")
        channels = [int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((luminance(ink), luminance(paper)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)
