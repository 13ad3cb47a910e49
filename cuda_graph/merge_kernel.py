# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `merge_trie`: one program merges one request's candidates, depth after depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .merge import MergedTrie, TrieLayout


@triton.jit
def _merge_kernel(
    draft_tokens_ptr,  # [batch, POOL] int64
    draft_parents_ptr,  # [batch, POOL] int64
    draft_weights_ptr,  # [batch, POOL] int64
    retrieved_tokens_ptr,  # [batch, RETRIEVED] int64
    retrieved_weights_ptr,  # [batch, RETRIEVED] int64
    order_ptr,  # [POOL + RETRIEVED] int64
    pool_shift_ptr,  # [POOL] int64
    fathers_ptr,  # [RETRIEVED] int64
    level_bounds_ptr,  # [LEVELS, 3] int64
    canonical_ptr,  # [batch, POOL + RETRIEVED] int64, scratch
    tokens_ptr,  # [batch, POOL + RETRIEVED] int64, and so on
    parents_ptr,
    weights_ptr,
    sources_ptr,
    POOL: tl.constexpr,
    RETRIEVED: tl.constexpr,
    LEVELS: tl.constexpr,
    LEVEL_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * (POOL + RETRIEVED)
    lane = tl.arange(0, LEVEL_BLOCK)
    above = tl.zeros([], tl.int64)
    for level in range(LEVELS):
        start = tl.load(level_bounds_ptr + level * 3)
        stop = tl.load(level_bounds_ptr + level * 3 + 2)
        node = start + lane
        there = node < stop
        origin = tl.load(order_ptr + node, mask=there, other=0)
        drafted = there & (origin < POOL)
        fetched = there & (origin >= POOL)
        pool_node = row * POOL + origin
        table_node = row * RETRIEVED + origin - POOL
        token = tl.load(draft_tokens_ptr + pool_node, mask=drafted, other=-1)
        token = tl.where(drafted, token, tl.load(retrieved_tokens_ptr + table_node, mask=fetched, other=-1))
        weight = tl.load(draft_weights_ptr + pool_node, mask=drafted, other=-1)
        weight = tl.where(
            drafted, weight, tl.load(retrieved_weights_ptr + table_node, mask=fetched, other=-1)
        )
        weight = tl.where(token < 0, -1, tl.maximum(weight, -1))

        parent = tl.full([LEVEL_BLOCK], -1, tl.int64)
        if level > 0:
            link = tl.load(draft_parents_ptr + pool_node, mask=drafted, other=0)
            link += tl.load(pool_shift_ptr + origin, mask=drafted, other=0)
            link = tl.where(drafted, link, tl.load(fathers_ptr + origin - POOL, mask=fetched, other=0))
            link = tl.minimum(tl.maximum(link, above), start - 1)  # garbage stays within the level above
            parent = tl.load(canonical_ptr + first + link, mask=there, other=0)
            weight = tl.minimum(weight, tl.load(weights_ptr + first + parent, mask=there, other=-1))

        # An absent node gets a key of its own, so that it equals no other.
        key = tl.where(weight < 0, -1 - node, token + ((parent + 1) << 32))
        same = (key[:, None] == key[None, :]) & there[None, :]
        twin = tl.min(tl.where(same, lane[None, :], LEVEL_BLOCK), axis=1)
        best = tl.max(tl.where(same, weight[None, :], -1), axis=1)
        from_table = tl.max((same & fetched[None, :]).to(tl.int64), axis=1)
        stands = (twin == lane) & (best >= 0)
        source = drafted.to(tl.int64) + 2 * from_table
        tl.store(canonical_ptr + first + node, start + twin, mask=there)
        tl.store(tokens_ptr + first + node, token, mask=there)
        tl.store(parents_ptr + first + node, parent, mask=there)
        tl.store(weights_ptr + first + node, tl.where(stands, best, -1), mask=there)
        tl.store(sources_ptr + first + node, tl.where(stands, source, 0), mask=there)
        above = start
        tl.debug_barrier()  # the next level reads what other threads stored here


def merge_trie_triton(
    layout: TrieLayout,
    draft_tokens: Tensor,  # [batch, pool] int64
    draft_parents: Tensor,  # [batch, pool] int64
    draft_weights: Tensor,  # [batch, pool] int64
    retrieved_tokens: Tensor,  # [batch, retrieved] int64
    retrieved_weights: Tensor,  # [batch, retrieved] int64
) -> MergedTrie:
    """Triton side of `merge_trie`."""
    from .merge import MergedTrie

    batch = draft_tokens.shape[0]
    outputs = torch.empty((5, batch, layout.num_nodes), dtype=torch.long, device=draft_tokens.device)
    sizes = [a + b for a, b in zip(layout.draft_levels, layout.retrieved_levels, strict=True)]
    block = triton.next_power_of_2(max(sizes))
    _merge_kernel[(batch,)](
        draft_tokens.contiguous(),
        draft_parents.contiguous(),
        draft_weights.contiguous(),
        retrieved_tokens.contiguous(),
        retrieved_weights.contiguous(),
        layout.order,
        layout.pool_shift,
        layout.fathers,
        layout.level_bounds,
        *outputs,
        POOL=layout.num_draft,
        RETRIEVED=layout.num_nodes - layout.num_draft,
        LEVELS=len(sizes),
        LEVEL_BLOCK=block,
        num_warps=4 if block <= 64 else 8,
    )
    return MergedTrie(*outputs[1:])
