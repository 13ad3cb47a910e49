# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `retrieve`: one program walks the table for one request, level after level."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .successor_table import HASH_MULTIPLIER, HASH_SHIFT, TOKEN_FIELD, TOKEN_MASK, SuccessorTable

if TYPE_CHECKING:
    from .retrieve import DeviceTemplate, Retrieved


@triton.jit
def context_place(
    tags, table_index, CONTEXT_ROWS: tl.constexpr, MULTIPLIER: tl.constexpr, SHIFT: tl.constexpr
):
    """`successor_table.context_places`."""
    return table_index * CONTEXT_ROWS + (((tags * MULTIPLIER) >> SHIFT) & (CONTEXT_ROWS - 1))


@triton.jit
def _retrieve_kernel(
    table_tokens_ptr,  # [rows, K] int32
    table_probs_ptr,  # [rows, K] float16
    tags_ptr,  # [num_tables * CONTEXT_ROWS + 1] int64
    table_index_ptr,  # [batch] int64
    root_ptr,  # [batch] int64
    contexts_ptr,  # [batch] int64
    fathers_ptr,  # [nodes] int64
    ranks_ptr,  # [nodes] int64
    level_starts_ptr,  # [LEVELS + 1] int64
    tokens_ptr,  # [batch, nodes] int64
    probs_ptr,  # [batch, nodes] float32
    vocab_size,
    num_tables,
    first_context_row,
    empty_row,
    NODES: tl.constexpr,
    LEVELS: tl.constexpr,
    LEVEL_BLOCK: tl.constexpr,
    K: tl.constexpr,
    CONTEXT_ROWS: tl.constexpr,
    CONTEXT_MASK: tl.constexpr,
    FIELD: tl.constexpr,
    TOKEN_MASK: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out = row * NODES
    root = tl.load(root_ptr + row)
    index = tl.load(table_index_ptr + row)
    has_table = (index >= 0) & (index < num_tables)
    root = tl.where(has_table & (root >= 0) & (root < vocab_size), root, -1)
    root_context = tl.load(contexts_ptr + row)
    below_root = ((root_context << FIELD) | (root & TOKEN_MASK)) & CONTEXT_MASK
    index = tl.minimum(tl.maximum(index, 0), num_tables - 1)

    for level in range(LEVELS):
        start = tl.load(level_starts_ptr + level)
        stop = tl.load(level_starts_ptr + level + 1)
        node = start + tl.arange(0, LEVEL_BLOCK)
        there = node < stop
        father = tl.load(fathers_ptr + node, mask=there, other=-1)
        rank = tl.load(ranks_ptr + node, mask=there, other=0)
        below = there & (father >= 0)
        grandfather = tl.load(fathers_ptr + father, mask=below, other=-1)
        last = tl.load(tokens_ptr + out + father, mask=below, other=0)
        last = tl.where(father < 0, root, last)
        # What stands before the father: its own father and grandfather, or what led to the root.
        deep = below & (grandfather >= 0)
        ancestor = tl.load(fathers_ptr + grandfather, mask=deep, other=-1)
        nearest = tl.load(tokens_ptr + out + grandfather, mask=deep, other=0)
        further = tl.load(tokens_ptr + out + ancestor, mask=deep & (ancestor >= 0), other=0)
        further = tl.where(ancestor < 0, root, further)
        context = (((further & TOKEN_MASK) << FIELD) | (nearest & TOKEN_MASK)) & CONTEXT_MASK
        context = tl.where(father < 0, root_context, tl.where(grandfather < 0, below_root, context))
        path_prob = tl.load(probs_ptr + out + father, mask=below, other=1.0)

        rows = index * vocab_size + last
        if CONTEXT_ROWS > 0:
            tags = (context << FIELD) + last
            place = context_place(tags, index, CONTEXT_ROWS, MULTIPLIER, SHIFT)
            stored = tl.load(tags_ptr + place, mask=there, other=-1)
            rows = tl.where(stored == tags, first_context_row + place, rows)
        rows = tl.where(last < 0, empty_row, rows)
        found = tl.load(table_tokens_ptr + rows * K + rank, mask=there, other=-1).to(tl.int64)
        step_prob = tl.load(table_probs_ptr + rows * K + rank, mask=there, other=0.0).to(tl.float32)
        step_prob = tl.where((step_prob > 0) & (step_prob < float("inf")), step_prob, 0.0)
        found = tl.where((found >= 0) & (found < vocab_size), found, -1)
        prob = tl.where(found >= 0, path_prob * tl.minimum(step_prob, 1.0), 0.0)
        tl.store(tokens_ptr + out + node, found, mask=there)
        tl.store(probs_ptr + out + node, prob, mask=there)
        tl.debug_barrier()  # the next level reads what other threads stored here


def retrieve_triton(
    table: SuccessorTable,
    template: DeviceTemplate,
    table_index: Tensor,  # [batch] int64
    root_tokens: Tensor,  # [batch] int64
    contexts: Tensor,  # [batch] int64
) -> Retrieved:
    """Triton side of `retrieve`."""
    from .retrieve import Retrieved

    batch, nodes = root_tokens.shape[0], template.template.num_nodes
    tokens = torch.empty((batch, nodes), dtype=torch.long, device=root_tokens.device)
    probs = torch.empty((batch, nodes), dtype=torch.float32, device=root_tokens.device)
    if not nodes:
        return Retrieved(tokens, probs)
    _retrieve_kernel[(batch,)](
        table.tokens,
        table.probs,
        table.tags,
        table_index,
        root_tokens,
        contexts,
        template.fathers,
        template.ranks,
        template.level_starts,
        tokens,
        probs,
        table.vocab_size,
        table.num_tables,
        table.first_context_row,
        table.empty_row,
        NODES=nodes,
        LEVELS=len(template.level_sizes),
        LEVEL_BLOCK=triton.next_power_of_2(max(template.level_sizes)),
        K=table.k,
        CONTEXT_ROWS=table.context_rows,
        CONTEXT_MASK=table.context_mask,
        FIELD=TOKEN_FIELD,
        TOKEN_MASK=TOKEN_MASK,
        MULTIPLIER=HASH_MULTIPLIER,
        SHIFT=HASH_SHIFT,
        num_warps=1,
    )
    return Retrieved(tokens, probs)
