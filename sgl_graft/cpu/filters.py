"""Top-k, top-p and min-p as one probability threshold per row, independent of the batch a row sits in."""

from __future__ import annotations

import torch

_HEAD = 256  # most rows' surviving tokens fit in this many; the rest are sorted in full


def thresholds(
    probs: torch.Tensor,  # [rows, vocab]
    top_ks: torch.Tensor,  # [rows] int
    top_ps: torch.Tensor,  # [rows]
    min_ps: torch.Tensor,  # [rows]
) -> torch.Tensor:  # [rows]
    """Smallest probability that survives all three filters of its row.

    Top-p counts the mass *before* a token, as SGLang does; min-p is relative to the likeliest token. Equal
    probabilities live or die together, so the outcome does not depend on a sort's order of ties.
    """
    vocab_size = probs.shape[1]
    head = min(_HEAD, vocab_size)
    result, undecided = _thresholds_of_sorted(probs.topk(head, dim=1).values, top_ks, top_ps, min_ps)
    rows = (undecided & ((top_ks < vocab_size) | (top_ps < 1.0))).nonzero().squeeze(1)
    if head < vocab_size and rows.numel():
        ordered = probs[rows].sort(dim=1, descending=True).values
        result[rows], _ = _thresholds_of_sorted(ordered, top_ks[rows], top_ps[rows], min_ps[rows])
    return result


def _thresholds_of_sorted(
    ordered: torch.Tensor,  # [rows, head] descending
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows], and [rows] bool: top-k and top-p cut nothing of the head
    rank = torch.arange(ordered.shape[1])
    mass_before = ordered.cumsum(1) - ordered
    kept = (rank < top_ks.unsqueeze(1)) & (mass_before <= top_ps.unsqueeze(1))
    whole_head = kept.all(1)
    last = kept.sum(1, keepdim=True).clamp(min=1) - 1
    smallest = ordered.gather(1, last).squeeze(1)
    smallest = torch.where(whole_head, torch.zeros_like(smallest), smallest)
    return torch.maximum(smallest, ordered[:, 0] * min_ps), whole_head
