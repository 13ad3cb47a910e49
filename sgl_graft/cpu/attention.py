"""The ``graft_cpu`` attention backend: one plan per forward, one call per layer, for the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from . import attention_native, attention_torch, kernels
from .attention_plan import AttentionPlan, ragged_plan, uniform_plan


class GraftCpuAttnBackend(AttentionBackend):
    """SGLang attention backend ``graft_cpu``."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        self.dtype = runner.dtype
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.max_context_len = runner.model_config.context_len
        self.plan: AttentionPlan | None = None

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
            self.plan = ragged_plan(
                self._table,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.extend_seq_lens,
            )

    @property
    def _table(self) -> torch.Tensor:
        table: torch.Tensor = self.req_to_token_pool.req_to_token
        return table

    def _causal_plan(self, forward_batch: Any, num_queries: int) -> AttentionPlan:
        """The last ``num_queries`` positions of every request, each seeing what is at or before it."""
        prefix = forward_batch.seq_lens - num_queries
        return uniform_plan(self._table, forward_batch.req_pool_indices, prefix, num_queries)

    def _verify_plan(self, forward_batch: Any) -> AttentionPlan:
        """Tree slots behind a fully visible prefix; a verify without a mask is a chain."""
        spec = forward_batch.spec_info
        slots = spec.draft_token_num
        mask = spec.custom_mask
        if mask is not None:
            batch = forward_batch.batch_size
            mask = mask[: batch * slots * slots].view(batch, slots, slots)
        return uniform_plan(
            self._table, forward_batch.req_pool_indices, forward_batch.seq_lens, slots, mask=mask
        )

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
        k: torch.Tensor | None,  # [tokens, kv_heads, head_dim]
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:  # [tokens, heads * value_dim]
        assert self.plan is not None
        pool = self.token_to_kv_pool
        keys = pool.get_key_buffer(layer.layer_id)  # [slots, kv_heads, head_dim]
        values = pool.get_value_buffer(layer.layer_id)
        native = kernels.attention_fits(keys.shape[2], values.shape[2], q.dtype) and keys.dtype == q.dtype
        if save_kv_cache and k is not None:
            slots = forward_batch.out_cache_loc
            if not (native and attention_native.write(k, v, keys, values, slots)):
                pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v)
        heads, width = layer.tp_q_head_num, layer.tp_q_head_num * layer.qk_head_dim
        if q.dim() != 2 or q.stride(1) != 1:
            q = q.reshape(-1, width)
        causal = not (layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY)
        run = attention_native.attend if native else attention_torch.attend
        return run(q, keys, values, heads, layer.scaling, causal, self.plan)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False
