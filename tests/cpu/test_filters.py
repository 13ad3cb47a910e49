"""Sampling filters against a plain sort, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sgl_graft.cpu.filters import thresholds


def kept_by_sorting(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which tokens of one row survive, by the definition: equal probabilities share one fate."""
    kept = torch.zeros_like(probs, dtype=torch.bool)
    mass = torch.zeros(())
    order = probs.argsort(descending=True, stable=True).tolist()
    for rank, token in enumerate(order):
        tied_with_kept = rank > 0 and kept[order[rank - 1]] and probs[token] == probs[order[rank - 1]]
        inside = rank < top_k and mass <= top_p
        kept[token] = inside or tied_with_kept
        mass = mass + probs[token]
    return kept & (probs >= probs.max() * min_p)


def kept_by_threshold(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    cut = thresholds(probs.unsqueeze(0), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return probs >= cut


def random_probs(seed: int, vocab: int, spread: float) -> torch.Tensor:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return logits.softmax(0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([2, 5, 40, 255, 256, 257, 700]),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    top_k=st.sampled_from([2, 3, 20, 255, 256, 257, 600, TOP_K_ALL]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_thresholds_keep_what_sorting_keeps(
    seed: int, vocab: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    probs = random_probs(seed, vocab, spread)
    expected = kept_by_sorting(probs, top_k, top_p, min_p)
    kept = kept_by_threshold(probs, top_k, top_p, min_p)
    # Sums of hundreds of terms differ in the last digit: a token exactly at the edge may fall either way.
    assert (kept != expected).sum() <= int(top_p < 1.0)
    assert kept[probs.argmax()]


@pytest.mark.parametrize("vocab", [300, 1000])
@pytest.mark.parametrize("top_k", [255, 256, 257, 299])
def test_top_k_keeps_exactly_k_at_the_edge_of_the_partial_sort(vocab: int, top_k: int) -> None:
    kept = kept_by_threshold(random_probs(1, vocab, 1.0), top_k, 1.0, 0.0)
    assert kept.sum() == top_k


@pytest.mark.parametrize("rank", [254, 255, 256, 257])
def test_top_p_that_ends_at_the_edge_of_the_partial_sort(rank: int) -> None:
    probs = random_probs(2, 1000, 1.0)
    ordered = probs.sort(descending=True).values
    middle_of_rank = (ordered[:rank].sum() + ordered[rank] / 2).item()
    kept = kept_by_threshold(probs, TOP_K_ALL, middle_of_rank, 0.0)
    assert kept.sum() == rank + 1


def test_equal_probabilities_live_or_die_together() -> None:
    probs = torch.tensor([0.3, 0.2, 0.2, 0.2, 0.1])
    assert kept_by_threshold(probs, 2, 1.0, 0.0).tolist() == [True, True, True, True, False]


def test_a_row_is_filtered_the_same_in_any_batch() -> None:
    rows = torch.stack([random_probs(seed, 700, 2.0) for seed in range(6)])
    top_ks = torch.tensor([5, TOP_K_ALL, 256, 300, TOP_K_ALL, 40])
    top_ps = torch.tensor([1.0, 0.9, 0.8, 1.0, 0.999, 0.7])
    min_ps = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0, 0.05])
    together = thresholds(rows, top_ks, top_ps, min_ps)
    alone = [thresholds(rows[i][None], top_ks[i][None], top_ps[i][None], min_ps[i][None]) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))
