"""Counts per request, from the device to `meta_info`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def module():
    return pytest.importorskip("sgl_graft.serving.request_counts")


class Request:
    def __init__(self, done=False):
        self.done = done

    def finished(self):
        return self.done


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3))
def test_counts_equal_a_naive_count(module, seed, batch):
    generator = torch.Generator().manual_seed(seed)
    slots, path = 6, 4
    sources = torch.randint(0, 4, (batch, slots), generator=generator)
    accept_index = torch.full((batch, path), -1)
    for row in range(batch):
        length = int(torch.randint(1, path + 1, (1,), generator=generator))
        accept_index[row, 0] = row * slots
        picked = torch.randperm(slots - 1, generator=generator)[: length - 1] + 1
        accept_index[row, 1:length] = picked + row * slots
    counts = module.count_slots(sources, accept_index)
    for row in range(batch):
        below = sources[row, 1:].tolist()
        hit = [int(sources.flatten()[i]) for i in accept_index[row, 1:].tolist() if i >= 0]
        wanted = [below.count(s) for s in range(4)] + [hit.count(s) for s in range(4)]
        assert counts[row].tolist() == wanted


def test_rounds_add_up_until_a_request_is_finished(module):
    rounds = module.RequestCounts()
    first, second = Request(), Request()
    one = torch.tensor([[1, 2, 3, 4, 0, 1, 1, 1], [0, 5, 0, 0, 0, 2, 0, 0]])
    for _ in range(2):
        rounds.verified([first, second], one)
        rounds.processed(2)
    assert module.counts_of(first) == [
        {"proposed": {"draft": 4, "table": 6, "both": 8}, "accepted": {"draft": 2, "table": 2, "both": 2}}
    ]
    streamer = module.GraftOutputStreamer
    build = streamer.build_additional_customized_info
    assert build(None, [first, second]) == {}
    second.done = True
    assert build(None, [first, second]) == {"graft": [[], module.counts_of(second)]}
    assert module.counts_of(Request(True)) == []


def test_a_round_that_does_not_fit_is_dropped(module):
    rounds = module.RequestCounts()
    request = Request()
    rounds.processed(3)
    rounds.verified([request], torch.ones(1, 8, dtype=torch.long))
    rounds.verified([request], torch.ones(1, 8, dtype=torch.long))
    rounds.processed(2)
    rounds.processed(1)
    assert module.counts_of(request) == []
