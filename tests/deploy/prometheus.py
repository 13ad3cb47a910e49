"""A real Prometheus over servers of this machine."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgl_graft.bench.server import free_port

from .chart import Object, only

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
)
# As a ServiceMonitor labels them.
LABELS = {"namespace": "llm", "service": "demo-sgl-graft", "pod": "demo-0"}


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """Data of an answer of its API; None while it does not answer."""
        try:
            query = urllib.parse.urlencode(parameters)
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list((self.ask("query", query=expression) or {"result": []})["result"])

    def firing(self) -> set[str]:
        alerts = (self.ask("alerts") or {"alerts": []})["alerts"]
        return {item["labels"]["alertname"] for item in alerts if item["state"] == "firing"}


def rules_of(objects: list[Object]) -> dict[str, Any]:
    rules: dict[str, Any] = only(objects, "PrometheusRule")["spec"]
    return rules


def hurried(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules for a test of minutes: nothing has to last, and windows are a fortieth, at least 20 s."""

    def shorter(match: re.Match[str]) -> str:
        seconds = int(match[1]) * {"m": 60, "h": 3600}[match[2]]
        return f"[{max(seconds // 40, 20)}s]"

    group = rules["groups"][0]
    quick = [
        {key: value for key, value in rule.items() if key != "for"}
        | {"expr": re.sub(r"\[(\d+)([mh])\]", shorter, rule["expr"])}
        for rule in group["rules"]
    ]
    return {"groups": [group | {"rules": quick}]}


@contextlib.contextmanager
def prometheus(port: int, rules: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """Scrapes the server at `port` every three seconds: a busy one may take that long to answer."""
    own = free_port()
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    target = {"targets": [f"127.0.0.1:{port}"], "labels": LABELS}
    config = {
        "global": {"scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [{"job_name": "engine", "static_configs": [target]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://127.0.0.1:{own}")
    finally:
        process.terminate()
        process.wait(30)
