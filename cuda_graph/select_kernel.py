# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of selection: sort keys, ranks by counting, and the tree of the best nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .merge import MergedTrie, TrieLayout
    from .select import GraftedTree

RIVALS = 32


@triton.jit
def sort_key(weights, depths, tokens):
    """`select.sort_keys`: 32 bits of weight, 5 of depth, 26 of token."""
    key = (weights << 31) + ((31 - depths) << 26) + ((1 << 26) - 1) - tokens
    return tl.where(weights < 0, -1, key)


@triton.jit
def better_rivals(keys, ids, rival_keys, rival_ids):
    """How many rivals stand before each key: larger ones, and equal ones with a lower id."""
    larger = rival_keys[None, :] > keys[:, None]
    earlier = (rival_keys[None, :] == keys[:, None]) & (rival_ids[None, :] < ids[:, None])
    return tl.sum((larger | earlier).to(tl.int32), axis=1)


@triton.jit
def _node_keys(weights_ptr, depths_ptr, tokens_ptr, first, node, nodes):
    there = node < nodes
    weights = tl.load(weights_ptr + first + node, mask=there, other=-1)
    depths = tl.load(depths_ptr + node, mask=there, other=0)
    tokens = tl.load(tokens_ptr + first + node, mask=there, other=0)
    return sort_key(weights, depths, tokens)


@triton.jit
def _select_kernel(
    tokens_ptr,  # [batch, nodes] int64
    parents_ptr,  # [batch, nodes] int64
    weights_ptr,  # [batch, nodes] int64
    sources_ptr,  # [batch, nodes] int64
    depths_ptr,  # [nodes] int64
    root_ptr,  # [batch] int64
    slot_of_ptr,  # [batch, nodes] int64, scratch
    tree_tokens_ptr,  # [batch, SLOTS] int64, and so on
    tree_parents_ptr,
    tree_depths_ptr,
    tree_sources_ptr,
    tree_weights_ptr,
    NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * NODES
    tree = row * SLOTS
    slot = tl.arange(0, SLOT_BLOCK)
    in_tree = slot < SLOTS
    root = tl.load(root_ptr + row)
    tl.store(tree_tokens_ptr + tree + slot, tl.where(slot == 0, root, 0), mask=in_tree)
    nothing = tl.zeros([SLOT_BLOCK], tl.int64)
    tl.store(tree_parents_ptr + tree + slot, nothing - 1, mask=in_tree)
    tl.store(tree_depths_ptr + tree + slot, nothing, mask=in_tree)
    tl.store(tree_sources_ptr + tree + slot, nothing, mask=in_tree)
    tl.store(tree_weights_ptr + tree + slot, nothing - 1, mask=in_tree)

    node = tl.arange(0, NODE_BLOCK)
    keys = _node_keys(weights_ptr, depths_ptr, tokens_ptr, first, node, NODES)
    rank = tl.zeros([NODE_BLOCK], tl.int32)
    for start in range(0, NODES, RIVALS):
        rival = start + tl.arange(0, RIVALS)
        rival_keys = _node_keys(weights_ptr, depths_ptr, tokens_ptr, first, rival, NODES)
        rank += better_rivals(keys, node, rival_keys, rival)
    chosen = (keys >= 0) & (rank < SLOTS - 1)
    place = (rank + 1).to(tl.int64)
    tl.store(slot_of_ptr + first + node, place, mask=chosen)
    tl.debug_barrier()  # other threads read the slots, and the fillers above must come first
    parent = tl.load(parents_ptr + first + node, mask=chosen, other=-1)
    parent_slot = tl.load(slot_of_ptr + first + parent, mask=chosen & (parent >= 0), other=0)
    tl.store(
        tree_tokens_ptr + tree + place, tl.load(tokens_ptr + first + node, mask=chosen, other=0), mask=chosen
    )
    tl.store(tree_parents_ptr + tree + place, parent_slot, mask=chosen)
    tl.store(tree_depths_ptr + tree + place, tl.load(depths_ptr + node, mask=chosen, other=0), mask=chosen)
    sources = tl.load(sources_ptr + first + node, mask=chosen, other=0)
    tl.store(tree_sources_ptr + tree + place, sources, mask=chosen)
    weights = tl.load(weights_ptr + first + node, mask=chosen, other=0)
    tl.store(tree_weights_ptr + tree + place, weights, mask=chosen)


def select_tree_triton(
    layout: TrieLayout,
    trie: MergedTrie,
    root_tokens: Tensor,  # [batch] int64
    slots: int,
) -> GraftedTree:
    """Triton side of `select_tree`."""
    from .select import GraftedTree

    batch, nodes = trie.tokens.shape
    tree = torch.empty((5, batch, slots), dtype=torch.long, device=root_tokens.device)
    _select_kernel[(batch,)](
        trie.tokens,
        trie.parents,
        trie.weights,
        trie.sources,
        layout.depths,
        root_tokens,
        torch.empty_like(trie.tokens),
        *tree,
        NODES=nodes,
        NODE_BLOCK=triton.next_power_of_2(nodes),
        SLOTS=slots,
        SLOT_BLOCK=triton.next_power_of_2(slots),
        RIVALS=RIVALS,
        num_warps=4 if nodes <= 128 else 8,
    )
    return GraftedTree(*tree)
