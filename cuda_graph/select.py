"""Selection: cut the merged trie down to the slot budget.

Both rules reduce to this: order the trie nodes by (weight descending, depth ascending, token ascending) and
keep the first `slots - 1`. Weights never rise along a path (see `merge.py`), so the kept nodes form a tree
and each parent gets a lower slot than its children.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .dispatch import host_op, use_triton
from .merge import MergedTrie, TrieLayout

EMPTY_SOURCE = 0

# A sort key: 32 bits of weight, 5 of depth, 26 of token id.
TOKEN_BITS = 26
DEPTH_BITS = 5
MAX_DEPTH = 2**DEPTH_BITS - 1


class GraftedTree(NamedTuple):
    """The tree to verify; slot 0 is the root."""

    tokens: Tensor  # [batch, slots] int64, 0 in empty slots
    parents: Tensor  # [batch, slots] int64, -1 for the root and for empty slots
    depths: Tensor  # [batch, slots] int64, 0 for the root and for empty slots
    sources: Tensor  # [batch, slots] int64, FROM_DRAFT | FROM_TABLE, 0 for the root and for empty slots
    weights: Tensor  # [batch, slots] int64, the trie node's weight, -1 for the root and for empty slots


def sort_keys(
    weights: Tensor,  # [batch, nodes] int64, below 2**32, negative for absent nodes
    depths: Tensor,  # [nodes] int64, at most MAX_DEPTH
    tokens: Tensor,  # [batch, nodes] int64, below 2**26
) -> Tensor:  # [batch, nodes] int64
    """Keys whose descending order is (weight descending, depth ascending, token ascending); absent nodes
    get -1.
    """
    tie = ((MAX_DEPTH - depths) << TOKEN_BITS) + (2**TOKEN_BITS - 1) - tokens
    return ((weights << (DEPTH_BITS + TOKEN_BITS)) + tie).masked_fill(weights < 0, -1)


def select_tree(
    layout: TrieLayout,
    trie: MergedTrie,
    root_tokens: Tensor,  # [batch] int64
    slots: int,
) -> GraftedTree:
    """Keep the root and the best `slots - 1` trie nodes; slots are left empty only when no node is left.

    Nodes that tie in weight, depth and token keep the merged order.
    """
    if use_triton(root_tokens):
        from .select_kernel import select_tree_triton

        return select_tree_triton(layout, trie, root_tokens, slots)
    return host_op(select_tree_torch)(layout, trie, root_tokens, slots)


def select_tree_torch(
    layout: TrieLayout,
    trie: MergedTrie,
    root_tokens: Tensor,  # [batch] int64
    slots: int,
) -> GraftedTree:
    """Reference of `select_tree`."""
    batch, nodes = trie.tokens.shape
    keys = sort_keys(trie.weights, layout.depths, trie.tokens)
    kept = min(slots - 1, nodes)
    keys, chosen = keys.sort(dim=1, descending=True, stable=True)
    keys, chosen = keys[:, :kept], chosen[:, :kept]  # [batch, kept]
    absent = keys < 0
    # Column 0 stands for the root, column i + 1 for trie node i; an absent node has no children.
    slot_of = torch.zeros((batch, nodes + 1), dtype=torch.long, device=keys.device)
    slot_of.scatter_(1, chosen + 1, torch.arange(1, kept + 1, device=keys.device).expand(batch, -1))
    parents = slot_of.gather(1, trie.parents.gather(1, chosen) + 1)
    unfilled = slots - 1 - kept

    def laid_out(values: Tensor, nothing: int) -> Tensor:
        """Put the root's column in front and the unfilled slots behind; `nothing` is the value of both."""
        return pad(values.masked_fill(absent, nothing), (1, unfilled), value=nothing)

    tokens = laid_out(trie.tokens.gather(1, chosen), 0)
    tokens[:, 0] = root_tokens
    return GraftedTree(
        tokens=tokens,
        parents=laid_out(parents, -1),
        depths=laid_out(layout.depths[chosen], 0),
        sources=laid_out(trie.sources.gather(1, chosen), EMPTY_SOURCE),
        weights=laid_out(trie.weights.gather(1, chosen), -1),
    )
