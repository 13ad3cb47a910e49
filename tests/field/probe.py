"""Runs the interleavings on one scheduler per variant.

``python -m tests.field.probe FOLDER FIRST_SEED NUM_SEEDS VARIANT...``: SGLang's state is global to a process,
so it is imported once and every variant runs in a fork. Plain decoding runs first and says what is right. A
fork writes FOLDER/VARIANT.json: mistakes, how much happened, and what was left behind.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from .interleavings import Job, Model, Scenario

SLOTS = 20  # the most that any variant reserves at the end of a context
CONTEXT_LENGTH = ("--context-length", "448")
TIGHT = ("--max-total-tokens", "704", "--chunked-prefill-size", "48", "--schedule-conservativeness", "0.05")
SIZES = Path(__file__).parents[1] / "serving" / "random_sizes.json"


def _tree(algorithm: str, steps: int, topk: int, slots: int) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", algorithm, "--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(slots)),
    )


def _config(**sections: Any) -> tuple[str, ...]:
    return ("--graft-config", json.dumps(sections))


_REPLAY = {"policy": "replay", "policy_file": str(SIZES)}
# name -> its draft, its flags
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tree": ("draft", _tree("EAGLE3", 5, 4, 16)),
    "pages": ("draft", (*_tree("EAGLE3", 5, 1, 6), "--page-size", "16")),
    "graft": ("draft", _tree("GRAFT", 5, 4, 16)),
    "groups": (
        "draft",
        (*_tree("GRAFT", 3, 2, 8), *_config(graft={"rule": "staged", "table": {"scope": "request"}})),
    ),
    # The batch crosses the cap all the time, and no tier is held.
    "capped": ("noisy", (*_tree("GRAFT", 3, 2, 8), *_config(graft={"load_cap": {"above": 2, "hold": 1}}))),
    "blockpilot": (
        "dflash",
        (
            *("--speculative-algorithm", "BLOCKPILOT", "--speculative-num-draft-tokens", "7"),
            *_config(blockpilot={**_REPLAY, "tail_graft": True}),
        ),
    ),
    "specblock": (
        "specblock",
        ("--speculative-algorithm", "SPECBLOCK", "--speculative-num-draft-tokens", "12"),
    ),
}


def scenarios(first: int, number: int) -> list[Scenario]:
    return [Scenario.draw(seed) for seed in range(first, first + number)]


def plain(target: Path, wanted: list[Scenario]) -> dict[str, Any]:
    """Plain decoding's answer to every job, each alone in the model but many at once in the batch."""
    from .edges import edge_jobs
    from .engine import Engine

    engine = Engine(target, "--max-total-tokens", "16384", *CONTEXT_LENGTH)
    jobs = {job.key: job for scenario in wanted for job in scenario.jobs}
    jobs |= {job.key: job for job in edge_jobs()}
    by_rid = {f"plain-{i}": key for i, key in enumerate(jobs)}
    answers: dict[str, Any] = {key: {"tokens": [], "finish": None} for key in jobs}
    waiting = [
        Job(rid, jobs[key].kind, jobs[key].prompt, jobs[key].tokens, jobs[key].seed, 0)
        for rid, key in by_rid.items()
    ]
    engine.submit(waiting)
    while any(answer["finish"] is None for answer in answers.values()):
        engine.step()
        for rid, tokens, finish, more in engine.sent:
            answer = answers[by_rid[rid]]
            answer["tokens"] += tokens
            if finish:
                answer |= {"finish": finish, **more}
        engine.sent.clear()
    return answers


def run(
    target: Path, drafts: dict[str, Path], variant: str, answers: dict[str, Any], wanted: list[Scenario]
) -> dict[str, Any]:
    from .edges import draft_cache, look_at_edges
    from .engine import MOST_RUNNING, Engine

    draft, flags = VARIANTS[variant]
    engine = Engine(
        target, *TIGHT, *CONTEXT_LENGTH, *flags, "--speculative-draft-model-path", str(drafts[draft])
    )
    rounds = count_rounds(engine) if variant == "capped" else None
    aborted_in: dict[str, int] = {}
    mistakes, finished, aborted = [], 0, 0
    for scenario in wanted:
        model = Model(answers, MOST_RUNNING)
        engine.run(scenario, model, aborted_in)
        mistakes += model.mistakes
        finished, aborted = finished + model.finished, aborted + model.aborted
    found = {
        "mistakes": mistakes,
        "finished": finished,
        "aborted": aborted,
        "aborted_in": aborted_in,
    }
    if rounds is not None:
        counted = int(engine.worker.state.counters.rounds)
        found["capped"] = rounds | {"cap": engine.worker.cap_status(), "counted": counted}
        found["draft_cache"] = draft_cache(engine)
    return found | look_at_edges(engine, answers)


def count_rounds(engine: Any) -> dict[str, int]:
    """Counts, from now on, drafts, the requests in them, and draft extends behind verifies."""
    rounds = {"drafts": 0, "drafted_requests": 0, "extends": 0}
    draft_worker = engine.worker.draft_worker
    draft, extend = draft_worker.draft, draft_worker._draft_extend_for_decode

    def counting_draft(batch: Any, **kwargs: Any) -> Any:
        rounds["drafts"] += 1
        rounds["drafted_requests"] += len(batch.reqs)
        return draft(batch, **kwargs)

    def counting_extend(*args: Any, **kwargs: Any) -> Any:
        rounds["extends"] += 1
        return extend(*args, **kwargs)

    draft_worker.draft, draft_worker._draft_extend_for_decode = counting_draft, counting_extend
    return rounds


def build(folder: Path) -> tuple[Path, dict[str, Path]]:
    from tests.serving import markov
    from tests.specblock import markov_draft

    target = markov.build_target(folder / "target")
    drafts = {"draft": markov.build_draft(folder / "draft"), "dflash": markov.build_dflash(folder / "dflash")}
    drafts |= {"specblock": markov_draft.build_draft(folder / "specblock")}
    return target, drafts | {"noisy": disturbed(markov.build_draft(folder / "noisy"))}


def disturbed(draft: Path) -> Path:
    """The bigram draft, made to read the target's states and to attend by them: a misplaced one shows."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(draft / "model.safetensors")
    generator = torch.Generator().manual_seed(6)
    for name, tensor in weights.items():
        if any(part in name for part in ("fc.weight", "k_proj.weight", "v_proj.weight")):
            weights[name] = tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
    save_file(weights, draft / "model.safetensors")
    return draft


def main(folder: Path, first: int, number: int, variants: list[str]) -> None:
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
    import torch

    torch.set_num_threads(1)
    target, drafts = build(folder)
    wanted = scenarios(first, number)
    answers_file = folder / "none.json"
    for name in ("none", *variants):
        child = os.fork()
        if child == 0:
            try:
                with torch.inference_mode():
                    if name == "none":
                        found = plain(target, wanted)
                    else:
                        found = run(target, drafts, name, json.loads(answers_file.read_text()), wanted)
                (folder / f"{name}.json").write_text(json.dumps(found))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
