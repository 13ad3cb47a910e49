"""Fits Graft-TAIL's acceptance maps: serve training prompts once, count which candidates come true."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from ..bench.server import ServerProcess
from ..cli.serve import TreeSettings, default_server_args
from ..graft.calibration import Calibration, fit_maps, write_calibration
from .collect import LabelPrompt
from .tail_rule import auc_by_offset


def calibrate_tail(
    target: Path,
    draft: Path,
    prompts: Sequence[LabelPrompt],
    output: Path,
    *,
    tokens: int,
    temperature: float = 0.0,
    concurrency: int = 8,
    slots: int | None = None,
    timeout_s: float = 600.0,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[Calibration, list[float], list[float]]:
    """Serve the prompts with ``tail_graft`` and write the fitted maps to ``output``.

    Args:
        prompts: training prompts, never the files that are measured on.
        slots: the server's largest block; None: what the draft was trained at.

    Returns:
        the calibration, and how well the draft's confidence, and the table's, order right before wrong at
        each offset (AUC).

    Raises:
        ValueError: nothing was counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        collected, config = Path(folder) / "counters.json", Path(folder) / "blockpilot.json"
        section = {"policy": "fixed", "tail_graft": True, "collect": str(collected)}
        config.write_text(json.dumps({"blockpilot": section}))
        settings = TreeSettings(slots=slots, config=config)
        args = default_server_args("BLOCKPILOT", target=target, draft=draft, tree=settings)
        with ServerProcess("tail-calibration", args, Path(folder) / "server.log") as server:
            server.wait_ready(timeout_s)
            work = _serve(server.url, prompts, tokens, temperature, concurrency, timeout_s, on_done)
            asyncio.run(work)
        if not collected.is_file():
            raise ValueError("the server counted no candidates: give more prompts or longer answers")
        counters = json.loads(collected.read_text())
    map_x, map_y = fit_maps(counters)
    calibration = Calibration(
        target=target.name,
        vocab_size=counters["vocab_size"],
        map_x=map_x,
        map_y=map_y,
        rounds=counters["rounds"],
    )
    write_calibration(output, calibration)
    by_source = zip(counters["seen"], counters["true"], strict=True)
    draft_auc, table_auc = (auc_by_offset(seen, true) for seen, true in by_source)
    return calibration, draft_auc, table_auc


async def _serve(
    url: str,
    prompts: Sequence[LabelPrompt],
    tokens: int,
    temperature: float,
    concurrency: int,
    timeout_s: float,
    on_done: Callable[[], None],
) -> None:
    waiting = list(reversed(prompts))

    async def worker(client: httpx.AsyncClient) -> None:
        while waiting:
            prompt = waiting.pop()
            body = {
                "input_ids": list(prompt.ids),
                "sampling_params": {"max_new_tokens": tokens, "temperature": temperature},
            }
            answer = await client.post(f"{url}/generate", json=body)
            if answer.status_code != 200:
                raise ValueError(f"{prompt.key}: HTTP {answer.status_code}: {answer.text[:300]}")
            on_done()

    async with (
        httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(worker(client))
