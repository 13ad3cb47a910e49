"""The arithmetic: percentiles, accept length, and one row of results per cell."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sgl_graft.bench.records import CellRecord, RequestRecord


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(np.asarray(values, dtype=float), [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


def accept_length(requests: Iterable[RequestRecord]) -> float | None:
    """Tokens committed by verifies over number of verifies: bonus included, the prefill's token excluded.

    Only tokens that reached the client count: what the last verify committed past the length limit does not.
    """
    tokens = verifies = 0
    for request in requests:
        if request.num_verifies:
            tokens += len(request.output_ids) - 1
            verifies += request.num_verifies
    return tokens / verifies if verifies else None


def inter_token_ms(request: RequestRecord) -> list[float]:
    """One latency per token after the first chunk; the tokens of one chunk share its wait equally, as in
    SGLang's own bench_serving."""
    latencies = []
    for (before, _), (now, count) in zip(request.arrivals, request.arrivals[1:], strict=False):
        latencies += [(now - before) / count] * count
    return latencies


def run_row(record: CellRecord, identical: int | None, compared: int) -> dict[str, Any]:
    """One entry of `runs` in the output file; the first block of keys is a stable interface."""
    requests, use = record.requests, record.use
    length = accept_length(requests)
    cpu_per_token = None if use.server_cpu_s is None else use.server_cpu_s / record.output_tokens
    return {
        "variant": record.cell.variant,
        "dataset": record.cell.dataset,
        "temperature": record.cell.temperature,
        "concurrency": record.cell.concurrency,
        "repeat": record.cell.repeat,
        "num_requests": len(requests),
        "output_tokens": record.output_tokens,
        "tokens_per_s": round(record.output_tokens / record.wall_s, 3),
        "accept_length": None if length is None else round(length, 4),
        "ttft_ms": percentiles([request.ttft_ms for request in requests]),
        "itl_ms": percentiles([ms for request in requests for ms in inter_token_ms(request)]),
        "identical": identical,
        "compared": compared,
        "warm": record.warm,
        "started": record.started,
        "wall_s": round(record.wall_s, 3),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "cached_tokens": sum(request.cached_tokens for request in requests),
        "num_verifies": sum(request.num_verifies or 0 for request in requests) or None,
        "server_cpu_s_per_token": None if cpu_per_token is None else round(cpu_per_token, 5),
        "idle_servers_cpu_s": round(use.idle_servers_cpu_s, 3),
        "foreign_cores": round(use.foreign_cores, 3),
        "load": {"before": use.load_before, "after": use.load_after},
    }


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median over repeats per variant, data set, temperature and concurrency, then the mean of the files."""
    groups: dict[tuple[str, float, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["variant"], row["temperature"], row["concurrency"], row["dataset"])
        groups.setdefault(key, []).append(row)
    per_file: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for (variant, temperature, concurrency, dataset), members in groups.items():
        entry = {
            "variant": variant,
            "dataset": dataset,
            "temperature": temperature,
            "concurrency": concurrency,
            "repeats": len(members),
            "tokens_per_s": median(row["tokens_per_s"] for row in members),
            "accept_length": median(row["accept_length"] for row in members),
            "ttft_ms_p50": median(row["ttft_ms"]["p50"] for row in members),
            "itl_ms_p50": median(row["itl_ms"]["p50"] for row in members),
            "itl_ms_p99": median(row["itl_ms"]["p99"] for row in members),
            "server_cpu_s_per_token": median(row["server_cpu_s_per_token"] for row in members),
            "identical": sum(row["identical"] or 0 for row in members),
            "compared": sum(row["compared"] for row in members),
        }
        per_file.setdefault((variant, temperature, concurrency), []).append(entry)
    summary: list[dict[str, Any]] = []
    for entries in per_file.values():
        summary += entries
        if len(entries) > 1:
            summary.append(_mean_of_files(entries))
    return summary


ALL_FILES = "mean of files"


def _mean_of_files(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    averaged = {
        key: mean(entry[key] for entry in entries)
        for key in entries[0]
        if key.startswith(("tokens_per_s", "accept", "ttft", "itl", "server_cpu"))
    }
    totals = {key: sum(entry[key] for entry in entries) for key in ("identical", "compared")}
    return {**entries[0], "dataset": ALL_FILES, **averaged, **totals}
