"""Who sees whom inside a SpecBlock draft, in one place for training, serving and tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Places(NamedTuple):
    """Where queries or keys stand, one tensor entry each (broadcastable integers).

    row: index of the features the row was made from.
    block: 0 for the block that reads target features, then 1, 2, ...
    slot: 0 .. K - 1 within the block.
    """

    row: Tensor
    block: Tensor
    slot: Tensor

    @classmethod
    def of(cls, rows: Tensor, block: int, size: int) -> Places:
        """All slots of `rows` `[rows]` in `block`, flattened to `[rows * size]`, row by row."""
        slot = torch.arange(size, device=rows.device).repeat(len(rows))
        return cls(rows.repeat_interleave(size), torch.full_like(slot, block), slot)

    def joined(self, other: Places) -> Places:
        return Places(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


def visible(queries: Places, keys: Places, cuts: Tensor) -> Tensor:
    """Boolean `[queries, keys]`.

    A query sees: block 0 of every earlier row; of its own row, each earlier block's slots before that block's
    cut (the slots that lead to where the next block starts); of its own block, the slots up to its own.
    `cuts` `[queries, blocks]` holds how many slots of each earlier block count, and is not read for the
    query's own block and later ones.

    The reference lets a later block also see that block of earlier rows while training, but never while
    serving (design note 2.5); here it is never seen.
    """
    row, block, slot = (q.unsqueeze(1) for q in queries)
    same_row = row == keys.row
    earlier_row = (keys.row < row) & (keys.block == 0)
    leads_here = keys.slot < cuts.gather(
        1, keys.block.clamp_max(cuts.shape[1] - 1).expand(cuts.shape[0], len(keys.block))
    )
    earlier_block = same_row & (keys.block < block) & leads_here
    own_block = same_row & (keys.block == block) & (keys.slot <= slot)
    return earlier_row | earlier_block | own_block


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of one sequence.

    queries `[q, heads, dim]`; keys and values `[k, kv_heads, dim]`; mask `[q, k]` True where seen, None for
    "the first q of k keys, causally". Returns `[q, heads * dim]`.
    """
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).flatten(1)
