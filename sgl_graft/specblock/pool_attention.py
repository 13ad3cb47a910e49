"""Attention of a serving SpecBlock draft over a token pool with K entries per committed token.

The pool is indexed like the target's: whatever keeps, moves or shares the target's slots (prefix cache,
chunked prefill, retraction) keeps the draft's with them. A row's entries stand in slot order, so that what a
query may see of the committed rows is always a prefix of the flattened `(position, slot)` sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .visibility import attend


@dataclass
class DraftPool:
    """Per layer `[pool slots, K, kv_heads, dim]`."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows `[rows, K, kv_heads, dim]` at pool slots `[rows]`."""
        self.keys[layer][slots] = keys.to(self.keys[layer].dtype)
        self.values[layer][slots] = values.to(self.values[layer].dtype)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at pool slots `[positions]`, flattened to `[positions * K, kv_heads, dim]`."""
        return self.keys[layer][slots].flatten(0, 1), self.values[layer][slots].flatten(0, 1)


@dataclass
class CommitRows:
    """`model.Attend` of block 1 over newly committed rows, which are written to the pool on the way.

    Attributes:
        written: pool slot of every row. [rows]
        contexts: per request, the pool slots of positions 0 .. its last new row. [positions]
        counts: per request, how many of `queried` are its.
        queried: position of every row whose output is wanted, request by request. [queried]
        everything: position of every row. [rows]
        all_counts: per request, its number of rows.
    """

    pool: DraftPool
    written: Tensor
    contexts: Sequence[Tensor]
    everything: Tensor
    all_counts: Sequence[int]
    queried: Tensor
    counts: Sequence[int]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.write(layer, self.written, keys, values)
        last = layer == len(self.pool.keys) - 1
        positions, counts = (self.queried, self.counts) if last else (self.everything, self.all_counts)
        size = queries.shape[1]
        slot = torch.arange(size, device=queries.device)
        out, start = [queries.new_empty(0, queries.shape[2] * queries.shape[3])], 0
        for context, count in zip(self.contexts, counts, strict=True):
            span = slice(start, start + count)
            start += count
            if not count:
                continue
            k, v = self.pool.read(layer, context)
            limit = (positions[span].unsqueeze(1) * size + slot).flatten()  # [count * K] last visible key
            mask = torch.arange(len(k), device=k.device) <= limit.unsqueeze(1)
            out.append(attend(queries[span].flatten(0, 1), k, v, mask))
        return torch.cat(out).unflatten(0, (start, size))


class ContinueBlocks:
    """`model.Attend` of the blocks that continue a tree; nothing of theirs enters the pool.

    Every request has the same number of leaves. A leaf sees the committed rows before its own, its row's
    slots up to where it left block 1, the slots of later blocks on its path up to where it left each, and its
    own.
    """

    def __init__(self, pool: DraftPool, contexts: Sequence[Tensor], size: int) -> None:
        """contexts: per request, the pool slots of positions 0 .. its last committed row `[positions]`."""
        self.pool, self.contexts, self.size = pool, contexts, size
        self.past: list[list[tuple[Tensor, Tensor]]] = []  # per later block, per layer, [leaves, K, ..]
        self.cuts: Tensor | None = None  # [requests * leaves, blocks so far]

    def start(self, source: Tensor | None, cuts: Tensor) -> None:
        """Begin the next block.

        source `[requests * leaves]` the leaf of the last block that each new leaf continues (None at the
        first, which continues block 1); cuts `[requests * leaves]` how many of its slots lead to the new one.
        """
        own = cuts.unsqueeze(1)
        if source is None:
            self.cuts = own
        else:
            assert self.cuts is not None
            self.past = [[(k[source], v[source]) for k, v in block] for block in self.past]
            self.cuts = torch.cat([self.cuts[source], own], dim=1)
        self.past.append([])

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self.cuts is not None
        self.past[-1].append((keys, values))
        blocks = [block[layer] for block in self.past]
        own_keys = torch.cat([k for k, _ in blocks], dim=1)  # [leaves, blocks * K, kv_heads, dim]
        own_values = torch.cat([v for _, v in blocks], dim=1)
        own_mask = self._own_mask()  # [leaves, K, blocks * K]
        leaves = len(queries) // len(self.contexts)
        out = []
        for i, context in enumerate(self.contexts):
            span = slice(i * leaves, (i + 1) * leaves)
            k, v = self.pool.read(layer, context)
            limit = (len(context) - 1) * self.size + self.cuts[span, 0]  # [leaves] keys of block 1 seen
            seen = torch.arange(len(k), device=k.device) < limit.unsqueeze(1)
            seen = seen.repeat_interleave(self.size, dim=0)  # [leaves * K, keys]
            private = torch.block_diag(*own_mask[span].int().unbind()).bool()
            k = torch.cat([k.to(keys.dtype), own_keys[span].flatten(0, 1)])
            v = torch.cat([v.to(values.dtype), own_values[span].flatten(0, 1)])
            out.append(attend(queries[span].flatten(0, 1), k, v, torch.cat([seen, private], dim=1)))
        return torch.cat(out).unflatten(0, (-1, self.size))

    def _own_mask(self) -> Tensor:
        """Which slots of the later blocks on its own path a leaf's slots see, `[leaves, K, blocks * K]`."""
        assert self.cuts is not None
        slot = torch.arange(self.size, device=self.cuts.device)
        earlier = slot < self.cuts[:, 1:, None]  # [leaves, blocks - 1, K]
        earlier = earlier.flatten(1).unsqueeze(1).expand(-1, self.size, -1)
        own = (slot <= slot.unsqueeze(1)).expand(len(self.cuts), -1, -1)
        return torch.cat([earlier, own], dim=2)
