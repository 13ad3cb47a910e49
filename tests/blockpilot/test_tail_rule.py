"""Where Graft-TAIL cuts a block, and what it puts there."""

from itertools import pairwise

import torch
from sgl_graft.cuda_graph.retrieve import Retrieved
from sgl_graft.cuda_graph.successor_table import SuccessorTable
from sgl_graft.cuda_graph.table_update import write_successors
from sgl_graft.cuda_graph.top_successors import TopSuccessors
from sgl_graft.cuda_graph.value_rule import ValueMaps

from sgl_graft.blockpilot.tail_rule import (
    auc_by_offset,
    chain_template,
    chains_from_every_start,
    graft_tail,
)

VOCAB = 40
IDENTITY = ValueMaps.identity(1)


def table_of(text, context_rows=64):
    """A table that knows what follows every token of ``text``, surely."""
    table = SuccessorTable.create(VOCAB, k=2, context_rows=context_rows)
    for before, after in pairwise(text):
        ids = torch.tensor([[after, (after + 1) % VOCAB]], dtype=torch.int32)
        best = TopSuccessors(ids, torch.tensor([[0.9, 0.05]], dtype=torch.float16))
        one = torch.zeros((1, 1), dtype=torch.int64)
        write_successors(
            table,
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([[before]]),
            one - 1,
            one,
            torch.tensor([-1]),
            torch.ones((1, 1), dtype=torch.bool),
            best,
        )
    return table


def chains(table, root, drafted, index=0):
    drafted = torch.tensor([drafted])
    return chains_from_every_start(
        table,
        chain_template(drafted.shape[1]),
        torch.tensor([index]),
        torch.tensor([root]),
        torch.tensor([-1]),
        drafted,
    )


def graft(table, root, drafted, confidence, limit=None, maps=IDENTITY):
    found = chains(table, root, drafted)
    limits = torch.tensor([len(drafted) if limit is None else limit])
    return graft_tail(found, maps, torch.tensor([drafted]), torch.tensor([confidence]), limits)


def test_chains_start_behind_every_drafted_token():
    table = table_of([1, 2, 3, 4, 5, 6])
    found = chains(table, 1, [2, 9, 4])
    assert found.tokens.tolist() == [[2, 3, 4], [3, 4, 5], [-1, -1, -1]]
    torch.testing.assert_close(found.probs[0], torch.tensor([0.9, 0.81, 0.729]), rtol=1e-2, atol=1e-2)


def test_a_sure_block_is_left_alone():
    block = graft(table_of([1, 2, 3, 4, 5]), 1, [7, 8, 9], [0.99, 0.99, 0.99])
    assert block.tokens.tolist() == [[7, 8, 9]] and block.start.tolist() == [3]


def test_the_weak_tail_gives_way_to_the_table():
    block = graft(table_of([7, 2, 3, 4, 5]), 1, [7, 30, 31], [0.95, 0.1, 0.1])
    assert block.start.tolist() == [1]
    assert block.tokens.tolist() == [[7, 2, 3]]


def test_an_empty_table_changes_nothing():
    block = graft(SuccessorTable.create(VOCAB, k=2, context_rows=64), 1, [7, 30, 31], [0.1, 0.1, 0.1])
    assert block.tokens.tolist() == [[7, 30, 31]] and block.start.tolist() == [3]


def test_a_request_kept_out_of_the_table_reads_nothing():
    found = chains(table_of([1, 2, 3, 4]), 1, [2, 3], index=-1)
    assert (found.tokens == -1).all()


def test_rows_beyond_the_block_do_not_count():
    """With one drafted token left to verify, a long chain is worth one token."""
    table = table_of([1, 2, 3, 4, 5, 6])
    long = graft(table, 1, [9, 9, 9, 9], [0.92, 0.1, 0.1, 0.1])
    assert long.start.tolist() == [0] and long.tokens.tolist() == [[2, 3, 4, 5]]
    short = graft(table, 1, [9, 9, 9, 9], [0.92, 0.1, 0.1, 0.1], limit=1)
    assert short.start.tolist() == [4]


def test_a_chain_that_ends_keeps_the_drafted_tokens_behind_it():
    block = graft(table_of([1, 2]), 1, [9, 8, 7], [0.1, 0.1, 0.1])
    assert block.tokens.tolist() == [[2, 8, 7]]


def test_calibration_decides():
    """A table that is known to be wrong is not used, however sure it is."""
    x = torch.tensor([0.0, 1.0]).expand(2, 1, 2)
    y = torch.stack((torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 0.01]])))
    block = graft(table_of([1, 2, 3, 4]), 1, [9, 8, 7], [0.5, 0.5, 0.5], maps=ValueMaps(x.contiguous(), y))
    assert block.start.tolist() == [3]


def test_rows_of_a_batch_do_not_mix():
    table = table_of([1, 2, 3, 4, 5])
    drafted = torch.tensor([[7, 8, 9], [7, 8, 9]])
    found = chains_from_every_start(
        table,
        chain_template(3),
        torch.tensor([0, 0]),
        torch.tensor([1, 30]),
        torch.tensor([-1, -1]),
        drafted,
    )
    block = graft_tail(found, IDENTITY, drafted, torch.full((2, 3), 0.2), torch.tensor([3, 3]))
    assert block.tokens.tolist() == [[2, 3, 4], [7, 8, 9]]


def test_shapes_are_fixed_and_nothing_is_read_back():
    from sgl_graft.cuda_graph.host_reads import count_host_reads

    table = table_of([1, 2, 3])
    found = chains(table, 1, [2, 9])
    drafted, confidence, limits = torch.tensor([[2, 9]]), torch.tensor([[0.5, 0.1]]), torch.tensor([2])
    assert count_host_reads(lambda: graft_tail(found, IDENTITY, drafted, confidence, limits)) == []
    assert isinstance(found, Retrieved)


def test_auc_by_offset():
    seen = [[10, 10], [10, 10], [4, 4], [0, 5]]
    true = [[0, 10], [5, 5], [1, 3], [0, 5]]
    assert auc_by_offset(seen, true) == [1.0, 0.5, 0.75, 0.5]
