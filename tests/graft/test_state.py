"""GRAFT's device state without an engine: trees, learning, privacy, refusals."""

from dataclasses import replace

import pytest
import torch
from sgl_graft.cuda_graph.eagle_tree import DraftPool, pool_level_sizes
from sgl_graft.cuda_graph.successor_table import contexts_within

from sgl_graft.config import GraftConfig, TableConfig
from sgl_graft.graft.calibration import Calibration
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import Assignment

VOCAB = 50
SHAPE = GraftShape(slots=8, topk=2, steps=3, num_rows=4, vocab_size=VOCAB)


def make_state(rule="value", scope="shared", **config):
    table = TableConfig(row_width=4, context_rows=64, scope=scope)
    state = GraftState(GraftConfig(rule=rule, table=table, **config), SHAPE, Calibration())
    for row in range(SHAPE.num_rows):
        state.begin(row, Assignment(row if scope == "request" else 0))
    return state


def make_pool(batch=2, seed=0):
    """A random draft pool whose scores fall along every path."""
    generator = torch.Generator().manual_seed(seed)
    sizes = pool_level_sizes(SHAPE.topk, SHAPE.steps)
    parents, scores, first_above = [], [], 0
    above = torch.ones(batch, 1)
    for level, size in enumerate(sizes):
        expanded = min(SHAPE.topk, sizes[level - 1]) if level else 1
        owner = torch.arange(size) // SHAPE.topk % expanded
        parents.append(owner + first_above if level else torch.full((size,), -1))
        score = above[:, owner] * torch.rand(batch, size, generator=generator)
        scores.append(score)
        first_above += sizes[level - 1] if level else 0
        above = score
    tokens = torch.randint(0, VOCAB, (batch, sum(sizes)), generator=generator)
    # Siblings differ, as they do in a real draft.
    tokens = torch.where(torch.arange(sum(sizes)) % SHAPE.topk == 0, tokens, (tokens + 1) % VOCAB)
    return DraftPool(tokens, torch.cat(parents).expand(batch, -1), torch.cat(scores, dim=1))


@pytest.mark.parametrize("rule", ["value", "staged"])
def test_trees_keep_their_slots_and_have_no_twin_siblings(rule):
    state = make_state(rule)
    rows = torch.tensor([1, 3])
    state.observe(0, torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(1)))
    for seed in range(20):
        tree, _ = state.grow(make_pool(seed=seed), rows)
        assert tree.tokens.shape == tree.parents.shape == (2, SHAPE.slots)
        for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            live = [(parents[i], tokens[i]) for i in range(1, SHAPE.slots) if parents[i] >= 0]
            assert len(live) == len(set(live))
            assert all(parents[i] < i for i in range(SHAPE.slots))


def test_an_observed_prompt_is_retrieved_and_grafted():
    state = make_state()
    state.observe(0, torch.tensor([7, 8, 9, 10, 11, 12, 13]))
    row = torch.tensor([2])
    state.end_prefill(row, torch.tensor([[-1, 7]]), torch.tensor([8]))
    pool = make_pool(batch=1)
    hopeless = DraftPool(pool.tokens, pool.parents, pool.scores * 1e-6)
    tree, _ = state.grow(hopeless, row)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    assert tokens[0] == 8
    path, at = [], 0
    for wanted in (9, 10, 11, 12, 13):
        at = next(i for i in range(1, SHAPE.slots) if parents[i] == at and tokens[i] == wanted)
        path.append(at)
    assert len(path) == 5


def test_an_empty_table_leaves_the_stock_choice():
    state = make_state()
    pool = make_pool()
    tree, _ = state.grow(pool, torch.tensor([0, 1]))
    assert int(tree.sources.max()) == 1  # draft nodes only
    best = pool.scores.topk(SHAPE.slots - 1, dim=1).values.sum(1)
    taken = torch.stack([weights_sum(tree, i) for i in range(2)])
    torch.testing.assert_close(taken, best)


def weights_sum(tree, request):
    from sgl_graft.cuda_graph.value_rule import weights_to_floats

    return weights_to_floats(tree.weights[request]).sum()


@pytest.mark.parametrize("context_len", [2, 3])
def test_commit_remembers_the_last_token_and_what_stands_before_it(context_len):
    state = make_state()
    state.table = replace(state.table, context_len=context_len)
    rows = torch.tensor([1, 2, 3])
    state.end_prefill(rows, torch.tensor([[4, 5], [5, 6], [6, 7]]), torch.tensor([7, 8, 9]))
    new = torch.tensor([[10, 11, 12, 0], [20, 0, 0, 0], [30, 31, 0, 0]])
    texts = [[4, 5, 7, 10, 11, 12], [5, 6, 8, 20], [6, 7, 9, 30, 31]]
    state.commit(rows, new, torch.tensor([3, 1, 2]))
    assert state.root_buf[rows].tolist() == [12, 20, 31]
    expected = [int(contexts_within(state.table, torch.tensor(text))[-1]) for text in texts]
    assert state.context_buf[rows].tolist() == expected
    assert len(set(expected)) == 3


def test_private_tables_share_nothing_and_are_emptied_for_the_next_owner():
    state = make_state(scope="request")
    state.observe(1, torch.tensor([7, 8, 9]))
    rows = torch.tensor([1, 2])
    state.end_prefill(rows, torch.tensor([[-1, 7], [-1, 7]]), torch.tensor([8, 8]))
    tree, _ = state.grow(make_pool(), rows)
    assert 9 in tree.tokens[0, 1:].tolist() and int(tree.sources[1].max()) == 1
    state.begin(1, Assignment(1, clear=1))
    assert int(state.grow(make_pool(), rows)[0].sources.max()) == 1


def test_learning_follows_the_logits():
    state = make_state()
    row = torch.tensor([0])
    state.end_prefill(row, torch.tensor([[2, 3]]), torch.tensor([4]))
    tokens = torch.tensor([[4, 5, 0, 0, 0, 0, 0, 0]])
    parents = torch.tensor([[-1, 0, -1, -1, -1, -1, -1, -1]])
    depths = torch.tensor([[0, 1, 0, 0, 0, 0, 0, 0]])
    logits = torch.zeros(SHAPE.slots, VOCAB)
    logits[0, 30], logits[1, 31] = 9.0, 9.0
    accept_index = torch.tensor([[0] + [-1] * (state.max_path - 1)])
    state.learn(row, tokens, parents, depths, accept_index, state.see(logits))
    assert int(state.table.tokens[4, 0]) == 30  # accepted
    assert int(state.table.tokens[5, 0]) == 31  # rejected, and learned all the same
    assert int(state.table.tokens[0].max()) == -1  # empty slots teach nothing


@pytest.mark.parametrize("depth", [2, 8])
def test_a_depth_out_of_range_is_refused(depth):
    with pytest.raises(ValueError, match=rf"graft.depth is {depth}"):
        make_state(depth=depth)
