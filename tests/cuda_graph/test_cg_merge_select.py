"""Merge and selection against dictionaries of paths, and the invariants every tree must keep."""

from __future__ import annotations

import pytest
import torch
from cg_candidates import Candidates, candidate_sets, merge_by_paths, tree_paths
from cg_trees import property_test
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.merge import TrieLayout, merge_trie
from sgl_graft.cuda_graph.select import select_tree


@property_test
@given(candidate_sets(), st.integers(1, 20))
def test_tree_holds_the_best_trie_nodes(cands: Candidates, slots: int) -> None:
    trie = merge_trie(cands.layout, *cands.tensors())
    roots = torch.full((len(cands.rows()),), 99)
    tree = select_tree(cands.layout, trie, roots, slots)
    for row in cands.rows():
        expected = merge_by_paths(cands, row)

        def best_first(path: tuple[int, ...], nodes: dict = expected) -> tuple:
            return -nodes[path].weight, len(path), path[-1], nodes[path].position

        kept = sorted(expected, key=best_first)[: slots - 1]
        filler = slots - 1 - len(kept)
        assert (
            tree_paths(tree.tokens[row].tolist(), tree.parents[row].tolist()) == [(), *kept] + [None] * filler
        )
        assert tree.weights[row].tolist() == [-1] + [expected[path].weight for path in kept] + [-1] * filler
        assert tree.sources[row].tolist() == [0] + [expected[path].source for path in kept] + [0] * filler
        assert tree.depths[row].tolist() == [0] + [len(path) for path in kept] + [0] * filler


@property_test
@given(candidate_sets(), st.integers(1, 20))
def test_invariants_of_every_tree(cands: Candidates, slots: int) -> None:
    """Constant width, parents before children, no siblings with one token, empty slots last and valid."""
    trie = merge_trie(cands.layout, *cands.tensors())
    roots = torch.full((len(cands.rows()),), 99)
    tree = select_tree(cands.layout, trie, roots, slots)
    for tensor in tree:
        assert tensor.shape == (len(cands.rows()), slots) and tensor.dtype == torch.long
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        assert tokens[0] == 99 and parents[0] == -1
        live = [slot for slot in range(1, slots) if parents[slot] >= 0]
        assert live == list(range(1, len(live) + 1)), "empty slots come last"
        assert all(parents[slot] < slot for slot in live)
        assert len({(parents[slot], tokens[slot]) for slot in live}) == len(live)
        assert all(tokens[slot] == 0 for slot in range(len(live) + 1, slots))


@property_test
@given(candidate_sets())
def test_the_order_of_equal_draft_siblings_does_not_matter(cands: Candidates) -> None:
    """Swapping two pool nodes (and all links to them) gives the same tree."""
    size = cands.layout.draft_levels[0]
    swap = torch.arange(cands.draft_tokens.shape[1])
    swap[0], swap[size - 1] = size - 1, 0
    parents = torch.where(cands.draft_parents < 0, -1, swap[cands.draft_parents])
    swapped = Candidates(
        cands.layout,
        cands.template,
        cands.draft_tokens[:, swap],
        parents[:, swap],
        cands.draft_weights[:, swap],
        cands.retrieved_tokens,
        cands.retrieved_weights,
    )
    for row in cands.rows():
        before, after = (merge_by_paths(c, row) for c in (cands, swapped))
        assert {path: node.weight for path, node in before.items()} == {p: n.weight for p, n in after.items()}
    roots = torch.zeros(len(cands.rows()), dtype=torch.long)
    trees = []
    for c in (cands, swapped):
        tree = select_tree(c.layout, merge_trie(c.layout, *c.tensors()), roots, 30)
        trees.append(
            [
                {p: w for p, w in zip(tree_paths(t, q), ws, strict=True) if p is not None}
                for t, q, ws in zip(
                    tree.tokens.tolist(), tree.parents.tolist(), tree.weights.tolist(), strict=True
                )
            ]
        )
    assert trees[0] == trees[1]


def test_a_retrieved_copy_lends_its_descendants_to_the_draft_node() -> None:
    """Root -> 7 from both; the table knows 7 -> 8, the draft 7 -> 9: one node 7 with both children."""
    layout = TrieLayout.create((1, 1), (1, 1), (-1, 0))
    one = torch.ones(1, 2, dtype=torch.long)
    trie = merge_trie(
        layout, torch.tensor([[7, 9]]), torch.tensor([[-1, 0]]), one, torch.tensor([[7, 8]]), one
    )
    tree = select_tree(layout, trie, torch.tensor([5]), 4)
    assert tree.tokens.tolist() == [[5, 7, 8, 9]]
    assert tree.parents.tolist() == [[-1, 0, 1, 1]]
    assert tree.sources.tolist() == [[0, 3, 2, 1]]


def test_garbage_parents_stay_within_their_row() -> None:
    """A padded row may hold any parent; the live row beside it is unchanged."""
    layout = TrieLayout.create((2, 2), (1,), (-1,))
    tokens, weights = torch.tensor([[1, 2, 3, 4]] * 2), torch.ones(2, 4, dtype=torch.long)
    parents = torch.tensor([[-1, -1, 0, 1], [2**40, -(2**40), 99, -7]])
    table = torch.tensor([[-1], [-(2**50)]]), torch.tensor([[0], [2**31]])
    trie = merge_trie(layout, tokens, parents, weights, *table)
    tree = select_tree(layout, trie, torch.tensor([0, 0]), 5)
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 2]


def test_layout_refuses_nothing_and_misfits() -> None:
    with pytest.raises(ValueError, match="nothing to merge"):
        TrieLayout.create((), (), ())
    with pytest.raises(ValueError, match="2 fathers"):
        TrieLayout.create((1,), (1,), (-1, 0))
