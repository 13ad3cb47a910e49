"""Replays of captured graphs: batches of every size over buffers that hold what larger batches left."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_graft.cuda_graph.buffers import CapturedGraph, ChainInputs, GraftBuffers
from sgl_graft.cuda_graph.chain import GraftChain
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.eagle_tree import draft_pool
from sgl_graft.cuda_graph.stages import paper_stage_plan
from sgl_graft.cuda_graph.successor_table import SuccessorTable
from sgl_graft.cuda_graph.tree_links import tree_links
from sgl_graft.cuda_graph.value_rule import ValueMaps

VOCAB, TOPK, STEPS, SLOTS = 11, 2, 3, 7
CAPTURED = (1, 2, 4, 8)
WILD = (-(2**62), -5, -1, 0, 3, VOCAB, 2**40)


def tensors_of(buffers: GraftBuffers) -> dict[str, torch.Tensor]:
    """Every tensor of the buffers, found by type, so that a new one cannot be forgotten here."""
    found: dict[str, torch.Tensor] = {}
    for field in fields(buffers):
        value: Any = getattr(buffers, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value
        elif isinstance(value, tuple):
            found |= {f"{field.name}.{name}": part for name, part in value._asdict().items()}
    return found


def spoil(buffers: GraftBuffers, rng: random.Random) -> None:
    for tensor in tensors_of(buffers).values():
        if tensor.is_floating_point():
            tensor.fill_(rng.choice([float("nan"), float("inf"), -1.0, 2.0]))
        else:
            tensor.copy_(torch.tensor([rng.choice(WILD) for _ in range(tensor.numel())]).view_as(tensor))


def inputs(gen: torch.Generator, live: int, seed: int) -> ChainInputs:
    def integers(high: int) -> torch.Tensor:
        return torch.randint(0, high, (live,), generator=gen)

    pool = draft_pool(*random_draft(seed, live, TOPK, STEPS, VOCAB))
    return ChainInputs(integers(VOCAB), integers(VOCAB), integers(2), integers(20) + 1, pool)


class Captures:
    """The chain over one set of buffers per captured size, and eagerly over exactly fitting ones."""

    def __init__(self, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.chain = GraftChain.create(paper_stage_plan(SLOTS, STEPS, 4, min_envelope=12), TOPK, STEPS, "cpu")
        self.table = SuccessorTable.create(VOCAB, 8, num_tables=2, context_rows=16)
        rows = self.table.empty_row
        self.table.tokens[:rows].copy_(torch.randint(-1, VOCAB, (rows, 8), generator=gen))
        self.table.probs[:rows].copy_(torch.rand(rows, 8, generator=gen))
        pool = draft_pool(*random_draft(0, 1, TOPK, STEPS, VOCAB)).tokens.shape[1]
        self.buffers = {size: GraftBuffers.create(size, pool) for size in CAPTURED}
        self.graphs = {size: CapturedGraph(b, lambda b=b: self.run(b)) for size, b in self.buffers.items()}
        self.pool = pool

    def run(self, buffers: GraftBuffers) -> Any:
        retrieved = self.chain.retrieve(
            self.table, buffers.table_index, buffers.root_tokens, buffers.contexts
        )
        tree = self.chain.graft_value(buffers.pool, retrieved, buffers.root_tokens, ValueMaps.identity(4))
        return tree, tree_links(tree.parents, buffers.seq_lens)

    def exact(self, given: ChainInputs) -> Any:
        live = given.root_tokens.shape[0]
        buffers = GraftBuffers.create(live, self.pool)
        buffers.load(given)
        return self.run(buffers)

    def padded(self, given: ChainInputs) -> Any:
        """As a server replays: the smallest captured size that holds the batch; eager above the largest."""
        live = given.root_tokens.shape[0]
        size = next((size for size in CAPTURED if size >= live), None)
        if size is None:
            return self.exact(given)
        buffers = self.buffers[size]
        (tree, links), rows = self.graphs[size].replay(buffers.load(given))
        assert rows == live
        return tree, links


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 10), min_size=4, max_size=14))
def test_batches_that_grow_shrink_and_cross_captured_sizes(seed: int, sizes: list[int]) -> None:
    """A batch of zero replays nothing; between batches every buffer holds garbage."""
    captures, rng = Captures(seed), random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    for step, live in enumerate(sizes):
        if rng.random() < 0.5:
            for buffers in captures.buffers.values():
                spoil(buffers, rng)
        if live == 0:
            continue
        given = inputs(gen, live, seed + step)
        (tree, links), (expected, wanted) = captures.padded(given), captures.exact(given)
        for left, right in zip((*expected, *wanted[2:]), (*tree, *links[2:]), strict=True):
            assert torch.equal(left, right[:live])
        for left, right in zip(wanted[:2], links[:2], strict=True):
            assert torch.equal(left, right.view(tree.tokens.shape[0], -1)[:live].flatten())


@pytest.mark.parametrize("live", [0, 1, 3, 8])
def test_every_static_buffer_is_reset(live: int) -> None:
    """Padded rows of every tensor are those of untouched buffers, whatever was in them."""
    fresh, spoiled = GraftBuffers.create(8, 5), GraftBuffers.create(8, 5)
    spoil(spoiled, random.Random(3))
    spoiled.reset_padding(live)
    assert len(tensors_of(fresh)) >= 7
    for name, tensor in tensors_of(spoiled).items():
        assert torch.equal(tensor[live:], tensors_of(fresh)[name][live:]), name
