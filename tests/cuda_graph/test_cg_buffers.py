"""Static buffers: padding never reaches live rows, no replay without a load, no host read in a round."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from cg_trees import property_test
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.buffers import CapturedGraph, ChainInputs, GraftBuffers
from sgl_graft.cuda_graph.chain import GraftChain
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.coupled import walk_accepted
from sgl_graft.cuda_graph.eagle_tree import DraftPool, draft_pool
from sgl_graft.cuda_graph.fork import fork
from sgl_graft.cuda_graph.host_reads import count_host_reads
from sgl_graft.cuda_graph.prompt_update import observe_prompt
from sgl_graft.cuda_graph.select import GraftedTree
from sgl_graft.cuda_graph.stages import paper_stage_plan
from sgl_graft.cuda_graph.successor_table import SuccessorTable
from sgl_graft.cuda_graph.table_update import accepted_slots, update_from_logits
from sgl_graft.cuda_graph.tree_links import TreeLinks, TreeMaskMode, tree_links
from sgl_graft.cuda_graph.value_rule import ValueMaps
from torch import Tensor

VOCAB, TOPK, STEPS, SLOTS, MAX_BATCH = 11, 2, 3, 7, 5


def make_chain(device: str = "cpu") -> GraftChain:
    return GraftChain.create(paper_stage_plan(SLOTS, STEPS, 4, min_envelope=12), TOPK, STEPS, device)


def random_table(gen: torch.Generator) -> SuccessorTable:
    table = SuccessorTable.create(VOCAB, 8, num_tables=2, context_rows=16)
    table.tokens[: table.empty_row].copy_(torch.randint(-1, VOCAB, (table.empty_row, 8), generator=gen))
    table.probs[: table.empty_row].copy_(torch.rand(table.empty_row, 8, generator=gen))
    return table


def random_inputs(gen: torch.Generator, live: int, seed: int) -> ChainInputs:
    def integers(high: int) -> Tensor:
        return torch.randint(0, high, (live,), generator=gen)

    pool = draft_pool(*random_draft(seed, live, TOPK, STEPS, VOCAB))
    return ChainInputs(integers(VOCAB), integers(VOCAB), integers(2), integers(20) + 1, pool)


def spoil_padding(buffers: GraftBuffers, live: int, rng: random.Random) -> None:
    """What a larger batch, or a bug, may have left behind."""
    wild = [-(2**62), -5, -1, 0, 3, VOCAB, 2**40]
    for tensor in (buffers.root_tokens, buffers.contexts, buffers.table_index, *buffers.pool[:2]):
        rows = tensor[live:]
        rows.copy_(torch.tensor([rng.choice(wild) for _ in range(rows.numel())]).view_as(rows))
    buffers.seq_lens[live:] = rng.choice([1, 9])
    buffers.pool.scores[live:] = rng.choice([float("nan"), float("inf"), -1.0, 2.0])


def chain_over(
    buffers: GraftBuffers, chain: GraftChain, table: SuccessorTable, staged: bool
) -> Callable[[], tuple[GraftedTree, TreeLinks]]:
    thresholds = torch.full((len(chain.stages.plan.checkpoints),), 0.3)
    maps = ValueMaps.identity(4)

    def run() -> tuple[GraftedTree, TreeLinks]:
        retrieved = chain.retrieve(table, buffers.table_index, buffers.root_tokens, buffers.contexts)
        if staged:
            stage = chain.stage(buffers.pool.scores, thresholds)
            tree = chain.graft_staged(buffers.pool, retrieved, buffers.root_tokens, stage)
        else:
            tree = chain.graft_value(buffers.pool, retrieved, buffers.root_tokens, maps)
        return tree, tree_links(tree.parents, buffers.seq_lens)

    return run


@property_test
@given(st.integers(0, 2**31), st.integers(1, MAX_BATCH), st.booleans(), st.booleans())
def test_garbage_padding_never_reaches_live_rows(seed: int, live: int, staged: bool, reset: bool) -> None:
    """Live rows equal those of a batch without padding, after a load and even with garbage left in place."""
    gen, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    chain, table, inputs = make_chain(), random_table(gen), random_inputs(gen, live, seed)
    exact = GraftBuffers.create(live, inputs.pool.tokens.shape[1])
    exact.load(inputs)
    expected = chain_over(exact, chain, table, staged)()

    padded = GraftBuffers.create(MAX_BATCH, inputs.pool.tokens.shape[1])
    run = chain_over(padded, chain, table, staged)
    if reset:
        spoil_padding(padded, 0, rng)
        (tree, links), rows = CapturedGraph(padded, run).replay(padded.load(inputs))
        assert rows == live
    else:
        padded.load(inputs)
        spoil_padding(padded, live, rng)
        tree, links = run()
    for left, right in zip((*expected[0], *expected[1][2:]), (*tree, *links[2:]), strict=True):
        assert torch.equal(left, right[:live])
    for left, right in zip(expected[1][:2], links[:2], strict=True):
        assert torch.equal(left, right.view(MAX_BATCH, -1)[:live].flatten())


@property_test
@given(st.integers(0, 2**31), st.integers(1, MAX_BATCH))
def test_padding_never_writes_the_table(seed: int, live: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    tables = [random_table(torch.Generator().manual_seed(seed)) for _ in range(2)]
    inputs = random_inputs(gen, live, seed)
    padded = GraftBuffers.create(MAX_BATCH, inputs.pool.tokens.shape[1])
    padded.load(inputs)
    tree, _ = chain_over(padded, make_chain(), tables[0], staged=False)()
    accepted = torch.rand(tree.tokens.shape, generator=gen) < 0.3
    logits = torch.randn(MAX_BATCH * SLOTS, VOCAB, generator=gen)
    for table, rows in zip(tables, (MAX_BATCH, live), strict=True):
        update_from_logits(
            table,
            padded.table_index[:rows],
            tree.tokens[:rows],
            tree.parents[:rows],
            tree.depths[:rows],
            padded.contexts[:rows],
            accepted[:rows],
            logits[: rows * SLOTS],
        )
    read = tables[0].discard_row
    for left, right in zip(*((t.tokens[:read], t.probs[:read], t.tags[:-1]) for t in tables), strict=True):
        assert torch.equal(left, right)


def test_a_replay_needs_a_fresh_load() -> None:
    gen = torch.Generator().manual_seed(0)
    inputs = random_inputs(gen, 2, 0)
    buffers = GraftBuffers.create(3, inputs.pool.tokens.shape[1])
    graph = CapturedGraph(buffers, lambda: buffers.root_tokens.clone())
    ticket = buffers.load(inputs)
    graph.replay(ticket)
    with pytest.raises(RuntimeError, match="load the batch before each replay"):
        graph.replay(ticket)
    stale = buffers.load(inputs)
    buffers.load(inputs)
    with pytest.raises(RuntimeError, match="replaced"):
        graph.replay(stale)


def test_load_refuses_what_does_not_fit() -> None:
    gen = torch.Generator().manual_seed(0)
    inputs = random_inputs(gen, 3, 0)
    with pytest.raises(ValueError, match="3 requests do not fit buffers for 2"):
        GraftBuffers.create(2, inputs.pool.tokens.shape[1]).load(inputs)
    with pytest.raises(ValueError, match="does not fit buffers for 0"):
        GraftBuffers.create(4).load(inputs)


def full_round(device: str, staged: bool) -> Callable[[], object]:
    """Draft lists to tree, links and walk, then both table updates."""
    gen = torch.Generator().manual_seed(1)
    live = 2
    chain = make_chain(device)
    lists = [[t.to(device) for t in part] for part in random_draft(5, live, TOPK, STEPS, VOCAB)]
    table = SuccessorTable.create(VOCAB, 8, num_tables=2, context_rows=16, device=device)
    roots, contexts, index, seq_lens, targets, logits, thresholds = (
        t.to(device)
        for t in (
            torch.tensor([3, 4]),
            torch.tensor([-1, 5]),
            torch.tensor([0, 1]),
            torch.tensor([6, 7]),
            torch.randint(0, VOCAB, (live, SLOTS), generator=gen),
            torch.randn(live * SLOTS, VOCAB, generator=gen),
            torch.full((len(chain.stages.plan.checkpoints),), 0.3),
        )
    )
    maps = ValueMaps.identity(4, device)
    mask = torch.empty(4096, dtype=torch.bool, device=device)

    def run() -> None:
        pool: DraftPool = draft_pool(*lists)
        retrieved = chain.retrieve(table, index, roots, contexts)
        if staged:
            tree = chain.graft_staged(pool, retrieved, roots, chain.stage(pool.scores, thresholds))
        else:
            tree = chain.graft_value(pool, retrieved, roots, maps)
        for mode in TreeMaskMode:
            buffer = mask if mode == TreeMaskMode.FULL_MASK else None
            tree_links(tree.parents, seq_lens, mode, buffer)
        path = walk_accepted(tree.tokens, tree.parents, targets, chain.max_path)
        accepted = accepted_slots(path.accept_index, SLOTS)
        update_from_logits(table, index, tree.tokens, tree.parents, tree.depths, contexts, accepted, logits)
        observe_prompt(table, index, contexts, roots, roots.flip(0))

    return run


@pytest.mark.parametrize("staged", [False, True])
def test_a_round_reads_nothing_back(staged: bool) -> None:
    assert count_host_reads(full_round("cpu", staged)) == []


@pytest.mark.parametrize("staged", [False, True])
def test_a_round_runs_without_any_data(staged: bool) -> None:
    """On the meta device tensors have shapes only: a read, or a data-dependent shape, raises."""
    full_round("meta", staged)()


def test_the_counter_sees_host_reads() -> None:
    """Negative control: each of these would stall a round."""
    values = torch.tensor([1, 0, 2])
    guilty: dict[str, Callable[[], object]] = {
        "aten::_local_scalar_dense": lambda: values[0].item(),
        "aten::nonzero": lambda: values.nonzero(),
        "aten::masked_select": lambda: values.masked_select(values > 0),
        "aten::index": lambda: values[values > 0],
        "aten::index_put_": lambda: values.index_put_((values > 5,), torch.tensor(0)),
        "aten::_unique2": lambda: values.unique(),
        "aten::lift_fresh": lambda: torch.tensor([1, 2]),
        "aten::equal": lambda: torch.equal(values, values),
        "aten::repeat_interleave": lambda: torch.arange(3).repeat_interleave(values),
    }
    for name, run in guilty.items():
        assert name in count_host_reads(run), name
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="meta").item()


def test_the_counter_lets_fixed_shapes_pass() -> None:
    values = torch.tensor([1, 0, 2])
    assert count_host_reads(lambda: values[values].sum() + values.to(torch.float32).sum()) == []


def test_fork_works_without_streams() -> None:
    beside = fork(lambda: (torch.ones(2),), torch.device("cpu"))
    assert beside.stream is None and torch.equal(beside.join()[0], torch.ones(2))
