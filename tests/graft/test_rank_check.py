"""Ranks that differ in one bit are noticed; equal ones are not."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_graft.serving.rank_check import RankCheck, RankMismatchError, digest, rank_check

DTYPES = (torch.int64, torch.int32, torch.float16, torch.float32, torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.data())
def test_any_changed_bit_changes_the_digest(dtype, size, data):
    bits = torch.randint(0, 256, (size * torch.empty(0, dtype=dtype).element_size(),), dtype=torch.uint8)
    changed = bits.clone()
    changed[data.draw(st.integers(0, bits.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(bits.view(dtype)) == digest(bits.clone().view(dtype))
    assert digest(bits.view(dtype)) != digest(changed.view(dtype))


def test_order_and_length_matter():
    assert digest(torch.tensor([1, 2])) != digest(torch.tensor([2, 1]))
    assert digest(torch.tensor([0])) != digest(torch.tensor([0, 0]))
    large = torch.zeros(2**20 + 3, dtype=torch.bool)
    changed = large.clone()
    changed[-1] = True
    assert digest(large) != digest(changed)


class Ranks:
    """Threads that gather from each other, as processes do over gloo."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.sent = [None] * size

    def gather(self, rank, mine):
        self.sent[rank] = mine
        self.barrier.wait(10)
        everyones = list(self.sent)
        self.barrier.wait(10)
        return everyones


def serve(ranks, rank, perturbed):
    check = RankCheck(3, lambda mine: ranks.gather(rank, mine))
    table = torch.arange(100)
    for turn in range(9):
        if perturbed and turn == 4 and rank == 1:
            table[7] += 1
        if check.due():
            check.compare(tree=torch.ones(4), table=table)
    return check.comparisons


def test_equal_ranks_are_compared_every_so_many_rounds():
    ranks = Ranks(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda rank: serve(ranks, rank, False), range(2))) == [3, 3]


def test_a_perturbed_rank_is_noticed_by_all_and_named():
    ranks = Ranks(2)
    with ThreadPoolExecutor(2) as pool:
        served = [pool.submit(serve, ranks, rank, True) for rank in range(2)]
    for each in served:
        with pytest.raises(RankMismatchError, match=r"round 6: table of rank 1 differs .*--tp 1"):
            each.result()


def test_it_is_off_unless_asked_for():
    assert rank_check() is None
