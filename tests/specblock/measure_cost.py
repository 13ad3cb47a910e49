"""CPU time of the parts of a round on the embedded model: `docs/measurements.md` 4.3.

    python -m tests.specblock.measure_cost SPECBLOCK '{"specblock": {"blocks": 2}}'
    python -m tests.specblock.measure_cost EAGLE3 8

The SpecBlock draft is random (two layers, K = 4, MLP 256, 3,392 tokens): what a round costs does not depend
on what it proposes, except that accepted rows are committed. Times are the thread's own CPU time, at one
request.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.scheduler import make_scheduler

from .probe import answers, request

TOKENS = 40
SLOTS = 16
PROMPTS = (b"Explain how bread rises.", b"Write a short story about a lighthouse.", b"What is 17 times 23?")


def main(algorithm: str, setting: str) -> None:
    import torch

    from sgl_graft import models

    from .markov_draft import build_random

    torch.set_num_threads(1)
    target = models.get("smollm2-135m-instruct")
    words = ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", str(SLOTS)]
    words += ["--max-total-tokens", "8192", "--context-length", "2048"]
    with tempfile.TemporaryDirectory() as scratch:
        if algorithm == "SPECBLOCK":
            draft = build_random(Path(scratch), target, vocab_size=3392, width=256)
            words += ["--graft-config", setting]
        else:
            draft = models.path("smollm2-135m-instruct-eagle3")
            words += ["--speculative-num-steps", setting, "--speculative-eagle-topk", "4"]
        scheduler = make_scheduler(target, *words, "--speculative-draft-model-path", str(draft))
    worker = scheduler.draft_worker
    spent: dict[str, list[float]] = {}

    def timed(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = inner(*args, **kwargs)
            spent.setdefault(name, []).append(time.thread_time() - start)
            return result

        setattr(owner, name, outer)

    def load(name: str, tokens: int) -> dict[str, Any]:
        requests = [
            request(scheduler, f"{name}{i}", prompt, tokens, {"temperature": 0.0, "ignore_eos": True})
            for i, prompt in enumerate(PROMPTS)
        ]
        return answers(scheduler, requests, 1)

    with torch.inference_mode():
        load("warm", 8)
        timed(worker.draft_worker, "draft")
        timed(worker.draft_worker, "_draft_extend_for_decode")
        timed(worker, "verify")
        measured = load("measured", TOKENS)
    rounds = len(spent["verify"])
    tokens = sum(len(a["tokens"]) - 1 for a in measured.values())  # the first of each is the prefill's
    parts = {name: 1000 * sum(times) / rounds for name, times in spent.items()}
    print(f"{algorithm} {setting}: {rounds} rounds, accept length {tokens / rounds:.2f}, CPU ms per round:")
    for name, value in parts.items():
        print(f"  {name:26s} {value:6.2f}")
    print(f"  {'drafting, both':26s} {parts['draft'] + parts['_draft_extend_for_decode']:6.2f}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
