"""Retrieval against a table kept as dictionaries, garbage included."""

from __future__ import annotations

import random

import pytest
import torch
from cg_trees import property_test
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.retrieve import DeviceTemplate, retrieve
from sgl_graft.cuda_graph.successor_table import SuccessorTable, order2_slots, pack_pairs
from sgl_graft.cuda_graph.templates import Template, assumed_rank_prior, template_for_budget

VOCAB, K = 12, 4


def random_table(rng: random.Random, num_tables: int, order2_rows: int, garbage: bool) -> SuccessorTable:
    """Rows half full; with garbage also ids outside the vocabulary and probabilities that are none."""
    table = SuccessorTable.create(VOCAB, K, num_tables, order2_rows)
    ids = [-1, *range(VOCAB)] + ([VOCAB, 2**31 - 1, -(2**31)] if garbage else [])
    probs = [0.0, 0.25, 0.5, 1.0] + ([float("nan"), float("inf"), -3.0, 7.0] if garbage else [])
    rows = table.empty_row
    for row in range(rows):
        table.tokens[row] = torch.tensor([rng.choice(ids) for _ in range(K)], dtype=torch.int32)
        table.probs[row] = torch.tensor([rng.choice(probs) for _ in range(K)], dtype=torch.float16)
    # The discard row may hold anything and is never read.
    table.tokens[table.discard_row] = 3
    for index in range(num_tables if order2_rows else 0):
        for _ in range(20):
            pair = pack_pairs(torch.tensor(rng.randrange(VOCAB)), torch.tensor(rng.randrange(VOCAB)))
            table.pairs[order2_slots(table, torch.tensor(index), pair)] = pair
    return table


def expected_nodes(
    table: SuccessorTable, template: Template, index: int, root: int, previous: int
) -> tuple[list[int], list[float]]:
    """Node by node: read the parent's row, order 2 if the pair is stored, and multiply probabilities."""
    tokens: list[int] = []
    probs: list[float] = []
    for father, rank in zip(template.fathers, template.ranks, strict=True):
        last = root if father < 0 else tokens[father]
        grandfather = -1 if father < 0 else template.fathers[father]
        before = previous if father < 0 else root if grandfather < 0 else tokens[grandfather]
        if not 0 <= last < VOCAB:
            tokens.append(-1)
            probs.append(0.0)
            continue
        row = index * VOCAB + last
        if table.order2_rows:
            pair = pack_pairs(torch.tensor(before), torch.tensor(last))
            slot = int(order2_slots(table, torch.tensor(index), pair))
            if table.pairs[slot] == pair:
                row = table.first_order2_row + slot
        token, prob = int(table.tokens[row, rank]), float(table.probs[row, rank])
        known = 0 <= token < VOCAB
        above = 1.0 if father < 0 else probs[father]
        clipped = min(prob, 1.0) if 0 < prob < float("inf") else 0.0
        tokens.append(token if known else -1)
        probs.append(float(torch.tensor(above) * torch.tensor(clipped)) if known else 0.0)
    return tokens, probs


@property_test
@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from([0, 8, 64]), st.booleans())
def test_retrieval(seed: int, num_tables: int, order2_rows: int, garbage: bool) -> None:
    rng = random.Random(seed)
    table = random_table(rng, num_tables, order2_rows, garbage)
    template = template_for_budget(rng.randint(0, 20), rng.randint(3, 6), assumed_rank_prior(K))
    batch = rng.randint(1, 4)
    index = [rng.randrange(num_tables) for _ in range(batch)]
    roots = [rng.choice([*range(VOCAB), -1, VOCAB, 2**40]) for _ in range(batch)]
    previous = [rng.randrange(-1, VOCAB) for _ in range(batch)]
    found = retrieve(
        table, DeviceTemplate.create(template), *(torch.tensor(v) for v in (index, roots, previous))
    )
    for row in range(batch):
        tokens, probs = expected_nodes(table, template, index[row], roots[row], previous[row])
        assert found.tokens[row].tolist() == tokens
        assert found.probs[row].tolist() == probs


def test_tables_do_not_see_each_other() -> None:
    table = SuccessorTable.create(VOCAB, K, num_tables=2, order2_rows=8)
    table.tokens[VOCAB + 5] = torch.tensor([7, -1, -1, -1], dtype=torch.int32)  # table 1 knows 5 -> 7
    template = DeviceTemplate.create(template_for_budget(1, 1, (0.5,)))
    found = retrieve(table, template, torch.tensor([0, 1]), torch.tensor([5, 5]), torch.tensor([-1, -1]))
    assert found.tokens.tolist() == [[-1], [7]]
    table.clear_table(1)
    found = retrieve(table, template, torch.tensor([0, 1]), torch.tensor([5, 5]), torch.tensor([-1, -1]))
    assert found.tokens.tolist() == [[-1], [-1]]


def test_clear_table_empties_its_own_rows_only() -> None:
    table = random_table(random.Random(1), 3, 8, garbage=False)
    table.tokens.fill_(4)
    table.pairs.fill_(9)
    table.clear_table(1)
    order1 = [row for row in range(3 * VOCAB) if int(table.tokens[row, 0]) == -1]
    order2 = [row for row in range(3 * 8) if int(table.tokens[3 * VOCAB + row, 0]) == -1]
    assert order1 == list(range(VOCAB, 2 * VOCAB)) and order2 == list(range(8, 16))
    assert [slot for slot in range(24) if int(table.pairs[slot]) == -1] == list(range(8, 16))


def test_refusals() -> None:
    table = SuccessorTable.create(VOCAB, 2)
    template = DeviceTemplate.create(template_for_budget(3, 1, assumed_rank_prior(3)))
    one = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="uses 3 ranks, rows hold 2"):
        retrieve(table, template, one, one, one)
    with pytest.raises(ValueError, match="order2_rows 6"):
        SuccessorTable.create(VOCAB, 2, 1, 6)
    with pytest.raises(ValueError, match="k 0"):
        SuccessorTable.create(VOCAB, 0)
    with pytest.raises(ValueError, match="table 1 does not exist"):
        table.clear_table(1)
