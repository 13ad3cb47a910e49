"""Batches for the attention tests, and the answer computed one query at a time."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode


class Pool:
    """As much of the engine's KV pool as the backend touches."""

    def __init__(self, slots: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.k = torch.randn(slots, kv_heads, dim).to(dtype)
        self.v = torch.randn(slots, kv_heads, dim).to(dtype)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[loc.loc] = k
        self.v[loc.loc] = v


@dataclass
class Case:
    """A batch, and for every query the positions of its request that it sees."""

    batch: Any
    seen: list[list[list[int]]]  # [request][query] -> positions


def random_parents(slots: int, generator: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(0, s, (1,), generator=generator)) for s in range(1, slots)]


def ancestors(parents: list[int], slot: int) -> list[int]:
    found = []
    while slot >= 0:
        found.append(slot)
        slot = parents[slot]
    return sorted(found)


class Scene:
    """A pool, a slot table with scattered slots, one layer and a backend over them."""

    def __init__(
        self, lens: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, room: int = 64
    ) -> None:
        torch.manual_seed(sum(lens) + heads * dim)
        self.lens, self.dtype, self.heads = lens, dtype, heads
        width = max(lens) + room
        slots = len(lens) * width + 8
        self.pool = Pool(slots, kv_heads, dim, dtype)
        # Row 0 belongs to nobody, as in the engine.
        self.table = torch.zeros(len(lens) + 1, width, dtype=torch.int32)
        self.table[1:] = torch.randperm(slots)[: len(lens) * width].view(len(lens), width).int()
        self.layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=heads,
            tp_k_head_num=kv_heads,
            qk_head_dim=dim,
            v_head_dim=dim,
            scaling=dim**-0.5,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
        )
        self.runner = SimpleNamespace(
            device="cpu",
            dtype=dtype,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
            model_config=SimpleNamespace(context_len=width),
        )

    def _batch(self, mode: ForwardMode, seq_lens: list[int], written: list[list[int]], **more: Any) -> Any:
        rows = torch.arange(1, len(self.lens) + 1)
        loc = torch.cat([self.table[b + 1, positions] for b, positions in enumerate(written)]).long()
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(self.lens),
            seq_lens=torch.tensor(seq_lens),
            req_pool_indices=rows,
            out_cache_loc=loc,
            input_ids=torch.zeros(loc.numel(), dtype=torch.long),
            spec_info=None,
            **more,
        )

    def decode(self) -> Case:
        batch = self._batch(ForwardMode.DECODE, self.lens, [[n - 1] for n in self.lens])
        return Case(batch, [[list(range(n))] for n in self.lens])

    def verify(self, slots: int, seed: int = 0) -> Case:
        generator = torch.Generator().manual_seed(seed)
        trees = [random_parents(slots, generator) for _ in self.lens]
        mask = torch.zeros(len(self.lens), slots, slots, dtype=torch.bool)
        for b, parents in enumerate(trees):
            for slot in range(slots):
                mask[b, slot, ancestors(parents, slot)] = True
        batch = self._batch(
            ForwardMode.TARGET_VERIFY, self.lens, [list(range(n, n + slots)) for n in self.lens]
        )
        # The engine's buffer may be longer than the mask.
        flat = torch.cat([mask.flatten(), torch.ones(7, dtype=torch.bool)])
        batch.spec_info = SimpleNamespace(draft_token_num=slots, custom_mask=flat)
        seen = [
            [list(range(n)) + [n + a for a in ancestors(parents, slot)] for slot in range(slots)]
            for n, parents in zip(self.lens, trees, strict=True)
        ]
        return Case(batch, seen)

    def chain_verify(self, slots: int) -> Case:
        """A verify without a mask: DFLASH's."""
        case = self.verify(slots)
        case.batch.spec_info.custom_mask = None
        return Case(case.batch, [[list(range(n + s + 1)) for s in range(slots)] for n in self.lens])

    def draft_step(self, topk: int, num_steps: int, step: int) -> Case:
        written = [[n + branch * num_steps + step for branch in range(topk)] for n in self.lens]
        batch = self._batch(ForwardMode.DECODE, self.lens, written)
        seen = [
            [list(range(n)) + [n + branch * num_steps + s for s in range(step + 1)] for branch in range(topk)]
            for n in self.lens
        ]
        return Case(batch, seen)

    def draft_extend(self, queries: int) -> Case:
        batch = self._batch(
            ForwardMode.DRAFT_EXTEND_V2, self.lens, [list(range(n - queries, n)) for n in self.lens]
        )
        return Case(batch, [[list(range(n - queries + q + 1)) for q in range(queries)] for n in self.lens])

    def prefill(self, prefixes: list[int]) -> Case:
        lengths = [n - p for n, p in zip(self.lens, prefixes, strict=True)]
        written = [list(range(p, n)) for n, p in zip(self.lens, prefixes, strict=True)]
        batch = self._batch(ForwardMode.EXTEND, self.lens, written, extend_seq_lens=torch.tensor(lengths))
        seen = [[list(range(q + 1)) for q in range(p, n)] for n, p in zip(self.lens, prefixes, strict=True)]
        return Case(batch, seen)

    def everything_seen(self, case: Case) -> Case:
        """The same queries in a layer without causality: each sees all keys its request has."""
        last = [max(max(query) for query in request) for request in case.seen]
        self.layer.attn_type = AttentionType.ENCODER_ONLY
        return Case(
            case.batch,
            [[list(range(n + 1)) for _ in request] for n, request in zip(last, case.seen, strict=True)],
        )

    def run(self, backend: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """The backend's answer and the reference's. both [tokens, heads * dim]"""
        tokens, layer = case.batch.out_cache_loc.numel(), self.layer
        kv_heads, dim = layer.tp_k_head_num, layer.qk_head_dim
        # Views into one projection, as the engine makes them: rows are not contiguous.
        qkv = torch.randn(tokens, (self.heads + 2 * kv_heads) * dim).to(self.dtype)
        q, k, v = qkv.split([self.heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        backend.init_forward_metadata(case.batch)
        k, v = k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, dim)
        forward = backend.forward_decode if case.batch.forward_mode.is_decode() else backend.forward_extend
        out = forward(q, k, v, layer, case.batch)
        assert torch.equal(self.pool.k[case.batch.out_cache_loc], k)
        assert torch.equal(self.pool.v[case.batch.out_cache_loc], v)
        return out, self.reference(q, case)

    def reference(self, q: torch.Tensor, case: Case) -> torch.Tensor:
        layer = self.layer
        group = self.heads // layer.tp_k_head_num
        q = q.double().view(-1, self.heads, layer.qk_head_dim)
        rows, token = [], 0
        for b, request in enumerate(case.seen):
            for positions in request:
                slots = self.table[b + 1, positions].long()
                k = self.pool.k[slots].double().repeat_interleave(group, 1)  # [keys, heads, dim]
                v = self.pool.v[slots].double().repeat_interleave(group, 1)
                weights = torch.einsum("hd,khd->hk", q[token], k).mul(layer.scaling).softmax(1)
                rows.append(torch.einsum("hk,khd->hd", weights, v).flatten())
                token += 1
        return torch.stack(rows)
