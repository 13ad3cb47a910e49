"""Gate thresholds from made-up drafts."""

import pytest
import torch

from sgl_graft.graft.collect import GateCounters
from sgl_graft.graft.thresholds import auc, best_threshold, fit_gates, fit_to_lengths


def test_a_clean_cut_is_found_and_scores_one():
    stopped, went_on = [5, 5, 5, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 4, 4, 4, 4, 4]
    assert 0.3 <= best_threshold(stopped, went_on) <= 0.5
    assert auc(stopped, went_on) == 1.0
    assert auc(went_on, stopped) == 0.0


def test_confidence_that_says_nothing_scores_half():
    assert auc([3, 6, 1], [3, 6, 1]) == pytest.approx(0.5)


def test_auc_counts_pairs():
    stopped, went_on = [1, 3, 0, 2], [0, 2, 4, 1]
    pairs = [
        (b > a) + (b == a) / 2
        for a, low in enumerate(stopped)
        for b, high in enumerate(went_on)
        for _ in range(low * high)
    ]
    assert auc(stopped, went_on) == pytest.approx(sum(pairs) / len(pairs))


def test_depths_where_nothing_differs_have_no_gate():
    fits = fit_gates([[2, 0], [0, 0]], [[0, 6], [1, 1]])
    assert [(fit.depth, fit.threshold, fit.rounds, fit.share) for fit in fits] == [(0, 0.5, 8, 0.75)]


def test_only_rounds_that_tell_are_counted():
    """Three steps. A draft that agrees with all of a short round may or may not have gone on."""
    counters = GateCounters.create(3)
    confidence = torch.tensor([[0.9, 0.5, 0.1]])

    def counted(right: int, committed: int) -> list[list[int]]:
        counters.seen.zero_()
        counters.record(confidence, torch.tensor([right]), torch.tensor([committed]))
        return counters.seen.sum(2).tolist()  # [stopped, went on], each per depth

    assert counted(right=3, committed=4) == [[0, 0, 0], [1, 1, 1]]
    assert counted(right=2, committed=3) == [[0, 1, 1], [1, 0, 0]]
    assert counted(right=0, committed=1) == [[1, 1, 1], [0, 0, 0]]
    assert counted(right=1, committed=1) == [[0, 0, 0], [0, 0, 0]]  # the second token is not known
    assert counted(right=2, committed=2) == [[0, 0, 0], [1, 0, 0]]
    assert int(counters.seen[1, 0, 90]) == 1  # in the bin of its confidence


def test_what_accepts_most_decides():
    """One checkpoint: pruning accepts 3, going on 1 to 5, and confidence says which."""
    confidence = [[0.1], [0.2], [0.6], [0.9]]
    (threshold,) = fit_to_lengths(confidence, [[3, 1], [3, 2], [3, 4], [3, 5]])
    assert threshold == pytest.approx(0.4)
    assert fit_to_lengths(confidence, [[1, 2]] * 4) == [0.0]  # never prune
    assert fit_to_lengths(confidence, [[2, 1]] * 4) == [pytest.approx(0.95)]  # always, as far as was seen


def test_a_shallow_gate_knows_what_the_deeper_one_does():
    """Two checkpoints that cannot tell rounds apart: the deeper one stops all, the shallow one need not."""
    confidence = [[0.5, 0.5], [0.5, 0.5]]
    shallow, deep = fit_to_lengths(confidence, [[2, 3, 1], [2, 3, 1]])
    assert shallow == 0.0 and deep > 0.5
    shallow, deep = fit_to_lengths(confidence, [[4, 3, 1], [4, 3, 1]])
    assert shallow > 0.5 and deep > 0.5
