"""A headless Chromium (Debian's package), driven over a pipe in its own DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    PROGRAM is None, reason="chromium is not installed: apt-get install chromium"
)
TIMEOUT_S = 60.0


class Chromium:
    """One browser; use as a context manager.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        flags = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
            *("--disable-background-networking", f"--user-data-dir={folder}", "--disable-dev-shm-usage"),
        ]
        # The browser reads commands from descriptor 3 and writes to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "chromium", PROGRAM, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._to)
        os.close(self._from)

    def page(self) -> Page:
        """A new, empty page."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") != self._number:
                self.events.append(answer)
                continue
            assert "error" not in answer, f"{method}: {answer['error']}"
            result: dict[str, Any] = answer["result"]
            return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert time.monotonic() < deadline, "the browser does not answer"
            self._rest += os.read(self._from, 2**20)
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


class Page:
    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def look(self, width: int, height: int, scheme: str) -> None:
        """Have the size of a screen, and a colour scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str, address: str = "") -> None:
        """Load a page; `address` is what the browser then shows, where it hides a part of the URL."""
        self.send("Page.navigate", url=url)
        shown = json.dumps(address or url)
        self.wait(f"location.href === {shown} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = TIMEOUT_S) -> Any:
        """The first true value of an expression."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"{script} is {value!r} after {seconds} s"
            time.sleep(0.2)
        return value

    def problems(self) -> list[str]:
        """What went wrong in the page's scripts so far; failed requests do not count."""
        self.run("0")  # brings events in
        thrown = [event for event in self._browser.events if event["method"] == "Runtime.exceptionThrown"]
        logged = [
            event["params"]["entry"] for event in self._browser.events if event["method"] == "Log.entryAdded"
        ]
        blocked = [entry for entry in logged if entry["level"] == "error" and entry["source"] != "network"]
        return [json.dumps(item) for item in [*thrown, *blocked]]

    def screenshot(self, path: Path) -> None:
        """The whole page, however long."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))
