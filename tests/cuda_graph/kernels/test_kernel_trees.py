"""Kernels over trees and candidates against their references."""

from __future__ import annotations

import math

import torch
from cg_candidates import Candidates, candidate_sets
from cg_compare import assert_equal, both, kernel_test
from cg_trees import TreeBatch, tree_batches
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.coupled import walk_accepted
from sgl_graft.cuda_graph.gate import path_confidence, staged_gate
from sgl_graft.cuda_graph.merge import merge_trie
from sgl_graft.cuda_graph.select import select_tree
from sgl_graft.cuda_graph.tree_links import TreeMaskMode, tree_links


@kernel_test
@given(
    tree_batches(max_batch=2, max_slots=20),
    st.sampled_from([TreeMaskMode.QLEN_ONLY, TreeMaskMode.QLEN_ONLY_BITPACKING]),
)
def test_tree_links(batch: TreeBatch, mode: TreeMaskMode) -> None:
    assert_equal(*both(tree_links, batch.parents, batch.seq_lens, mode))


@kernel_test
@given(tree_batches(max_batch=3, max_slots=6), st.booleans())
def test_full_mask(batch: TreeBatch, fill_prefix: bool) -> None:
    cells = int(batch.seq_lens.sum()) * batch.slots + batch.batch * batch.slots**2
    masks = [torch.zeros(cells + 3, dtype=torch.bool) for _ in range(2)]
    waiting = list(masks)
    both(
        lambda: tree_links(batch.parents, batch.seq_lens, TreeMaskMode.FULL_MASK, waiting.pop(0), fill_prefix)
    )
    assert torch.equal(*masks) and bool(masks[0].any())


def test_tree_links_of_garbage() -> None:
    """Cycles and wild parents in a padded row: the kernel ends, and the live row is right."""
    parents = torch.tensor([[2, 3, 1, 2**40, -9], [-1, 0, 1, 1, -1]])
    reference, kernel = both(tree_links, parents, torch.tensor([3, 4]))
    for left, right in zip(reference, kernel, strict=True):
        assert torch.equal(left.view(2, -1)[1], right.view(2, -1)[1])


@kernel_test
@given(tree_batches(vocab=3), st.integers(0, 2**31), st.integers(1, 9))
def test_walk(batch: TreeBatch, seed: int, max_path: int) -> None:
    targets = torch.randint(0, 3, batch.tokens.shape, generator=torch.Generator().manual_seed(seed))
    assert_equal(*both(walk_accepted, batch.tokens, batch.parents, targets, max_path))


@kernel_test
@given(candidate_sets())
def test_merge(cands: Candidates) -> None:
    assert_equal(*both(merge_trie, cands.layout, *cands.tensors()))


@kernel_test
@given(candidate_sets(max_weight=2**32 - 1), st.integers(1, 20))
def test_select(cands: Candidates, slots: int) -> None:
    trie = merge_trie(cands.layout, *cands.tensors())
    roots = torch.arange(len(cands.rows())) + 50
    assert_equal(*both(select_tree, cands.layout, trie, roots, slots))


@kernel_test
@given(candidate_sets(), st.integers(1, 20))
def test_select_with_ties(cands: Candidates, slots: int) -> None:
    trie = merge_trie(cands.layout, *cands.tensors())
    assert_equal(
        *both(select_tree, cands.layout, trie, torch.zeros(len(cands.rows()), dtype=torch.long), slots)
    )


@kernel_test
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 5))
def test_gate(seed: int, topk: int, steps: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    scores = torch.rand(3, topk + (steps - 1) * topk * topk, generator=gen)
    scores[1, int(torch.randint(0, scores.shape[1], (), generator=gen))] = math.nan
    reference, kernel = both(path_confidence, scores, topk, steps)
    assert_equal((reference,), (kernel,))
    checkpoints = tuple(range(0, steps, 2))
    thresholds = reference[0, list(checkpoints)] * torch.tensor([1.0, 0.9, 1.1])[: len(checkpoints)]
    assert_equal(*both(staged_gate, reference, checkpoints, thresholds))
