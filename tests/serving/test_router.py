"""Two replicas behind SGLang's router, one of which is killed half-way: what clients see.

The router's arguments are the chart's, with the replicas' addresses in place of service discovery.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sgl_graft.bench.server import free_port

from .conftest import READY_TIMEOUT_S, ROOMY, TIGHT
from .payloads import PROMPTS, request
from .server import Server, Start
from .variants import EAGLE_TREE, Variant

pytestmark = pytest.mark.soak

REQUESTS, CONCURRENCY, TOKENS = 200, 8, 24
HEALTH_INTERVAL_S = 10.0  # the chart's
GRAFT = Variant("routed", "GRAFT", EAGLE_TREE.shape)


@dataclass
class Outcome:
    """One request as its client saw it."""

    began: float
    ended: float
    status: int  # 0: no answer
    right: bool
    text: str


@pytest.fixture
def replicas(start_server: Start, tiny: dict[str, Path]) -> Iterator[list[Server]]:
    args = (*ROOMY, *TIGHT[2:4], *GRAFT.args(str(tiny["draft"])))
    servers = [start_server(f"routed-{i}", tiny["llama"], *args, OMP_NUM_THREADS="1") for i in range(2)]
    for server in servers:
        server.process.wait_ready(READY_TIMEOUT_S)
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def router(replicas: list[Server], tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", "cache_aware", "--worker-urls", *(server.url for server in replicas)),
        *("--health-check-endpoint", "/ready", "--health-check-interval-secs", f"{HEALTH_INTERVAL_S:.0f}"),
        *("--prometheus-port", str(free_port())),
    ]
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if httpx.post(f"{url}/generate", json=request(tokens=2), timeout=60).status_code == 200:
                break
        except httpx.HTTPError:
            time.sleep(0.5)
    yield url
    process.terminate()
    process.wait(30)


def test_a_killed_replica_costs_at_most_what_was_in_flight(replicas: list[Server], router: str) -> None:
    prompts = [f"{PROMPTS[i % len(PROMPTS)]}{i % 25} " for i in range(REQUESTS)]
    expected = {prompt: replicas[0].generate(request(prompt, TOKENS))["text"] for prompt in set(prompts)}
    waiting = list(enumerate(prompts))
    outcomes: list[Outcome] = []
    lock, killed_at = threading.Lock(), [0.0]

    def work() -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            while True:
                with lock:
                    if not waiting:
                        return
                    _, prompt = waiting.pop(0)
                    if len(waiting) == REQUESTS // 2:
                        kill(replicas[1])
                        killed_at[0] = time.monotonic()
                outcomes.append(ask(client, router, prompt, expected[prompt]))

    threads = [threading.Thread(target=work) for _ in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    failed = [outcome for outcome in outcomes if outcome.status != 200]
    wrong = [outcome for outcome in outcomes if outcome.status == 200 and not outcome.right]
    late = [outcome for outcome in failed if outcome.began > killed_at[0] + 2 * HEALTH_INTERVAL_S]
    recovered = max((outcome.ended - killed_at[0] for outcome in failed), default=0.0)
    slowest = max(o.ended - o.began for o in outcomes if o.ended > killed_at[0])
    print(
        f"{len(outcomes)} requests, {len(wrong)} wrong, {len(failed)} failed "
        f"({sorted({outcome.status for outcome in failed})}), the last {recovered:.1f} s after the kill; "
        f"slowest afterwards {slowest:.1f} s"
    )
    assert len(outcomes) == REQUESTS and not wrong
    assert len(failed) <= CONCURRENCY, [outcome.text for outcome in failed]
    assert not late
    # The other replica alone answers everything now.
    with httpx.Client(timeout=120, trust_env=False) as client:
        assert all(ask(client, router, prompt, expected[prompt]).right for prompt in prompts[:16])


def kill(server: Server) -> None:
    """The whole pod, without a goodbye."""
    for process in server.process.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def ask(client: httpx.Client, url: str, prompt: str, expected: str) -> Outcome:
    began = time.monotonic()
    status, text = 0, ""
    try:
        answer = client.post(f"{url}/generate", json=request(prompt, TOKENS))
        status, text = answer.status_code, answer.text
        body: Any = answer.json() if status == 200 else {}
        right = body.get("text") == expected
    except httpx.HTTPError as error:
        text, right = repr(error), False
    return Outcome(began, time.monotonic(), status, right, text)
