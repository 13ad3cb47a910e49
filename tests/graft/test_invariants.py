"""The invariants of a round, on random and on degenerate drafts, tables, budgets and vocabularies.

1: the verify shape never changes. 2: no two siblings carry the same token. 4: ranks that hold the same data
decide the same. 6: nothing is read back to the host. (5, static buffers, is in `tests/cuda_graph`.)
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.dispatch import forced_backend
from sgl_graft.cuda_graph.eagle_tree import DraftPool, draft_pool
from sgl_graft.cuda_graph.host_reads import count_host_reads

from sgl_graft.config import GraftConfig, TableConfig
from sgl_graft.graft.calibration import Calibration
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import NO_TABLE, Assignment
from sgl_graft.serving.rank_check import digest

VOCAB, ROWS, STEPS, TOPK = 12, 6, 3, 3
EDGES = (0, VOCAB - 1, VOCAB, -1, 2**31 - 1)  # ids at the ends of the vocabulary, and SGLang's for images
DRAFTS = ("usual", "empty", "hopeless", "nan", "ties")
TABLES = ("empty", "prompt", "garbage", "none")


def make_state(rule: str, slots: int, table: str, seed: int) -> GraftState:
    config = GraftConfig(rule=rule, table=TableConfig(context_rows=64))
    shape = GraftShape(slots=slots, topk=TOPK, steps=STEPS, num_rows=ROWS, vocab_size=VOCAB)
    state = GraftState(config, shape, Calibration())
    generator = torch.Generator().manual_seed(seed)
    for row in range(ROWS):
        state.begin(row, Assignment(NO_TABLE if table == "none" else 0))
    if table == "prompt":
        state.observe(0, torch.randint(-1, VOCAB + 2, (200,), generator=generator))
    if table == "garbage":
        held = state.table
        held.tokens.copy_(torch.randint(-5, 2 * VOCAB, held.tokens.shape, generator=generator))
        probs = torch.randn(held.probs.shape, generator=generator)
        held.probs.copy_(torch.where(probs > 2, float("nan"), probs))
        held.tags.copy_(torch.randint(-1, 2**40, held.tags.shape, generator=generator))
    return state


def make_draft(kind: str, seed: int, batch: int) -> DraftPool:
    pool = draft_pool(*random_draft(seed, batch, TOPK, STEPS, vocab=VOCAB))
    if kind == "empty":
        return DraftPool(torch.full_like(pool.tokens, -1), pool.parents, pool.scores)
    scores = {
        "hopeless": torch.zeros_like(pool.scores),
        "nan": pool.scores.masked_fill(pool.scores < 0.1, float("nan")),
        "ties": (pool.scores * 4).round() / 4,
    }
    return DraftPool(pool.tokens, pool.parents, scores.get(kind, pool.scores))


def one_round(state: GraftState, pool: DraftPool, rows: torch.Tensor, seed: int) -> Any:
    """Grow, verify against random logits, learn and commit, as the worker does."""
    batch, slots = len(rows), state.shape.slots
    tree, stage = state.grow(pool, rows)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch * slots, VOCAB + 3, generator=generator)
    best = state.see(logits)
    accept_index = torch.full((batch, state.max_path), -1)
    accept_index[:, 0] = torch.arange(batch) * slots
    accept_lens = torch.ones(batch, dtype=torch.int32)
    committed = torch.randint(0, VOCAB, (batch, slots), generator=generator)
    state.learn(rows, tree.tokens, tree.parents, tree.depths, accept_index, best)
    state.commit(rows, committed, accept_lens)
    state.counters.record(tree.sources, tree.depths, stage, accept_index, accept_lens)
    return tree


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["value", "staged"]),
    st.sampled_from([1, 2, 5, 16]),
    st.sampled_from(DRAFTS),
    st.sampled_from(TABLES),
    st.integers(1, 4),
    st.integers(0, 2**20),
)
def test_trees_keep_their_shape_and_siblings_differ_and_ranks_agree(
    rule: str, slots: int, draft: str, table: str, batch: int, seed: int
) -> None:
    ranks = [make_state(rule, slots, table, seed) for _ in range(2)]
    rows = torch.arange(ROWS)[:batch]
    roots = torch.tensor([EDGES[(seed + i) % len(EDGES)] for i in range(batch)])
    for state in ranks:
        state.end_prefill(rows, torch.stack((roots, roots.flip(0)), dim=1), roots)
    for step in range(3):
        pool = make_draft(draft, seed + step, batch)
        trees = [one_round(state, pool, rows, seed + step) for state in ranks]
        assert all(torch.equal(one, other) for one, other in zip(*trees, strict=True))
        tree = trees[0]
        assert tree.tokens.shape == tree.parents.shape == (batch, slots)
        for row in range(batch):
            assert_is_a_tree(tree.tokens[row].tolist(), tree.parents[row].tolist())
        if draft == "empty" and table == "none":
            assert int(tree.parents.max()) == -1  # the root alone, in an unchanged number of slots
    for name in ("tokens", "probs", "tags"):
        assert len({digest(getattr(state.table, name)) for state in ranks}) == 1, name  # NaN equals NaN here


def assert_is_a_tree(tokens: list[int], parents: list[int]) -> None:
    filled = [slot for slot in range(1, len(tokens)) if parents[slot] >= 0]
    assert all(parents[slot] < slot for slot in filled)
    assert all(parents[slot] == 0 or parents[parents[slot]] >= 0 for slot in filled)
    assert all(0 <= tokens[slot] < VOCAB for slot in filled)
    children = [(parents[slot], tokens[slot]) for slot in filled]
    assert len(children) == len(set(children))


@pytest.mark.parametrize(("rule", "draft"), list(itertools.product(("value", "staged"), DRAFTS)))
def test_a_round_reads_nothing_back(rule: str, draft: str) -> None:
    state = make_state(rule, 16, "prompt", 3)
    rows = torch.tensor([0, 2])
    state.end_prefill(rows, torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6]))
    pool = make_draft(draft, 4, 2)
    prepared = torch.randn(32, VOCAB + 3), torch.randint(0, VOCAB, (2, 16))
    accept_index = torch.full((2, state.max_path), -1)
    accept_index[:, 0] = torch.tensor([0, 16])
    accept_lens = torch.ones(2, dtype=torch.int32)

    def a_round() -> None:
        tree, stage = state.grow(pool, rows)
        state.learn(rows, tree.tokens, tree.parents, tree.depths, accept_index, state.see(prepared[0]))
        state.commit(rows, prepared[1], accept_lens)
        state.counters.record(tree.sources, tree.depths, stage, accept_index, accept_lens)

    with forced_backend("torch"):  # a platform's own operations are invisible to the counter
        assert count_host_reads(a_round) == []
