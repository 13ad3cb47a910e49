"""Turn a tree into what the verify pass reads: attention mask, positions and retrieve links.

The layouts are those of SGLang 0.5.23's `build_tree_kernel_efficient` (`srt/speculative/eagle_utils.py`),
so its attention backends and verify kernels take the result as it is. An empty slot looks like a leaf below
the root that nothing links to: it attends to the prefix, the root and itself, and no walk can reach it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import host_op, use_triton

MAX_BITPACKED_SLOTS = 32


class TreeMaskMode(IntEnum):
    """SGLang's mask layouts, with its numbering.

    FULL_MASK: per request, `slots` rows of `seq_len + slots` cells, requests end to end.
    QLEN_ONLY: per request, `slots` rows of `slots` cells.
    QLEN_ONLY_BITPACKING: one unsigned integer per slot, bit j set when it attends to slot j.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class TreeLinks(NamedTuple):
    """Everything the verify pass derives from a tree's shape."""

    tree_mask: Tensor  # flat, bool or a packed unsigned integer: see TreeMaskMode
    positions: Tensor  # [batch * slots] int64, sequence position of each slot: seq_len + depth
    retrieve_index: Tensor  # [batch, slots] int64, row of each slot in the flattened verify batch
    retrieve_next_token: Tensor  # [batch, slots] int64, first child, -1 when there is none
    retrieve_next_sibling: Tensor  # [batch, slots] int64, next child of the same parent, -1 at the end


def tree_links(
    parents: Tensor,  # [batch, slots] int64
    seq_lens: Tensor,  # [batch] int64, committed tokens before the root
    mask_mode: TreeMaskMode = TreeMaskMode.QLEN_ONLY,
    mask_out: Tensor | None = None,  # flat buffer that takes the mask; required for FULL_MASK
    fill_prefix: bool = True,  # FULL_MASK: also set the cells of the committed prefix
) -> TreeLinks:
    """Build mask, positions and retrieve links of a batch of trees.

    `mask_out` may be longer than needed (a captured graph's buffer): only the cells of this batch are
    written, except that `fill_prefix` sets the whole buffer first, as SGLang does. Siblings link in slot
    order.

    Raises ValueError when FULL_MASK comes without a buffer (its size depends on `seq_lens`, which the host
    may not read) or when a bit-packed row would not fit in 32 bits.
    """
    slots = parents.shape[1]
    if mask_mode == TreeMaskMode.FULL_MASK and mask_out is None:
        raise ValueError(
            "FULL_MASK needs mask_out, a bool buffer of sum(seq_lens) * slots + batch * slots**2 cells"
        )
    if mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING and slots > MAX_BITPACKED_SLOTS:
        raise ValueError(
            f"bit packing holds {MAX_BITPACKED_SLOTS} slots, not {slots}: use QLEN_ONLY or fewer slots"
        )
    if mask_mode == TreeMaskMode.FULL_MASK and fill_prefix and mask_out is not None:
        mask_out.fill_(True)
    if use_triton(parents):
        from .tree_links_kernel import tree_links_triton

        return tree_links_triton(parents, seq_lens, mask_mode, mask_out)
    return host_op(tree_links_torch)(parents, seq_lens, mask_mode, mask_out)


def tree_links_torch(
    parents: Tensor,  # [batch, slots] int64
    seq_lens: Tensor,  # [batch] int64
    mask_mode: TreeMaskMode,
    mask_out: Tensor | None,
) -> TreeLinks:
    """Reference of `tree_links`."""
    batch, slots = parents.shape
    attends = ancestor_mask(parents)  # [batch, slots, slots]
    depths = attends.sum(-1) - 1  # [batch, slots]
    rows = torch.arange(batch * slots, device=parents.device).view(batch, slots)
    next_token, next_sibling = _child_links(parents)
    return TreeLinks(
        tree_mask=_lay_out_mask(attends, seq_lens, mask_mode, mask_out),
        positions=(depths + seq_lens.unsqueeze(1)).flatten(),
        retrieve_index=rows,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
    )


def ancestor_mask(
    parents: Tensor,  # [batch, slots] int64
) -> Tensor:  # [batch, slots, slots] bool
    """Cell (i, j) is set when slot j is slot i or an ancestor of it. An empty slot has itself and the root.

    Ancestors are gathered by pointer doubling: each pass doubles the number of steps towards the root that a
    row covers, so log2(slots) passes do for a tree of any shape.
    """
    batch, slots = parents.shape
    slot = torch.arange(slots, device=parents.device)
    # The root and the empty slots point at the root; no garbage can point outside the row.
    jumps = torch.where(slot > 0, parents, 0).clamp(0, slots - 1)  # [batch, slots]
    attends = (slot.unsqueeze(1) == slot) | (jumps.unsqueeze(2) == slot)
    for _ in range((slots - 1).bit_length() - 1):
        jumps = jumps.gather(1, jumps)
        attends = attends | attends.gather(1, jumps.unsqueeze(2).expand(batch, slots, slots))
    return attends


def _child_links(
    parents: Tensor,  # [batch, slots] int64
) -> tuple[Tensor, Tensor]:  # both [batch, slots] int64
    """First child of each slot and next sibling of each slot, -1 where there is none."""
    slots = parents.shape[1]
    slot = torch.arange(slots, device=parents.device)
    # No slot is anyone's child at index 0, so the root's own entry can never match.
    child = torch.where(slot > 0, parents, -1)  # [batch, slots]
    is_child = slot.unsqueeze(1) == child.unsqueeze(1)  # [batch, parent, child]
    next_token = torch.where(is_child, slot, slots).amin(-1)
    later = slot > slot.unsqueeze(1)  # [slot, later slot]
    shares = (child.unsqueeze(2) == child.unsqueeze(1)) & later & (child >= 0).unsqueeze(2)
    next_sibling = torch.where(shares, slot, slots).amin(-1)
    return _absent_to_minus_one(next_token, slots), _absent_to_minus_one(next_sibling, slots)


def _absent_to_minus_one(index: Tensor, absent: int) -> Tensor:
    return torch.where(index == absent, -1, index)


def _lay_out_mask(
    attends: Tensor,  # [batch, slots, slots] bool
    seq_lens: Tensor,  # [batch] int64
    mask_mode: TreeMaskMode,
    mask_out: Tensor | None,
) -> Tensor:
    if mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        return _into_buffer(pack_rows(attends).flatten(), mask_out)
    if mask_mode == TreeMaskMode.QLEN_ONLY or mask_out is None:
        return _into_buffer(attends.flatten(), mask_out)
    slots = attends.shape[1]
    slot = torch.arange(slots, device=attends.device)
    row_len = seq_lens + slots  # [batch]
    block_start = (torch.cumsum(row_len, 0) - row_len) * slots  # [batch]
    row_start = (
        block_start.unsqueeze(1) + slot * row_len.unsqueeze(1) + seq_lens.unsqueeze(1)
    )  # [batch, slots]
    cells = row_start.unsqueeze(2) + slot  # [batch, slots, slots]
    mask_out.scatter_(0, cells.flatten(), attends.flatten().to(mask_out.dtype))
    return mask_out


def _into_buffer(mask: Tensor, mask_out: Tensor | None) -> Tensor:
    if mask_out is None:
        return mask
    mask_out[: mask.numel()].copy_(mask)
    return mask_out


def packed_dtype(slots: int) -> torch.dtype:
    """The unsigned integer that SGLang packs a row of `slots` mask bits into."""
    if slots <= 8:
        return torch.uint8
    return torch.uint16 if slots <= 16 else torch.uint32


def pack_rows(
    attends: Tensor,  # [batch, slots, slots] bool
) -> Tensor:  # [batch, slots] unsigned
    """One integer per row, bit j set where cell j is."""
    slots = attends.shape[2]
    bits = torch.arange(slots, device=attends.device)
    return (attends.long() << bits).sum(-1).to(packed_dtype(slots))
