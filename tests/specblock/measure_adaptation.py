"""A stream of requests with online adaptation and without: accept length by request, and what learning costs.

    python -m tests.specblock.measure_adaptation run OUT.json --draft DRAFT --data sum [--frozen]
        [--requests 400] [--tokens 64] [--adaptation '{"min_tokens": 4000}']
    python -m tests.specblock.measure_adaptation compare FROZEN.json ADAPTED.json... [--plot actions.png]

The embedded model answers in this process, one request at a time, greedily; rows of the evaluation files are
taken in order and come again when they are used up. CPU seconds are those of the server's process and of the
learner's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.scheduler import make_request, make_scheduler
from tests.serving.in_process import EVAL

from .probe import answers

SLOTS = 16
QUARTERS = 4


def run(args: argparse.Namespace) -> None:
    import torch

    from sgl_graft import models
    from sgl_graft.bench.prompts import load_datasets, load_tokenizer

    torch.set_num_threads(1)
    target = models.get("smollm2-135m-instruct")
    files = [EVAL / f"{name}.jsonl" for name in args.data.split(",")]
    datasets = load_datasets(files, args.requests, load_tokenizer(target))
    prompts = [(each.name, list(p.input_ids)) for each in datasets for p in each.prompts]
    if len(files) > 1:  # mixed traffic: one of each in turn
        columns = [[list(p.input_ids) for p in each.prompts] for each in datasets]
        prompts = [(datasets[i].name, column[n]) for n in range(min(map(len, columns)))
                   for i, column in enumerate(columns)]  # fmt: skip
    adaptation = {"enabled": not args.frozen, **json.loads(args.adaptation)}
    config = {"specblock": {"blocks": 2, "adaptation": adaptation}}
    scheduler = make_scheduler(
        target, "--speculative-algorithm", "SPECBLOCK", "--speculative-draft-model-path", str(args.draft),
        "--speculative-num-draft-tokens", str(SLOTS), "--max-total-tokens", "8192",
        "--context-length", "2048", "--graft-config", json.dumps(config), "--disable-radix-cache",
    )  # fmt: skip
    found = scheduler.draft_worker.adaptation
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        warm = {"temperature": 0.0, "max_new_tokens": 8}
        answers(scheduler, [make_request(scheduler, "warm", prompts[0][1], warm)], 1)
        for number in range(args.requests):
            name, ids = prompts[number % len(prompts)]
            params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": args.tokens}
            if args.grouped:
                params["custom_params"] = {"graft": {"group": name}}
            request = make_request(scheduler, f"r{number}", ids, params)
            own, wall = time.process_time(), time.monotonic()
            (answer,) = answers(scheduler, [request], 1).values()
            rows.append(
                {
                    "data": name,
                    "tokens": len(answer["tokens"]) - 1,
                    "verifies": answer["verifies"],
                    "cpu": time.process_time() - own,
                    "wall": time.monotonic() - wall,
                    "learner_cpu": learner_cpu(found),
                    "version": 0 if found is None else found.version,
                }
            )
            if number % 20 == 19:
                write(args.output, rows, found)
                last = rows[-20:]
                print(
                    f"{number + 1}: accept length {accept(last):.3f}, version {last[-1]['version']}",
                    flush=True,
                )
    write(args.output, rows, found)
    if found is not None:
        found.director.close()
    os._exit(0)


def learner_cpu(adaptation: Any) -> float:
    """Seconds that the learner's process computed so far; one that has ended counts no more."""
    import psutil

    learner = None if adaptation is None else adaptation.director._learner
    try:
        times = psutil.Process(learner.pid).cpu_times() if learner is not None else None
    except psutil.Error:
        times = None
    return 0.0 if times is None else times.user + times.system


def write(output: Path, rows: list[dict[str, Any]], adaptation: Any) -> None:
    status = None if adaptation is None else adaptation.status()
    output.write_text(json.dumps({"requests": rows, "status": status}))


def accept(rows: list[dict[str, Any]]) -> float:
    """Tokens per verify, bonus included."""
    return sum(r["tokens"] for r in rows) / max(1, sum(r["verifies"] for r in rows))


def cost(rows: list[dict[str, Any]], start: float) -> float:
    """CPU seconds per token, the learner's included; `start`: what the learner had computed before."""
    learner = rows[-1]["learner_cpu"] - start
    return (sum(r["cpu"] for r in rows) + learner) / sum(r["tokens"] for r in rows)


def compare(args: argparse.Namespace) -> None:
    frozen, *others = [json.loads(file.read_text()) for file in (args.frozen, *args.adapted)]
    for file, found in zip(args.adapted, others, strict=True):
        count = min(len(frozen["requests"]), len(found["requests"]))
        print(f"{file.stem}: {count} requests; accept length and speed (1 / CPU-s) over frozen, by quarter:")
        for part in [*((i / QUARTERS, (i + 1) / QUARTERS) for i in range(QUARTERS)), (0.5, 1), (0, 1)]:
            span = slice(int(part[0] * count), int(part[1] * count))
            ours, theirs = found["requests"][span], frozen["requests"][span]
            before = found["requests"][span.start - 1]["learner_cpu"] if span.start else 0.0
            print(
                f"  {part[0]:.2f}-{part[1]:.2f}: {accept(ours):.3f} / {accept(theirs):.3f} = "
                f"{accept(ours) / accept(theirs):.3f}, speed {cost(theirs, 0) / cost(ours, before):.3f}"
            )
        print(f"  {found['status']['counts']}")
        for action in found["status"]["actions"]:
            print(f"  {action}")
    if args.plot:
        plot(
            args.plot,
            {f.stem: o for f, o in zip([args.frozen, *args.adapted], [frozen, *others], strict=True)},
        )


def plot(file: Path, runs: dict[str, Any]) -> None:
    """Accept length by request, with the bandit's actions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    for name, found in runs.items():
        rows = found["requests"]
        means = [accept(rows[max(0, i - 19) : i + 1]) for i in range(len(rows))]
        (line,) = axes.plot(means, label=name)
        tokens, totals = 0, []
        for row in rows:
            tokens += row["tokens"]
            totals.append(tokens)
        for action in (found["status"] or {}).get("actions", []):
            at = next((i for i, total in enumerate(totals) if total >= action["tokens"]), len(rows) - 1)
            marker = "^" if action["arm"] == "full" else "o"
            fill = line.get_color() if action["outcome"] == "served" else "none"
            axes.plot(at, means[at], marker, color=line.get_color(), markerfacecolor=fill)
    axes.set_xlabel("request")
    axes.set_ylabel("accept length, mean of 20")
    axes.set_title("^ full, o head-only; filled: its weights served")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run")
    runner.set_defaults(do=run)
    runner.add_argument("output", type=Path)
    runner.add_argument("--draft", type=Path, required=True)
    runner.add_argument("--data", default="sum", help="evaluation files, by comma; several are mixed")
    runner.add_argument("--requests", type=int, default=400)
    runner.add_argument("--tokens", type=int, default=64)
    runner.add_argument("--frozen", action="store_true", help="without adaptation")
    runner.add_argument("--grouped", action="store_true", help="each file is a domain of its own")
    runner.add_argument("--adaptation", default="{}", help="settings of specblock.adaptation")
    comparer = commands.add_parser("compare")
    comparer.set_defaults(do=compare)
    comparer.add_argument("frozen", type=Path)
    comparer.add_argument("adapted", type=Path, nargs="+")
    comparer.add_argument("--plot", type=Path)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
