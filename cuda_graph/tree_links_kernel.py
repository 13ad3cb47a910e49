# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `tree_links`: one program builds one request's mask rows, positions and links."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tree_links import TreeLinks, TreeMaskMode, packed_dtype


@triton.jit
def _tree_links_kernel(
    parents_ptr,  # [batch, slots] int64
    seq_lens_ptr,  # [batch] int64
    mask_ptr,  # flat, bool or packed
    positions_ptr,  # [batch, slots] int64
    index_ptr,  # [batch, slots] int64
    next_token_ptr,  # [batch, slots] int64
    next_sibling_ptr,  # [batch, slots] int64
    SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOT_BLOCK)
    in_tree = slot < SLOTS
    first = row * SLOTS
    stored = tl.load(parents_ptr + first + slot, mask=in_tree & (slot > 0), other=-1)
    seq_len = tl.load(seq_lens_ptr + row)

    # Climb from every slot at once until all have reached the root; an empty slot stands right below it.
    attends = slot[:, None] == slot[None, :]
    depth = tl.zeros([SLOT_BLOCK], tl.int64)
    current = tl.where(slot > 0, tl.minimum(tl.maximum(stored, 0), SLOTS - 1), 0)
    below_root = (slot > 0) & in_tree
    for _ in range(SLOTS - 1):
        attends = attends | (current[:, None] == slot[None, :])
        depth += below_root.to(tl.int64)
        below_root = below_root & (current > 0)
        above = tl.load(parents_ptr + first + current, mask=below_root, other=0)
        current = tl.minimum(tl.maximum(above, 0), SLOTS - 1)

    # A slot's links: the lowest child, and the next higher slot with the same parent.
    is_child = (stored[None, :] == slot[:, None]) & in_tree[None, :]
    next_token = tl.min(tl.where(is_child, slot[None, :], SLOT_BLOCK), axis=1)
    shares = (stored[None, :] == stored[:, None]) & (stored >= 0)[:, None] & (slot[None, :] > slot[:, None])
    next_sibling = tl.min(tl.where(shares, slot[None, :], SLOT_BLOCK), axis=1)

    tl.store(positions_ptr + first + slot, seq_len + depth, mask=in_tree)
    tl.store(index_ptr + first + slot, first + slot, mask=in_tree)
    tl.store(next_token_ptr + first + slot, tl.where(next_token == SLOT_BLOCK, -1, next_token), mask=in_tree)
    tl.store(
        next_sibling_ptr + first + slot, tl.where(next_sibling == SLOT_BLOCK, -1, next_sibling), mask=in_tree
    )

    cells = in_tree[:, None] & in_tree[None, :]
    if MODE == 2:
        bits = tl.where(attends & cells, 1, 0).to(tl.int64) << slot[None, :].to(tl.int64)
        packed = tl.sum(bits, axis=1)
        tl.store(mask_ptr + first + slot, packed.to(mask_ptr.dtype.element_ty), mask=in_tree)
    else:
        row_len = tl.zeros([], tl.int64) + SLOTS
        start = first * SLOTS
        if MODE == 0:
            other = tl.arange(0, BATCH_BLOCK)
            before = tl.load(seq_lens_ptr + other, mask=other < row, other=0)
            start += tl.sum(before) * SLOTS + seq_len
            row_len += seq_len
        cell = start + slot[:, None] * row_len + slot[None, :]
        tl.store(mask_ptr + cell, attends.to(mask_ptr.dtype.element_ty), mask=cells)


def tree_links_triton(
    parents: Tensor,  # [batch, slots] int64
    seq_lens: Tensor,  # [batch] int64
    mask_mode: TreeMaskMode,
    mask_out: Tensor | None,
) -> TreeLinks:
    """Triton side of `tree_links`."""
    batch, slots = parents.shape
    if mask_out is None:
        packed = mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING
        cells = batch * slots if packed else batch * slots * slots
        dtype = packed_dtype(slots) if packed else torch.bool
        mask_out = torch.empty(cells, dtype=dtype, device=parents.device)
    rows = torch.empty((4, batch, slots), dtype=torch.long, device=parents.device)
    _tree_links_kernel[(batch,)](
        parents.contiguous(),
        seq_lens,
        mask_out,
        *rows,
        SLOTS=slots,
        SLOT_BLOCK=triton.next_power_of_2(slots),
        BATCH_BLOCK=triton.next_power_of_2(batch),
        MODE=int(mask_mode),
    )
    positions, index, next_token, next_sibling = rows
    return TreeLinks(mask_out, positions.flatten(), index, next_token, next_sibling)
