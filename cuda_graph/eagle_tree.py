"""The draft pool: every node an EAGLE drafter scored, and the stock tree cut from it.

With `steps` draft steps of `topk` beams the pool holds `topk + (steps - 1) * topk**2` nodes, level after
level: the root's `topk` children, then for each later step `topk` children of each of its `topk` beam nodes.
Source: SGLang 0.5.23, `EagleDraftWorker.draft_forward`, `select_top_k_tokens` and `organize_draft_results`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DraftPool(NamedTuple):
    """All nodes of a draft, before any is chosen. Parents stand before their children."""

    tokens: Tensor  # [batch, pool] int64
    parents: Tensor  # [batch, pool] int64, pool index of the parent, -1 for the root
    scores: Tensor  # [batch, pool] float32, probability of the node's path under the drafter


def pool_level_sizes(topk: int, steps: int) -> tuple[int, ...]:
    """Number of pool nodes at depth 1, 2, ... `steps`."""
    if topk < 1 or steps < 1:
        raise ValueError(f"topk and steps must be at least 1, not {topk} and {steps}")
    return (topk,) + (topk * topk,) * (steps - 1)


def pool_depths(topk: int, steps: int) -> tuple[int, ...]:
    """Depth of every pool node, 1 for the root's children."""
    return tuple(depth for depth, size in enumerate(pool_level_sizes(topk, steps), 1) for _ in range(size))


def draft_pool(
    score_list: list[Tensor],  # steps x [batch, 1 or topk, topk] float
    token_list: list[Tensor],  # steps x [batch, topk or topk**2] int64
    parents_list: list[Tensor],  # steps x [batch, topk + 1 or topk] int64
) -> DraftPool:
    """Join the per-step lists that `draft_forward` collects into one pool."""
    topk = score_list[0].shape[2]
    # One entry per expanded node, -1 for the root; the last step's beam is never expanded.
    expanded = torch.cat(parents_list[:-1], dim=1) if len(parents_list) > 1 else parents_list[0][:, :1]
    return DraftPool(
        tokens=torch.cat(token_list, dim=1),
        parents=expanded.unsqueeze(2).expand(-1, -1, topk).flatten(1),
        scores=torch.cat([scores.flatten(1) for scores in score_list], dim=1).float(),
    )


def pad_pool(pool: DraftPool, topk: int, steps: int) -> DraftPool:
    """A pool whose draft ended early, with absent nodes where the missing levels would be."""
    missing = sum(pool_level_sizes(topk, steps)) - pool.tokens.shape[1]
    if not missing:
        return pool
    batch = pool.tokens.shape[0]
    return DraftPool(
        tokens=torch.cat([pool.tokens, pool.tokens.new_full((batch, missing), -1)], dim=1),
        parents=torch.cat([pool.parents, pool.parents.new_zeros((batch, missing))], dim=1),
        scores=torch.cat([pool.scores, pool.scores.new_zeros((batch, missing))], dim=1),
    )


def stock_tree(
    pool: DraftPool,
    root_tokens: Tensor,  # [batch] int64
    slots: int,
) -> tuple[Tensor, Tensor]:  # tokens and parents, both [batch, slots] int64
    """The tree that stock EAGLE verifies: the `slots - 1` best nodes of the pool, in pool order.

    Ties fall as `torch.topk` lets them, exactly as in SGLang; a node whose parent lost a tie becomes an
    empty slot. Raises ValueError when the pool is too small to fill the tree.
    """
    batch, pool_size = pool.tokens.shape
    if slots - 1 > pool_size:
        raise ValueError(
            f"{slots} slots need {slots - 1} draft nodes, the pool has {pool_size}: raise topk or steps"
        )
    chosen = pool.scores.topk(slots - 1, dim=1).indices.sort(dim=1).values  # [batch, slots - 1]
    slot = torch.arange(1, slots, device=chosen.device).expand(batch, -1)
    # Column 0 stands for the root, column i + 1 for pool node i.
    slot_of = torch.full((batch, pool_size + 1), -1, dtype=torch.long, device=chosen.device)
    slot_of = slot_of.scatter(1, chosen + 1, slot)
    slot_of[:, 0] = 0
    parents = slot_of.gather(1, pool.parents.gather(1, chosen) + 1)
    tokens = torch.cat([root_tokens.unsqueeze(1), pool.tokens.gather(1, chosen)], dim=1)
    return tokens, torch.cat([torch.full_like(parents[:, :1], -1), parents], dim=1)
