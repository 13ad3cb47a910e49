"""Counters against plain Python on random rounds."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_graft.graft.counters import CandidateCounters, RoundCounters


def test_round_counters_tell_sources_and_depths_apart():
    counters = RoundCounters.create(depth=2, num_stages=2)
    sources = torch.tensor([[0, 1, 2, 0]])
    depths = torch.tensor([[0, 1, 2, 0]])
    accept_index = torch.tensor([[0, 1, -1]], dtype=torch.int32)
    counters.record(sources, depths, torch.tensor([1]), accept_index, torch.tensor([2]))
    totals = counters.snapshot()
    assert totals["used"][1] == [0, 1, 0] and totals["used"][2] == [0, 0, 1]
    assert totals["accepted"][1] == [0, 1, 0] and totals["accepted"][2] == [0, 0, 0]
    assert (totals["stages"], totals["rounds"], totals["committed"]) == ([0, 1], 1, 2)


def naive_candidates(tokens, parents, depths, committed, accept_len):
    """For every node: True or False when the outcome is known, None when it is not."""
    labels = []
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            at = parents[at]
        path.reverse()
        label = True
        for step, at in enumerate(path):
            if step >= accept_len:
                label = None
                break
            if tokens[at] != committed[step]:
                label = False
                break
        labels.append(label)
    return labels


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_candidate_labels_equal_a_naive_walk(data):
    depth = data.draw(st.integers(1, 4))
    sizes = [data.draw(st.integers(1, 4)) for _ in range(depth)]
    parents, depths = [], []
    for level, size in enumerate(sizes):
        first_above = sum(sizes[: level - 1]) if level else 0
        for _ in range(size):
            parents.append(first_above + data.draw(st.integers(0, sizes[level - 1] - 1)) if level else -1)
            depths.append(level + 1)
    tokens = [data.draw(st.integers(0, 2)) for _ in parents]
    committed = [data.draw(st.integers(0, 2)) for _ in range(6)]
    accept_len = data.draw(st.integers(1, 6))
    counters = CandidateCounters.create(depth)
    probs = torch.full((1, len(tokens)), 0.5)
    counters.record_level_order(
        1,
        torch.tensor([tokens]),
        torch.tensor([parents]),
        probs,
        torch.tensor(depths),
        torch.tensor([committed]),
        torch.tensor([accept_len]),
    )
    labels = naive_candidates(tokens, parents, depths, committed, accept_len)
    for level in range(depth):
        at_level = [label for label, d in zip(labels, depths, strict=True) if d == level + 1]
        assert int(counters.seen[1, level].sum()) == sum(label is not None for label in at_level)
        assert int(counters.true[1, level].sum()) == sum(label is True for label in at_level)
    assert int(counters.seen[0].sum()) == 0
