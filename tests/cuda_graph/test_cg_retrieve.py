"""Retrieval against a table kept as dictionaries, garbage included."""

from __future__ import annotations

import random

import pytest
import torch
from cg_trees import property_test
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.retrieve import DeviceTemplate, retrieve
from sgl_graft.cuda_graph.successor_table import SuccessorTable, context_places
from sgl_graft.cuda_graph.templates import Template, assumed_rank_prior, template_for_budget

VOCAB, K = 12, 4


def random_context(rng: random.Random, table: SuccessorTable) -> int:
    """Nothing known, or the last one or two tokens."""
    further, nearest = rng.choices(range(table.vocab_size), k=2)
    return rng.choice([-1, *(pack(first, nearest) & table.context_mask for first in (None, further))])


def pack(*tokens: int | None) -> int:
    """Tokens as a context or a tag, the nearest last; None where unknown."""
    packed = 0
    for token in tokens:
        packed = packed * 2**21 + (2**21 - 1 if token is None else token)
    return packed


def random_table(
    rng: random.Random, num_tables: int, context_rows: int, garbage: bool, context_len: int = 3
) -> SuccessorTable:
    """Rows half full; with garbage also ids outside the vocabulary and probabilities that are none."""
    table = SuccessorTable.create(VOCAB, K, num_tables, context_rows, context_len)
    ids = [-1, *range(VOCAB)] + ([VOCAB, 2**31 - 1, -(2**31)] if garbage else [])
    probs = [0.0, 0.25, 0.5, 1.0] + ([float("nan"), float("inf"), -3.0, 7.0] if garbage else [])
    rows = table.empty_row
    for row in range(rows):
        table.tokens[row] = torch.tensor([rng.choice(ids) for _ in range(K)], dtype=torch.int32)
        table.probs[row] = torch.tensor([rng.choice(probs) for _ in range(K)], dtype=torch.float16)
    # The discard row may hold anything and is never read.
    table.tokens[table.discard_row] = 3
    for index in range(num_tables if context_rows else 0):
        for _ in range(20):
            tag = torch.tensor(pack(*rng.choices(range(VOCAB), k=context_len)))
            table.tags[context_places(table, torch.tensor(index), tag)] = tag
    return table


def expected_nodes(
    table: SuccessorTable, template: Template, index: int, root: int, context: int
) -> tuple[list[int], list[float]]:
    """Node by node: read the parent's row, its context row if that is stored, and multiply probabilities."""
    before_root = [] if context < 0 else [context >> 21, context & (2**21 - 1)]
    tokens: list[int] = []
    probs: list[float] = []
    for father, rank in zip(template.fathers, template.ranks, strict=True):
        last = root if father < 0 else tokens[father]
        if not 0 <= index < table.num_tables:  # of no table: padding, or a request that is kept out
            last = -1
        path, node = [], father  # from the father up to the root, then what led to it
        while node >= 0:
            path.append(tokens[node])
            node = template.fathers[node]
        text = [None, *before_root, root, *path[::-1]]
        if not 0 <= last < VOCAB:
            tokens.append(-1)
            probs.append(0.0)
            continue
        row = index * VOCAB + last
        if table.context_rows and not (father < 0 and context < 0):
            tag = pack(*text[-table.context_len :])
            slot = int(context_places(table, torch.tensor(index), torch.tensor(tag)))
            if table.tags[slot] == tag:
                row = table.first_context_row + slot
        token, prob = int(table.tokens[row, rank]), float(table.probs[row, rank])
        known = 0 <= token < VOCAB
        above = 1.0 if father < 0 else probs[father]
        clipped = min(prob, 1.0) if 0 < prob < float("inf") else 0.0
        tokens.append(token if known else -1)
        probs.append(float(torch.tensor(above) * torch.tensor(clipped)) if known else 0.0)
    return tokens, probs


@property_test
@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from([0, 8, 64]), st.booleans())
def test_retrieval(seed: int, num_tables: int, context_rows: int, garbage: bool) -> None:
    rng = random.Random(seed)
    table = random_table(rng, num_tables, context_rows, garbage, rng.choice([2, 3]))
    template = template_for_budget(rng.randint(0, 20), rng.randint(3, 6), assumed_rank_prior(K))
    batch = rng.randint(1, 4)
    index = [rng.randrange(-2, num_tables + 2) for _ in range(batch)]
    roots = [rng.choice([*range(VOCAB), -1, VOCAB, 2**40]) for _ in range(batch)]
    contexts = [random_context(rng, table) for _ in range(batch)]
    found = retrieve(
        table, DeviceTemplate.create(template), *(torch.tensor(v) for v in (index, roots, contexts))
    )
    for row in range(batch):
        tokens, probs = expected_nodes(table, template, index[row], roots[row], contexts[row])
        assert found.tokens[row].tolist() == tokens
        assert found.probs[row].tolist() == probs


def test_tables_do_not_see_each_other() -> None:
    table = SuccessorTable.create(VOCAB, K, num_tables=2, context_rows=8)
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
    table.tags.fill_(9)
    table.clear_table(1)
    order1 = [row for row in range(3 * VOCAB) if int(table.tokens[row, 0]) == -1]
    context = [row for row in range(3 * 8) if int(table.tokens[3 * VOCAB + row, 0]) == -1]
    assert order1 == list(range(VOCAB, 2 * VOCAB)) and context == list(range(8, 16))
    assert [slot for slot in range(24) if int(table.tags[slot]) == -1] == list(range(8, 16))


def test_refusals() -> None:
    table = SuccessorTable.create(VOCAB, 2)
    template = DeviceTemplate.create(template_for_budget(3, 1, assumed_rank_prior(3)))
    one = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="uses 3 ranks, rows hold 2"):
        retrieve(table, template, one, one, one)
    with pytest.raises(ValueError, match="context_rows 6"):
        SuccessorTable.create(VOCAB, 2, 1, 6)
    with pytest.raises(ValueError, match="context_len is 4"):
        SuccessorTable.create(VOCAB, 2, 1, 8, 4)
    with pytest.raises(ValueError, match="the vocabulary has 2097152: set context_rows to 0"):
        SuccessorTable.create(2**21, 2, 1, 8)
    with pytest.raises(ValueError, match="k 0"):
        SuccessorTable.create(VOCAB, 0)
    with pytest.raises(ValueError, match="table 1 does not exist"):
        table.clear_table(1)
