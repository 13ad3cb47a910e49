"""A draft that stops early grafts the tree that a whole one would have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.eagle_tree import DraftPool, draft_pool, pad_pool, pool_level_sizes

from sgl_graft.config import GraftConfig, TableConfig
from sgl_graft.graft.calibration import Calibration
from sgl_graft.graft.early_stop import MAX_BATCH, DraftLevels
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import Assignment

VOCAB, ROWS, STEPS, TOPK = 40, 80, 5, 3
SHAPE = GraftShape(slots=8, topk=TOPK, steps=STEPS, num_rows=ROWS, vocab_size=VOCAB)


def make_state(rule, **config):
    state = GraftState(GraftConfig(rule=rule, table=TableConfig(), **config), SHAPE, Calibration())
    for row in range(ROWS):
        state.begin(row, Assignment(0))
    return state


def drafted(state, rows, lists):
    """Feed levels until the draft may stop; how many it took."""
    levels = DraftLevels(state, rows, state.look_up(rows))
    for level, one in enumerate(zip(*lists, strict=True), start=1):
        if levels.add(*one):
            return level, levels
    return STEPS, levels


def weak_draft(seed, batch, strength):
    """A draft that is unsure: path probabilities shrink faster with every level."""
    scores, tokens, parents = random_draft(seed, batch, TOPK, STEPS, vocab=VOCAB)
    shrunk = [level * strength ** (depth + 1) for depth, level in enumerate(scores)]
    return shrunk, tokens, parents


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from([0.2, 0.5, 0.8, 1.0]), st.integers(0, 200))
def test_the_value_rule_stops_without_changing_any_tree(seed, batch, strength, prompt):
    state = make_state("value")
    generator = torch.Generator().manual_seed(seed)
    state.observe(0, torch.randint(0, VOCAB, (prompt,), generator=generator))
    rows = torch.arange(batch)
    state.root_buf[rows] = torch.randint(0, VOCAB, (batch,), generator=generator)
    lists = weak_draft(seed, batch, strength)
    level, levels = drafted(state, rows, lists)
    whole, _ = state.grow(draft_pool(*lists), rows)
    if level < STEPS:
        tree, _ = levels.tree
        for name in ("tokens", "parents", "depths", "weights"):
            assert torch.equal(getattr(tree, name), getattr(whole, name)), name


def test_the_value_rule_stops_often_when_the_draft_is_weak_and_never_when_it_is_sure():
    state = make_state("value")
    state.observe(0, torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1)))
    one = torch.tensor([0])
    weak = [drafted(state, one, weak_draft(seed, 1, 0.3))[0] for seed in range(40)]
    assert sum(level < STEPS for level in weak) > 20
    chain = random_draft(3, 1, TOPK, STEPS, vocab=VOCAB)
    sure = [torch.full_like(level, 0.9) for level in chain[0]]
    assert drafted(state, one, (sure, *chain[1:]))[0] == STEPS


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6))
def test_the_staged_rule_stops_at_the_depth_where_the_last_request_fails(seed, batch):
    state = make_state("staged")
    lists = random_draft(seed, batch, TOPK, STEPS, vocab=VOCAB)
    level, _ = drafted(state, torch.arange(batch), lists)
    checkpoints = state.chain.stages.plan.checkpoints
    failed_at = []
    for row in range(batch):
        confidence = [float(level_scores[row].max()) for level_scores in lists[0]]
        fails = [d for d, t in zip(checkpoints, state.thresholds.tolist(), strict=True) if confidence[d] <= t]
        failed_at.append(fails[0] + 1 if fails else STEPS)
    assert level == min(max(failed_at), STEPS)
    cut = [part[:level] for part in lists]
    _, stage = state.grow(pad_pool(draft_pool(*cut), TOPK, STEPS), torch.arange(batch))
    _, whole_stage = state.grow(draft_pool(*lists), torch.arange(batch))
    assert torch.equal(stage, whole_stage)


def test_large_batches_and_calibration_runs_draft_to_the_end(tmp_path):
    state = make_state("value")
    rows = torch.arange(MAX_BATCH["value"] + 1)
    assert drafted(state, rows, weak_draft(0, len(rows), 0.01))[0] == STEPS
    collecting = make_state("staged", collect=tmp_path / "c")
    assert drafted(collecting, torch.tensor([0]), weak_draft(0, 1, 0.01))[0] == STEPS


@pytest.mark.parametrize("levels", range(1, STEPS + 1))
def test_a_padded_pool_has_the_shape_of_a_whole_one(levels):
    lists = [part[:levels] for part in random_draft(0, 2, TOPK, STEPS, vocab=VOCAB)]
    pool: DraftPool = pad_pool(draft_pool(*lists), TOPK, STEPS)
    size = sum(pool_level_sizes(TOPK, STEPS))
    assert {tensor.shape for tensor in pool} == {(2, size)}
    assert int((pool.tokens[0] >= 0).sum()) == sum(pool_level_sizes(TOPK, levels))
