"""Drafts as SGLang's worker collects them, from random step probabilities."""

from __future__ import annotations

import torch


def fake_draft(seed: int, batch: int, topk: int, steps: int, vocab: int = 50) -> tuple[list, list, list]:
    """What `draft_forward` collects, from random step probabilities (select_top_k_tokens restated)."""
    gen = torch.Generator().manual_seed(seed)
    score_list, token_list, parents_list = [], [], []
    scores = None
    for step in range(steps):
        rows = batch if step == 0 else batch * topk
        probs, index = torch.softmax(torch.randn(rows, vocab, generator=gen) * 2, -1).topk(topk)
        if step == 0:
            scores = probs
            score_list.append(probs.unsqueeze(1))
            token_list.append(index)
            parents_list.append(torch.arange(-1, topk).expand(batch, -1))
            continue
        expanded = scores.unsqueeze(2) * probs.view(batch, topk, topk)
        scores, chosen = expanded.flatten(1).topk(topk)
        score_list.append(expanded)
        token_list.append(index.view(batch, topk * topk))
        parents_list.append(chosen + topk * topk * (step - 1) + topk)
    return score_list, token_list, parents_list
