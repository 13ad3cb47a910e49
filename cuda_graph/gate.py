"""The confidence gate: how deep the draft can be trusted (Graft, section 3.1, eq. 5 to 7).

Confidence at depth d is the probability of the drafter's best path of that depth. At each checkpoint a
request goes on while its confidence is strictly above the threshold; the first checkpoint where it is not
is its stage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton
from .eagle_tree import pool_level_sizes

SVIP_ENTROPY_SCALE = 0.15  # the constant in the SVIP authors' code


def path_confidence(
    scores: Tensor,  # [batch, pool] float32, probability of each node's path
    topk: int,
    steps: int,
) -> Tensor:  # [batch, steps] float32
    """Confidence at draft depth 0 (after the root step) to `steps - 1`: the best path's probability."""
    if use_triton(scores):
        from .gate_kernel import path_confidence_triton

        return path_confidence_triton(scores, topk, steps)
    return path_confidence_torch(scores, topk, steps)


def path_confidence_torch(
    scores: Tensor,  # [batch, pool] float32
    topk: int,
    steps: int,
) -> Tensor:  # [batch, steps] float32
    """Reference of `path_confidence`."""
    levels = scores.split(pool_level_sizes(topk, steps), dim=1)
    return torch.stack([level.amax(1) for level in levels], dim=1)


def staged_gate(
    confidence: Tensor,  # [batch, steps] float32
    checkpoints: tuple[int, ...],  # draft depths
    thresholds: Tensor,  # [checkpoints] float32
) -> Tensor:  # [batch] int64
    """Index of the first checkpoint whose confidence is not above its threshold, or their number if all pass.

    NaN confidence does not pass.
    """
    if not checkpoints:
        return torch.zeros(confidence.shape[0], dtype=torch.long, device=confidence.device)
    if use_triton(confidence):
        from .gate_kernel import staged_gate_triton

        return staged_gate_triton(confidence, checkpoints, thresholds)
    return staged_gate_torch(confidence, checkpoints, thresholds)


def staged_gate_torch(
    confidence: Tensor,  # [batch, steps] float32
    checkpoints: tuple[int, ...],
    thresholds: Tensor,  # [checkpoints] float32
) -> Tensor:  # [batch] int64
    """Reference of `staged_gate`."""
    looked_at = torch.stack([confidence[:, depth] for depth in checkpoints], dim=1)
    return (looked_at > thresholds).cumprod(1).sum(1)


def entropy_confidence(
    scores: Tensor,  # [batch, pool] float32
    parents: Tensor,  # [batch, pool] int64
    topk: int,
    steps: int,
) -> Tensor:  # [batch, steps] float32
    """An entropy gate for the ablation, after SVIP (arXiv 2411.18462): 1 - sqrt(0.15 * entropy).

    SVIP stops when sqrt(0.15 * entropy) exceeds h, so its h = 0.3 is a threshold of 0.7 here. The entropy is
    that of the next-token distribution at the best node expanded at each depth, from the `topk` probabilities
    that the pool keeps, with the rest as one outcome.
    """
    parent_scores = torch.where(parents < 0, 1.0, scores.gather(1, parents.clamp(min=0)))  # [batch, pool]
    probs = (scores / parent_scores.clamp(min=torch.finfo(scores.dtype).tiny)).clamp(0, 1)
    sizes = pool_level_sizes(topk, steps)
    confidence = []
    for level_probs, level_parents in zip(probs.split(sizes, 1), parent_scores.split(sizes, 1), strict=True):
        families = level_probs.unflatten(1, (-1, topk))  # [batch, expanded nodes, topk]
        rest = (1 - families.sum(2, keepdim=True)).clamp(min=0)
        outcomes = torch.cat([families, rest], dim=2)
        entropy = -torch.special.xlogy(outcomes, outcomes).sum(2)  # [batch, expanded nodes]
        best = level_parents[:, ::topk].argmax(1, keepdim=True)  # [batch, 1]
        confidence.append(1 - (SVIP_ENTROPY_SCALE * entropy.gather(1, best)).sqrt())
    return torch.cat(confidence, dim=1)
