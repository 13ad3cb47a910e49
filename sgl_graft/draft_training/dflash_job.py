"""`sgl-graft train dflash`: from dialogues and features to an exported draft with its card and curve."""

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
from sgl_graft.draft_training.dflash import ARCHITECTURE, DFlashDraft, draft_config
from sgl_graft.draft_training.dflash_init import init_from_target, init_gather
from sgl_graft.draft_training.dflash_recipe import DFlashRecipe, DFlashSettings, load_dflash
from sgl_graft.draft_training.features import default_layers
from sgl_graft.draft_training.feed import Feed
from sgl_graft.draft_training.loop import Trainer, TrainSettings

_INIT_SAMPLES = 24  # dialogues that the first layer's probes are fitted on


@dataclass(frozen=True)
class DFlashJob:
    """`data` are dialogue files or folders of shards; `run` holds checkpoint, log and export, and features
    unless `features` names the folder of another run (they are the same for EAGLE-3). `mask_token_id` must be
    a token that no dialogue uses. `start_from` is an exported draft to continue without its optimizer.
    """

    target: Path
    data: tuple[Path, ...]
    run: Path
    features: Path | None = None
    block_size: int = 8
    layers: int = 2
    intermediate_size: int = 1024
    mask_token_id: int = 16
    frequent: int = 3072
    batch_targets: int = 1024
    max_len: int = 1024
    start_from: Path | None = None
    train: TrainSettings = field(default_factory=TrainSettings)
    dflash: DFlashSettings = field(default_factory=DFlashSettings)

    @property
    def feature_folder(self) -> Path:
        return self.features or self.run / "features"


def make_trainer(job: DFlashJob) -> Trainer:
    """Everything loaded and, where a checkpoint exists, resumed.

    Raises ValueError where sizes or the mask token do not fit.
    """
    config = AutoConfig.from_pretrained(job.target)
    if not 2 <= job.dflash.smallest_block <= job.block_size:
        raise ValueError(
            f"--smallest-block {job.dflash.smallest_block} must lie between 2 and --block-size "
            f"{job.block_size}"
        )
    found = dialogues.load_all(job.data)
    if not 0 <= job.mask_token_id < config.vocab_size or any(job.mask_token_id in d.ids for d in found):
        raise ValueError(
            f"--mask-token-id {job.mask_token_id} must be a token of the target's vocabulary "
            f"({config.vocab_size}) that the dialogues never use"
        )
    frequent = vocab.choose(found, min(job.frequent, config.vocab_size), config.vocab_size).draft_to_target
    del found
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=torch.float32)
    feed = Feed(job.feature_folder, batch_targets=job.batch_targets, max_len=job.max_len, seed=job.train.seed)
    torch.manual_seed(job.train.seed)
    fresh = not (job.run / "checkpoint.pt").is_file()
    if job.start_from is not None and fresh:
        module = load_dflash(job.start_from)
    else:
        # Features are inputs of layers, DFlash names the layers whose outputs they are.
        outputs = [layer - 1 for layer in default_layers(config.num_hidden_layers)]
        module = DFlashDraft(
            draft_config(
                config,
                target_layer_ids=outputs,
                mask_token_id=job.mask_token_id,
                block_size=job.block_size,
                layers=job.layers,
                intermediate_size=job.intermediate_size,
            )
        )
        if fresh:
            init_from_target(module, target)
            init_gather(module, feed.training(_INIT_SAMPLES), target.get_input_embeddings().weight)
    recipe = DFlashRecipe(
        module, target.get_input_embeddings().weight, target.lm_head.weight, frequent, job.dflash
    )
    del target
    gc.collect()  # half a gigabyte that training does not need
    trainer = Trainer(recipe, feed, job.run, job.train)
    trainer.resume()
    return trainer


def write_card(job: DFlashJob, trainer: Trainer, command: str, figures: dict[str, Any]) -> None:
    """`training_card.json` and `README.md` beside the exported weights."""
    sources: dict[str, int] = {}
    count = 0
    for shard in trainer.feed.shards.values():
        for i, source in enumerate(shard.sources):
            sources[source] = sources.get(source, 0) + shard.num_targets(i)
        count += len(shard)
    card = {
        "target": job.target.name,
        "architecture": ARCHITECTURE,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "dialogues": count,
        "answer_tokens": sum(sources.values()),
        "answer_tokens_by_source": sources,
        "steps": trainer.step,
        "answer_tokens_passed": trainer.targets_seen,
        "blocks_seen": round(trainer.targets_seen * job.dflash.anchor_share),
        "hours": round(trainer.seconds / 3600, 2),
        "trained_context": job.max_len,
        "block_size": job.block_size,
        "parameters": sum(p.numel() for p in trainer.params),
        "settings": {
            "train": asdict(job.train),
            "dflash": asdict(job.dflash),
            "batch_targets": job.batch_targets,
        },
        "held_out": figures,
    }
    folder = job.run / "export"
    (folder / "training_card.json").write_text(json.dumps(card, indent=2) + "\n")
    offsets = "\n".join(f"| {i + 1} | {hit:.3f} |" for i, hit in enumerate(figures["top1"]))
    (folder / "README.md").write_text(
        f"# DFlash draft for {job.target.name}\n\n"
        f"Trained with `sgl_graft` for {card['hours']} hours on a CPU: {trainer.step} steps over "
        f"{card['answer_tokens']:,} answer tokens that the target wrote itself ({count:,} dialogues), blocks "
        f"of {job.dflash.smallest_block} to {job.block_size}, contexts of up to {job.max_len} tokens. "
        "Serve it with stock SGLang: `--speculative-algorithm DFLASH --speculative-draft-model-path` and "
        "this folder.\n\n"
        f"Held-out dialogues, true tokens fed, blocks of {job.block_size} (mean accept length "
        f"{figures['chain']:.2f}):\n\n"
        f"| offset | top-1 |\n|---|---|\n{offsets}\n\nCommand:\n\n```\n{command}\n```\n"
    )
