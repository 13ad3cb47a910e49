"""The `staged` rule: the paper's prune, retrieve and graft (Graft, section 3.2 and Algorithm 2).

The gate's stage says how many of the best draft nodes stay and which retrieved nodes join them. Slots that
this leaves free, because a retrieved node was missing or equal to a draft node, go to the next best draft
nodes, so the tree always contains what pruning alone would keep.

In terms of merge weights: kept draft nodes outrank grafted nodes, which outrank the remaining draft nodes,
which outrank retrieved nodes of other stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import use_triton
from .merge import TrieLayout
from .select import sort_keys
from .stages import StagePlan
from .value_rule import WEIGHT_BITS, float_weights

KEPT, GRAFTED, NEXT_DRAFT, OTHER_RETRIEVED = 3, 2, 1, 0


@dataclass(frozen=True)
class DeviceStages:
    """A stage plan's constants on a device, made once before capture."""

    plan: StagePlan
    num_draft: Tensor  # [stages] int64
    members: Tensor  # [stages, envelope nodes] bool
    order: Tensor  # [envelope nodes] int64, best-first position of each node

    @classmethod
    def create(cls, plan: StagePlan, device: torch.device | str = "cpu") -> DeviceStages:
        return cls(
            plan=plan,
            num_draft=torch.tensor(plan.num_draft, dtype=torch.long, device=device),
            members=torch.tensor(plan.members, dtype=torch.bool, device=device),
            order=torch.tensor(plan.envelope.order, dtype=torch.long, device=device),
        )


def staged_weights(
    stages: DeviceStages,
    layout: TrieLayout,
    stage: Tensor,  # [batch] int64, from `gate.staged_gate`
    draft_tokens: Tensor,  # [batch, pool] int64
    draft_scores: Tensor,  # [batch, pool] float32, probability of each node's path; NaN counts as 0
    retrieved_tokens: Tensor,  # [batch, envelope nodes] int64, -1 where the table has nothing
) -> tuple[Tensor, Tensor]:  # [batch, pool] int64, [batch, envelope nodes] int64
    """Merge weights of both sources under the staged rule."""
    args = (stages, layout, stage, draft_tokens, draft_scores, retrieved_tokens)
    if use_triton(draft_scores):
        from .staged_kernel import staged_weights_triton

        return staged_weights_triton(*args)
    return staged_weights_torch(*args)


def staged_weights_torch(
    stages: DeviceStages,
    layout: TrieLayout,
    stage: Tensor,  # [batch] int64
    draft_tokens: Tensor,  # [batch, pool] int64
    draft_scores: Tensor,  # [batch, pool] float32
    retrieved_tokens: Tensor,  # [batch, envelope nodes] int64
) -> tuple[Tensor, Tensor]:  # [batch, pool] int64, [batch, envelope nodes] int64
    """Reference of `staged_weights`."""
    stage = stage.clamp(0, stages.plan.num_stages - 1)  # a padded row may hold anything
    scores = float_weights(draft_scores)
    ranks = score_ranks(scores, layout.pool_depths, draft_tokens)
    kept = ranks < stages.num_draft[stage].unsqueeze(1)  # [batch, pool]
    grafted = stages.members[stage]  # [batch, envelope nodes]
    position = 2**WEIGHT_BITS - 1 - stages.order  # [envelope nodes]
    draft_weights = scores + torch.where(kept, KEPT << WEIGHT_BITS, NEXT_DRAFT << WEIGHT_BITS)
    retrieved_weights = position + torch.where(grafted, GRAFTED << WEIGHT_BITS, OTHER_RETRIEVED)
    if not stages.plan.backfill:
        draft_weights = torch.where(kept, draft_weights, -1)
        retrieved_weights = torch.where(grafted, retrieved_weights, -1)
    return draft_weights, torch.where(retrieved_tokens < 0, -1, retrieved_weights)


def score_ranks(
    scores: Tensor,  # [batch, pool] int64, from `float_weights`
    depths: Tensor,  # [pool] int64
    tokens: Tensor,  # [batch, pool] int64
) -> Tensor:  # [batch, pool] int64
    """0 for the best-scored node, and so on; ties by depth, then token, then pool order."""
    best_first = sort_keys(scores, depths, tokens).sort(dim=1, descending=True, stable=True).indices
    position = torch.arange(scores.shape[1], device=scores.device).expand_as(best_first)
    return torch.empty_like(best_first).scatter_(1, best_first, position)
