"""The worker's own part of a round, through the functions that the engine calls."""

import pytest
import torch
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.dispatch import forced_backend
from sgl_graft.cuda_graph.fork import fork
from sgl_graft.cuda_graph.host_reads import count_host_reads
from sgl_graft.cuda_graph.tree_links import TreeMaskMode

from sgl_graft.config import GraftConfig
from sgl_graft.graft.calibration import Calibration
from sgl_graft.graft.early_stop import DraftLevels
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import Assignment

VOCAB, SLOTS, STEPS, TOPK = 50, 16, 5, 4
ROWS = torch.tensor([1, 2])


@pytest.fixture(scope="module")
def module():
    return pytest.importorskip("sgl_graft.graft.worker")


@pytest.fixture(scope="module")
def trees():
    return pytest.importorskip("sgl_graft.graft.trees")


def make_worker(module, rule):
    shape = GraftShape(slots=SLOTS, topk=TOPK, steps=STEPS, num_rows=4, vocab_size=VOCAB)
    worker = module.GraftDraftWorker.__new__(module.GraftDraftWorker)
    worker.graft = GraftState(GraftConfig(rule=rule), shape, Calibration())
    for row in range(4):
        worker.graft.begin(row, Assignment(0))
    worker.graft.observe(1, torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(1)))
    worker.topk, worker.speculative_num_steps = TOPK, STEPS
    worker.draft_rows, worker.levels = ROWS, None
    worker.steps_saved_now = 0
    return worker


def round_of(trees, worker, seed=0):
    """Prepare a round's inputs, and give what runs it: draft scores to verify input, then learn and count."""
    state = worker.graft
    lists = random_draft(seed, 2, TOPK, STEPS, vocab=VOCAB)
    logits = torch.randn(2 * SLOTS, VOCAB)
    seq_lens, bonus = torch.tensor([7, 9]), torch.tensor([1, 2])
    mask = torch.zeros(2 * SLOTS * SLOTS, dtype=torch.bool)
    accept_index = torch.full((2, state.max_path), -1)
    accept_index[:, 0] = torch.tensor([0, SLOTS])
    accept_lens, committed = torch.ones(2, dtype=torch.int32), torch.ones(2, SLOTS, dtype=torch.long)

    def run():
        worker.beside = fork(lambda: state.look_up(ROWS), ROWS.device)
        with trees.growing(worker):
            parents, notes, tokens = trees.organize(None, *lists, SLOTS)
            built = trees.build_tree(
                None, bonus, parents, notes, tokens, seq_lens, 16, TOPK, STEPS, SLOTS,
                TreeMaskMode.QLEN_ONLY, mask,
            )  # fmt: skip
        tree = worker.tree
        best = state.see(logits)
        state.learn(ROWS, built[-1].view(2, SLOTS), tree.parents, tree.depths, accept_index, best)
        state.commit(ROWS, committed, accept_lens)
        state.counters.record(tree.sources, tree.depths, tree.stage, accept_index, accept_lens)
        return built

    return run


@pytest.mark.parametrize("rule", ["value", "staged"])
def test_from_draft_scores_to_verify_input_and_back_nothing_is_read(module, trees, rule):
    worker = make_worker(module, rule)
    run = round_of(trees, worker)
    with forced_backend("torch"):
        assert count_host_reads(run) == []
    assert worker.graft.counters.snapshot()["rounds"] == 2


def test_the_engine_gets_its_layout(module, trees):
    worker = make_worker(module, "value")
    with forced_backend("torch"):
        mask, positions, retrieve_index, next_token, next_sibling, tokens = round_of(trees, worker)()
    assert mask.numel() == 2 * SLOTS * SLOTS and tokens.shape == positions.shape == (2 * SLOTS,)
    assert retrieve_index.shape == next_token.shape == next_sibling.shape == (2, SLOTS)
    assert tokens.view(2, SLOTS)[:, 0].tolist() == [1, 2] and positions.view(2, SLOTS)[:, 0].tolist() == [
        7,
        9,
    ]


def test_without_grafting_the_engines_functions_are_called(trees):
    calls = []
    trees.organize(lambda *args: calls.append(args), 1, 2, 3, 4)
    trees.build_tree(lambda *args: calls.append(args), *range(10))
    assert calls[0] == (1, 2, 3, 4) and calls[1][:10] == tuple(range(10))


@pytest.mark.parametrize("rule", ["value", "staged"])
def test_a_stopped_draft_ends_the_engines_loop_and_is_counted(module, trees, rule):
    worker = make_worker(module, rule)
    scores, tokens, parents = random_draft(3, 2, TOPK, STEPS, vocab=VOCAB)
    weak = [level * 0.2 ** (depth + 1) for depth, level in enumerate(scores)]
    worker.beside = fork(lambda: worker.graft.look_up(ROWS), ROWS.device)
    worker.levels = DraftLevels(worker.graft, ROWS, worker.beside.result)
    lists = ([], [], [])
    with trees.growing(worker):
        for level, one in enumerate(zip(weak, tokens, parents, strict=True)):
            trees.watch_level(lambda *_, one=one: (None, None, None, one), level)
            for collected, part in zip(lists, one, strict=True):
                collected.append(part)
            if level == worker.speculative_num_steps - 1:
                break
        assert len(lists[0]) < STEPS
        grown, _, _ = trees.organize(None, *lists, SLOTS)
    assert grown.shape == (2, SLOTS)
    assert worker.steps_saved_now == STEPS - len(lists[0])
