"""Attention with tree masks for the whole batch in a few torch calls.

Every forward mode but the ragged prefill has the same number of queries per request. So one gather brings
each request's keys into a padded [batch, keys] block, one mask says who sees what, and one fused attention
call serves the batch. The gather index and the mask are built once per forward, not per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class UniformPlan:
    """One forward in which every request has ``num_queries`` queries.

    Attributes:
        kv_index: pool slot of every visible key, 0 where padded. [batch * keys]
        mask: who may see whom, additive; None when nothing is hidden. [batch, 1, queries, keys]
        num_queries: queries per request.
        num_keys: padded keys per request.
    """

    kv_index: torch.Tensor
    mask: torch.Tensor | None
    num_queries: int
    num_keys: int


@dataclass(frozen=True)
class RaggedPlan:
    """A prefill: one entry per request with its query range, key slots and cached prefix length."""

    spans: tuple[tuple[int, int, torch.Tensor, int], ...]


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn a boolean visibility mask into the additive mask that the fused attention call reads fastest."""
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill_(~visible, float("-inf"))


class GraftCpuAttnBackend(AttentionBackend):
    """SGLang attention backend ``graft_cpu``."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        self.dtype = runner.dtype
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.max_context_len = runner.model_config.context_len
        self.plan: UniformPlan | RaggedPlan | None = None

    # ---- once per forward ------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.plan = None
        elif mode.is_target_verify():
            self.plan = self._verify_plan(forward_batch)
        elif mode.is_decode():
            self.plan = self._causal_plan(forward_batch, num_queries=1)
        elif mode.is_draft_extend_v2():
            queries = forward_batch.input_ids.numel() // forward_batch.batch_size
            self.plan = self._causal_plan(forward_batch, num_queries=queries)
        else:
            self.plan = self._ragged_plan(forward_batch)

    def _rows(self, forward_batch: Any, num_keys: int) -> torch.Tensor:  # [batch, keys] int64
        table = self.req_to_token_pool.req_to_token
        return table[forward_batch.req_pool_indices.long(), :num_keys].long()

    def _causal_plan(self, forward_batch: Any, num_queries: int) -> UniformPlan:
        """The last ``num_queries`` positions of every request, each seeing what is at or before it."""
        seq_lens = forward_batch.seq_lens.long()
        num_keys = int(seq_lens.max())
        position = torch.arange(num_keys)
        query_position = seq_lens.unsqueeze(1) - num_queries + torch.arange(num_queries)
        visible = position <= query_position.unsqueeze(2)  # [batch, queries, keys]
        index = self._rows(forward_batch, num_keys).masked_fill_(position >= seq_lens.unsqueeze(1), 0)
        return self._uniform(index, visible, num_queries)

    def _verify_plan(self, forward_batch: Any) -> UniformPlan:
        """Tree slots behind a fully visible prefix; the slots-by-slots part comes from the tree."""
        spec = forward_batch.spec_info
        slots = spec.draft_token_num
        batch = forward_batch.batch_size
        seq_lens = forward_batch.seq_lens.long()
        num_keys = int(seq_lens.max()) + slots
        tree = spec.custom_mask[: batch * slots * slots].view(batch, slots, slots)
        return self._window_plan(forward_batch, seq_lens, num_keys, tree)

    def _window_plan(
        self,
        forward_batch: Any,
        seq_lens: torch.Tensor,  # [batch] committed keys, all visible
        num_keys: int,
        window: torch.Tensor,  # [batch, queries, window] bool: visibility of the slots behind the prefix
    ) -> UniformPlan:
        batch, queries, width = window.shape
        position = torch.arange(num_keys)
        offset = position - seq_lens.unsqueeze(1)  # [batch, keys], negative in the prefix
        inside = (offset >= 0) & (offset < width)
        column = offset.clamp(0, width - 1).unsqueeze(1).expand(batch, queries, num_keys)
        visible = window.gather(2, column) & inside.unsqueeze(1) | (offset < 0).unsqueeze(1)
        index = self._rows(forward_batch, num_keys).masked_fill_(offset >= width, 0)
        return self._uniform(index, visible, queries)

    def _uniform(self, index: torch.Tensor, visible: torch.Tensor, num_queries: int) -> UniformPlan:
        batch, num_keys = index.shape
        # A lone query that sees all its keys needs no mask.
        hidden = batch > 1 or num_queries > 1
        mask = additive_mask(visible, self.dtype).unsqueeze(1) if hidden else None
        return UniformPlan(index.flatten(), mask, num_queries, num_keys)

    def _ragged_plan(self, forward_batch: Any) -> RaggedPlan:
        spans = []
        start = 0
        table = self.req_to_token_pool.req_to_token
        lens = forward_batch.extend_seq_lens_cpu or forward_batch.extend_seq_lens.tolist()
        totals = forward_batch.seq_lens.tolist()
        rows = forward_batch.req_pool_indices.tolist()
        for row, total, length in zip(rows, totals, lens, strict=True):
            spans.append((start, start + length, table[row, :total].long(), total - length))
            start += length
        return RaggedPlan(tuple(spans))

    # ---- once per layer --------------------------------------------------------------------------------

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(
        self,
        q: torch.Tensor,  # [tokens, heads * head_dim]
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:  # [tokens, heads * head_dim]
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys = pool.get_key_buffer(layer.layer_id)  # [slots, kv_heads, head_dim]
        values = pool.get_value_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if isinstance(self.plan, RaggedPlan):
            out = self._attend_ragged(q, keys, values, layer, self.plan)
        else:
            assert self.plan is not None
            out = self._attend_uniform(q, keys, values, layer, self.plan)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _attend_uniform(
        self,
        q: torch.Tensor,  # [batch * queries, heads, head_dim]
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: Any,
        plan: UniformPlan,
    ) -> torch.Tensor:
        kv_heads = layer.tp_k_head_num
        group = layer.tp_q_head_num // kv_heads
        batch = q.shape[0] // plan.num_queries
        k = keys.index_select(0, plan.kv_index).view(batch, plan.num_keys, kv_heads, -1).transpose(1, 2)
        v = values.index_select(0, plan.kv_index).view(batch, plan.num_keys, kv_heads, -1).transpose(1, 2)
        # Queries that share a key head are stacked as rows, so keys are never expanded to all heads.
        q = q.view(batch, plan.num_queries, kv_heads, group, -1).permute(0, 2, 3, 1, 4)
        q = q.reshape(batch, kv_heads, group * plan.num_queries, -1)
        mask = plan.mask
        if mask is not None and group > 1:
            mask = mask.unsqueeze(2).expand(batch, 1, group, plan.num_queries, plan.num_keys)
            mask = mask.reshape(batch, 1, group * plan.num_queries, plan.num_keys)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scaling)
        out = out.view(batch, kv_heads, group, plan.num_queries, -1)
        return out.permute(0, 3, 1, 2, 4)

    def _attend_ragged(
        self,
        q: torch.Tensor,  # [tokens, heads, head_dim]
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: Any,
        plan: RaggedPlan,
    ) -> torch.Tensor:
        causal = not (layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY)
        outputs = []
        for start, end, index, prefix in plan.spans:
            length = end - start
            k = keys.index_select(0, index).transpose(0, 1).unsqueeze(0)
            v = values.index_select(0, index).transpose(0, 1).unsqueeze(0)
            queries = q[start:end].transpose(0, 1).unsqueeze(0)
            mask = None
            if causal and prefix > 0:
                visible = torch.arange(prefix + length) <= (prefix + torch.arange(length)).unsqueeze(1)
                mask = additive_mask(visible, q.dtype)
            out = scaled_dot_product_attention(
                queries,
                k,
                v,
                attn_mask=mask,
                is_causal=causal and prefix == 0,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False
