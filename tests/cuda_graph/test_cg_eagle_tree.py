"""The pool and the stock tree equal what SGLang 0.5.23 itself builds from the same draft."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cg_trees import property_test
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.eagle_tree import DraftPool, draft_pool, pool_depths, stock_tree
from sgl_graft.cuda_graph.tree_links import tree_links

drafts = st.tuples(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))


@property_test
@given(drafts)
def test_pool_is_one_consistent_tree(args: tuple[int, int, int, int]) -> None:
    _, _, topk, steps = args
    pool = draft_pool(*random_draft(*args))
    depths = torch.tensor(pool_depths(topk, steps))
    for tokens, parents, scores in zip(*pool, strict=True):
        assert tokens.shape == parents.shape == scores.shape == depths.shape
        for node, parent in enumerate(parents.tolist()):
            assert depths[node] == (1 if parent < 0 else depths[parent] + 1)
            assert parent < 0 or scores[node] <= scores[parent]
        # Siblings come from one top-k, so (parent, token) is unique.
        assert len(set(zip(parents.tolist(), tokens.tolist(), strict=True))) == len(tokens)


@property_test
@given(drafts, st.integers(0, 100))
def test_stock_tree_is_sglangs(args: tuple[int, int, int, int], pick: int) -> None:
    """Same tokens, and the same links as the link loop over SGLang's (parent_list, top_scores_index)."""
    _, batch, topk, _ = args
    lists = random_draft(*args)
    pool = draft_pool(*lists)
    slots = 2 + pick % pool.tokens.shape[1]
    parent_list, selected, draft_tokens = organize_draft_results(*lists, slots)
    roots = torch.arange(batch) + 1000
    tokens, parents = stock_tree(pool, roots, slots)
    assert torch.equal(tokens, torch.cat([roots.unsqueeze(1), draft_tokens], 1))
    links = tree_links(parents, torch.full((batch,), 3))
    for row in range(batch):
        next_token, sibling = sglang_links(parent_list[row].tolist(), selected[row].tolist(), topk, slots)
        assert links.retrieve_next_token[row].tolist() == next_token
        assert links.retrieve_next_sibling[row].tolist() == sibling


def sglang_organize() -> Callable:
    """`organize_draft_results` from the wheel's source: importing its module takes half a minute."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    source = (Path(package.origin).parent / "srt/speculative/eagle_utils.py").read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    wanted = next(node for node in functions if node.name == "organize_draft_results")
    namespace = {"torch": torch, "List": list, "maybe_detect_oob": lambda *args: None}
    exec(compile(ast.Module([wanted], []), "eagle_utils.py", "exec"), namespace)
    return namespace["organize_draft_results"]


organize_draft_results = sglang_organize()


def sglang_links(parent_list: list[int], selected: list[int], topk: int, slots: int) -> tuple[list, list]:
    """`build_tree_efficient` (eagle.cuh), thread 0, restated."""
    next_token, sibling = [-1] * slots, [-1] * slots
    for slot in range(slots - 1, 0, -1):
        expanded = selected[slot - 1] // topk
        if expanded > 0 and parent_list[expanded] not in selected:
            continue
        parent = selected.index(parent_list[expanded]) + 1 if expanded > 0 else 0
        sibling[slot] = next_token[parent]
        next_token[parent] = slot
    return next_token, sibling


def test_a_node_whose_parent_lost_a_tie_becomes_an_empty_slot() -> None:
    pool = DraftPool(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, -1, 0]]), torch.tensor([[0.1, 0.4, 0.3]]))
    tokens, parents = stock_tree(pool, torch.tensor([9]), 3)
    assert tokens.tolist() == [[9, 6, 7]]
    assert parents.tolist() == [[-1, 0, -1]]


def test_refuses_more_slots_than_nodes() -> None:
    pool = draft_pool(*random_draft(0, 1, 2, 1))
    with pytest.raises(ValueError, match="3 draft nodes, the pool has 2"):
        stock_tree(pool, torch.tensor([1]), 4)
