"""Losslessness of one variant through the engine's own scheduler in this process: no HTTP, one start.

    python -m tests.serving.in_process run OUT.json --variant tree [--family qwen3] [--tokens 128] ...
    python -m tests.serving.in_process compare NONE.json OUT.json ...

`run` answers every cell (a setting at a number of requests at once, ten prompts at a time), writes after it,
and continues where an earlier call stopped. `mixed` puts all settings into the same batches. The embedded
model gets the first rows of the evaluation files, a tiny family the prompts of the serving tests.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.scheduler import make_request, make_scheduler, serve, step, tokens_of

from .variants import PLAIN, SPECULATIVE, Variant

EVAL = Path(os.environ.get("SGLGRAFT_EVAL", Path(__file__).parents[3] / "shared" / "data" / "eval"))
OTHERS = (
    Variant("eagle", "EAGLE", (4, 2, 8)),
    Variant("standalone", "STANDALONE", (3, 2, 6)),
    Variant("random", "EAGLE3", (5, 4, 16)),
    Variant(
        "staged-private",
        "GRAFT",
        (5, 4, 16),
        config='{"graft": {"rule": "staged", "table": {"scope": "request"}}}',
    ),
)
VARIANTS = {variant.name: variant for variant in (PLAIN, *SPECULATIVE, *OTHERS)}
GREEDY = {"temperature": 0.0}
SAMPLED = {
    "T=0.7": {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "T=1": {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "T=1, top-k": {"temperature": 1.0, "top_k": 20},
    "T=1, top-p": {"temperature": 1.0, "top_p": 0.8},
    "T=0.7, min-p": {"temperature": 0.7, "min_p": 0.1},
}
SETTINGS = {"T=0": GREEDY, **SAMPLED}
BATCH = 10  # prompts of a cell: few enough that an interrupted call loses little


def eval_prompts(rows: int) -> list[tuple[str, list[int], int]]:
    """(data set, token ids, seed) of the first rows of every evaluation file, inside the chat template."""
    from sgl_graft import models
    from sgl_graft.bench.prompts import load_datasets, load_tokenizer

    tokenizer = load_tokenizer(models.get("smollm2-135m-instruct"))
    files = sorted(EVAL.glob("*.jsonl"))
    assert files, f"no evaluation files in {EVAL}: set SGLGRAFT_EVAL"
    datasets = load_datasets(files, rows, tokenizer)
    return [(each.name, list(p.input_ids), p.seed) for each in datasets for p in each.prompts]


def tiny_prompts(count: int = 60) -> list[tuple[str, list[int], int]]:
    """The serving tests' prompts, and as many again that begin later in them."""
    from .payloads import PROMPTS

    texts = [PROMPTS[seed % len(PROMPTS)][seed // len(PROMPTS) :] for seed in range(count)]
    assert len(set(texts)) == count
    return [("tiny", list(text.encode()), seed) for seed, text in enumerate(texts)]


def folders(variant: Variant, family: str | None, scratch: Path) -> tuple[Path, str]:
    """Target and draft of a variant."""
    from . import markov

    if family is not None:
        draft = scratch / "draft"
        if variant.algorithm == "STANDALONE":
            markov.build_target(draft, layers=1)
        else:
            (markov.build_eagle_draft if variant.algorithm == "EAGLE" else markov.build_draft)(draft)
        return markov.build_target(scratch / "target", family), str(draft)
    from sgl_graft import models

    target = models.get("smollm2-135m-instruct")
    if variant.name == "random":
        from sgl_graft.models import tiny

        return target, str(tiny.build_draft(scratch / "random", target, draft_vocab_size=8192))
    return target, str(models.path("smollm2-135m-instruct-eagle3"))


def drain(scheduler: Any) -> None:
    """Let the scheduler drop its finished requests, then find the whole pool free."""
    assert step(scheduler) == []
    assert scheduler.flush_cache(), "requests are left behind"


def cells(args: argparse.Namespace, count: int) -> list[tuple[str, str, int, int]]:
    """(name, setting, requests at once, first prompt) in the order of running."""
    wanted = [
        (setting, at_once) for at_once in args.at_once for setting in args.settings if setting != "mixed"
    ]
    if "mixed" in args.settings:
        wanted.append(("mixed", 8))
    return [
        (f"{setting}|{at_once}|{start}", setting, at_once, start)
        for setting, at_once in wanted
        for start in range(0, count, BATCH)
    ]


def run(args: argparse.Namespace) -> None:
    import torch

    from tests.faults.injections import fill_with_garbage

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(8)
    variant = VARIANTS[args.variant]
    found: dict[str, Any] = json.loads(args.output.read_text()) if args.output.is_file() else {}
    prompts = tiny_prompts() if args.family else eval_prompts(args.rows)
    todo = [cell for cell in cells(args, len(prompts)) if cell[0] not in found]
    if not todo:
        return
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = folders(variant, args.family, Path(scratch))
        scheduler = make_scheduler(target, "--max-total-tokens", "32768", *variant.args(draft))
        with torch.inference_mode():
            for name, setting, at_once, start in todo:
                requests = []
                for row, (dataset, ids, seed) in enumerate(prompts[start : start + BATCH], start):
                    for each in SETTINGS if setting == "mixed" else (setting,):
                        tokens = args.tokens if setting == "T=0" else args.sampled_tokens
                        params = SETTINGS[each] | {"sampling_seed": seed, "max_new_tokens": tokens}
                        rid = f"{each}|{dataset}|{row}"
                        requests.append(make_request(scheduler, rid, ids, params))
                if args.garbage:
                    fill_with_garbage(scheduler.draft_worker.state.table, generator)
                found[name] = {
                    rid: {"tokens": tokens_of(req), "verifies": getattr(req, "spec_verify_ct", 0)}
                    for rid, req in serve(scheduler, requests, at_once).items()
                }
                drain(scheduler)
                scratch_file = args.output.with_suffix(".tmp")
                scratch_file.write_text(json.dumps(found))
                scratch_file.replace(args.output)
                print(f"{variant.name} {name}", flush=True)


def compare(args: argparse.Namespace) -> None:
    """Hold every answer against plain decoding's to the same prompt and setting, as far as both go."""
    expected: dict[str, list[int]] = {}
    for cell in json.loads(args.reference.read_text()).values():
        for rid, answer in cell.items():
            known = expected.setdefault(rid, answer["tokens"])
            common = min(len(known), len(answer["tokens"]))
            assert known[:common] == answer["tokens"][:common], f"plain decoding differs from itself: {rid}"
            expected[rid] = max(known, answer["tokens"], key=len)
    for file in args.files:
        totals: dict[str, list[Any]] = {}
        for name, cell in json.loads(file.read_text()).items():
            setting, at_once, _ = name.split("|")
            total = totals.setdefault(f"{setting}, {at_once} at once", [0, 0, [], {}])
            for rid, answer in cell.items():
                if rid not in expected:
                    continue
                tokens, known = answer["tokens"], expected[rid]
                common = min(len(tokens), len(known))
                total[0] += 1
                total[1] += common
                if tokens[:common] != known[:common]:
                    at = next(i for i in range(common) if tokens[i] != known[i])
                    total[2].append(f"{rid} at {at}")
                sums = total[3].setdefault(rid.split("|")[1], [0, 0])
                sums[0] += len(tokens) - 1
                sums[1] += answer["verifies"]
        for name, (answers, tokens, differ, sums) in totals.items():
            means = {each: done / verifies for each, (done, verifies) in sums.items() if verifies}
            lengths = ", ".join(f"{each} {value:.2f}" for each, value in means.items())
            mean = f"{sum(means.values()) / len(means):.2f}" if means else "none"
            print(
                f"{file.stem}: {name}: {answers - len(differ)} of {answers} identical over {tokens} tokens, "
                f"accept length {mean} ({lengths}){'; differ: ' if differ else ''}{', '.join(differ)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run")
    runner.set_defaults(do=run)
    runner.add_argument("output", type=Path)
    runner.add_argument("--variant", choices=VARIANTS, required=True)
    runner.add_argument("--garbage", action="store_true", help="GRAFT: spoil the table before every cell")
    runner.add_argument("--family", help="a tiny target instead of the embedded model")
    runner.add_argument("--rows", type=int, default=10, help="prompts per evaluation file")
    runner.add_argument("--tokens", type=int, default=128, help="at temperature 0")
    runner.add_argument("--sampled-tokens", type=int, default=32, help="above, and in mixed batches")
    runner.add_argument("--at-once", type=int, nargs="+", default=[8, 1])
    runner.add_argument("--settings", nargs="+", default=[*SETTINGS, "mixed"])
    comparer = commands.add_parser("compare")
    comparer.set_defaults(do=compare)
    comparer.add_argument("reference", type=Path)
    comparer.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
    os._exit(0)  # the scheduler leaves threads behind
