"""`sgl-graft train eagle3`: from dialogues to an exported draft with its card and curve."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sgl_graft.draft_training import dialogues, features, vocab
from sgl_graft.draft_training.eagle3 import Eagle3Draft, draft_config
from sgl_graft.draft_training.eagle3_recipe import Eagle3Recipe, Eagle3Settings, init_from_target, load_eagle3
from sgl_graft.draft_training.feed import Feed
from sgl_graft.draft_training.loop import Trainer, TrainSettings


@dataclass(frozen=True)
class Eagle3Job:
    """`data` are dialogue files or folders of shards; `run` holds features, checkpoint, log and export.

    `max_len` is the longest context trained; `rope` (JSON fields of `rope_parameters`) and
    `max_position_embeddings` default to the target's. `start_from` is an exported draft to continue on new
    data without its optimizer.
    """

    target: Path
    data: tuple[Path, ...]
    run: Path
    draft_vocab_size: int = 8192
    batch_targets: int = 1024
    max_len: int = 1344
    rope: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    intermediate_size: int | None = None
    start_from: Path | None = None
    train: TrainSettings = field(default_factory=TrainSettings)
    eagle3: Eagle3Settings = field(default_factory=Eagle3Settings)


def compute_features(
    target: Path, data: tuple[Path, ...], folder: Path, report: Callable[[str, int], None] | None = None
) -> int:
    """Write the feature shard of every dialogue file that has none yet; returns how many were written."""
    pending = [f for f in _files(data) if not _feature_file(folder, f).is_file()]
    if not pending:
        return 0
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    capture = features.FeatureCapture(model, features.default_layers(model.config.num_hidden_layers))
    for file in random.Random(os.getpid()).sample(
        pending, len(pending)
    ):  # several processes may share the work
        if _feature_file(folder, file).is_file():
            continue
        tokens = features.compute(model, capture, dialogues.load(file).dialogues, _feature_file(folder, file))
        if report is not None:
            report(file.name, tokens)
    return len(pending)


def make_trainer(job: Eagle3Job) -> Trainer:
    """Everything loaded and, where a checkpoint exists, resumed."""
    target_config = AutoConfig.from_pretrained(job.target)
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=torch.float32)
    torch.manual_seed(job.train.seed)
    kept = job.run / "vocab.json"
    if job.start_from is not None and not (job.run / "checkpoint.pt").is_file():
        module, draft_vocab = load_eagle3(job.start_from)
    else:
        if kept.is_file():
            tokens = json.loads(kept.read_text())
            draft_vocab = vocab.DraftVocab.of(torch.tensor(tokens), target_config.vocab_size)
        else:
            found = dialogues.load_all(job.data)
            draft_vocab = vocab.choose(found, job.draft_vocab_size, target_config.vocab_size)
        changes: dict[str, Any] = {
            "rope_parameters": job.rope,
            "max_position_embeddings": job.max_position_embeddings,
            "intermediate_size": job.intermediate_size,
        }
        changes = {k: v for k, v in changes.items() if v is not None}
        module = Eagle3Draft(draft_config(target_config, len(draft_vocab.draft_to_target), **changes))
        init_from_target(module, target, draft_vocab)
    job.run.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(draft_vocab.draft_to_target.tolist()))
    recipe = Eagle3Recipe(module, target.get_input_embeddings().weight, draft_vocab, job.eagle3)
    del target
    gc.collect()  # half a gigabyte that training does not need
    feed = Feed(
        job.run / "features", batch_targets=job.batch_targets, max_len=job.max_len, seed=job.train.seed
    )
    trainer = Trainer(recipe, feed, job.run, job.train)
    trainer.resume()
    return trainer


def write_card(job: Eagle3Job, trainer: Trainer, command: str, figures: dict[str, Any]) -> None:
    """`training_card.json` and `README.md` beside the exported weights."""
    found = dialogues.load_all(job.data)
    sources: dict[str, int] = {}
    for dialogue in found:
        sources[dialogue.source] = sources.get(dialogue.source, 0) + dialogue.num_answer_tokens
    card = {
        "target": job.target.name,
        "architecture": "LlamaForCausalLMEagle3",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "dialogues": len(found),
        "answer_tokens": sum(sources.values()),
        "answer_tokens_by_source": sources,
        "steps": trainer.step,
        "answer_tokens_seen": trainer.targets_seen,
        "hours": round(trainer.seconds / 3600, 2),
        "trained_context": job.max_len,
        "draft_vocab_size": len(trainer.recipe.vocab.draft_to_target),  # type: ignore[attr-defined]
        "parameters": sum(p.numel() for p in trainer.params),
        "settings": {
            "train": asdict(job.train),
            "eagle3": asdict(job.eagle3),
            "batch_targets": job.batch_targets,
        },
        "held_out": figures,
    }
    folder = job.run / "export"
    (folder / "training_card.json").write_text(json.dumps(card, indent=2) + "\n")
    depth = "\n".join(
        f"| {i + 1} | {one:.3f} | {four:.3f} |"
        for i, (one, four) in enumerate(zip(figures["top1"], figures["top4"], strict=True))
    )
    (folder / "README.md").write_text(
        f"# EAGLE-3 draft for {job.target.name}\n\n"
        f"Trained with `sgl_graft` for {card['hours']} hours on a CPU: {trainer.step} steps over "
        f"{card['answer_tokens']:,} answer tokens that the target wrote itself ({len(found):,} dialogues), "
        f"contexts of up to {job.max_len} tokens. Serve it with stock SGLang: "
        "`--speculative-algorithm EAGLE3 --speculative-draft-model-path` and this folder.\n\n"
        f"Held-out dialogues, true tokens fed (accepted by one path: {figures['chain']:.2f}):\n\n"
        f"| depth | top-1 | top-4 |\n|---|---|---|\n{depth}\n\nCommand:\n\n```\n{command}\n```\n"
    )


def draw_curve(log: Path, picture: Path) -> None:
    """Training curve from `log.jsonl`: loss, and held-out top-1 by depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = [json.loads(line) for line in log.read_text().splitlines()]
    held = [r for r in records if "held_out" in r]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    left.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=0.7)
    left.set(xlabel="step", ylabel="training loss")
    for depth in range(len(held[0]["held_out"]["top1"]) if held else 0):
        steps, hits = [r["step"] for r in held], [r["held_out"]["top1"][depth] for r in held]
        right.plot(steps, hits, marker=".", label=f"depth {depth + 1}")
    right.set(xlabel="step", ylabel="held-out top-1 hit rate")
    if held:
        right.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _files(data: tuple[Path, ...]) -> list[Path]:
    return [f for p in data for f in (sorted(p.glob(f"*{dialogues.SUFFIX}")) if p.is_dir() else [p])]


def _feature_file(folder: Path, dialogue_file: Path) -> Path:
    return folder / f"{dialogue_file.name.removesuffix(dialogues.SUFFIX)}{features.SUFFIX}"
