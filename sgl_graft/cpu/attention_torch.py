"""Runs an attention plan with plain torch calls, where there is no kernel.

Where every request has the same number of queries, one gather brings the keys into a padded [batch, keys]
block and one fused attention call serves the batch; a prefill goes request by request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from .attention_plan import AttentionPlan


@dataclass(frozen=True)
class _Padded:
    """What every layer of the forward shares."""

    kv_index: torch.Tensor  # [batch * keys] pool slot of every key, 0 where padded
    mask: torch.Tensor | None  # [batch, 1, group * queries, keys] additive; None when nothing is hidden
    num_keys: int


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn a boolean visibility mask into the additive mask that the fused attention call reads fastest."""
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill_(~visible, float("-inf"))


def attend(
    q: torch.Tensor,  # [tokens, heads * head_dim]
    keys: torch.Tensor,  # [slots, kv_heads, head_dim]
    values: torch.Tensor,  # [slots, kv_heads, value_dim]
    heads: int,
    scale: float,
    causal: bool,
    plan: AttentionPlan,
) -> torch.Tensor:  # [tokens, heads * value_dim]
    q = q.reshape(-1, heads, keys.shape[2])
    run = _ragged if plan.num_queries is None else _uniform
    return run(q, keys, values, scale, causal, plan).reshape(q.shape[0], -1)


def _uniform(
    q: torch.Tensor,  # [batch * queries, heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    plan: AttentionPlan,
) -> torch.Tensor:  # [batch, queries, kv_heads, group, value_dim]
    batch, queries, kv_heads = plan.batch_size, plan.num_queries, keys.shape[1]
    assert queries is not None
    group = q.shape[1] // kv_heads
    kind = (group, causal, q.dtype)
    padded = plan.scratch.get(kind)
    if padded is None:
        padded = plan.scratch[kind] = _pad(plan, group, causal, q.dtype)
    k = keys.index_select(0, padded.kv_index).view(batch, padded.num_keys, kv_heads, -1).transpose(1, 2)
    v = values.index_select(0, padded.kv_index).view(batch, padded.num_keys, kv_heads, -1).transpose(1, 2)
    # Queries that share a key head are stacked as rows, so keys are never expanded to all heads.
    q = q.view(batch, queries, kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * queries, -1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=padded.mask, scale=scale)
    return out.view(batch, kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4)


def _pad(plan: AttentionPlan, group: int, causal: bool, dtype: torch.dtype) -> _Padded:
    queries = plan.num_queries
    assert queries is not None
    batch = plan.batch_size
    total = plan.prefix + plan.window
    num_keys = int(total.max())
    position = torch.arange(num_keys)
    live = position < total.unsqueeze(1)  # [batch, keys]
    index = plan.table[plan.rows, :num_keys].long().masked_fill_(~live, 0)
    if batch == 1 and (queries == 1 or not causal) and plan.mask is None:
        return _Padded(index.flatten(), None, num_keys)
    offset = position - plan.prefix.unsqueeze(1)  # [batch, keys], negative in the prefix
    if not causal:
        visible = live.unsqueeze(1).expand(batch, queries, num_keys)
    elif plan.mask is None:
        visible = offset.unsqueeze(1) <= torch.arange(queries).unsqueeze(1)
    else:
        width = plan.mask.shape[2]
        column = offset.clamp(0, width - 1).unsqueeze(1).expand(batch, queries, num_keys)
        seen = plan.mask.expand(batch, queries, width).gather(2, column)
        visible = (seen & (offset >= 0).unsqueeze(1) | (offset < 0).unsqueeze(1)) & live.unsqueeze(1)
    mask = additive_mask(visible, dtype).repeat(1, group, 1)
    return _Padded(index.flatten(), mask.unsqueeze(1), num_keys)


def _ragged(
    q: torch.Tensor,  # [tokens, heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    plan: AttentionPlan,
) -> torch.Tensor:  # [tokens, heads, value_dim]
    outputs = []
    starts = plan.query_start.tolist()
    for b, (row, prefix, length) in enumerate(
        zip(plan.rows.tolist(), plan.prefix.tolist(), plan.window.tolist(), strict=True)
    ):
        index = plan.table[row, : prefix + length].long()
        mask = None
        if causal and prefix > 0:
            visible = torch.arange(prefix + length) <= (prefix + torch.arange(length)).unsqueeze(1)
            mask = additive_mask(visible, q.dtype)
        out = scaled_dot_product_attention(
            q[starts[b] : starts[b + 1]].transpose(0, 1).unsqueeze(0),
            keys.index_select(0, index).transpose(0, 1).unsqueeze(0),
            values.index_select(0, index).transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=causal and prefix == 0,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
