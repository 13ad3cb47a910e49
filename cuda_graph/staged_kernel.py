# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `staged_weights`: rank the pool by score and hand out the stage's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .select_kernel import RIVALS, better_rivals, sort_key
from .value_kernel import float_bits

if TYPE_CHECKING:
    from .merge import TrieLayout
    from .staged_rule import DeviceStages


@triton.jit
def _pool_scores(scores_ptr, first, node, pool):
    return float_bits(tl.load(scores_ptr + first + node, mask=node < pool, other=0.0))


@triton.jit
def _pool_keys(scores, depths_ptr, tokens_ptr, first, node, pool):
    there = node < pool
    depths = tl.load(depths_ptr + node, mask=there, other=0)
    tokens = tl.load(tokens_ptr + first + node, mask=there, other=0)
    return tl.where(there, sort_key(scores, depths, tokens), -1)


@triton.jit
def _staged_weights_kernel(
    scores_ptr,  # [batch, POOL] float32
    draft_tokens_ptr,  # [batch, POOL] int64
    depths_ptr,  # [POOL] int64
    stage_ptr,  # [batch] int64
    num_draft_ptr,  # [STAGES] int64
    members_ptr,  # [STAGES, NODES] bool
    order_ptr,  # [NODES] int64
    retrieved_tokens_ptr,  # [batch, NODES] int64
    draft_weights_ptr,  # [batch, POOL] int64
    retrieved_weights_ptr,  # [batch, NODES] int64
    POOL: tl.constexpr,
    POOL_BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BACKFILL: tl.constexpr,
    WEIGHT_BITS: tl.constexpr,
    RIVALS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stage = tl.minimum(tl.maximum(tl.load(stage_ptr + row), 0), STAGES - 1)
    first = row * POOL
    node = tl.arange(0, POOL_BLOCK)
    scores = _pool_scores(scores_ptr, first, node, POOL)
    keys = _pool_keys(scores, depths_ptr, draft_tokens_ptr, first, node, POOL)
    rank = tl.zeros([POOL_BLOCK], tl.int32)
    for start in range(0, POOL, RIVALS):
        rival = start + tl.arange(0, RIVALS)
        rival_scores = _pool_scores(scores_ptr, first, rival, POOL)
        rival_keys = _pool_keys(rival_scores, depths_ptr, draft_tokens_ptr, first, rival, POOL)
        rank += better_rivals(keys, node, rival_keys, rival)
    one = tl.full([], 1, tl.int64)
    kept = rank < tl.load(num_draft_ptr + stage)
    others = scores + (one << WEIGHT_BITS) if BACKFILL else scores * 0 - 1
    weights = tl.where(kept, scores + (one * 3 << WEIGHT_BITS), others)
    tl.store(draft_weights_ptr + first + node, weights, mask=node < POOL)

    node = tl.arange(0, NODE_BLOCK)
    there = node < NODES
    member = tl.load(members_ptr + stage * NODES + node, mask=there, other=0) != 0
    position = (one << WEIGHT_BITS) - 1 - tl.load(order_ptr + node, mask=there, other=0)
    others = position if BACKFILL else position * 0 - 1
    weights = tl.where(member, position + (one * 2 << WEIGHT_BITS), others)
    tokens = tl.load(retrieved_tokens_ptr + row * NODES + node, mask=there, other=-1)
    tl.store(retrieved_weights_ptr + row * NODES + node, tl.where(tokens < 0, -1, weights), mask=there)


def staged_weights_triton(
    stages: DeviceStages,
    layout: TrieLayout,
    stage: Tensor,  # [batch] int64
    draft_tokens: Tensor,  # [batch, pool] int64
    draft_scores: Tensor,  # [batch, pool] float32
    retrieved_tokens: Tensor,  # [batch, envelope nodes] int64
) -> tuple[Tensor, Tensor]:  # [batch, pool] int64, [batch, envelope nodes] int64
    """Triton side of `staged_weights`."""
    from .value_rule import WEIGHT_BITS

    batch, pool = draft_tokens.shape
    nodes = retrieved_tokens.shape[1]
    draft_weights = torch.empty((batch, pool), dtype=torch.long, device=stage.device)
    retrieved_weights = torch.empty((batch, nodes), dtype=torch.long, device=stage.device)
    _staged_weights_kernel[(batch,)](
        draft_scores.contiguous(),
        draft_tokens.contiguous(),
        layout.pool_depths,
        stage,
        stages.num_draft,
        stages.members,
        stages.order,
        retrieved_tokens.contiguous(),
        draft_weights,
        retrieved_weights,
        POOL=pool,
        POOL_BLOCK=triton.next_power_of_2(pool),
        NODES=nodes,
        NODE_BLOCK=triton.next_power_of_2(max(nodes, 1)),
        STAGES=stages.plan.num_stages,
        BACKFILL=stages.plan.backfill,
        WEIGHT_BITS=WEIGHT_BITS,
        RIVALS=RIVALS,
        num_warps=4 if pool <= 128 else 8,
    )
    return draft_weights, retrieved_weights
