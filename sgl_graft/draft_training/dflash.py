"""The DFlash draft as a trainable module, computing what SGLang's `models/dflash.py` serves.

DFlash (arXiv 2602.06036): a small transformer fills a block in one pass. A block is the newest committed
token (the *anchor*) and masks; its rows attend to each other without a causal mask and to the target's
features of every position before the anchor, which enter each layer's keys and values directly.

Training puts many blocks in one forward pass: a block sees the features before its own anchor and itself.
Only the rows whose prediction is scored run through the last layer; the others give it keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sgl_graft.draft_training import dflash_ops

ARCHITECTURE = "DFlashDraftModel"
_CHUNK = 8  # anchors whose attention is computed at once: their masks then waste few columns


@dataclass
class Blocks:
    """Blocks of one size over one dialogue.

    anchors `[blocks]`: ascending positions of the newest committed tokens. scored `[scored]`: ascending
    rows of the flattened blocks `[blocks * size]` whose prediction is wanted; row `b * size + j` predicts the
    token at `anchors[b] + j`.
    """

    anchors: Tensor
    scored: Tensor


class Norm(nn.Module):
    """Weight and epsilon of a root-mean-square norm; `dflash_ops` computes it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps


class DFlashAttention(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm = Norm(dim, config.rms_norm_eps)
        self.k_norm = Norm(dim, config.rms_norm_eps)

    def heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """One projection of x `[rows, hidden]` by head, `[rows, heads, head_dim]`."""
        return projection(x).view(len(x), -1, self.head_dim)


class DFlashMLP(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DFlashLayer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


class DFlashDraft(nn.Module):
    """Parameter names are those of a DFlash checkpoint (`fc`, `hidden_norm`, `layers.*`, `norm`)."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.ops = dflash_ops.EAGER
        captured = len(config.dflash_config["target_layer_ids"])
        self.fc = nn.Linear(captured * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)

    @property
    def decoder(self) -> list[DFlashLayer]:
        """`layers`, by their type."""
        return cast(list[DFlashLayer], list(self.layers))

    @property
    def mask_token_id(self) -> int:
        return int(self.config.dflash_config["mask_token_id"])

    def forward(
        self,
        ids: Sequence[Tensor],
        features: Sequence[Tensor],
        blocks: Sequence[Blocks],
        size: int,
        embedding: Tensor,
    ) -> Tensor:
        """Normed output `[scored rows of all dialogues, hidden]` for the LM head, in the embedding's dtype.

        Per dialogue: ids `[tokens]`, features `[tokens, layers * hidden]` and its blocks of `size` rows.
        embedding `[vocab, hidden]` is the target's, which serving shares; its dtype is that of the products.
        """
        lengths = [len(i) for i in ids]
        counts = [len(b.anchors) for b in blocks]
        starts = torch.tensor([0, *counts]).cumsum(0)[:-1] * size
        scored = torch.cat([b.scored + start for b, start in zip(blocks, starts, strict=True)])
        every = torch.arange(sum(counts) * size)
        anchors = torch.cat([b.anchors for b in blocks])  # [blocks] position in its dialogue
        cos, sin = self._angles(max(lengths) + size)
        ctx_at = torch.cat([torch.arange(n) for n in lengths])
        at = (anchors[:, None] + torch.arange(size)).flatten()  # [blocks * size] positions

        anchor_ids = torch.cat([i[b.anchors] for i, b in zip(ids, blocks, strict=True)])
        # All masks enter the first layer as the same vector: its projections are computed once.
        distinct = torch.cat([embedding[anchor_ids], embedding[self.mask_token_id, None]])
        source = torch.full((len(anchors), size), len(anchors))
        source[:, 0] = torch.arange(len(anchors))
        source = source.flatten()  # [blocks * size] row of `distinct`
        hidden = distinct[source].float()
        with torch.autocast("cpu", torch.bfloat16, enabled=embedding.dtype == torch.bfloat16):
            ctx = self._norm(self.hidden_norm, self.fc(torch.cat(list(features)).to(embedding.dtype)))
            for depth, layer in enumerate(self.decoder):
                attention = layer.self_attn
                wanted = scored if depth + 1 == len(self.decoder) else every
                x = self._norm(layer.input_layernorm, distinct if depth == 0 else hidden)
                keys, values = attention.heads(attention.k_proj, x), attention.heads(attention.v_proj, x)
                if depth == 0:
                    queries = attention.heads(attention.q_proj, x).index_select(0, source[wanted])
                    keys, values = keys.index_select(0, source), values.index_select(0, source)
                else:
                    queries = attention.heads(attention.q_proj, x.index_select(0, wanted))
                attended = dflash_ops.BlockAttention.apply(
                    self._rotate(attention.q_norm, queries, cos[at[wanted]], sin[at[wanted]]),
                    self._rotate(
                        attention.k_norm, attention.heads(attention.k_proj, ctx), cos[ctx_at], sin[ctx_at]
                    ),
                    attention.heads(attention.v_proj, ctx),
                    self._rotate(attention.k_norm, keys, cos[at], sin[at]),
                    values,
                    _chunks(blocks, lengths, size, wanted, embedding.dtype),
                )
                hidden = hidden.index_select(0, wanted) + attention.o_proj(attended)
                x = self._norm(layer.post_attention_layernorm, hidden)
                mlp = layer.mlp
                hidden = hidden + mlp.down_proj(self.ops.gate(mlp.gate_proj(x), mlp.up_proj(x)))
            return self._norm(self.norm, hidden)

    def _norm(self, norm: Norm, x: Tensor) -> Tensor:
        return self.ops.norm(x, norm.weight, norm.eps, self._dtype)

    def _rotate(self, norm: Norm, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.ops.norm_rotate(x, norm.weight, norm.eps, cos, sin, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin `[positions, 1, head_dim / 2]`."""
        cos, sin = self.rotary(self.norm.weight, torch.arange(positions)[None])
        half = cos.shape[-1] // 2
        return cos[0, :, None, :half], sin[0, :, None, :half]


def _chunks(
    blocks: Sequence[Blocks], lengths: Sequence[int], size: int, wanted: Tensor, dtype: torch.dtype
) -> list[dflash_ops.Chunk]:
    """The attention's work in pieces of up to `_CHUNK` blocks of one dialogue; `wanted` are the flat block
    rows that have a query, ascending."""
    chunks: list[dflash_ops.Chunk] = []
    block = token = query = 0
    owner = wanted // size  # [queries] flat block of each query
    for own, length in zip(blocks, lengths, strict=True):
        for i in range(0, len(own.anchors), _CHUNK):
            here = own.anchors[i : i + _CHUNK]
            end = query + int(((owner >= block + i) & (owner < block + i + len(here))).sum())
            if end > query:
                mine = owner[query:end] - block - i  # [queries] block within this chunk
                seen = int(here[-1])
                hidden = torch.cat(
                    [
                        torch.arange(seen) >= here[mine, None],
                        torch.arange(len(here)).repeat_interleave(size) != mine[:, None],
                    ],
                    dim=1,
                )
                chunks.append(
                    dflash_ops.Chunk(
                        slice(query, end),
                        slice(token, token + seen),
                        slice((block + i) * size, (block + i + len(here)) * size),
                        torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")),
                    )
                )
            query = end
        block += len(own.anchors)
        token += length
    return chunks


def draft_config(
    target: Any,
    *,
    target_layer_ids: Sequence[int],
    mask_token_id: int,
    block_size: int,
    layers: int,
    intermediate_size: int,
    kv_heads: int | None = None,
) -> Qwen3Config:
    """The draft's config from the target's: same width, query heads, RoPE and positions.

    `target_layer_ids` are the layers whose *outputs* are captured; `kv_heads` defaults to one per query head:
    what a block knows of a position has to pass through its values.
    """
    heads = target.num_attention_heads
    return Qwen3Config(
        architectures=[ARCHITECTURE],
        block_size=block_size,
        dflash_config={"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)},
        num_target_layers=target.num_hidden_layers,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        hidden_act="silu",
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters=target.rope_parameters,
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )
