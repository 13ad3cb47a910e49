"""A running server as the tests see it: requests go in, answers and log lines come out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from sgl_graft.bench.server import ServerProcess

Payload = dict[str, Any]
Answer = dict[str, Any]
REQUEST_TIMEOUT_S = 240.0


@dataclass
class Server:
    """One server process and the target folder it serves."""

    process: ServerProcess
    model: Path

    @property
    def url(self) -> str:
        return self.process.url

    @cached_property
    def client(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits)

    def poll(self) -> int | None:
        """Exit code of the server, None while it runs."""
        return self.process._process.poll()

    def generate(self, payload: Payload) -> Any:
        """Answer of ``/generate``: one dictionary, or a list of them for a list of prompts or ``n`` > 1."""
        answer = self.client.post("/generate", json=payload)
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}\n{self.process.log_tail()}"
        return answer.json()

    def generate_all(self, payloads: Sequence[Payload], concurrency: int) -> list[Any]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(self.generate, payloads))

    def stream(self, payload: Payload) -> Iterator[Answer]:
        """Chunks of a streamed answer; closing the iterator early drops the connection."""
        with self.client.stream("POST", "/generate", json=payload | {"stream": True}) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data:") and not line.endswith("[DONE]"):
                    yield json.loads(line.removeprefix("data:"))

    def info(self) -> Answer:
        answer: Answer = self.client.get("/server_info").json()
        return answer

    def tokens_in_use(self) -> int:
        """KV slots held by running requests (what only the radix cache holds does not count)."""
        (load,) = self.client.get("/v1/loads").json()["loads"]
        return int(load["num_used_tokens"])

    def flush(self) -> None:
        assert self.client.post("/flush_cache").status_code == 200

    def log_text(self) -> str:
        return self.process.log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        self.client.close()
        self.process.stop()


class Reference:
    """Answers of plain decoding, one request at a time, each asked for once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._answers: dict[str, Any] = {}

    def __call__(self, payload: Payload) -> Any:
        key = json.dumps(payload, sort_keys=True)
        if key not in self._answers:
            self._answers[key] = self.server.generate(payload)
        return self._answers[key]

    def together(self, payloads: Sequence[Payload]) -> list[Any]:
        """Answers to long requests, asked for at once because one at a time would take too long."""
        key = json.dumps(payloads, sort_keys=True)
        if key not in self._answers:
            self._answers[key] = self.server.generate_all(payloads, len(payloads))
        answers: list[Any] = self._answers[key]
        return answers


Start = Callable[..., Server]
