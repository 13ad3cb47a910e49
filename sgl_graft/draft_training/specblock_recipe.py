"""Recipe for SpecBlock: initial weights, loss, held-out acceptance, export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from sgl_graft.draft_training.features import Sample, default_layers
from sgl_graft.draft_training.loss import soft_head_loss
from sgl_graft.draft_training.specblock_loss import CLASSES, prefix_mask, rank_class, rank_loss
from sgl_graft.draft_training.specblock_unroll import BlockRows, unroll
from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock import checkpoint
from sgl_graft.specblock.model import RANK_TOP, SpecBlockDraft

# A slot that fewer of its rows reach is not scaled up as if all did: early in training a handful of rows,
# right by chance so far, would be most of the gradient.
_LEAST_SHARE = 0.25


@dataclass(frozen=True)
class SpecBlockSettings:
    """`blocks` chained blocks are trained, each after the first on a share `keep` of the rows of the one
    before it; slot k of a block weighs `slot_decay` to the k-th power; `valid_prefix` off trains every slot
    whatever came before it (for the ablation); `rank_weight` scales the rank loss; `bf16` runs matrix
    products in bfloat16.
    """

    blocks: int = 2
    keep: float = 0.4
    slot_decay: float = 0.8
    valid_prefix: bool = True
    rank_weight: float = 1.0
    bf16: bool = True


class Best(NamedTuple):
    """The draft's likeliest tokens, likeliest first."""

    values: Tensor  # [rows, K, RANK_TOP] logits
    indices: Tensor  # [rows, K, RANK_TOP] draft ids


class SpecBlockRecipe:
    """See `loop.Recipe`."""

    def __init__(
        self,
        module: SpecBlockDraft,
        embedding: Tensor,
        vocab: DraftVocab,
        settings: SpecBlockSettings | None = None,
    ) -> None:
        self.module = module
        self.vocab = vocab
        self.settings = settings or SpecBlockSettings()
        self.dtype = torch.bfloat16 if self.settings.bf16 else torch.float32
        self.embedding = embedding.detach().to(self.dtype)  # [vocab, hidden] the target's, frozen

    def loss(self, samples: Sequence[Sample], denominator: int, random: torch.Generator) -> Tensor:
        """Every slot of every block is a mean over the rows that reach it; parts weigh by their rows."""
        settings = self.settings

        def cut(rows: int) -> Tensor:
            return torch.randint(1, self.module.block + 1, (rows,), generator=random)

        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            blocks = unroll(self.module, samples, self.embedding, settings.blocks, cut, settings.keep, random)
        ids, probs = self._targets(samples)
        total = torch.zeros(())
        for block in blocks:
            if len(block.first):
                total = total + self._block_loss(block, ids, probs)
        return total * (sum(len(s.rows) for s in samples) / denominator)

    def _block_loss(self, block: BlockRows, ids: Tensor, probs: Tensor) -> Tensor:
        settings = self.settings
        normed = self.module.norm(block.hidden)  # [rows, K, hidden]
        top = self._best(normed)
        target = block.target.clamp_max(len(ids) - 1)  # [rows, K]
        wanted = torch.where(probs[target, 0] > 0, ids[target, 0], -1)  # [rows, K] the target's likeliest
        right = (top.indices[..., 0] == wanted) & block.valid
        counted = prefix_mask(right, block.valid) if settings.valid_prefix else block.valid
        counted = counted & (wanted >= 0)
        slots = torch.arange(self.module.block)
        reached = torch.maximum(counted.sum(0), _LEAST_SHARE * block.valid.sum(0)).clamp_min(1)  # [K]
        scale = settings.slot_decay**slots / reached  # [K]
        rows, slot = counted.nonzero(as_tuple=True)
        loss = soft_head_loss(
            normed[rows, slot],
            self.module.lm_head.weight,
            ids[target[rows, slot]],
            probs[target[rows, slot]],
            scale[slot],
            self.dtype,
        )
        if settings.rank_weight:
            scores = self.module.rank_logits(normed, top.values)
            classes = rank_class(top.indices, wanted)
            loss = loss + settings.rank_weight * rank_loss(scores, classes, block.valid)
        return loss

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Over all held-out rows, block 1 and a block 2 behind its last slot, fed the true tokens.

        `top1`, `top4`: how often the target's likeliest token is the draft's first, or among its first four,
        per slot of both blocks. `chain`: mean accept length of the greedy chain of both, bonus included;
        `chain1`: of block 1 alone. `rank_confusion` `[true][guessed]` of block 1's classes; `rank_hits`
        `[guessed][rank - 1]` how often the target's likeliest token stood at that rank, the last for none.
        """
        size = self.module.block
        hits = {1: torch.zeros(2 * size), 4: torch.zeros(2 * size)}
        counts = torch.zeros(2 * size)
        confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
        ranks = torch.zeros(CLASSES, RANK_TOP + 1, dtype=torch.long)
        chains = [0.0, 0.0]
        rows = 0
        for start in range(0, len(samples), 8):
            part = samples[start : start + 8]
            with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.bf16):
                blocks = unroll(self.module, part, self.embedding, 2, lambda n: torch.full((n,), size))
            ids, probs = self._targets(part)
            unbroken = torch.zeros(len(ids), dtype=torch.bool)  # [targets] by row: block 1 was right
            for number, block in enumerate(blocks):
                normed = self.module.norm(block.hidden)
                top = self._best(normed)
                target = block.target.clamp_max(len(ids) - 1)
                wanted = torch.where(probs[target, 0] > 0, ids[target, 0], -1)
                right = (top.indices[..., 0] == wanted) & block.valid
                near = (top.indices[..., :4] == wanted.unsqueeze(-1)).any(-1) & block.valid
                span = slice(number * size, (number + 1) * size)
                hits[1][span] += right.sum(0)
                hits[4][span] += near.sum(0)
                counts[span] += block.valid.sum(0)
                length = right.cummin(dim=1).values  # [rows, K] right so far
                if number:
                    length = length & unbroken[block.first].unsqueeze(1)
                else:
                    unbroken[block.first] = length[:, -1]
                    rows += len(block.first)
                    guess = self.module.rank_logits(normed, top.values).argmax(-1)
                    classes = rank_class(top.indices, wanted)
                    pairs = (classes * CLASSES + guess)[block.valid]
                    confusion += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)
                    hit = top.indices == wanted.unsqueeze(-1)
                    place = torch.where(hit.any(-1), hit.int().argmax(-1), RANK_TOP)
                    pairs = (guess * (RANK_TOP + 1) + place)[block.valid]
                    ranks += torch.bincount(pairs, minlength=ranks.numel()).view(ranks.shape)
                chains[number] += float(length.sum())
        rate = {n: [round(v, 4) for v in (hits[n] / counts.clamp_min(1)).tolist()] for n in (1, 4)}
        return {
            "top1": rate[1],
            "top4": rate[4],
            "chain": round(1 + sum(chains) / max(1, rows), 4),
            "chain1": round(1 + chains[0] / max(1, rows), 4),
            "rank_confusion": confusion.tolist(),
            "rank_hits": ranks.tolist(),
        }

    def export(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` (bf16)."""
        checkpoint.export(self.module, self.vocab, folder)

    def _targets(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Draft ids and probabilities `[targets, TOP]`; probability 0 where the draft has no such token."""
        ids = self.vocab.target_to_draft[torch.cat([s.top_ids for s in samples])]
        probs = torch.cat([s.top_probs for s in samples]) * (ids >= 0)
        return ids.clamp_min(0), probs

    @torch.no_grad()
    def _best(self, normed: Tensor) -> Best:
        """The draft's likeliest tokens and their logits, a part of the rows at a time."""
        weight = self.module.lm_head.weight.to(self.dtype)
        flat = normed.flatten(0, 1).to(self.dtype)
        parts = [F.linear(piece, weight).float().topk(RANK_TOP, dim=-1) for piece in flat.split(512)]
        shape = (*normed.shape[:2], RANK_TOP)
        values = torch.cat([p.values for p in parts]).view(shape)
        return Best(values, torch.cat([p.indices for p in parts]).view(shape))


def specblock_config(target: Any, draft_vocab_size: int, block: int = 4, **changes: Any) -> LlamaConfig:
    """The draft's config from the target's: same width, heads, RoPE and positions, two layers.

    `changes` override fields (`intermediate_size`, `num_hidden_layers`, `rope_parameters`, ...).
    """
    captured = len(default_layers(target.num_hidden_layers))
    fields: dict[str, Any] = {
        "architectures": [checkpoint.ARCHITECTURES[1]],
        **({} if captured == 3 else {"num_aux_hidden_states": captured}),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "diffspec_draft_token_num": block,
        "rank_classes": CLASSES,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 2,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": target.rope_parameters,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
    }
    return LlamaConfig(**{**fields, **changes})


@torch.no_grad()
def init_from_target(draft: SpecBlockDraft, target: Any, vocab: DraftVocab, stream: float = 4.5) -> None:
    """Start from what the target knows: its last layers over its last captured state, its head's rows.

    The stream enters normed, while in the target it is about `stream` squared large there: half of that (on
    a log scale) scales the stream up, half scales down what the copied layers add to it, which keeps both at
    a size that training moves. A narrower MLP takes the target's strongest neurons. Widths that differ
    otherwise stay random. `target` is a transformers model of the Llama or Qwen3 family.
    """
    width = draft.config.hidden_size
    draft.lm_head.weight.copy_(target.lm_head.weight[vocab.draft_to_target])
    draft.norm.weight.copy_(target.model.norm.weight)
    entry = draft.input_layer
    entry.condition_proj.weight.normal_(0.0, 0.01)
    entry.condition_proj.weight[:, -width:] += torch.eye(width)
    entry.condition_norm.weight.fill_(stream)
    entry.fuse.weight.normal_(0.0, 0.03)
    entry.fuse.weight[:, :width] += torch.eye(width)
    for shift in draft.shift_proj:
        shift.weight.normal_(0.0, 0.01)
        shift.weight[:, :width] += torch.eye(width)
    for layer, source in zip(draft.layers, target.model.layers[-len(draft.layers) :], strict=True):
        _copy_layer(layer, source, stream)


def _copy_layer(layer: Any, source: Any, stream: float) -> None:
    attention, theirs = layer.self_attn, source.self_attn
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    if all(getattr(attention, n).weight.shape == getattr(theirs, n).weight.shape for n in names):
        for name in names:
            getattr(attention, name).weight.copy_(getattr(theirs, name).weight)
        attention.o_proj.weight /= stream
        layer.input_layernorm.weight.copy_(source.input_layernorm.weight)
    mlp, width = source.mlp, layer.mlp.gate_proj.out_features
    if getattr(mlp, "gate_proj", None) is None or mlp.gate_proj.out_features < width:
        return
    strength = (
        mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)
    )
    chosen = strength.topk(width).indices.sort().values
    layer.mlp.gate_proj.weight.copy_(mlp.gate_proj.weight[chosen])
    layer.mlp.up_proj.weight.copy_(mlp.up_proj.weight[chosen])
    layer.mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, chosen] / stream)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
