"""`sgl-graft train specblock`: from dialogues to an exported draft with its card."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sgl_graft.draft_training import dialogues, vocab
from sgl_graft.draft_training.feed import Feed
from sgl_graft.draft_training.loop import Trainer, TrainSettings
from sgl_graft.draft_training.specblock_recipe import (
    SpecBlockRecipe,
    SpecBlockSettings,
    init_from_target,
    specblock_config,
)
from sgl_graft.specblock.model import SpecBlockDraft


@dataclass(frozen=True)
class SpecBlockJob:
    """`data` are dialogue files or folders of shards; `run` holds features, checkpoint, log and export.

    `block` is K, the slots of a block, fixed for the draft's life; `max_len` the longest context trained;
    `shift` and `broadcast` off leave the layer-wise shift or the prefix broadcast out, for the ablation.
    """

    target: Path
    data: tuple[Path, ...]
    run: Path
    draft_vocab_size: int = 3392
    block: int = 4
    layers: int = 2
    intermediate_size: int | None = None
    shift: bool = True
    broadcast: bool = True
    batch_targets: int = 1024
    max_len: int = 1024
    train: TrainSettings = field(default_factory=TrainSettings)
    specblock: SpecBlockSettings = field(default_factory=SpecBlockSettings)


def make_trainer(job: SpecBlockJob) -> Trainer:
    """Everything loaded and, where a checkpoint exists, resumed."""
    target_config = AutoConfig.from_pretrained(job.target)
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=torch.float32)
    torch.manual_seed(job.train.seed)
    kept = job.run / "vocab.json"
    if kept.is_file():
        tokens = torch.tensor(json.loads(kept.read_text()))
        draft_vocab = vocab.DraftVocab.of(tokens, target_config.vocab_size)
    else:
        found = dialogues.load_all(job.data)
        draft_vocab = vocab.choose(found, job.draft_vocab_size, target_config.vocab_size)
    changes: dict[str, Any] = {"num_hidden_layers": job.layers}
    if job.intermediate_size is not None:
        changes["intermediate_size"] = job.intermediate_size
    if not job.shift:
        changes["layer_shift"] = False
    if not job.broadcast:
        changes["prefix_broadcast"] = False
    config = specblock_config(target_config, len(draft_vocab.draft_to_target), job.block, **changes)
    module = SpecBlockDraft(config)
    init_from_target(module, target, draft_vocab)
    job.run.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(draft_vocab.draft_to_target.tolist()))
    recipe = SpecBlockRecipe(module, target.get_input_embeddings().weight, draft_vocab, job.specblock)
    del target
    gc.collect()
    feed = Feed(
        job.run / "features", batch_targets=job.batch_targets, max_len=job.max_len, seed=job.train.seed
    )
    trainer = Trainer(recipe, feed, job.run, job.train)
    trainer.resume()
    return trainer


def rank_figures(confusion: list[list[int]]) -> dict[str, list[float]]:
    """Precision, recall and F1 of every class from `[true][guessed]` counts; 0 where a class never occurs."""
    counts = torch.tensor(confusion, dtype=torch.float64)
    hits = counts.diagonal()
    precision = hits / counts.sum(0).clamp_min(1)
    recall = hits / counts.sum(1).clamp_min(1)
    f1 = 2 * precision * recall / (precision + recall).clamp_min(1e-12)
    named = {"precision": precision, "recall": recall, "f1": f1}
    return {name: [round(v, 4) for v in values.tolist()] for name, values in named.items()}


def fit_children(rank_hits: list[list[int]], worth: float = 0.04) -> list[int]:
    """Children per guessed class for `specblock.children`: the ranks that came true in at least a share
    `worth` of the slots with that guess (the likeliest one always)."""
    children = []
    for counts in rank_hits:
        total = max(1, sum(counts))
        worthy = [rank for rank, count in enumerate(counts[:-1], 1) if count >= worth * total]
        children.append(max([1, *worthy]))
    return children


def write_card(job: SpecBlockJob, trainer: Trainer, command: str, figures: dict[str, Any]) -> None:
    """`training_card.json` and `README.md` beside the exported weights."""
    found = dialogues.load_all(job.data)
    sources: dict[str, int] = {}
    for dialogue in found:
        sources[dialogue.source] = sources.get(dialogue.source, 0) + dialogue.num_answer_tokens
    module: Any = trainer.recipe.module
    ranks = rank_figures(figures["rank_confusion"])
    card = {
        "target": job.target.name,
        "architecture": "SpecBlock",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "dialogues": len(found),
        "answer_tokens": sum(sources.values()),
        "answer_tokens_by_source": sources,
        "steps": trainer.step,
        "answer_tokens_seen": trainer.targets_seen,
        "hours": round(trainer.seconds / 3600, 2),
        "trained_context": job.max_len,
        "block": module.block,
        "draft_vocab_size": module.config.draft_vocab_size,
        "parameters": sum(p.numel() for p in trainer.params),
        "settings": {
            "train": asdict(job.train),
            "specblock": asdict(job.specblock),
            "batch_targets": job.batch_targets,
        },
        "held_out": figures,
        "held_out_rank_head": ranks,
        "fitted_children": fit_children(figures["rank_hits"]),
    }
    folder = job.run / "export"
    (folder / "training_card.json").write_text(json.dumps(card, indent=2) + "\n")
    rows = zip(figures["top1"], figures["top4"], strict=True)
    slots = "\n".join(
        f"| {1 + i // module.block} | {1 + i % module.block} | {one:.3f} | {four:.3f} |"
        for i, (one, four) in enumerate(rows)
    )
    (folder / "README.md").write_text(
        f"# SpecBlock draft for {job.target.name}\n\n"
        f"Trained with `sgl_graft` for {card['hours']} hours on a CPU: {trainer.step} steps over "
        f"{card['answer_tokens']:,} answer tokens that the target wrote itself ({len(found):,} dialogues), "
        f"contexts of up to {job.max_len} tokens, {module.block} tokens per block.\n\n"
        f"Held-out dialogues, true tokens fed (accepted by one path of two blocks: {figures['chain']:.2f}, "
        f"of one: {figures['chain1']:.2f}):\n\n"
        f"| block | slot | top-1 | top-4 |\n|---|---|---|---|\n{slots}\n\n"
        f"Rank head, classes 1, 2-4, 5-10, above 10: precision {ranks['precision']}, F1 {ranks['f1']}. "
        f"Fitted branching: `specblock.children: {card['fitted_children']}`.\n\n"
        f"Command:\n\n```\n{command}\n```\n"
    )
