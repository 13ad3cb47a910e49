"""Labels without a server: every block size drafted over answers that the target has already given.

A block depends on the features before its anchor alone, and the answer is known, so the rounds that serving
would run at a size can be walked exactly, each block drafted at that size (``simulate_dflash``). A sampled
answer counts as well as a greedy one: acceptance is equality with the target's own token. Time is not
measured this way; labels by time need a cost table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ..draft_training.dflash_recipe import load_dflash
from ..draft_training.features import SUFFIX, FeatureShard, Sample
from ..draft_training.simulate_dflash import accept_lengths
from .collect import LabelPrompt
from .labels import Run


def one_turn(sample: Sample) -> bool:
    """Whether the answer is one stretch: later turns would mix the user's text into it."""
    rows = sample.rows
    return len(rows) > 0 and int(rows[-1]) - int(rows[0]) + 1 == len(rows)


def recorded_runs(
    target: Path,
    draft: Path,
    folder: Path,
    sizes: Sequence[int],
    limit: int,
    on_done: Callable[[Run], None] = lambda run: None,
) -> tuple[tuple[LabelPrompt, ...], list[Run]]:
    """Runs of the first ``limit`` one-turn dialogues whose features are in ``folder``, at every size.

    Answers too short to hold a block of the largest size are left out.

    Raises:
        ValueError: there are no such dialogues.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    module = load_dflash(draft)
    prompts: list[LabelPrompt] = []
    runs: list[Run] = []
    for shard_file in sorted(folder.glob(f"*{SUFFIX}")):
        shard = FeatureShard(shard_file)
        for i in range(len(shard)):
            if len(prompts) >= limit:
                return tuple(prompts), runs
            sample = shard.sample(i)
            if not one_turn(sample) or len(sample.rows) < 2 * max(sizes):
                continue
            key = f"{shard_file.name.removesuffix(SUFFIX)}:{i}"
            start = int(sample.rows[0]) + 1
            prompts.append(LabelPrompt(key, sample.source, tuple(sample.ids[:start].tolist())))
            for size in sizes:
                # A block of one row commits the target's own token.
                answer = len(sample.rows) - 1
                lengths = [1] * answer if size == 1 else accept_lengths(module, embedding, head, sample, size)
                run = Run(key, size, sum(lengths), max(len(lengths), 1))
                runs.append(run)
                on_done(run)
    if not prompts:
        raise ValueError(f"{folder} holds no features of one-turn dialogues: run `sgl-graft train features`")
    return tuple(prompts), runs
