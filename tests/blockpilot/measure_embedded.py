"""Block sizes and policies on the embedded model, in one process: accept length, CPU time, equal answers.

    python -m tests.blockpilot.measure_embedded --draft DIR --variants 1,4,8,16,ewma,tail --output OUT.json

A whole scheduler runs in this process and serves the same prompts once per variant: a number is a block size
for every request, ``ewma`` the policy of that name (it needs ``--costs``), ``tail`` Graft-TAIL at the default
size, ``random`` a new size in every round. Time is CPU time of the one thread that computes, so neighbours
on a shared machine do not count; prefills are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

FILES = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")
EVAL = Path("/work/shared/data/eval")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variants", default="1,4,8,16,tail")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=2, help="per file")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--costs", type=Path, help="cost table for ewma; `measure` writes it there first")
    parser.add_argument("--measure", action="store_true", help="measure the cost table of batches 1 and 8")
    parser.add_argument("--calibration", type=Path, help="acceptance maps for tail")
    parser.add_argument("--longest", type=int, default=700, help="prompts are cut to so many tokens")
    return parser.parse_args()


def load_prompts(target: Path, count: int, longest: int) -> list[tuple[str, list[int]]]:
    from sgl_graft.bench.prompts import load_datasets, load_tokenizer

    files = [EVAL / f"{name}.jsonl" for name in FILES]
    datasets = load_datasets(files, count, load_tokenizer(target))
    return [
        (dataset.name, list(prompt.input_ids)[:longest]) for dataset in datasets for prompt in dataset.prompts
    ]


class Bench:
    """One scheduler; every call of :meth:`run` serves the prompts once."""

    def __init__(self, options: argparse.Namespace) -> None:
        from sgl_graft import models

        from .probe import start

        self.options = options
        self.target = Path(models.get("smollm2-135m-instruct"))
        self.prompts = load_prompts(self.target, options.prompts, options.longest)
        config = {"blockpilot": {"policy": "fixed"}}
        self.scheduler = start(
            self.target,
            options.draft,
            config,
            *("--speculative-num-draft-tokens", str(options.slots), "--max-total-tokens", "32768"),
            *("--context-length", "4096"),
        )
        self.worker = self.scheduler.draft_worker
        self.default = self.worker.state.shape.default
        self.calls = 0

    def run(
        self, size: int | None, prompts: list[tuple[str, list[int]]], tokens: int, concurrency: int
    ) -> dict[str, Any]:
        """Serve; figures by file and in all. ``size`` None leaves the policy to it."""
        from tests.scheduler import step

        from .probe import request

        self.calls += 1
        scheduler = self.scheduler
        settings = None if size is None else {"block_size": size}
        waiting = list(enumerate(prompts))
        live: dict[str, Any] = {}
        finished: dict[str, Any] = {}
        seconds, rounds = 0.0, 0
        while waiting or live:
            while waiting and len(live) < concurrency:
                at, (_, ids) = waiting.pop(0)
                asked = request(
                    scheduler, f"{self.calls}-{at}", ids, settings, tokens,
                    temperature=self.options.temperature, sampling_seed=at,
                )  # fmt: skip
                scheduler.process_input_requests([asked])
                live[f"{self.calls}-{at}"] = None
            decodes = []
            start = time.thread_time()
            ran = step(scheduler, lambda batch, _, seen=decodes: seen.append(batch.forward_mode.is_decode()))
            if any(decodes):
                seconds += time.thread_time() - start
                rounds += 1
            for req in ran:
                if req.finished():
                    finished[req.rid] = req
                    live.pop(req.rid, None)
        by_file: dict[str, list[int]] = {}
        answers = []
        for at, (name, _) in enumerate(prompts):
            req = finished[f"{self.calls}-{at}"]
            cell = by_file.setdefault(name, [0, 0])
            cell[0] += len(req.output_ids) - 1  # the prefill's token is not a verify's
            cell[1] += req.spec_verify_ct
            answers.append(list(req.output_ids_through_stop))  # a run may reach beyond the end
        tokens_in_all = sum(cell[0] for cell in by_file.values())
        verifies = sum(cell[1] for cell in by_file.values())
        return {
            "accept_length": tokens_in_all / max(verifies, 1),
            "by_file": {name: made / max(count, 1) for name, (made, count) in by_file.items()},
            "tokens_per_cpu_second": tokens_in_all / max(seconds, 1e-9),
            "ms_per_round": seconds / max(rounds, 1) * 1e3,
            "rounds": rounds,
            "answers": answers,
        }


def measure_costs(bench: Bench, sizes: list[int], path: Path) -> None:
    """Seconds of a round by batch and width; the prompts of one file are enough."""
    from sgl_graft.blockpilot.costs import CostTable, write_costs

    prompts = [prompt for prompt in bench.prompts if len(prompt[1]) < 300][:8]
    seconds: dict[int, dict[int, float]] = {}
    rounds = 0
    for batch in (1, 8):
        for size in sizes:
            few = prompts[: max(batch, 2)]
            bench.run(size, few, 4, batch)
            run = bench.run(size, few, 16, batch)
            seconds.setdefault(batch, {})[size] = run["ms_per_round"] / 1e3
            rounds += run["rounds"]
            print(f"batch {batch}, size {size}: {run['ms_per_round']:.1f} ms CPU a round", flush=True)
    write_costs(path, CostTable(seconds=seconds, machine="one thread, CPU time", rounds=rounds))


def prepare(bench: Bench, variant: str) -> int | None:
    """Switch the worker to a variant; the block size to ask for, None where the policy chooses."""
    from sgl_graft.cuda_graph.value_rule import ValueMaps

    from sgl_graft.blockpilot.costs import read_costs
    from sgl_graft.blockpilot.ewma import AcceptHistory, EwmaPolicy
    from sgl_graft.blockpilot.policy import FixedPolicy, ReplayPolicy
    from sgl_graft.blockpilot.tail import TailGraft
    from sgl_graft.config import BlockPilotConfig
    from sgl_graft.graft.calibration import read_calibration

    worker, options = bench.worker, bench.options
    state = worker.state
    rows = worker.model_runner.req_to_token_pool.req_to_token.shape[0]
    vocab_size = worker.model_runner.model_config.vocab_size
    worker.tail = worker.blockpilot.tail = None
    state.costs = None
    state.policy = FixedPolicy(bench.default)
    state.history = AcceptHistory(rows, state.shape.b_max)
    for counter in (state.rounds, state.accepted):
        counter.zero_()
    if variant.isdigit():
        return int(variant)
    if variant == "random":
        state.policy = ReplayPolicy({}, bench.default, (5, 1, state.shape.b_max))
        return None
    if variant == "ewma":
        costs = read_costs(options.costs)
        sizes = tuple(size for size in sorted(costs.seconds[1]) if size <= state.shape.b_max)
        state.policy = EwmaPolicy(state.history, sizes, bench.default, costs)
        state.costs = costs
        return None
    if variant == "tail":
        maps = (
            read_calibration(options.calibration, vocab_size).value_maps()
            if options.calibration
            else ValueMaps.identity(1)
        )
        worker.tail = TailGraft(BlockPilotConfig(tail_graft=True), maps, state.shape.b_max, rows, vocab_size)
        worker.blockpilot.tail = worker.tail
        return bench.default
    raise SystemExit(f"unknown variant {variant}")


def main() -> None:
    options = arguments()
    bench = Bench(options)
    sizes = [int(name) for name in options.variants.split(",") if name.isdigit()]
    bench.run(1, bench.prompts, 1, options.concurrency)  # prefixes are cached from here on
    if options.measure:
        measure_costs(bench, sizes, options.costs)
    found: dict[str, Any] = {}
    plain = None
    for variant in options.variants.split(","):
        size = prepare(bench, variant)
        run = bench.run(size, bench.prompts, options.tokens, options.concurrency)
        answers = run.pop("answers")
        plain = plain or answers
        run["other_answers"] = sum(a != b for a, b in zip(answers, plain, strict=True))
        state = bench.worker.state
        total = int(state.rounds.sum())
        run["speculated_share"] = 1.0 - int(state.rounds[1]) / max(total, 1)
        run["mean_size"] = float((state.rounds * range_of(state.rounds)).sum()) / max(total, 1)
        if variant == "tail":
            run["grafted_share"] = int(bench.worker.tail.grafted) / max(int(bench.worker.tail.blocks), 1)
        found[variant] = run
        print(variant, json.dumps(run), flush=True)
        settings = {key: str(value) for key, value in vars(options).items()}
        options.output.write_text(json.dumps({"settings": settings, "variants": found}, indent=1) + "\n")
    os._exit(0)  # the scheduler's threads do not end by themselves


def range_of(tensor: Any) -> Any:
    import torch

    return torch.arange(tensor.numel())


if __name__ == "__main__":
    main()
