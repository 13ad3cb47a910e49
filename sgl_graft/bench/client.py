"""Drives one server over HTTP: streams `/generate`, keeps a fixed number of requests in flight."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from sgl_graft.bench.plan import Sampling
from sgl_graft.bench.prompts import Prompt
from sgl_graft.bench.records import RequestRecord

# What forgets things on a server: SGLang's prefix cache, then whatever a plugin has learned. A route that the
# server does not have is skipped, except the first.
CLEAR_ROUTES = ("/flush_cache", "/graft/table/clear")
WARM_UP_IDS = tuple(range(100, 132))


class ServerError(RuntimeError):
    """A server that answered with an error, or not at all."""


def run_requests(
    url: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    temperature: float,
    concurrency: int,
    timeout_s: float,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[tuple[RequestRecord, ...], float]:
    """All prompts in order, `concurrency` at a time; returns their records and the wall time in seconds."""
    return asyncio.run(_run(url, prompts, sampling, temperature, concurrency, timeout_s, on_done))


async def _run(
    url: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    temperature: float,
    concurrency: int,
    timeout_s: float,
    on_done: Callable[[], None],
) -> tuple[tuple[RequestRecord, ...], float]:
    waiting = list(reversed(prompts))
    records: list[RequestRecord] = []

    async def worker(client: httpx.AsyncClient) -> None:
        while waiting:
            prompt = waiting.pop()
            body = {
                "input_ids": list(prompt.input_ids),
                "sampling_params": sampling.params(temperature, prompt.seed),
                "stream": True,
            }
            records.append(await stream_one(client, url, prompt.index, body))
            on_done()

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(timeout=timeout_s, limits=limits, **_transport(url)) as client:
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(worker(client))
        except* (ServerError, httpx.HTTPError) as errors:
            first = errors.exceptions[0]
            raise ServerError(f"{url}: {first or type(first).__name__}") from first
        wall_s = time.perf_counter() - start
    return tuple(sorted(records, key=lambda record: record.index)), wall_s


async def stream_one(client: httpx.AsyncClient, url: str, index: int, body: dict[str, Any]) -> RequestRecord:
    output_ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    meta: dict[str, Any] = {}
    start = time.perf_counter()
    async with client.stream("POST", f"{url}/generate", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise ServerError(f"prompt {index}: HTTP {response.status_code}: {text[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            payload = line[len("data:") :].strip()
            if payload == "[DONE]":
                break
            event = json.loads(payload)
            if "error" in event:
                raise ServerError(f"prompt {index}: {event['error']}")
            meta = event["meta_info"]
            num_before = len(output_ids)
            output_ids = _extend(output_ids, event["output_ids"], meta["completion_tokens"])
            if len(output_ids) > num_before:
                elapsed_ms = round((time.perf_counter() - start) * 1000, 2)
                arrivals.append((elapsed_ms, len(output_ids) - num_before))
    return _record(index, output_ids, arrivals, meta)


def _transport(url: str) -> dict[str, Any]:
    """Straight to the server, past any proxy; certificates, 50 ms a client, are loaded only for https."""
    return {"trust_env": False, "verify": url.startswith("https")}


def _extend(known: list[int], received: list[int], total: int) -> list[int]:
    """A chunk holds all ids so far, or, with --incremental-streaming-output, only the new ones."""
    return received if len(received) == total else known + received


def _record(
    index: int, output_ids: list[int], arrivals: list[tuple[float, int]], meta: dict[str, Any]
) -> RequestRecord:
    finish = (meta.get("finish_reason") or {}).get("type")
    if finish not in ("length", "stop") or not arrivals:
        raise ServerError(
            f"prompt {index}: ended as {meta.get('finish_reason')} after {len(output_ids)} tokens"
        )
    if len(output_ids) != meta["completion_tokens"]:
        raise ServerError(
            f"prompt {index}: {len(output_ids)} tokens streamed, {meta['completion_tokens']} reported"
        )
    return RequestRecord(
        index=index,
        output_ids=tuple(output_ids),
        arrivals=tuple(arrivals),
        num_verifies=meta.get("spec_verify_ct"),
        finish=finish,
        prompt_tokens=meta.get("prompt_tokens", 0),
        cached_tokens=meta.get("cached_tokens", 0),
    )


def clear_learned(url: str, timeout_s: float = 60) -> None:
    """Empty the prefix cache and everything a plugin has learned; waits until the server is idle enough."""
    with httpx.Client(timeout=timeout_s, **_transport(url)) as client:
        for route in CLEAR_ROUTES:
            deadline = time.monotonic() + timeout_s
            while (response := client.post(url + route)).status_code == 400 and time.monotonic() < deadline:
                time.sleep(0.2)
            missing = response.status_code in (404, 405) and route != CLEAR_ROUTES[0]
            if not missing and response.status_code != 200:
                raise ServerError(f"{url}{route}: HTTP {response.status_code}: {response.text[:200]}")


def warm_up(url: str, concurrency: int, timeout_s: float) -> None:
    """Unmeasured requests that pay for lazy imports and first-time allocations at the largest batch."""
    prompts = [Prompt(i, (*WARM_UP_IDS, 100 + i), i) for i in range(concurrency)]
    run_requests(url, prompts, Sampling(16), temperature=0.0, concurrency=concurrency, timeout_s=timeout_s)


def server_info(url: str, timeout_s: float = 30) -> dict[str, Any]:
    try:
        response = httpx.get(f"{url}/server_info", timeout=timeout_s, **_transport(url))
        response.raise_for_status()
        return dict(response.json())
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"{url}/server_info: {error or type(error).__name__}") from error


def top_gap(url: str, prompt: Prompt, position: int, timeout_s: float) -> float:
    """Difference of the two best log-probabilities at one output position of the greedy run."""
    body = {
        "input_ids": list(prompt.input_ids),
        "sampling_params": {"max_new_tokens": position + 1, "temperature": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=timeout_s, **_transport(url))
    if response.status_code != 200:
        raise ServerError(f"{url}: HTTP {response.status_code}: {response.text[:500]}")
    (best, *_), (second, *_) = response.json()["meta_info"]["output_top_logprobs"][position][:2]
    return float(best - second)
