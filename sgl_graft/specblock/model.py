"""The SpecBlock draft: K dependent tokens from one forward pass, and blocks that continue blocks.

One module serves training and serving; what differs is who attends to what, which callers pass in as
`Attend`. Paper: arXiv 2605.07243; `shared/design/specblock.md` section 2 has the equations.

Row i pairs the target's features of position i with token i + 1; slot k of block 1 predicts token i + 2 + k.
A later block starts at a slot of the block before it and predicts the tokens after that slot's.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

RANK_FEATURES = 15
RANK_WIDTH = 256
RANK_TOP = 20  # logits that the rank head looks at


class Attend(Protocol):
    """Attention of one layer: keeps the rows' keys and values, returns what their queries gather."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries `[queried, K, heads, dim]`, keys and values `[rows, K, kv_heads, dim]`, all rotated;
        returns `[queried, K, heads * dim]`. `queried` is below `rows` where only some rows were asked for.
        """
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32, in the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class InputLayer(nn.Module):
    """Prefix broadcast: all slots of a row see the same condition and token, and a query of their own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.condition_proj = nn.Linear(features_width(config), hidden, bias=False)
        self.condition_norm = RMSNorm(hidden, eps)
        self.token_norm = RMSNorm(hidden, eps)
        self.query_norm = RMSNorm(hidden, eps)
        self.position_queries = nn.Embedding(block_size(config), hidden)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        self.broadcasts = has_broadcast(config)

    def forward(self, condition: Tensor, embeds: Tensor) -> Tensor:
        """condition and embeds `[rows, hidden]`; returns `[rows, K, hidden]`.

        `fuse` is applied part by part, so that the parts all slots share are computed once.
        """
        for_condition, for_token, for_query = self.fuse.weight.chunk(3, dim=1)
        shared = F.linear(self.condition_norm(condition), for_condition)
        shared = shared + F.linear(self.token_norm(embeds), for_token)
        own = F.linear(self.query_norm(self.position_queries.weight), for_query)  # [K, hidden]
        if not self.broadcasts:
            first = torch.arange(len(own), device=own.device) == 0
            return torch.where(first.unsqueeze(1), shared.unsqueeze(1) + own, own).to(self.fuse.weight.dtype)
        return (shared.unsqueeze(1) + own).to(self.fuse.weight.dtype)


class Attention(nn.Module):
    """Projections of grouped-query attention; the attending itself is the caller's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        hidden, wide = config.hidden_size, config.num_attention_heads * self.head_dim
        narrow = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, wide, bias=False)
        self.k_proj = nn.Linear(hidden, narrow, bias=False)
        self.v_proj = nn.Linear(hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, hidden, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries `[rows, K, heads, dim]` of x `[rows, K, hidden]`."""
        return _rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, `[rows, K, kv_heads, dim]`."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        return _rotate(keys, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A Llama layer without its attending."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class SpecBlockDraft(nn.Module):
    """Parameter names are those of a released checkpoint."""

    def __init__(self, config: Any) -> None:
        """Raises ValueError for a shape that no draft of this kind can have."""
        super().__init__()
        check_config(config)
        self.config = config
        self.block = block_size(config)
        hidden = config.hidden_size
        self.input_layer = InputLayer(config)
        self.layers: Any = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.shift_proj: Any = nn.ModuleList(
            nn.Linear(2 * hidden, hidden, bias=False) for _ in range(config.num_hidden_layers - 1)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rank_head: Any = nn.Sequential(
            nn.Linear(hidden + RANK_FEATURES, RANK_WIDTH, bias=False),
            nn.SiLU(),
            nn.Linear(RANK_WIDTH, config.rank_classes, bias=False),
        )
        self.rotary = LlamaRotaryEmbedding(config)

    def first_inputs(self, features: Tensor, embeds: Tensor) -> Tensor:
        """Input of block 1: features `[rows, captured * hidden]`, embeds `[rows, hidden]` of the token after
        them; returns `[rows, K, hidden]`."""
        return self.input_layer(self.input_layer.condition_proj(features), embeds)

    def next_inputs(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """Input of a later block: hidden `[rows, hidden]` of the slot it continues (before the final norm)
        and the embedding of that slot's token; returns `[rows, K, hidden]`."""
        return self.input_layer(hidden, embeds)

    def run(self, inputs: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """One block forward.

        inputs `[rows, K, hidden]`; positions `[rows]` index of the row's features, also in later blocks,
        which keep the rotary positions of the first; `rows` selects whose output is wanted (the others only
        leave their keys and values). Returns the hidden states before the final norm, `[rows, K, hidden]`.
        """
        slots = torch.arange(1, self.block + 1, device=positions.device)
        cos, sin = self._angles(positions.unsqueeze(1) + slots)
        x = inputs
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            if i > 0:
                x = self._shifted(i - 1, x)
            normed = layer.input_layernorm(x)
            keys, values = layer.self_attn.keys_values(normed, cos, sin)
            if i == last and rows is not None:
                x, normed, cos, sin = x[rows], normed[rows], cos[rows], sin[rows]
            attended = attend(i, layer.self_attn.queries(normed, cos, sin), keys, values)
            x = x + layer.self_attn.o_proj(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x

    def propose(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens of every slot.

        hidden `[.., hidden]` as `run` returns it. Returns draft ids and log-probabilities `[.., width]`,
        likeliest first, and the guessed rank class `[..]`.
        """
        normed = self.norm(hidden)
        logits = self.lm_head(normed).float()
        top = logits.topk(max(width, RANK_TOP), dim=-1)
        classes = self.rank_logits(normed, top.values[..., :RANK_TOP]).argmax(-1)
        log_probs = top.values - logits.logsumexp(-1, keepdim=True)
        return top.indices[..., :width], log_probs[..., :width], classes

    def rank_logits(self, normed: Tensor, top_logits: Tensor) -> Tensor:
        """Rank class scores `[.., classes]`; normed `[.., hidden]` after the final norm, top_logits
        `[.., RANK_TOP]` the draft's largest logits, descending. No gradient reaches either."""
        found = torch.cat([normed.detach().float(), rank_features(top_logits.detach())], dim=-1)
        return self.rank_head(found.to(self.rank_head[0].weight.dtype)).float()

    def _shifted(self, index: int, x: Tensor) -> Tensor:
        """Layer-wise shift: slot k also reads slot k - 1 of the layer below (slot 0 reads itself)."""
        if not has_shift(self.config):
            return F.linear(torch.cat([x, x], dim=-1), self.shift_proj[index].weight)
        own, before = self.shift_proj[index].weight.chunk(2, dim=1)
        from_before = F.linear(x, before)
        from_before = torch.cat([from_before[:, :1], from_before[:, :-1]], dim=1)
        return (F.linear(x, own) + from_before).to(x.dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[rows, K, 1, dim]` at positions `[rows, K]`."""
        cos, sin = self.rotary(self.norm.weight, positions)
        return cos.unsqueeze(2), sin.unsqueeze(2)


def rank_features(top_logits: Tensor) -> Tensor:
    """What the rank head sees of the draft's distribution, `[.., 15]`: ten log-probabilities, the gaps from
    the first logit to the second, third and fifth, the first's probability and the entropy, all over the
    `[.., RANK_TOP]` largest logits only."""
    logits = top_logits.float()
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    gaps = logits[..., :1] - logits[..., [1, 2, 4]]
    entropy = -(probs * log_probs).sum(-1, keepdim=True)
    return torch.cat([log_probs[..., :10], gaps, probs[..., :1], entropy], dim=-1)


def block_size(config: Any) -> int:
    """Slots of a block (K)."""
    return int(config.diffspec_draft_token_num)


def has_shift(config: Any) -> bool:
    """False in an ablation: each slot reads itself twice, with as many weights."""
    return bool(getattr(config, "layer_shift", True))


def has_broadcast(config: Any) -> bool:
    """False in an ablation: only slot 0 sees the condition and the token, later slots their query alone."""
    return bool(getattr(config, "prefix_broadcast", True))


def head_dim(config: Any) -> int:
    """Always the hidden size by heads: the reference ignores the config's own `head_dim`."""
    return int(config.hidden_size // config.num_attention_heads)


def features_width(config: Any) -> int:
    """Width of a row's features: the captured target states side by side.

    There are three, unless the config counts or names them (as SGLang reads EAGLE-3 configs).
    """
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    named = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids") or ()
    return int(width * (getattr(config, "num_aux_hidden_states", None) or len(named) or 3))


def check_config(config: Any) -> None:
    """Raises ValueError, naming the key, for a config no draft can be built from."""
    for key in ("diffspec_draft_token_num", "draft_vocab_size", "rank_classes"):
        value = getattr(config, key, None)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"a SpecBlock draft's config needs a positive {key!r}, not {value!r}")
    if config.rank_classes != 4:
        raise ValueError(f"rank_classes is {config.rank_classes}: only the 4 classes 1, 2-4, 5-10, >10 exist")
    if config.draft_vocab_size < RANK_TOP:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab_size}: the rank head reads the {RANK_TOP} best tokens"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} is no multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.to(x.dtype) + rotate_half(x) * sin.to(x.dtype)
