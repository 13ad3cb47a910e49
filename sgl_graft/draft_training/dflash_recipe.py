"""Recipe for DFlash: initial weights, loss, held-out acceptance, export."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from sgl_graft.draft_training import dflash_ops
from sgl_graft.draft_training.dflash import ARCHITECTURE, Blocks, DFlashDraft
from sgl_graft.draft_training.eagle3 import run_lengths
from sgl_graft.draft_training.features import Sample
from sgl_graft.draft_training.loss import soft_head_loss


@dataclass(frozen=True)
class DFlashSettings:
    """`anchor_share` of the answer positions start a block in each epoch. Offset j of a block counts
    `exp(-(j - 1) / gamma)` in the loss, by being scored with that probability. A share `full_size` of the
    batches has blocks of the full size, the others of a size drawn from `[smallest_block, block_size)`:
    cheaper, and the draft then also knows shorter blocks, whose masks attend to fewer others.
    `random_negatives` rows of the LM head stand for all tokens that are neither frequent nor among the likely
    ones of the batch. Targets are the teacher's probabilities to the power `sharpen`: above 1 they lean to
    what a greedy target says. `compile` fuses the pointwise parts (see `dflash_ops.compiled`).
    """

    anchor_share: float = 0.5
    gamma: float = 2.5
    smallest_block: int = 4
    full_size: float = 0.5
    random_negatives: int = 1024
    sharpen: float = 1.0
    bf16: bool = True
    compile: bool = False

    def weight(self, offset: Tensor) -> Tensor:
        """Share of the loss of 1-based offsets (DFlash, eq. 4)."""
        return torch.exp(-(offset - 1) / self.gamma)


class DFlashRecipe:
    """See `loop.Recipe`. `embedding` and `head` `[vocab, hidden]` are the target's; `frequent` `[n]` are the
    token ids every step's softmax contains."""

    def __init__(
        self,
        module: DFlashDraft,
        embedding: Tensor,
        head: Tensor,
        frequent: Tensor,
        settings: DFlashSettings | None = None,
    ) -> None:
        self.module = module
        self.settings = settings or DFlashSettings()
        if self.settings.compile:
            module.ops = dflash_ops.compiled()
        self.dtype = torch.bfloat16 if self.settings.bf16 else torch.float32
        self.embedding = embedding.detach().to(self.dtype)
        self.head = self.embedding if head is embedding else head.detach().to(self.dtype)
        self.frequent = torch.zeros(len(head), dtype=torch.bool)
        self.frequent[frequent] = True

    @property
    def block_size(self) -> int:
        return int(self.module.config.block_size)

    def loss(self, samples: Sequence[Sample], denominator: int, random: torch.Generator) -> Tensor:
        settings = self.settings
        size = self.block_size
        if settings.smallest_block < size and torch.rand((), generator=random) >= settings.full_size:
            size = int(torch.randint(settings.smallest_block, size, (), generator=random))
        blocks, targets = [], []  # per sample; `targets` are rows of its top_ids, one per scored block row
        offsets = torch.arange(size)
        chance = settings.weight(offsets.float()) * (offsets > 0)
        for sample in samples:
            starts = (torch.rand(len(sample.rows), generator=random) < settings.anchor_share).nonzero()[:, 0]
            known = offsets <= run_lengths(sample.rows)[starts, None]  # [blocks, size] token is in the answer
            scored = known & (torch.rand(known.shape, generator=random) < chance)
            blocks.append(Blocks(sample.rows[starts], scored.flatten().nonzero()[:, 0]))
            targets.append((starts[:, None] + offsets - 1)[scored])
        if not any(len(t) for t in targets):
            return sum(p.sum() for p in self.module.parameters()) * 0.0  # type: ignore[return-value]
        normed = self.module(
            [s.ids for s in samples], [s.features for s in samples], blocks, size, self.embedding
        )
        ids = torch.cat([s.top_ids[t] for s, t in zip(samples, targets, strict=True)])  # [scored, TOP]
        probs = torch.cat([s.top_probs[t] for s, t in zip(samples, targets, strict=True)])
        if settings.sharpen != 1.0:
            mass = probs.sum(-1, keepdim=True)
            probs = probs**settings.sharpen
            probs = probs * (mass / probs.sum(-1, keepdim=True))
        tokens, bias = self._softmax_tokens(ids[:, :4], random)
        place = torch.full((len(self.head),), -1)
        place[tokens] = torch.arange(len(tokens))
        local = place[ids]
        scale = 1.0 / (denominator * settings.anchor_share * float(chance.sum()))
        return soft_head_loss(
            normed,
            self.head[tokens],
            local.clamp_min(0),
            probs * (local >= 0),
            torch.full((len(ids),), scale),
            self.dtype,
            bias,
        )

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample], every: int = 4) -> dict[str, Any]:
        """Over every `every`-th held-out position with a whole block before the answer's end: how often each
        offset's proposal is the target's likeliest (`top1`) and `chain`, the mean accept length of a block,
        bonus included. The true tokens are fed, and the whole vocabulary competes.
        """
        size = self.block_size
        hits = torch.zeros(size - 1)
        chain = count = 0.0
        for start in range(0, len(samples), 8):
            kept = []
            for sample in samples[start : start + 8]:
                starts = (run_lengths(sample.rows) >= size - 1).nonzero()[::every, 0]
                if len(starts):
                    kept.append((sample, starts))
            if not kept:
                continue
            scored = [(torch.arange(len(s) * size) % size).nonzero()[:, 0] for _, s in kept]
            blocks = [Blocks(a.rows[s], rows) for (a, s), rows in zip(kept, scored, strict=True)]
            normed = self.module(
                [a.ids for a, _ in kept], [a.features for a, _ in kept], blocks, size, self.embedding
            )
            best = torch.cat([(part.to(self.dtype) @ self.head.T).argmax(-1) for part in normed.split(512)])
            truth = torch.cat([a.top_ids[s[:, None] + torch.arange(size - 1), 0].flatten() for a, s in kept])
            right = (best == truth).view(-1, size - 1)  # [blocks, size - 1]
            hits += right.float().sum(0)
            chain += float(right.cumprod(-1).sum())
            count += len(right)
        return {
            "top1": [round(float(h), 4) for h in hits / max(1.0, count)],
            "chain": round(1 + chain / max(1.0, count), 4),
            "blocks": int(count),
        }

    def export(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` (bf16) for stock SGLang."""
        export_dflash(self.module, folder)

    def _softmax_tokens(self, likely: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """The tokens of this step's softmax `[n]` and what is added to their logits `[n]`: the frequent, the
        `likely` ones of any shape, and a random sample of the rest, each of which stands for several."""
        certain = self.frequent.clone()
        certain[likely.flatten()] = True
        drawn = torch.randint(len(certain), (self.settings.random_negatives,), generator=random).unique()
        drawn = drawn[~certain[drawn]]
        fixed = certain.nonzero()[:, 0]
        rest = len(certain) - len(fixed)
        bias = torch.zeros(len(fixed) + len(drawn))
        if len(drawn):
            bias[len(fixed) :] = math.log(rest / len(drawn))
        return torch.cat([fixed, drawn]), bias


def export_dflash(draft: DFlashDraft, folder: Path) -> None:
    """Write the draft as `DFlashDraftModel` in bf16; embedding and LM head are the target's at serving."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in draft.state_dict().items()
        if not name.startswith("rotary.")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = draft.config.to_dict()
    config["dtype"] = "bfloat16"
    for stale in ("_name_or_path", "transformers_version", "torch_dtype"):
        config.pop(stale, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_dflash(folder: Path) -> DFlashDraft:
    """Read an exported draft back (fp32 module). Raises ValueError for another architecture."""
    raw = json.loads((folder / "config.json").read_text())
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{folder} holds {raw.get('architectures')}, not a DFlash draft ({ARCHITECTURE})")
    draft = DFlashDraft(Qwen3Config(**raw))
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    missing, unexpected = draft.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if not name.startswith("rotary.")]
    if missing or unexpected:
        raise ValueError(f"{folder}: tensors missing {missing}, unknown {unexpected}")
    return draft
