"""Random candidates for merge and selection, and the merge written as a plain dictionary of paths."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from sgl_graft.cuda_graph.merge import FROM_DRAFT, FROM_TABLE, TrieLayout
from sgl_graft.cuda_graph.templates import Template, assumed_rank_prior, template_for_budget
from torch import Tensor

Path = tuple[int, ...]


@dataclass
class Candidates:
    """Two forests below one root: a pool with free parents, and a template's nodes."""

    layout: TrieLayout
    template: Template
    draft_tokens: Tensor  # [batch, pool] int64
    draft_parents: Tensor  # [batch, pool] int64
    draft_weights: Tensor  # [batch, pool] int64
    retrieved_tokens: Tensor  # [batch, retrieved] int64
    retrieved_weights: Tensor  # [batch, retrieved] int64

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.draft_tokens,
            self.draft_parents,
            self.draft_weights,
            self.retrieved_tokens,
            self.retrieved_weights,
        )

    def rows(self) -> range:
        return range(self.draft_tokens.shape[0])


@dataclass
class TrieNode:
    weight: int
    source: int
    position: int  # in the merged order


@st.composite
def candidate_sets(draw, max_batch: int = 3, vocab: int = 4, max_weight: int = 4) -> Candidates:
    """Few tokens and weights, so that duplicates and ties are common; some nodes are absent."""
    rng = random.Random(draw(st.integers(0, 2**31)))
    batch = draw(st.integers(1, max_batch))
    draft_levels = tuple(rng.randint(1, 5) for _ in range(draw(st.integers(1, 4))))
    template = template_for_budget(draw(st.integers(0, 14)), rng.randint(2, 5), assumed_rank_prior(4))
    starts = [sum(draft_levels[:level]) for level in range(len(draft_levels) + 1)]
    parents = [
        [-1 if level == 0 else rng.randrange(starts[level - 1], starts[level]) for _ in range(batch)]
        for level, size in enumerate(draft_levels)
        for _ in range(size)
    ]

    def numbers(count: int, low: int, high: int) -> Tensor:
        flat = [rng.randint(low, high) for _ in range(batch * count)]
        return torch.tensor(flat, dtype=torch.long).view(batch, count)

    pool, retrieved = sum(draft_levels), template.num_nodes
    return Candidates(
        layout=TrieLayout.create(draft_levels, template.level_sizes, template.fathers),
        template=template,
        draft_tokens=numbers(pool, 0, vocab - 1),
        draft_parents=torch.tensor(parents, dtype=torch.long).view(pool, batch).t().contiguous(),
        draft_weights=numbers(pool, rng.choice([-1, 0]), max_weight),
        retrieved_tokens=numbers(retrieved, -1, vocab - 1),
        retrieved_weights=numbers(retrieved, rng.choice([-1, 0]), max_weight),
    )


def merge_by_paths(cands: Candidates, row: int) -> dict[Path, TrieNode]:
    """Nodes as token paths; equal paths are one node, worth its best copy but no more than its parent."""
    position = {int(union): merged for merged, union in enumerate(cands.layout.order.tolist())}
    offset = cands.draft_tokens.shape[1]
    draft_parents = cands.draft_parents[row].tolist()
    retrieved_parents = [father + offset if father >= 0 else -1 for father in cands.template.fathers]
    parents = draft_parents + retrieved_parents
    tokens = cands.draft_tokens[row].tolist() + cands.retrieved_tokens[row].tolist()
    weights = cands.draft_weights[row].tolist() + cands.retrieved_weights[row].tolist()

    def path_of(node: int) -> Path | None:
        """None when the node or an ancestor is absent."""
        if tokens[node] < 0 or weights[node] < 0:
            return None
        if parents[node] < 0:
            return (tokens[node],)
        above = path_of(parents[node])
        return None if above is None else (*above, tokens[node])

    trie: dict[Path, TrieNode] = {}
    for node in sorted(range(len(tokens)), key=position.__getitem__):
        path = path_of(node)
        if path is None:
            continue
        source = FROM_DRAFT if node < offset else FROM_TABLE
        entry = trie.setdefault(path, TrieNode(-1, 0, position[node]))
        entry.weight = max(entry.weight, weights[node])
        entry.source |= source
    for path in sorted(trie, key=len):
        if len(path) > 1:
            trie[path].weight = min(trie[path].weight, trie[path[:-1]].weight)
    return trie


def tree_paths(tokens: list[int], parents: list[int]) -> list[Path | None]:
    """Token path of each slot from below the root; () for the root, None for empty slots."""
    paths: list[Path | None] = [()]
    for slot in range(1, len(tokens)):
        above = paths[parents[slot]] if parents[slot] >= 0 else None
        paths.append(None if above is None else (*above, tokens[slot]))
    return paths
