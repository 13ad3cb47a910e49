"""Generate dialogues into a folder of shards: resumable, one single-threaded process per core.

One thread per process because OpenMP barriers stall whenever another program holds one of the cores; two
processes lose nothing then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sgl_graft.draft_training import dialogues
from sgl_graft.draft_training.dialogues import SUFFIX, Dialogue
from sgl_graft.draft_training.generate import Generator
from sgl_graft.draft_training.prompts import LONG_MIX, SHORT_MIX, ScriptSource, read_prompts


@dataclass(frozen=True)
class DataJob:
    """One worker's job: scripts `worker, worker + workers, ...` until `tokens` answer tokens are on disk."""

    target: Path
    output: Path
    tokens: int
    mix: str = "short"  # "short" or "long"
    prompts: tuple[Path, ...] = ()
    articles: tuple[Path, ...] = ()  # dialogues whose answers the long mix summarises
    seed: int = 0
    slots: int = 96
    worker: int = 0
    workers: int = 1
    dtype: str = "bfloat16"
    shard_dialogues: int = 32


def run(job: DataJob, report: Callable[[int, float], None] | None = None) -> int:
    """Generate until this worker's share of answer tokens is on disk; returns answer tokens of all shards.

    `report(answer tokens so far, generated tokens per second)` is called after each shard.
    """
    tokenizer = AutoTokenizer.from_pretrained(job.target)
    source = make_source(job, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(job.target, dtype=getattr(torch, job.dtype))
    longest = 640 if job.mix == "short" else 1024
    name = f"{job.mix}-{job.worker}of{job.workers}"
    done = [d for f in sorted(job.output.glob(f"{name}-*{SUFFIX}")) for d in dialogues.load(f).dialogues]
    shards = len(list(job.output.glob(f"{name}-*{SUFFIX}")))
    answered = sum(d.num_answer_tokens for d in done)
    skip = frozenset(d.index for d in done)
    generator = Generator(
        model,
        end_of_turn=source.pieces.end_of_turn,
        slots=job.slots,
        max_len=longest,
        seed=job.seed * 1_000_003 + job.worker * 10_007 + shards,
    )
    held: list[Dialogue] = []
    share = job.tokens // job.workers
    generated, started = 0, time.monotonic()

    def count(written: int) -> None:
        nonlocal generated
        generated += written

    header = {"target": job.target.name, "mix": job.mix, "seed": job.seed}
    if answered >= share:
        return answered
    for dialogue in generator.run(source.scripts(job.worker, job.workers, skip), count):
        if not dialogue.num_answer_tokens:
            continue
        held.append(dialogue)
        if len(held) == job.shard_dialogues:
            dialogues.save(job.output / f"{name}-{shards:05d}{SUFFIX}", held, header)
            answered += sum(d.num_answer_tokens for d in held)
            shards += 1
            held = []
            if report is not None:
                report(answered, generated / (time.monotonic() - started))
            if answered >= share:
                break
    return answered


def make_source(job: DataJob, tokenizer: object) -> ScriptSource:
    """The endless scripts of a job. Raises ValueError for an unknown mix."""
    mixes = {"short": SHORT_MIX, "long": LONG_MIX}
    if job.mix not in mixes:
        raise ValueError(f"unknown mix {job.mix!r}; choose from {sorted(mixes)}")
    prompts = [p for file in job.prompts for p in read_prompts(file)]
    articles: list[str] = []
    if job.articles:
        for dialogue in dialogues.load_all(job.articles):
            for start, end in dialogue.answers:
                text = tokenizer.decode(dialogue.ids[start:end], skip_special_tokens=True)  # type: ignore[attr-defined]
                if end - start >= 100 and "```" not in text:
                    articles.append(" ".join(text.split()))
    return ScriptSource(
        tokenizer,
        mixes[job.mix],
        seed=job.seed,
        math_prompts=prompts,
        articles=articles,
        max_prompt_len=180 if job.mix == "short" else 800,
    )
