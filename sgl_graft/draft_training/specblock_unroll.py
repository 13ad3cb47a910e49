"""Blocks of a SpecBlock draft over whole dialogues, as training sees them.

Block 1 runs at every position, because its keys and values are what later positions attend to; its last layer
answers for target rows only. Every later block continues a random share of the rows at a random slot, fed the
true token there (paper section 3; design note 4.2). Who sees whom is `specblock.visibility`, so that training
and serving cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_graft.draft_training.eagle3 import run_lengths
from sgl_graft.draft_training.features import Sample
from sgl_graft.specblock.model import SpecBlockDraft
from sgl_graft.specblock.visibility import Places, attend, visible

Cut = Callable[[int], Tensor]  # rows -> `[rows]`, which slot (1-based) of its block each next block continues


@dataclass
class BlockRows:
    """What one block proposes."""

    hidden: Tensor  # [rows, K, hidden] before the final norm
    target: Tensor  # [rows, K] index into the batch's targets of what each slot must predict
    valid: Tensor  # [rows, K] bool, whether that target belongs to the row's answer
    first: Tensor  # [rows] index into the batch's targets of the row itself


def unroll(
    draft: SpecBlockDraft,
    samples: Sequence[Sample],
    embedding: Tensor,
    blocks: int,
    cut: Cut,
    keep: float = 1.0,
    random: torch.Generator | None = None,
) -> list[BlockRows]:
    """Run `blocks` chained blocks from every target row of `samples`.

    embedding `[vocab, hidden]` is the target's, which serving shares. Each block after the first goes on with
    a random share `keep` of the rows that the one before it had.
    """
    size = draft.block
    lengths = torch.tensor([len(s.ids) for s in samples])
    starts = lengths.cumsum(0) - lengths  # [samples] flat position of each dialogue's first token
    ids = torch.cat([s.ids for s in samples])  # [tokens]
    local = torch.cat([torch.arange(len(s.ids)) for s in samples])  # [tokens]
    counts = torch.tensor([len(s.rows) for s in samples])
    owner = torch.repeat_interleave(torch.arange(len(samples)), counts)  # [targets]
    rows = torch.cat([s.rows for s in samples]) + starts[owner]  # [targets] flat position
    left = run_lengths(rows)  # [targets] targets from here to the end of the answer
    context = _Context(size, lengths.tolist())

    features = torch.cat([s.features for s in samples]).to(embedding.dtype)
    alive = (left > 1).nonzero()[:, 0]  # indices of targets whose chain of blocks is still running
    context.select(local[rows[alive]], owner[alive])
    inputs = draft.first_inputs(features, embedding[ids.roll(-1)])
    hidden = draft.run(inputs, local, context, rows[alive])
    offset = torch.zeros(len(alive), dtype=torch.long)  # [rows] tokens the earlier blocks have covered
    slots = torch.arange(size)
    out: list[BlockRows] = []
    for block in range(blocks):
        if block > 0:
            cuts = cut(len(alive))
            going = left[alive] > 1 + offset + cuts
            if keep < 1.0:
                going &= torch.rand(len(alive), generator=random) < keep
            kept = going.nonzero()[:, 0]
            cuts, offset = cuts[kept], offset[kept] + cuts[kept]
            condition = hidden[kept, cuts - 1]  # [rows, hidden]
            alive = alive[kept]
            context.go_on(kept, cuts)
            inputs = draft.next_inputs(condition, embedding[ids[rows[alive] + 1 + offset]])
            hidden = draft.run(inputs, local[rows[alive]], context)
        ahead = 1 + offset.unsqueeze(1) + slots  # [rows, K]
        out.append(
            BlockRows(hidden, alive.unsqueeze(1) + ahead, left[alive].unsqueeze(1) > ahead, first=alive)
        )
    return out


class _Context:
    """`model.Attend` over the keys and values that the blocks of several dialogues have left."""

    def __init__(self, size: int, lengths: Sequence[int]) -> None:
        self.size = size
        self.bounds = _spans(lengths)  # per dialogue, its positions
        self.base: list[tuple[Tensor, Tensor]] = []  # per layer, block 1's [tokens, K, kv_heads, dim]
        self.later: list[list[tuple[Tensor, Tensor]]] = []  # per earlier block >= 2, per layer
        self.block = 0
        self.cuts = torch.zeros(0, 0, dtype=torch.long)  # [rows, blocks]

    def select(self, rows: Tensor, owner: Tensor) -> None:
        """The rows that go on: local positions `[rows]`, dialogue of each `[rows]`, ascending."""
        self.rows, self.owner = rows, owner
        self.spans = _spans(torch.bincount(owner, minlength=len(self.bounds)).tolist())
        self.cuts = torch.zeros(len(rows), 0, dtype=torch.long)

    def go_on(self, kept: Tensor, cuts: Tensor) -> None:
        """Start the next block for the rows `kept`, each at its slot `cuts` (1-based) of the last block."""
        past = torch.cat([self.cuts[kept], cuts.unsqueeze(1)], dim=1)
        self.later = [[(k[kept], v[kept]) for k, v in block] for block in self.later]
        self.select(self.rows[kept], self.owner[kept])
        self.cuts = past
        self.block += 1
        self.later.append([])
        self.masks: list[Tensor | None] = [None] * len(self.bounds)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.block == 0:
            self.base.append((keys, values))
        else:
            self.later[-1].append((keys, values))
        run = self._first_block if self.block == 0 else self._later_block
        parts = [
            run(layer, i, queries, everything=len(queries) == len(keys) and self.block == 0)
            for i in range(len(self.bounds))
        ]
        return torch.cat(parts).unflatten(0, (-1, self.size))

    def _first_block(self, layer: int, i: int, queries: Tensor, everything: bool) -> Tensor:
        """Row by row, slot by slot, block 1 is one causal sequence."""
        a, b = self.bounds[i]
        keys, values = (t[a:b].flatten(0, 1) for t in self.base[layer])
        if everything:
            return attend(queries[a:b].flatten(0, 1), keys, values, None)
        first, last = self.spans[i]
        place = self.rows[first:last].unsqueeze(1) * self.size + torch.arange(self.size)  # [rows, K]
        mask = torch.arange(len(keys)) <= place.flatten().unsqueeze(1)
        return attend(queries[first:last].flatten(0, 1), keys, values, mask)

    def _later_block(self, layer: int, i: int, queries: Tensor, everything: bool) -> Tensor:
        (a, b), (first, last) = self.bounds[i], self.spans[i]
        own = [(k[first:last], v[first:last]) for k, v in (block[layer] for block in self.later)]
        keys = torch.cat([self.base[layer][0][a:b], *(k for k, _ in own)]).flatten(0, 1)
        values = torch.cat([self.base[layer][1][a:b], *(v for _, v in own)]).flatten(0, 1)
        if self.masks[i] is None:
            self.masks[i] = self._mask(b - a, first, last)
        return attend(queries[first:last].flatten(0, 1), keys, values, self.masks[i])

    def _mask(self, length: int, first: int, last: int) -> Tensor:
        rows = self.rows[first:last]
        places = Places.of(torch.arange(length), 0, self.size)
        for block in range(1, self.block + 1):
            places = places.joined(Places.of(rows, block, self.size))
        cuts = self.cuts[first:last].repeat_interleave(self.size, dim=0)
        return visible(Places.of(rows, self.block, self.size), places, cuts)


def _spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(list(counts)).cumsum(0).tolist()
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]
