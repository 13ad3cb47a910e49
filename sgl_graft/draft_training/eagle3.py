"""The EAGLE-3 draft as a trainable module, computing what SGLang's `models/llama_eagle3.py` serves.

EAGLE-3 (Li et al. 2025, section 3.1): one decoder layer over (embedding of the next token, fused target
features); a chain of proposals feeds the layer's own output back in place of features. Training unrolls the
chain ("training-time test"): step k's query at position p attends to the feature rows up to p and to steps
1..k of its own chain, which is exactly what serving keeps in the draft's KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from sgl_graft.draft_training.features import Sample, default_layers


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class DraftAttention(nn.Module):
    """Projections of the draft's attention; its input is twice as wide as the model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        wide = 2 * config.hidden_size
        self.q_proj = nn.Linear(wide, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values `[rows, kv_heads, head_dim]` of x `[rows, 2 * hidden]`."""
        keys = self.k_proj(x).view(-1, self.kv_heads, self.head_dim)
        return _rotate(keys, cos, sin), self.v_proj(x).view(-1, self.kv_heads, self.head_dim)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries `[rows, heads, head_dim]`."""
        return _rotate(self.q_proj(x).view(-1, self.heads, self.head_dim), cos, sin)


class DraftMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


@dataclass
class Unrolled:
    """All steps' rows, step by step, each sample's rows in order."""

    normed: list[Tensor]  # per step [rows, hidden], input of the LM head
    target: list[Tensor]  # per step [rows], index into the batch's targets of what each row must predict


class Eagle3Draft(nn.Module):
    """Parameter names are those of an EAGLE-3 checkpoint (`midlayer.*`, `fc`, `norm`, `lm_head`)."""

    def __init__(self, config: LlamaConfig, num_captured: int | None = None) -> None:
        super().__init__()
        self.config = config
        if num_captured is None:
            num_captured = getattr(config, "num_aux_hidden_states", 3)
        self.fc = nn.Linear(num_captured * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[rows, 1, head_dim]` at positions `[rows]`."""
        cos, sin = self.rotary(self.norm.weight, positions[None])
        return cos[0, :, None], sin[0, :, None]

    def layer_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads, `[rows, 2 * hidden]`."""
        return torch.cat([self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(hidden)], dim=-1)

    def after_attention(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """The layer's output before the final norm: the next step's hidden state, `[rows, hidden]`."""
        residual = hidden.float() + self.midlayer.self_attn.o_proj(attended).float()
        return residual + self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual)).float()

    def unroll(
        self,
        samples: Sequence[Sample],
        embedding: Tensor,
        steps: int,
        keep: float = 1.0,
        random: torch.Generator | None = None,
    ) -> Unrolled:
        """Run `steps` steps of the training-time test from every target row of `samples`.

        embedding `[vocab, hidden]` is the target's, which serving shares. From step 1 on, only a random
        share `keep` of the rows goes on: chains are independent given step 0, so this is an unbiased sample.
        """
        attention = self.midlayer.self_attn
        lengths = [len(s.ids) for s in samples]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        ids = torch.cat([s.ids for s in samples])  # [tokens]
        local = torch.cat([torch.arange(n) for n in lengths])  # [tokens] position in the dialogue
        rows = torch.cat([s.rows + offsets[i] for i, s in enumerate(samples)])  # [targets] flat position
        owner = torch.repeat_interleave(
            torch.arange(len(samples)), torch.tensor([len(s.rows) for s in samples])
        )
        run_left = run_lengths(rows)  # [targets] targets from here to the end of the answer

        fused = self.fc(torch.cat([s.features for s in samples]).to(embedding.dtype))  # [tokens, hidden]
        wide = self.layer_input(embedding[ids.roll(-1)], fused)
        cos, sin = self.angles(local)
        keys, values = attention.keys_values(wide, cos, sin)  # [tokens, kv_heads, head_dim]
        queries = attention.queries(wide[rows], cos[rows], sin[rows])
        hidden = fused[rows]
        chain: list[tuple[Tensor, Tensor]] = []
        out = Unrolled([], [])
        alive = torch.arange(len(rows))  # indices of targets whose chain is still running
        for step in range(steps):
            # Row p is fed token p + 1 + step; the target's word on what follows that token is one row on.
            going = run_left[alive] > step + 1
            if step == 0:
                alive = going.nonzero()[:, 0]
                queries, hidden = queries[alive], hidden[alive]
            else:
                if step == 1 and keep < 1.0:
                    going &= torch.rand(len(alive), generator=random) < keep
                kept = going.nonzero()[:, 0]
                alive, hidden = alive[kept], hidden[kept]
                chain = [(k[kept], v[kept]) for k, v in chain]
                wide = self.layer_input(embedding[ids[rows[alive] + 1 + step]], hidden)
                cos, sin = self.angles(local[rows[alive]] + step)
                queries = attention.queries(wide, cos, sin)
                chain.append(attention.keys_values(wide, cos, sin))
            counts = torch.bincount(owner[alive], minlength=len(samples)).tolist()
            spans = _spans(counts)
            attended = [
                chain_attention(
                    queries[a:b],
                    keys[offsets[i] : offsets[i + 1]],
                    values[offsets[i] : offsets[i + 1]],
                    local[rows[alive[a:b]]],
                    [(k[a:b], v[a:b]) for k, v in chain],
                )
                for i, (a, b) in enumerate(spans)
                if b > a
            ]
            hidden = self.after_attention(torch.cat(attended) if attended else queries.flatten(1), hidden)
            out.normed.append(self.norm(hidden))
            out.target.append(alive + 1 + step)
        return out


def chain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor, chain: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of one dialogue's chains at one step.

    queries `[r, heads, dim]`; keys and values of the feature rows `[tokens, kv_heads, dim]`; rows `[r]` the
    last feature row each query may see; chain: per earlier step and the current one, that chain's own keys
    and values `[r, kv_heads, dim]`. Returns `[r, heads * dim]`.
    """
    count, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    last = int(rows.max()) + 1
    grouped = queries.view(count, kv_heads, group, dim).permute(1, 2, 0, 3)  # [kv_heads, group, r, dim]
    flat = grouped.reshape(kv_heads, group * count, dim)
    scores = torch.bmm(flat, keys[:last].permute(1, 2, 0)).view(kv_heads, group, count, last).float()
    hidden_from_row = torch.arange(last) > rows[:, None]  # [r, last]
    scores = scores.masked_fill(hidden_from_row, float("-inf"))
    own = [(grouped * k.permute(1, 0, 2)[:, None]).sum(-1, dtype=torch.float32) for k, _ in chain]
    probs = (
        torch.cat([scores, *[s[..., None] for s in own]], dim=-1).mul(dim**-0.5).softmax(-1).to(values.dtype)
    )
    past = probs[..., :last].reshape(kv_heads, group * count, last)
    mixed = torch.bmm(past, values[:last].transpose(0, 1)).view(kv_heads, group, count, dim)
    for j, (_, v) in enumerate(chain):
        mixed = mixed + probs[..., last + j, None] * v.permute(1, 0, 2)[:, None]
    return mixed.permute(2, 0, 1, 3).reshape(count, heads * dim)


def draft_config(target: Any, draft_vocab_size: int, **changes: Any) -> LlamaConfig:
    """The draft's config from the target's: same width, heads, RoPE and positions, one layer.

    `changes` override fields (`intermediate_size`, `rope_parameters`, `max_position_embeddings`, ...).
    """
    captured = len(default_layers(target.num_hidden_layers))
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **({} if captured == 3 else {"num_aux_hidden_states": captured}),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": target.rope_parameters,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
    }
    return LlamaConfig(**{**fields, **changes})


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.to(x.dtype) + rotate_half(x) * sin.to(x.dtype)


def run_lengths(rows: Tensor) -> Tensor:
    """For ascending positions `[n]`: how many consecutive positions start at each."""
    breaks = torch.ones(len(rows), dtype=torch.bool)
    breaks[:-1] = rows[1:] != rows[:-1] + 1
    ends = breaks.nonzero()[:, 0]  # last index of every run
    index = torch.arange(len(rows))
    return ends[torch.searchsorted(ends, index)] - index + 1


def _spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(list(counts)).cumsum(0).tolist()
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]
