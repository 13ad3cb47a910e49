"""Masks, positions and links equal those of SGLang's documented algorithm, written here in plain Python."""

from __future__ import annotations

import pytest
import torch
from cg_trees import TreeBatch, is_live, path_to_root, property_test, tree_batches
from hypothesis import given
from sgl_graft.cuda_graph.tree_links import TreeMaskMode, packed_dtype, tree_links


def expected_links(batch: TreeBatch) -> tuple[list, list, list]:
    """The link loop of `build_tree_efficient` (eagle.cuh): last slot first, each pushed onto its parent's
    list.
    """
    next_token = [[-1] * batch.slots for _ in range(batch.batch)]
    sibling = [[-1] * batch.slots for _ in range(batch.batch)]
    for row, parents in enumerate(batch.parents.tolist()):
        for slot in range(batch.slots - 1, 0, -1):
            if is_live(parents, slot):
                sibling[row][slot] = next_token[row][parents[slot]]
                next_token[row][parents[slot]] = slot
    index = [[row * batch.slots + slot for slot in range(batch.slots)] for row in range(batch.batch)]
    return index, next_token, sibling


def expected_rows(batch: TreeBatch) -> list[list[list[bool]]]:
    """Tree part of the mask: the root's column, then the slot and its ancestors."""
    return [
        [[j == 0 or j in path_to_root(parents, i) for j in range(batch.slots)] for i in range(batch.slots)]
        for parents in batch.parents.tolist()
    ]


@property_test
@given(tree_batches())
def test_links_and_positions(batch: TreeBatch) -> None:
    links = tree_links(batch.parents, batch.seq_lens)
    index, next_token, sibling = expected_links(batch)
    assert links.retrieve_index.tolist() == index
    assert links.retrieve_next_token.tolist() == next_token
    assert links.retrieve_next_sibling.tolist() == sibling
    depths = [len(path_to_root(p, slot)) - 1 for p in batch.parents.tolist() for slot in range(batch.slots)]
    starts = batch.seq_lens.repeat_interleave(batch.slots).tolist()
    assert links.positions.tolist() == [start + depth for start, depth in zip(starts, depths, strict=True)]


@property_test
@given(tree_batches())
def test_tree_only_mask(batch: TreeBatch) -> None:
    mask = tree_links(batch.parents, batch.seq_lens, TreeMaskMode.QLEN_ONLY).tree_mask
    assert mask.dtype == torch.bool
    assert mask.view(batch.batch, batch.slots, batch.slots).tolist() == expected_rows(batch)


@property_test
@given(tree_batches())
def test_bit_packed_mask(batch: TreeBatch) -> None:
    mask = tree_links(batch.parents, batch.seq_lens, TreeMaskMode.QLEN_ONLY_BITPACKING).tree_mask
    assert mask.dtype == packed_dtype(batch.slots)
    expected = [
        sum(1 << j for j, bit in enumerate(row) if bit) for rows in expected_rows(batch) for row in rows
    ]
    assert mask.tolist() == expected


@property_test
@given(tree_batches())
def test_full_mask_layout(batch: TreeBatch) -> None:
    """Requests end to end, rows of seq_len + slots cells; a longer buffer keeps its tail."""
    cells = int(batch.seq_lens.sum()) * batch.slots + batch.batch * batch.slots**2
    buffer = torch.zeros(cells + 7, dtype=torch.bool)
    mask = tree_links(batch.parents, batch.seq_lens, TreeMaskMode.FULL_MASK, mask_out=buffer).tree_mask
    expected: list[bool] = []
    for seq_len, rows in zip(batch.seq_lens.tolist(), expected_rows(batch), strict=True):
        for row in rows:
            expected += [True] * seq_len + row
    assert mask is buffer
    assert mask[:cells].tolist() == expected


def test_full_mask_leaves_the_prefix_alone_when_asked() -> None:
    buffer = torch.zeros(2 * (3 + 2), dtype=torch.bool)
    parents, seq_lens = torch.tensor([[-1, 0]]), torch.tensor([3])
    tree_links(parents, seq_lens, TreeMaskMode.FULL_MASK, mask_out=buffer, fill_prefix=False)
    assert buffer.view(2, 5).tolist() == [[False] * 3 + [True, False], [False] * 3 + [True, True]]


def test_prefers_no_garbage_over_a_crash() -> None:
    """Padded rows may hold anything: out-of-range parents must not reach outside their row."""
    parents = torch.tensor([[7, 99, -50, 2**40], [-1, 0, 1, 2]])
    links = tree_links(parents, torch.tensor([5, 5]))
    assert links.positions[4:].tolist() == [5, 6, 7, 8]


def test_refusals() -> None:
    parents, seq_lens = torch.full((1, 33), -1), torch.tensor([1])
    with pytest.raises(ValueError, match="mask_out"):
        tree_links(parents, seq_lens, TreeMaskMode.FULL_MASK)
    with pytest.raises(ValueError, match="32 slots, not 33"):
        tree_links(parents, seq_lens, TreeMaskMode.QLEN_ONLY_BITPACKING)
