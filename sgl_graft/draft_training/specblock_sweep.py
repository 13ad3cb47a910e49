"""Accept length of a SpecBlock draft on held-out dialogues, by number of blocks and by branching.

    python -m sgl_graft.draft_training.specblock_sweep --draft runs/specblock/export \
        --features runs/specblock/features [--dialogues 48] [--slots 16]

Trees as a server grows them, walked against what the target wrote (greedily or not, as the dialogues are);
no server, no target forward.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sgl_graft.draft_training.eagle3 import run_lengths
from sgl_graft.draft_training.features import Sample

BRANCHINGS = ("code", "give_up", "paper", "fitted")


def main(
    draft: Annotated[Path, typer.Option(help="An exported draft.")],
    features: Annotated[Path, typer.Option(help="Folder of features; only held-out dialogues are read.")],
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    dialogues: Annotated[int, typer.Option(help="Held-out dialogues.")] = 48,
    slots: Annotated[int, typer.Option(help="Slots of a tree, root included.")] = 16,
    blocks: Annotated[str, typer.Option(help="Numbers of blocks, by comma.")] = "1,2,3,4",
    leaves: Annotated[str, typer.Option(help="Leaves that a block continues, by comma.")] = "8,4",
) -> None:
    """Print a table: one row per branching, blocks and leaves."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM

    from sgl_graft.cli.train_inputs import target_and_data
    from sgl_graft.config import SpecBlockConfig
    from sgl_graft.draft_training.feed import Feed
    from sgl_graft.draft_training.specblock_simulate import accept_lengths
    from sgl_graft.specblock import checkpoint
    from sgl_graft.specblock.drafting import Drafter, DraftShape
    from sgl_graft.specblock.startup import rule_of

    feed = Feed(features, batch_targets=1, max_len=1024, seed=0)
    feed.refresh()
    samples = [first_answer(sample) for sample in feed.held_out(dialogues)]
    folder = target or target_and_data(None, None)[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.detach()
    module, vocab = checkpoint.load(draft)
    print(f"{len(samples)} held-out dialogues, {slots} slots, {draft}\n")
    print("| branching | children | blocks | leaves | accept length | rounds |\n|---|---|---|---|---|---|")

    def row(branching: str, count: int, best: int) -> None:
        rule = rule_of(SpecBlockConfig(branching=branching), draft)  # type: ignore[arg-type]
        drafter = Drafter(module, embedding, vocab.draft_to_target, rule)
        shape = DraftShape(count, best, slots)
        lengths = [n for sample in samples for n in accept_lengths(drafter, sample, shape)]
        mean = sum(lengths) / max(1, len(lengths))
        print(
            f"| {branching} | {list(rule.children)} | {count} | {best} | {mean:.3f} | {len(lengths)} |",
            flush=True,
        )

    numbers, widths = ([int(word) for word in words.split(",")] for words in (blocks, leaves))
    for count in numbers:
        for best in widths if count > 1 else widths[:1]:
            row("code", count, best)
    for branching in BRANCHINGS[1:]:
        row(branching, 2, widths[0])


def first_answer(sample: Sample) -> Sample:
    """A dialogue cut behind its first answer, as only one can be walked."""
    length = int(run_lengths(sample.rows)[0])
    end = int(sample.rows[length - 1]) + 2
    return replace(
        sample,
        ids=sample.ids[:end],
        features=sample.features[:end],
        rows=sample.rows[:length],
        top_ids=sample.top_ids[:length],
        top_probs=sample.top_probs[:length],
    )


if __name__ == "__main__":
    typer.run(main)
