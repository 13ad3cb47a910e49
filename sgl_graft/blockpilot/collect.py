"""Really runs every candidate size of every prompt, and measures what a round of each width costs.

All sizes of a prompt go to one BLOCKPILOT server as per-request block sizes. What is written is appended to
``runs.jsonl`` as it comes, so an interrupted collection goes on where it was. A size is ended early when it
can no longer be the cheapest of its prompt, even if every round to come committed its whole block.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from .costs import CostTable
from .labels import Rule, Run, can_still_win

RUNS_NAME = "runs.jsonl"


@dataclass(frozen=True)
class LabelPrompt:
    """One prompt to run.

    Attributes:
        key: identifies it in every file of the run.
        group: its data set.
        ids: token ids.
    """

    key: str
    group: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class CollectPlan:
    """What is run.

    Attributes:
        sizes: block sizes, the default among them.
        default: run first; it says how long the answer is.
        tokens: tokens per answer at most.
        temperature: 0 is greedy, with one run per size; above, one run per seed.
        seeds: runs per size at a temperature above 0.
        concurrency: requests in flight.
    """

    sizes: tuple[int, ...]
    default: int
    tokens: int
    temperature: float = 0.0
    seeds: int = 4
    concurrency: int = 8

    @property
    def seed_values(self) -> tuple[int, ...]:
        return (0,) if self.temperature == 0 else tuple(range(1, self.seeds + 1))


def read_runs(folder: Path, rule: Rule = "time") -> list[Run]:
    """What was collected so far for labels by ``rule``: also whole runs that another rule asked for.

    A line that was cut off by an interruption is left out, and so is a run that another rule ended early.
    """
    path = folder / RUNS_NAME
    runs: list[Run] = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                runs.append(Run(**json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                continue
    return [run for run in runs if not run.stopped or run.rule == rule]


class Collector:
    """Collects the runs of a plan from one server.

    Args:
        url: of a BLOCKPILOT server whose largest size covers the plan's.
        folder: where ``runs.jsonl`` is.
        costs: what a round costs by size, for stopping early; None counts rounds, for labels by ``accept``.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        plan: CollectPlan,
        costs: CostTable | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url
        self.plan = plan
        self.costs = costs
        self.timeout_s = timeout_s
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RUNS_NAME
        if self.path.is_file() and not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a") as file:
                file.write("\n")  # ends a line that an interruption cut off
        self.rule: Rule = "accept" if costs is None else "time"
        self.known = {(run.prompt, run.size, run.seed): run for run in read_runs(folder, self.rule)}

    def cost(self, size: int) -> float:
        return 1.0 if self.costs is None else self.costs.cost(1, size)

    def collect(self, prompts: Sequence[LabelPrompt], on_done: Callable[[Run], None]) -> list[Run]:
        """Run what is missing; returns all runs of these prompts."""
        asyncio.run(self._collect(prompts, on_done))
        keys = {prompt.key for prompt in prompts}
        return [run for run in self.known.values() if run.prompt in keys]

    async def _collect(self, prompts: Sequence[LabelPrompt], on_done: Callable[[Run], None]) -> None:
        jobs = [(prompt, seed) for prompt in prompts for seed in self.plan.seed_values]
        waiting = list(reversed(jobs))
        limits = httpx.Limits(max_connections=self.plan.concurrency)

        async def worker(client: httpx.AsyncClient) -> None:
            while waiting:
                prompt, seed = waiting.pop()
                await self._one_prompt(client, prompt, seed, on_done)

        async with (
            httpx.AsyncClient(timeout=self.timeout_s, limits=limits, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(min(self.plan.concurrency, len(jobs))):
                group.create_task(worker(client))

    async def _one_prompt(
        self, client: httpx.AsyncClient, prompt: LabelPrompt, seed: int, on_done: Callable[[Run], None]
    ) -> None:
        """The default first, then the nearest to it: they set the bar that the others must clear."""
        plan = self.plan
        order = sorted(plan.sizes, key=lambda size: (abs(size - plan.default), size))
        best, total = float("inf"), plan.tokens
        for size in order:
            run = self.known.get((prompt.key, size, seed))
            if run is None:
                run = await self._decode(client, prompt, size, seed, total, best)
                self.known[prompt.key, size, seed] = run
                with self.path.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
                on_done(run)
            if not run.stopped:
                best = min(best, run.rounds * self.cost(size))
                total = run.tokens
        return

    async def _decode(
        self, client: httpx.AsyncClient, prompt: LabelPrompt, size: int, seed: int, total: int, best: float
    ) -> Run:
        sampling: dict[str, Any] = {
            "max_new_tokens": self.plan.tokens,
            "temperature": self.plan.temperature,
            "custom_params": {"graft": {"block_size": size}},
        }
        if self.plan.temperature > 0:
            sampling["sampling_seed"] = seed
        body = {"input_ids": list(prompt.ids), "sampling_params": sampling, "stream": True}
        tokens = rounds = 0
        stopped = False
        async with client.stream("POST", f"{self.url}/generate", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise ValueError(f"{prompt.key} at size {size}: HTTP {response.status_code}: {text[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                meta = json.loads(line[len("data:") :])["meta_info"]
                tokens, rounds = meta["completion_tokens"], meta.get("spec_verify_ct") or 0
                finished = meta.get("finish_reason") is not None
                if not finished and not can_still_win(rounds, tokens, size, total, best, self.cost(size)):
                    stopped = True
                    break  # closing the stream ends the request on the server
        return Run(prompt.key, size, tokens, max(rounds, 1), seed, stopped, self.rule)


def measure_costs(
    url: str,
    prompts: Sequence[LabelPrompt],
    sizes: Iterable[int],
    batches: Sequence[int],
    *,
    tokens: int,
    machine: str,
    device: str,
    timeout_s: float = 600.0,
    on_done: Callable[[int, int, float], None] = lambda batch, size, seconds: None,
) -> CostTable:
    """Seconds of a round by batch size and block size: the same prompts, all at one size, ``batch`` at once.

    The time is taken between a request's first and last token, where all ``batch`` requests are decoding;
    the fastest half of the requests counts, so that what else the machine did weighs less.
    """
    seconds: dict[int, dict[int, float]] = {}
    total = 0
    for batch in batches:
        for size in sorted({1, *sizes}):
            per_round, rounds = asyncio.run(_uniform(url, prompts, size, batch, tokens, timeout_s))
            seconds.setdefault(batch, {})[size] = per_round
            total += rounds
            on_done(batch, size, per_round)
    return CostTable(seconds=seconds, machine=machine, device=device, rounds=total)


async def _uniform(
    url: str, prompts: Sequence[LabelPrompt], size: int, batch: int, tokens: int, timeout_s: float
) -> tuple[float, int]:
    async def one(client: httpx.AsyncClient, prompt: LabelPrompt) -> tuple[float, int]:
        body = {
            "input_ids": list(prompt.ids),
            "stream": True,
            "sampling_params": {
                "max_new_tokens": tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "custom_params": {"graft": {"block_size": size}},
            },
        }
        times: list[float] = []
        rounds: list[int] = []
        async with client.stream("POST", f"{url}/generate", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data:") and not line.endswith("[DONE]"):
                    meta = json.loads(line[len("data:") :])["meta_info"]
                    times.append(time.perf_counter())
                    rounds.append(meta.get("spec_verify_ct") or 0)
        return times[-1] - times[0], rounds[-1] - rounds[0]

    measured: list[tuple[float, int]] = []
    async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            if len(group) == batch:
                measured += await asyncio.gather(*(one(client, prompt) for prompt in group))
    if not measured:
        raise ValueError(f"{len(prompts)} prompts do not fill one batch of {batch}: give more prompts")
    rates = sorted(time / count for time, count in measured if count > 0)
    kept = rates[: max(1, len(rates) // 2)]
    return sum(kept) / len(kept), sum(count for _, count in measured)


def shipped_label_prompts(target: str, num_prompts: int) -> tuple[LabelPrompt, ...]:
    """Prompts of the dialogues a shipped draft was trained on, an equal share of every source.

    Raises:
        ValueError: no dialogues ship for this target.
    """
    from ..draft_training.dialogues import shipped_openings

    openings = shipped_openings(target, num_prompts)
    return tuple(LabelPrompt(f"{source}:{number}", source, ids) for source, number, ids in openings)
