"""Where the draft's keys and values lie in the engine's memory."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel

from .model import SpecBlockDraft, head_dim
from .pool_attention import DraftPool


def size_pools(draft: SpecBlockDraft, draft_config: Any, target_runner: Any) -> None:
    """Before memory is allocated: K entries per token in the draft's pool, and in the target's budget.

    Every rank holds all of the draft's heads. The engine budgets a draft's layers at the size of the
    target's, so the entries are expressed in layers of that size, rounded up.
    """
    heads, ranks = draft.block * draft.config.num_key_value_heads, get_parallel().attn_tp_size
    draft_config.hf_text_config.num_key_value_heads = heads * ranks
    target = target_runner.model_config
    per_layer = target.get_num_kv_heads(ranks) * target.head_dim
    entries = len(draft.layers) * heads * head_dim(draft.config)
    target_runner.spec_aux_config.eagle_draft_num_layers = -(-entries // per_layer)


def draft_pool(engine_pool: Any, layers: int, block: int) -> DraftPool:
    """The engine's buffers `[slots, K * kv_heads, dim]` as `[slots, K, kv_heads, dim]`."""
    keys = [engine_pool.get_key_buffer(layer).unflatten(1, (block, -1)) for layer in range(layers)]
    values = [engine_pool.get_value_buffer(layer).unflatten(1, (block, -1)) for layer in range(layers)]
    return DraftPool(keys, values)
