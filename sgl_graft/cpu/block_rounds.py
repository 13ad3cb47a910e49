"""SpecBlock's rounds on a CPU with kernels: `specblock.rounds.Blocks` in one call per block.

The entries of later blocks go where the verify's slots are, which the engine has reserved behind every
request: nothing is copied together, and each query reads its keys where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..specblock.pool_attention import DraftPool
from ..specblock.rounds import Continuation, NewRows, Part, TorchBlocks, in_parts
from .block_draft import BlockDraft, Reach, fits


def native_blocks(draft: Any, pool: DraftPool, reserved: int, positions: int) -> NativeBlocks | None:
    """The kernels for a draft and its pools, None where they do not fit; positions: most of a request."""
    if not fits(draft, pool.keys[0].dtype) or not all(k.is_contiguous() for k in (*pool.keys, *pool.values)):
        return None
    # Later slots of a row stand at later rotary positions than the row itself.
    blocks = BlockDraft(draft, pool.keys, pool.values, positions + draft.block + 1)
    return NativeBlocks(blocks, pool, reserved)


class NativeBlocks:
    """
    Args:
        blocks: the draft's kernels.
        pool: what they write to.
        reserved: slots behind each request's committed ones that a round may write to.
    """

    def __init__(self, blocks: BlockDraft, pool: DraftPool, reserved: int) -> None:
        self._blocks, self._reserved = blocks, reserved
        self._plain = TorchBlocks(blocks.draft, pool)
        self.propose = blocks.propose
        self.refresh = blocks.refresh

    def commit(self, rows: NewRows, features: Tensor, embeds: Tensor) -> Tensor:
        table = entries_of(rows.slots, self._blocks.size)
        return in_parts(rows, lambda part, span: self._commit(part, table, features[span], embeds[span]))

    def _commit(self, part: Part, table: Tensor, features: Tensor, embeds: Tensor) -> Tensor:
        size, lengths, counts = self._blocks.size, part.rows.lengths, part.rows.counts
        spans = list(zip(part.owners, lengths, counts, strict=True))
        entries = torch.cat([table[i, (length - n) * size : length * size] for i, length, n in spans])
        places = torch.cat([torch.arange(length - n, length) for _, length, n in spans])
        last = torch.tensor(counts).cumsum(0) - 1
        return self._blocks.block(
            features,
            embeds,
            True,
            places,
            entries.long(),
            Reach(
                table, [n * size for n in counts], [(length - n) * size for _, length, n in spans],
                [n * size for n in counts], rows=part.owners,
            ),
            last[torch.tensor(part.ends)],
            Reach(
                table, [size * end for end in part.ends], [(length - 1) * size for length in lengths],
                [size] * len(counts), rows=part.owners,
            ),
        )  # fmt: skip

    def continuing(self, slots: Tensor, lengths: Sequence[int], planned: int) -> Continuation:
        if planned > self._reserved or max(lengths) + planned > slots.shape[1]:
            return self._plain.continuing(slots, lengths, planned)
        return _Rounds(self._blocks, entries_of(slots, self._blocks.size), lengths)


class _Rounds:
    """The later blocks of one round; every request's leaves write behind its own committed rows."""

    def __init__(
        self,
        blocks: BlockDraft,
        table: Tensor,  # [requests, places]
        lengths: Sequence[int],
    ) -> None:
        self._blocks, self._table, self._lengths = blocks, table, lengths
        self._paths: list[Tensor] = []  # per later block but the newest: the leaf that leads to each [leaves]
        self._cuts: list[Tensor] = []  # per block but the newest: how many of its slots lead on [leaves]
        self._starts = [0]  # per later block: leaves, of one request, before its own

    def next(
        self, source: Tensor | None, cuts: Tensor, condition: Tensor, embeds: Tensor, positions: Tensor
    ) -> Tensor:
        size, batch = self._blocks.size, len(self._lengths)
        leaves = len(cuts) // batch
        if source is not None:
            source = source % (self._starts[-1] - self._starts[-2])  # within its request
            self._cuts = [_of_leaf(cut, source, batch) for cut in self._cuts]
            self._paths = [*(_of_leaf(path, source, batch) for path in self._paths), source]
        self._cuts.append(cuts)
        start, end = self._starts[-1], self._starts[-1] + leaves
        behind = (torch.tensor(self._lengths) + start) * size  # [requests]
        where = behind.unsqueeze(1) + torch.arange(leaves * size)
        entries = self._table.gather(1, where).flatten().long()
        reach = Reach(
            self._table, [leaves * size] * batch, [(length - 1) * size for length in self._lengths],
            [(1 + end) * size] * batch, self._mask(batch, leaves),
        )  # fmt: skip
        self._starts.append(end)
        return self._blocks.block(condition, embeds, False, positions, entries, reach)

    def _mask(self, batch: int, leaves: int) -> Tensor:
        """`[requests, leaves * K, places * K]`: the row's slots of block 1, then the later blocks' leaves."""
        size, start = self._blocks.size, self._starts[-1]
        slot, every = torch.arange(size), torch.arange(batch * leaves)
        mask = torch.zeros(batch * leaves, size, 1 + start + leaves, size, dtype=torch.bool)
        mask[:, :, 0] = (slot < self._cuts[0].unsqueeze(1)).unsqueeze(1)
        for path, cut, first in zip(self._paths, self._cuts[1:], self._starts, strict=False):
            mask[every, :, 1 + first + path] = (slot < cut.unsqueeze(1)).unsqueeze(1)
        mask[every, :, 1 + start + every % leaves] = slot <= slot.unsqueeze(1)
        return mask.view(batch, leaves * size, -1)


def _of_leaf(values: Tensor, source: Tensor, batch: int) -> Tensor:
    """values `[requests * leaves]` of the leaf `source` `[requests * leaves]` within each request."""
    return values.view(batch, -1).gather(1, source.view(batch, -1)).flatten()


def entries_of(slots: Tensor, size: int) -> Tensor:
    """Entries of the pools `[requests, positions * K]` int32 of pool slots `[requests, positions]`."""
    return (slots.int().unsqueeze(2) * size + torch.arange(size, dtype=torch.int32)).flatten(1)
