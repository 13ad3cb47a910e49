"""Kernels over the successor table, the selection rules and the logits against their references."""

from __future__ import annotations

import random

import torch
from cg_compare import assert_equal, both, kernel_test
from cg_trees import TreeBatch, tree_batches
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph import top_successors_kernel
from sgl_graft.cuda_graph.chain import GraftChain
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.eagle_tree import draft_pool
from sgl_graft.cuda_graph.race import race_tokens
from sgl_graft.cuda_graph.retrieve import DeviceTemplate, retrieve
from sgl_graft.cuda_graph.staged_rule import staged_weights
from sgl_graft.cuda_graph.stages import paper_stage_plan
from sgl_graft.cuda_graph.successor_table import SuccessorTable
from sgl_graft.cuda_graph.table_update import update_from_logits
from sgl_graft.cuda_graph.templates import assumed_rank_prior, template_for_budget
from sgl_graft.cuda_graph.top_successors import top_successors
from sgl_graft.cuda_graph.tree_links import tree_links
from sgl_graft.cuda_graph.value_rule import ValueMaps, value_weights, weights_to_floats
from test_cg_retrieve import VOCAB, K, random_context, random_table


@kernel_test
@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from([0, 8, 64]), st.booleans())
def test_retrieve(seed: int, num_tables: int, context_rows: int, garbage: bool) -> None:
    rng = random.Random(seed)
    table = random_table(rng, num_tables, context_rows, garbage, rng.choice([2, 3]))
    template = DeviceTemplate.create(template_for_budget(rng.randint(0, 20), 4, assumed_rank_prior(K)))
    index = torch.tensor([rng.randrange(-2, num_tables + 2) for _ in range(4)])
    roots = torch.tensor([rng.choice([*range(VOCAB), -1, VOCAB, 2**40]) for _ in range(4)])
    contexts = torch.tensor([random_context(rng, table) for _ in range(4)])
    assert_equal(*both(retrieve, table, template, index, roots, contexts))


@kernel_test
@given(st.integers(0, 2**31), st.integers(0, 1), st.integers(2, 5))
def test_value_weights(seed: int, source: int, knots: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = torch.rand(2, 3, knots, generator=gen).sort(2).values
    maps = ValueMaps(x + torch.arange(knots) * 0.01, torch.rand(2, 3, knots, generator=gen).sort(2).values)
    probs = torch.rand(2, 150, generator=gen)
    probs[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    tokens = torch.randint(-1, 5, (2, 150), generator=gen)
    depths = torch.randint(1, 6, (150,), generator=gen)
    reference, kernel = both(value_weights, maps, source, depths, probs, tokens)
    assert torch.equal(reference < 0, kernel < 0)
    assert_equal((weights_to_floats(reference),), (weights_to_floats(kernel),))


@kernel_test
@given(st.integers(0, 2**31), st.booleans(), st.booleans())
def test_staged_weights(seed: int, backfill: bool, ties: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    plan = paper_stage_plan(12, 3, 4, min_envelope=20)
    chain = GraftChain.create(plan if backfill else plan.prune_only(), 3, 3)
    pool = draft_pool(*random_draft(seed, 4, 3, 3, vocab=9))
    scores = (pool.scores * 4).round() / 4 if ties else pool.scores
    scores[0, :2] = torch.tensor([float("nan"), -1.0])
    retrieved = torch.randint(-1, 9, (4, plan.envelope.num_nodes), generator=gen)
    stage = torch.randint(-1, plan.num_stages + 1, (4,), generator=gen)
    args = (chain.stages, chain.layout, stage, pool.tokens, scores, retrieved)
    assert_equal(*both(staged_weights, *args))


@kernel_test
@given(
    st.integers(0, 2**31),
    st.sampled_from([10, 2048, 2049, 7000]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([3, 100, 10**6]),
    st.sampled_from([1, 2, 1024]),
)
def test_top_successors(seed: int, vocab: int, dtype: torch.dtype, levels: int, programs: int) -> None:
    """One chunk or several; few distinct logits, so that ties cross tiles and chunks."""
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randint(-levels, levels, (2, vocab + 3), generator=gen) * (8 / levels)).to(dtype)
    usual = top_successors_kernel.TARGET_PROGRAMS
    top_successors_kernel.TARGET_PROGRAMS = programs
    try:
        assert_equal(*both(top_successors, logits, 8, vocab))
    finally:
        top_successors_kernel.TARGET_PROGRAMS = usual


def test_top_successors_of_bad_rows() -> None:
    logits = torch.zeros(4, 3000)
    logits[0] = -float("inf")
    logits[1, ::2] = -0.0
    logits[2, 7] = float("inf")
    logits[3, :2900] = -float("inf")
    assert_equal(*both(top_successors, logits, 5, 3000))
    logits[3, 2950] = float("nan")
    with_nan = both(top_successors, logits[3:], 5, 3000)
    assert [best.probs.tolist() for best in with_nan] == [[[0.0] * 5]] * 2
    assert all(int(best.ids.min()) >= 0 and int(best.ids.max()) < 3000 for best in with_nan)


@kernel_test
@given(
    tree_batches(max_batch=3, max_slots=6, vocab=VOCAB + 2),
    st.integers(0, 2**31),
    st.sampled_from([0, 4, 64]),
)
def test_update_from_logits(batch: TreeBatch, seed: int, context_rows: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, 3, (batch.batch,), generator=gen)
    rng = random.Random(seed)
    context_len = rng.choice([2, 3])
    accepted = torch.rand(batch.tokens.shape, generator=gen) < 0.3
    depths = tree_links(batch.parents, torch.zeros_like(batch.seq_lens)).positions.view_as(batch.tokens)
    logits = torch.randn(batch.tokens.numel(), VOCAB + 1, generator=gen)
    tables = [SuccessorTable.create(VOCAB, K, 2, context_rows, context_len) for _ in range(2)]
    waiting = list(tables)
    contexts = torch.tensor([random_context(rng, tables[0]) for _ in range(batch.batch)])

    def update() -> torch.Tensor:
        table = waiting.pop(0)
        update_from_logits(table, index, batch.tokens, batch.parents, depths, contexts, accepted, logits)
        return table.tokens

    both(update)
    read = tables[0].discard_row
    assert_equal(*((table.tokens[:read], table.probs[:read], table.tags[:-1]) for table in tables))


@kernel_test
@given(st.integers(0, 2**31), st.sampled_from([1, 50, 1024, 1500]))
def test_race_tokens(seed: int, vocab: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    probs = torch.rand(3, vocab, generator=gen)
    probs[0, ::2] = 0.0
    probs[1, 0] = float("nan")
    seeds = torch.randint(-(2**63), 2**63 - 1, (3,), generator=gen)
    positions = torch.randint(0, 2**31, (3,), generator=gen)
    cuts = torch.tensor([0.0, 0.3, 2.0])  # nobody runs in the last row
    assert_equal(*both(race_tokens, probs, seeds, positions, cuts))
