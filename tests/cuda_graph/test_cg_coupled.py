"""The walk equals SGLang's `verify_tree_greedy`, written here in plain Python over its links."""

from __future__ import annotations

import random

import pytest
import torch
from cg_trees import TreeBatch, property_test, tree_batches
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.coupled import parents_from_links, walk_accepted
from sgl_graft.cuda_graph.tree_links import tree_links


def greedy_walk(batch: TreeBatch, targets: torch.Tensor, max_path: int) -> tuple[list, list, list]:
    """`VerifyTreeGreedy` (eagle.cuh), restated: predicts, accept_index, accept_token_num."""
    links = tree_links(batch.parents, batch.seq_lens)
    flat_targets = targets.flatten().tolist()
    predicts = [0] * len(flat_targets)
    accept_index, accepted_counts = [], []
    for row in range(batch.batch):
        last, current, accepted = row * batch.slots, 0, [row * batch.slots]
        for _ in range(1, max_path):
            current = int(links.retrieve_next_token[row, current])
            while current != -1 and int(batch.tokens[row, current]) != flat_targets[last]:
                current = int(links.retrieve_next_sibling[row, current])
            if current == -1:
                break
            predicts[last] = flat_targets[last]
            last = row * batch.slots + current
            accepted.append(last)
        predicts[last] = flat_targets[last]
        accept_index.append(accepted + [-1] * (max_path - len(accepted)))
        accepted_counts.append(len(accepted) - 1)
    return predicts, accept_index, accepted_counts


@property_test
@given(tree_batches(vocab=3), st.integers(0, 2**31), st.integers(1, 9))
def test_walk_is_sglangs(batch: TreeBatch, seed: int, max_path: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, batch.tokens.shape, generator=gen)
    path = walk_accepted(batch.tokens, batch.parents, targets, max_path)
    predicts, accept_index, counts = greedy_walk(batch, targets, max_path)
    assert path.predicts.tolist() == predicts
    assert path.accept_index.tolist() == accept_index
    assert path.num_correct_drafts.tolist() == counts
    last_rows = [max(row) for row in accept_index]
    assert path.bonus_tokens.tolist() == [targets.flatten()[row].item() for row in last_rows]
    assert {path.predicts.dtype, path.accept_index.dtype, path.num_correct_drafts.dtype} == {torch.int32}


@property_test
@given(tree_batches(), st.integers(0, 2**31))
def test_committed_tokens_do_not_depend_on_the_tree(batch: TreeBatch, seed: int) -> None:
    """Lossless by construction: the committed tokens are always a prefix of the target's own path."""
    rng = random.Random(seed)
    answer = {
        depth: rng.randrange(5) for depth in range(batch.slots + 2)
    }  # the target's token at each position
    depths = tree_links(batch.parents, torch.zeros_like(batch.seq_lens)).positions.view_as(batch.tokens)
    targets = depths.clone().apply_(lambda depth: answer[depth])
    path = walk_accepted(batch.tokens, batch.parents, targets, batch.slots + 1)
    for row in range(batch.batch):
        count = int(path.num_correct_drafts[row])
        committed = [int(path.predicts[index]) for index in path.accept_index[row, : count + 1]]
        assert committed == [answer[depth] for depth in range(count + 1)]


@property_test
@given(tree_batches())
def test_parents_from_links(batch: TreeBatch) -> None:
    links = tree_links(batch.parents, batch.seq_lens)
    parents = parents_from_links(links.retrieve_next_token, links.retrieve_next_sibling)
    expected = batch.parents.clone()
    expected[:, 0] = -1
    assert torch.equal(parents, expected)


def test_empty_slot_is_never_accepted() -> None:
    tokens, parents = torch.tensor([[1, 2, 2]]), torch.tensor([[-1, -1, 0]])
    path = walk_accepted(tokens, parents, torch.tensor([[2, 2, 4]]), 3)
    assert path.accept_index.tolist() == [[0, 2, -1]]
    assert path.bonus_tokens.tolist() == [4]


def test_refuses_a_path_without_root() -> None:
    ones = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        walk_accepted(ones, -ones, ones, 0)
