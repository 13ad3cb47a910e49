"""Trie merge: draft pool and retrieved nodes become one tree in which no two siblings carry the same token.

Both are trees below the same root. Two nodes are the same trie node when they have the same token and their
parents are the same trie node; the first of them (a draft node if there is one) stands for all, and
descendants of either hang under it. A duplicate would waste a slot, and under SGLang's target-only sampling
kernel bias the output (`graft.md` section 2.5).

Nodes compete through an integer `weight` below 2**32, higher is better, -1 for "not there". The trie node's
weight is the best of its copies, but never above its parent's, so any set of the heaviest nodes is closed
under parents.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import host_op, use_triton

FROM_DRAFT = 1
FROM_TABLE = 2


class MergedTrie(NamedTuple):
    """All candidate nodes, sorted by depth and within a depth draft before retrieved."""

    tokens: Tensor  # [batch, nodes] int64
    parents: Tensor  # [batch, nodes] int64, trie node of the parent, -1 for the root
    weights: Tensor  # [batch, nodes] int64, -1 for nodes that are absent or stand behind an equal one
    sources: Tensor  # [batch, nodes] int64, FROM_DRAFT | FROM_TABLE


@dataclass(frozen=True)
class TrieLayout:
    """Where the nodes of a pool and a template stand in the merged order; made once, before capture."""

    draft_levels: tuple[int, ...]  # pool nodes at depth 1, 2, ..
    retrieved_levels: tuple[int, ...]  # template nodes at depth 1, 2, ..
    order: Tensor  # [nodes] int64, for each merged node its index among pool nodes, then template nodes
    depths: Tensor  # [nodes] int64
    pool_depths: Tensor  # [pool] int64
    retrieved_depths: Tensor  # [retrieved] int64
    pool_shift: Tensor  # [pool] int64, adds to a pool parent's pool index to give its merged index
    fathers: Tensor  # [retrieved] int64, merged index of each template node's parent, -1 for the root
    level_bounds: Tensor  # [levels, 3] int64, first draft node, first retrieved node and end of each depth

    @classmethod
    def create(
        cls,
        draft_levels: tuple[int, ...],
        retrieved_levels: tuple[int, ...],
        fathers: tuple[int, ...],  # template index of each template node's parent, -1 for the root
        device: torch.device | str = "cpu",
    ) -> TrieLayout:
        """Lay out `draft_levels` pool nodes and `retrieved_levels` template nodes per depth.

        Raises ValueError when both are empty or `fathers` does not fit the levels.
        """
        levels = max(len(draft_levels), len(retrieved_levels))
        if not levels or len(fathers) != sum(retrieved_levels):
            raise ValueError(
                f"{len(fathers)} fathers, levels {draft_levels} and {retrieved_levels}: nothing to merge"
            )
        draft, retrieved = _padded(draft_levels, levels), _padded(retrieved_levels, levels)
        starts = tuple(accumulate((a + b for a, b in zip(draft, retrieved, strict=True)), initial=0))
        draft_starts = tuple(accumulate(draft, initial=0))
        retrieved_starts = tuple(accumulate(retrieved, initial=0))
        order: list[int] = []
        shift: list[int] = []
        merged_fathers: list[int] = []
        for level in range(levels):
            order += range(draft_starts[level], draft_starts[level + 1])
            order += [sum(draft) + i for i in range(retrieved_starts[level], retrieved_starts[level + 1])]
            above = max(level - 1, 0)
            shift += [starts[above] - draft_starts[above] if level else 0] * draft[level]
            to_merged = starts[above] + draft[above] - retrieved_starts[above]
            level_fathers = fathers[retrieved_starts[level] : retrieved_starts[level + 1]]
            merged_fathers += [father + to_merged if level else -1 for father in level_fathers]
        bounds = [(starts[i], starts[i] + draft[i], starts[i + 1]) for i in range(levels)]

        def as_tensor(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return cls(
            draft_levels=draft,
            retrieved_levels=retrieved,
            order=as_tensor(order),
            depths=as_tensor(_node_depths(tuple(a + b for a, b in zip(draft, retrieved, strict=True)))),
            pool_depths=as_tensor(_node_depths(draft)),
            retrieved_depths=as_tensor(_node_depths(retrieved)),
            pool_shift=as_tensor(shift),
            fathers=as_tensor(merged_fathers),
            level_bounds=as_tensor(bounds),
        )

    @property
    def num_draft(self) -> int:
        return sum(self.draft_levels)

    @property
    def num_nodes(self) -> int:
        return self.num_draft + sum(self.retrieved_levels)


def merge_trie(
    layout: TrieLayout,
    draft_tokens: Tensor,  # [batch, pool] int64
    draft_parents: Tensor,  # [batch, pool] int64, pool index of the parent, -1 for the root
    draft_weights: Tensor,  # [batch, pool] int64
    retrieved_tokens: Tensor,  # [batch, retrieved] int64
    retrieved_weights: Tensor,  # [batch, retrieved] int64
) -> MergedTrie:
    """Merge the two trees of each request, level by level.

    The pool's parents must lie one depth above their children. Weights are below 2**32; any negative weight
    removes the node with all its descendants, and so does a negative token.
    """
    args = (layout, draft_tokens, draft_parents, draft_weights, retrieved_tokens, retrieved_weights)
    if use_triton(draft_tokens):
        from .merge_kernel import merge_trie_triton

        return merge_trie_triton(*args)
    return host_op(merge_trie_torch)(*args)


def merge_trie_torch(
    layout: TrieLayout,
    draft_tokens: Tensor,  # [batch, pool] int64
    draft_parents: Tensor,  # [batch, pool] int64
    draft_weights: Tensor,  # [batch, pool] int64
    retrieved_tokens: Tensor,  # [batch, retrieved] int64
    retrieved_weights: Tensor,  # [batch, retrieved] int64
) -> MergedTrie:
    """Reference of `merge_trie`."""
    batch = draft_tokens.shape[0]

    def merged(draft: Tensor, retrieved: Tensor) -> Tensor:
        return torch.cat([draft, retrieved], dim=1).index_select(1, layout.order)

    tokens = merged(draft_tokens, retrieved_tokens)
    links = merged(draft_parents + layout.pool_shift, layout.fathers.expand(batch, -1))
    weights = merged(draft_weights, retrieved_weights).clamp(min=-1)
    weights = weights.masked_fill(tokens < 0, -1)

    nodes = torch.arange(layout.num_nodes, device=tokens.device)
    canonical: list[Tensor] = []
    parents: list[Tensor] = []
    merged_weights: list[Tensor] = []
    above = 0
    start = 0
    for size in map(sum, zip(layout.draft_levels, layout.retrieved_levels, strict=True)):
        level = slice(start, start + size)
        weight = weights[:, level]
        if start == 0:
            parent = torch.full_like(weight, -1)
        else:
            link = (links[:, level] - above).clamp(
                0, start - above - 1
            )  # garbage stays within the level above
            parent = canonical[-1].gather(1, link)
            weight = torch.minimum(weight, merged_weights[-1].gather(1, link))
        # An absent node gets a key of its own, so that it equals no other.
        key = torch.where(weight < 0, -1 - nodes[level], torch.add(tokens[:, level], parent + 1, alpha=2**32))
        same = key.unsqueeze(2) == key.unsqueeze(1)  # [batch, size, size]
        canonical.append(same.view(torch.uint8).argmax(2) + start)  # argmax takes the first of equals
        merged_weights.append(weight.unsqueeze(1).expand_as(same).masked_fill(~same, -1).amax(2))
        parents.append(parent)
        above, start = start, start + size

    stands_for = torch.cat(canonical, dim=1)
    weight = torch.cat(merged_weights, dim=1)
    return MergedTrie(
        tokens=tokens,
        parents=torch.cat(parents, dim=1),
        weights=weight.masked_fill(stands_for != nodes, -1),
        sources=_sources(layout, stands_for, weight).masked_fill(stands_for != nodes, 0),
    )


def _sources(
    layout: TrieLayout,
    stands_for: Tensor,  # [batch, nodes] int64, trie node of each node
    weights: Tensor,  # [batch, nodes] int64
) -> Tensor:  # [batch, nodes] int64
    """Who proposed each trie node. A draft node always stands for its retrieved copies, never the reverse."""
    from_draft = layout.order < layout.num_draft  # [nodes]
    retrieved = (~from_draft & (weights >= 0)).long() * FROM_TABLE  # [batch, nodes]
    # Equal nodes write equal values, except the draft copies' zeros: hence the maximum.
    table_bits = torch.zeros_like(retrieved).scatter_reduce(1, stands_for, retrieved, "amax")
    return torch.where(weights >= 0, table_bits + from_draft * FROM_DRAFT, 0)


def _node_depths(level_sizes: tuple[int, ...]) -> list[int]:
    return [depth for depth, size in enumerate(level_sizes, 1) for _ in range(size)]


def _padded(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    return sizes + (0,) * (length - len(sizes))
