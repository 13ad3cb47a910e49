"""The gate and the two selection rules, end to end on random drafts and tables."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from cg_candidates import tree_paths
from cg_trees import property_test
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.chain import GraftChain
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.coupled import walk_accepted
from sgl_graft.cuda_graph.eagle_tree import DraftPool, draft_pool
from sgl_graft.cuda_graph.gate import entropy_confidence, path_confidence, staged_gate
from sgl_graft.cuda_graph.merge import FROM_DRAFT, FROM_TABLE
from sgl_graft.cuda_graph.retrieve import Retrieved
from sgl_graft.cuda_graph.select import GraftedTree
from sgl_graft.cuda_graph.stages import StagePlan, custom_stage_plan, paper_stage_plan
from sgl_graft.cuda_graph.templates import assumed_rank_prior, template_for_budget
from sgl_graft.cuda_graph.value_rule import ValueMaps, float_weights, value_weights, weights_to_floats
from torch import Tensor

VOCAB = 9


@dataclass
class Round:
    chain: GraftChain
    pool: DraftPool
    retrieved: Retrieved
    roots: Tensor  # [batch] int64
    stage: Tensor  # [batch] int64

    def staged(self, plan: StagePlan) -> GraftedTree:
        chain = GraftChain.create(plan, self.chain.topk, self.chain.steps)
        return chain.graft_staged(self.pool, self.retrieved, self.roots, self.stage)


@st.composite
def rounds(draw) -> Round:
    """A real draft over a tiny vocabulary, so that table and draft often agree, and some empty table rows."""
    rng = random.Random(draw(st.integers(0, 2**31)))
    batch, topk, steps = rng.randint(1, 3), rng.randint(2, 4), rng.randint(2, 4)
    pool = draft_pool(*random_draft(rng.randrange(2**31), batch, topk, steps, VOCAB))
    slots = draw(st.integers(1, pool.tokens.shape[1] + 1))
    plan = paper_stage_plan(slots, steps, 5, min_envelope=rng.randint(0, 20))
    chain = GraftChain.create(plan, topk, steps)
    nodes = plan.envelope.num_nodes
    gen = torch.Generator().manual_seed(rng.randrange(2**31))
    tokens = torch.randint(-1, VOCAB, (batch, nodes), generator=gen)
    probs = torch.rand(batch, nodes, generator=gen)
    stage = torch.randint(0, plan.num_stages, (batch,), generator=gen)
    return Round(chain, pool, Retrieved(tokens, probs), torch.full((batch,), 99), stage)


def live_paths(tree: GraftedTree, row: int) -> set:
    paths = tree_paths(tree.tokens[row].tolist(), tree.parents[row].tolist())
    return {path for path in paths if path is not None}


@property_test
@given(rounds())
def test_staged_contains_its_prune_only_tree_and_accepts_no_less(case: Round) -> None:
    plan = case.chain.stages.plan
    grafted, pruned = case.staged(plan), case.staged(plan.prune_only())
    for row, stage in enumerate(case.stage.tolist()):
        assert live_paths(pruned, row) <= live_paths(grafted, row)
        assert len(live_paths(pruned, row)) == 1 + plan.num_draft[stage]
        # The pool alone can fill the tree, so back-filling leaves no slot empty.
        assert len(live_paths(grafted, row)) == plan.slots
    answer = torch.arange(len(case.stage) * 12).view(-1, 12) * 7 % VOCAB
    lengths = []
    for tree in (pruned, grafted):
        targets = answer.gather(1, tree.depths)
        lengths.append(walk_accepted(tree.tokens, tree.parents, targets, 12).num_correct_drafts)
    assert bool((lengths[1] >= lengths[0]).all())


@property_test
@given(rounds())
def test_staged_keeps_the_best_draft_nodes_and_grafts_the_stage(case: Round) -> None:
    """Every kept draft node and every present member of the stage is in the tree."""
    plan, tree = case.chain.stages.plan, case.staged(case.chain.stages.plan)
    for row, stage in enumerate(case.stage.tolist()):
        paths = live_paths(tree, row)
        pool_paths = node_paths(case.pool.tokens[row].tolist(), case.pool.parents[row].tolist())
        scores = case.pool.scores[row].tolist()
        best = sorted(range(len(scores)), key=lambda n: (-scores[n], len(pool_paths[n] or ()), n))
        strict = [n for n in best if scores.count(scores[n]) == 1][: plan.num_draft[stage]]
        assert {pool_paths[n] for n in strict if best.index(n) < plan.num_draft[stage]} <= paths
        table_paths = node_paths(case.retrieved.tokens[row].tolist(), list(plan.envelope.fathers))
        wanted = {
            path for path, member in zip(table_paths, plan.members[stage], strict=True) if member and path
        }
        assert wanted <= paths


def node_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...] | None]:
    paths: list[tuple[int, ...] | None] = []
    for token, parent in zip(tokens, parents, strict=True):
        above = () if parent < 0 else paths[parent]
        paths.append(None if above is None or token < 0 else (*above, token))
    return paths


@property_test
@given(rounds())
def test_last_stage_without_grafts_is_the_best_draft_tree(case: Round) -> None:
    """When every gate passes, the tree is EAGLE's: the best `slots - 1` pool nodes."""
    plan = case.chain.stages.plan
    case.stage = torch.full_like(case.stage, plan.num_stages - 1)
    tree = case.staged(plan)
    for row in range(len(case.stage)):
        kept = case.pool.scores[row].sort(descending=True).values[: plan.slots - 1]
        pool_paths = node_paths(case.pool.tokens[row].tolist(), case.pool.parents[row].tolist())
        score = dict(zip(pool_paths, case.pool.scores[row].tolist(), strict=True))
        chosen = sorted((score[path] for path in live_paths(tree, row) if path), reverse=True)
        assert chosen == kept.tolist()


@property_test
@given(rounds())
def test_value_rule_maximises_the_sum_of_values(case: Round) -> None:
    """Every tree node is worth at least as much as every candidate left out."""
    maps = ValueMaps.identity(4)
    tree = case.chain.graft_value(case.pool, case.retrieved, case.roots, maps)
    values = weights_to_floats(tree.weights)
    envelope = case.chain.stages.plan.envelope
    for row in range(len(case.stage)):
        pool_paths = node_paths(case.pool.tokens[row].tolist(), case.pool.parents[row].tolist())
        table_paths = node_paths(case.retrieved.tokens[row].tolist(), list(envelope.fathers))
        worth: dict = {}
        for path, prob in [
            *zip(pool_paths, case.pool.scores[row].tolist(), strict=True),
            *zip(table_paths, case.retrieved.probs[row].tolist(), strict=True),
        ]:
            if path:
                worth[path] = max(worth.get(path, 0.0), prob)
        for path in sorted(worth, key=len):
            worth[path] = min(worth[path], worth.get(path[:-1], 1.0))
        kept = live_paths(tree, row) - {()}
        assert len(kept) == min(case.chain.slots - 1, len(worth))
        lowest = min((worth[path] for path in kept), default=1.0)
        assert lowest >= max((worth[path] for path in worth.keys() - kept), default=0.0)
        by_slot = tree_paths(tree.tokens[row].tolist(), tree.parents[row].tolist())
        assert [worth[path] for path in by_slot[1:] if path] == list(values[row, 1 : len(kept) + 1].tolist())
        for path, source in zip(by_slot[1:], tree.sources[row, 1:].tolist(), strict=True):
            if path:
                assert bool(source & FROM_DRAFT) == (path in pool_paths)
                assert bool(source & FROM_TABLE) == (path in table_paths)


def test_value_maps_interpolate_and_clamp() -> None:
    x = torch.tensor([[[0.2, 0.4, 0.8]], [[0.0, 0.5, 1.0]]])
    y = torch.tensor([[[0.1, 0.5, 0.6]], [[0.0, 0.1, 0.9]]])
    maps = ValueMaps(x, y)
    maps.check()
    probs = torch.tensor([[0.0, 0.2, 0.3, 0.4, 0.6, 0.9, math.nan, 0.3]])
    tokens = torch.tensor([[1, 1, 1, 1, 1, 1, 1, -1]])
    weights = value_weights(maps, 0, torch.tensor([1] * 7 + [9]), probs, tokens)
    values = weights_to_floats(weights)
    torch.testing.assert_close(values, torch.tensor([[0.1, 0.1, 0.3, 0.5, 0.55, 0.6, 0.1, 0.0]]))
    assert weights[0, -1] == -1
    table = weights_to_floats(
        value_weights(maps, 1, torch.ones(1, dtype=torch.long), probs[:, 4:5], tokens[:, 4:5])
    )
    torch.testing.assert_close(table, torch.tensor([[0.26]]))


@property_test
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=20))
def test_float_weights_keep_the_order(values: list[float]) -> None:
    weights = float_weights(torch.tensor(values))
    assert weights.argsort(stable=True).tolist() == torch.tensor(values).argsort(stable=True).tolist()
    assert weights_to_floats(weights).tolist() == [abs(v) for v in torch.tensor(values).tolist()]
    assert int(weights.min()) >= 0 and int(weights.max()) < 2**30
    garbage = float_weights(torch.tensor([math.nan, -1.0, -0.0, math.inf, 5.0]))
    assert weights_to_floats(garbage).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_value_map_check_refuses() -> None:
    good = ValueMaps.identity(2)
    good.check()
    with pytest.raises(ValueError, match="rise in x"):
        ValueMaps(good.x.flip(2), good.y).check()
    with pytest.raises(ValueError, match="calibrate again"):
        ValueMaps(good.x, good.y * 2).check()
    with pytest.raises(ValueError, match="shapes"):
        ValueMaps(good.x[:, :, :1], good.y[:, :, :1]).check()


def test_gate_is_strict_and_takes_the_first_failure() -> None:
    """Equal to the threshold prunes (Graft, eq. 7); later checkpoints cannot undo it; NaN prunes."""
    confidence = torch.tensor(
        [[0.5, 0.5, 0.5], [0.1, 0.9, 0.9], [0.9, 0.1, 0.05], [0.9, 0.9, math.nan], [0.9, 0.8, 0.7]]
    )
    thresholds = torch.tensor([0.5, 0.3])
    assert staged_gate(confidence, (0, 2), thresholds).tolist() == [0, 0, 1, 1, 2]
    assert staged_gate(confidence, (), torch.zeros(0)).tolist() == [0] * 5


@property_test
@given(rounds())
def test_confidence_is_the_best_path_of_each_depth(case: Round) -> None:
    confidence = path_confidence(case.pool.scores, case.chain.topk, case.chain.steps)
    depths = case.chain.layout.pool_depths
    for row in range(len(case.stage)):
        expected = [float(case.pool.scores[row][depths == d].max()) for d in range(1, case.chain.steps + 1)]
        assert confidence[row].tolist() == expected == sorted(expected, reverse=True)


def test_entropy_gate_by_hand() -> None:
    """Two steps of two beams: the best node expanded is the one of probability 0.6."""
    scores = torch.tensor([[0.3, 0.6, 0.1, 0.1, 0.3, 0.3]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]])
    confidence = entropy_confidence(scores, parents, 2, 2)
    root = -sum(p * math.log(p) for p in (0.3, 0.6, 0.1))
    expected = [1 - math.sqrt(0.15 * root), 1 - math.sqrt(0.15 * math.log(2))]
    torch.testing.assert_close(confidence, torch.tensor([expected]))


def test_ablations_are_plans() -> None:
    """Retrieval only and a fixed split need no other code."""
    pool = draft_pool(*random_draft(3, 1, 2, 2, VOCAB))
    envelope = template_for_budget(4, 2, assumed_rank_prior(2))
    tokens, probs = torch.tensor([[20, 21, 22, -1]]), torch.full((1, 4), 0.5)
    stage, roots = torch.zeros(1, dtype=torch.long), torch.tensor([99])
    only = custom_stage_plan(5, 2, (), (0,), (4,), envelope, backfill=False)
    tree = GraftChain.create(only, 2, 2).graft_staged(pool, Retrieved(tokens, probs), roots, stage)
    assert set(tree.sources[0].tolist()) == {0, FROM_TABLE} and tree.parents[0].tolist().count(-1) == 2
    split = custom_stage_plan(5, 2, (), (2,), (2,), envelope)
    tree = GraftChain.create(split, 2, 2).graft_staged(pool, Retrieved(tokens, probs), roots, stage)
    assert sorted(tree.sources[0].tolist()) == [0, FROM_DRAFT, FROM_DRAFT, FROM_TABLE, FROM_TABLE]


def test_chain_refuses_impossible_plans() -> None:
    plan = paper_stage_plan(16, 5, 8)
    with pytest.raises(ValueError, match="checkpoint 3 is beyond a draft of 2 steps"):
        GraftChain.create(plan, 4, 2)
    deep = paper_stage_plan(40, 5, 40, rank_prior=(0.9,))
    with pytest.raises(ValueError, match="beyond the limit 31"):
        GraftChain.create(deep, 4, 5)


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("backfill", [True, False])
def test_nothing_retrieved_and_everything_pruned(slots: int, backfill: bool) -> None:
    """An empty table and a gate that fails at once: back-filling rebuilds the draft tree, else the root
    stands alone.
    """
    pool = draft_pool(*random_draft(1, 2, 4, 5, VOCAB))
    plan = paper_stage_plan(slots, 5, 8)
    chain = GraftChain.create(plan if backfill else plan.prune_only(), 4, 5)
    nothing = torch.full((2, plan.envelope.num_nodes), -1)
    retrieved = Retrieved(nothing, torch.zeros(nothing.shape))
    roots, stage = torch.tensor([7, 8]), torch.zeros(2, dtype=torch.long)
    tree = chain.graft_staged(pool, retrieved, roots, stage)
    live = slots if backfill else 1 + plan.num_draft[0]
    assert [len(live_paths(tree, row)) for row in range(2)] == [live] * 2
    path = walk_accepted(tree.tokens, tree.parents, torch.full((2, slots), VOCAB + 1), chain.max_path)
    assert path.num_correct_drafts.tolist() == [0, 0] and path.bonus_tokens.tolist() == [VOCAB + 1] * 2


def test_a_draft_without_any_probability_still_fills_the_tree() -> None:
    """NaN or zero scores: nodes of no worth are taken last, but no slot is wasted and no tree is broken."""
    pool = draft_pool(*random_draft(1, 2, 3, 3, VOCAB))
    scores = torch.stack([torch.full_like(pool.scores[0], math.nan), torch.zeros_like(pool.scores[0])])
    chain = GraftChain.create(paper_stage_plan(9, 3, 4), 3, 3)
    envelope = chain.stages.plan.envelope
    tokens = torch.arange(20, 20 + envelope.num_nodes).expand(2, -1)
    retrieved = Retrieved(tokens, torch.full(tokens.shape, 0.5))
    roots = torch.tensor([7, 8])
    tree = chain.graft_value(
        DraftPool(pool.tokens, pool.parents, scores), retrieved, roots, ValueMaps.identity(4)
    )
    for row in range(2):
        assert len(live_paths(tree, row)) == 9
        assert tree.sources[row].tolist().count(FROM_TABLE) == min(8, envelope.num_nodes)
