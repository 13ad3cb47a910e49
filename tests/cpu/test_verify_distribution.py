"""Coupled verification against the exact distribution of two consecutive tokens, with controls that fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from .two_tokens import (
    VOCAB,
    Filters,
    Verify,
    coupled,
    exact_pairs,
    noise_by_column,
    plain,
    ratio_test,
    speculated,
)

NUM_SEEDS = 20_000
LEVEL = 0.01
FILTERS = {
    "plain": Filters(),
    "cold": Filters(temperature=0.7),
    "top-k": Filters(top_k=3),
    "top-p": Filters(top_p=0.8),
    "min-p": Filters(min_p=0.15),
    "all": Filters(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
}
TREES = {
    "chain": ([0, 3, 1], [-1, 0, 1]),
    "tree": ([0, 3, 1, 5, 2, 4, 0], [-1, 0, 0, 0, 1, 1, 2]),
    "duplicate siblings": ([0, 3, 3, 1, 2, 2], [-1, 0, 0, 1, 2, 2]),
    "empty slots": ([0, 3, 1, 2, 6], [-1, 0, 0, -1, -1]),
}


def p_value(pairs: torch.Tensor, filters: Filters) -> float:
    """Chi-square test of observed pairs; 0 when a pair of probability zero was seen."""
    exact = exact_pairs(filters).flatten().numpy()
    observed = np.bincount((pairs[:, 0] * VOCAB + pairs[:, 1]).numpy(), minlength=VOCAB * VOCAB)
    expected = exact * observed.sum()
    if observed[exact == 0].any():
        return 0.0
    # Cells that expect fewer than five share one cell.
    rare = expected < 5
    cells = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)]
    if cells[1][-1] == 0:
        cells = [counts[:-1] for counts in cells]
    return float(stats.chisquare(*cells).pvalue)


@pytest.fixture(scope="module")
def seeds() -> torch.Tensor:
    return torch.arange(NUM_SEEDS)


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_verified_pairs_are_those_of_plain_decoding(seeds: torch.Tensor, filters: Filters, tree: str) -> None:
    few = seeds[:1000]
    assert torch.equal(speculated(few, filters, coupled, *TREES[tree]), plain(few, filters))


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_verified_pairs_follow_the_exact_distribution(seeds: torch.Tensor, filters: Filters) -> None:
    assert p_value(speculated(seeds, filters, coupled, *TREES["tree"]), filters) > LEVEL


@pytest.mark.parametrize("wrong", [noise_by_column, ratio_test])
def test_a_wrong_verify_fails_both_checks(seeds: torch.Tensor, wrong: Verify) -> None:
    pairs = speculated(seeds, Filters(), wrong, *TREES["tree"])
    assert p_value(pairs, Filters()) < 1e-6
    assert not torch.equal(pairs, plain(seeds, Filters()))


def test_requests_of_one_batch_keep_their_own_filters_and_seeds(seeds: torch.Tensor) -> None:
    """Rows of a mixed batch draw what they draw alone."""
    from sgl_graft.cpu.verify import target_tokens

    from .two_tokens import sampling_info

    logits = torch.randn(6 * 4, 300, generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([9, 10, 10, 11]).repeat(6)
    infos = [sampling_info(seeds[50 + i : 51 + i], filters) for i, filters in enumerate(FILTERS.values())]
    mixed = sampling_info(seeds[50:56], Filters())
    for name in ("temperatures", "top_ks", "top_ps", "min_ps"):
        setattr(mixed, name, torch.cat([getattr(info, name) for info in infos]))
    mixed.top_ks[2] = 1  # a greedy request among them
    drawn = target_tokens(logits, mixed, positions, 4)
    assert torch.equal(drawn[2], logits.view(6, 4, 300)[2].argmax(1))
    for row in (0, 1, 3, 4, 5):
        alone = target_tokens(logits.view(6, 4, 300)[row], infos[row], positions[:4], 4)
        assert torch.equal(drawn[row], alone[0])
