# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `write_successors`: a program checks one node's rivals, and writes its rows if it wins."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .retrieve_kernel import context_place
from .successor_table import HASH_MULTIPLIER, HASH_SHIFT, TOKEN_FIELD, TOKEN_MASK, SuccessorTable
from .top_successors import TopSuccessors

RIVALS = 128


@triton.jit
def _priority(accepted_ptr, depths_ptr, node, there):
    """Smaller wins: accepted, then shallow, then the lower position."""
    rejected = (tl.load(accepted_ptr + node, mask=there, other=0) == 0).to(tl.int64)
    depth = tl.load(depths_ptr + node, mask=there, other=0)
    return (rejected << 48) + (depth << 32) + node


@triton.jit
def _node(tokens_ptr, parents_ptr, table_index_ptr, node, there, vocab_size, num_tables, SLOTS: tl.constexpr):
    """Token, table and presence of a node."""
    token = tl.load(tokens_ptr + node, mask=there, other=-1)
    parent = tl.load(parents_ptr + node, mask=there, other=-1)
    index = tl.load(table_index_ptr + node // SLOTS, mask=there, other=-1)
    real = there & ((node % SLOTS == 0) | (parent >= 0))
    real = real & (index >= 0) & (index < num_tables) & (token >= 0) & (token < vocab_size)
    return token, parent, index, real


@triton.jit
def _known_token(tokens_ptr, node, there, vocab_size, TOKEN_MASK: tl.constexpr):
    """A node's token as it stands in a context: all bits set when it is unknown."""
    token = tl.load(tokens_ptr + node, mask=there, other=-1)
    return tl.where((token >= 0) & (token < vocab_size), token, -1) & TOKEN_MASK


@triton.jit
def _context(
    tokens_ptr,
    parents_ptr,
    contexts_ptr,
    node,
    parent,
    there,
    vocab_size,
    SLOTS: tl.constexpr,
    CONTEXT_MASK: tl.constexpr,
    FIELD: tl.constexpr,
    TOKEN_MASK: tl.constexpr,
):
    """`table_update.node_contexts`: what stands before a node."""
    first = node // SLOTS * SLOTS
    is_root = node % SLOTS == 0
    of_root = tl.load(contexts_ptr + node // SLOTS, mask=there, other=-1)
    above = tl.minimum(tl.maximum(parent, 0), SLOTS - 1)
    nearest = _known_token(tokens_ptr, first + above, there & ~is_root, vocab_size, TOKEN_MASK)
    parent_above = tl.load(parents_ptr + first + above, mask=there & ~is_root, other=0)
    parent_above = tl.minimum(tl.maximum(parent_above, 0), SLOTS - 1)
    further = _known_token(
        tokens_ptr, first + parent_above, there & ~is_root & (above > 0), vocab_size, TOKEN_MASK
    )
    further = tl.where(above == 0, of_root & TOKEN_MASK, further)
    context = ((further << FIELD) | nearest) & CONTEXT_MASK
    return tl.where(is_root, of_root, context)


@triton.jit
def _write_kernel(
    table_tokens_ptr,  # [rows, K] int32
    table_probs_ptr,  # [rows, K] float16
    tags_ptr,  # [num_tables * CONTEXT_ROWS + 1] int64
    table_index_ptr,  # [batch] int64
    tokens_ptr,  # [batch, SLOTS] int64
    parents_ptr,  # [batch, SLOTS] int64
    depths_ptr,  # [batch, SLOTS] int64
    contexts_ptr,  # [batch] int64
    accepted_ptr,  # [batch, SLOTS] bool
    ids_ptr,  # [batch * SLOTS, K] int32
    probs_ptr,  # [batch * SLOTS, K] float16
    nodes,
    vocab_size,
    num_tables,
    first_context_row,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CONTEXT_ROWS: tl.constexpr,
    CONTEXT_MASK: tl.constexpr,
    FIELD: tl.constexpr,
    TOKEN_MASK: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    SHIFT: tl.constexpr,
    RIVALS: tl.constexpr,
):
    me = tl.program_id(0).to(tl.int64)
    token, parent, index, real = _node(
        tokens_ptr, parents_ptr, table_index_ptr, me, me >= 0, vocab_size, num_tables, SLOTS
    )
    row = index * vocab_size + token
    priority = _priority(accepted_ptr, depths_ptr, me, me >= 0)
    context = _context(
        tokens_ptr, parents_ptr, contexts_ptr, me, parent, me >= 0, vocab_size,
        SLOTS, CONTEXT_MASK, FIELD, TOKEN_MASK,
    )  # fmt: skip
    tag = (context << FIELD) + token
    place = context_place(tag, index, CONTEXT_ROWS, MULTIPLIER, SHIFT)
    real2 = real & (context >= 0)

    beaten = tl.zeros([], tl.int32)
    beaten2 = tl.zeros([], tl.int32)
    for start in range(0, nodes, RIVALS):
        rival = start + tl.arange(0, RIVALS).to(tl.int64)
        there = rival < nodes
        rival_token, rival_parent, rival_index, rival_real = _node(
            tokens_ptr, parents_ptr, table_index_ptr, rival, there, vocab_size, num_tables, SLOTS
        )
        better = rival_real & (_priority(accepted_ptr, depths_ptr, rival, there) < priority)
        same = rival_index * vocab_size + rival_token == row
        beaten += tl.sum((better & same).to(tl.int32), axis=0)
        if CONTEXT_ROWS > 0:
            rival_context = _context(
                tokens_ptr, parents_ptr, contexts_ptr, rival, rival_parent, there, vocab_size,
                SLOTS, CONTEXT_MASK, FIELD, TOKEN_MASK,
            )  # fmt: skip
            rival_tag = (rival_context << FIELD) + rival_token
            same = context_place(rival_tag, rival_index, CONTEXT_ROWS, MULTIPLIER, SHIFT) == place
            beaten2 += tl.sum((better & same & (rival_context >= 0)).to(tl.int32), axis=0)

    lane = tl.arange(0, K_BLOCK)
    ids = tl.load(ids_ptr + me * K + lane, mask=lane < K, other=-1)
    probs = tl.load(probs_ptr + me * K + lane, mask=lane < K, other=0.0)
    wins = real & (beaten == 0) & (lane < K)
    tl.store(table_tokens_ptr + row * K + lane, ids, mask=wins)
    tl.store(table_probs_ptr + row * K + lane, probs, mask=wins)
    if CONTEXT_ROWS > 0:
        row2 = first_context_row + place
        wins2 = real2 & (beaten2 == 0) & (lane < K)
        tl.store(table_tokens_ptr + row2 * K + lane, ids, mask=wins2)
        tl.store(table_probs_ptr + row2 * K + lane, probs, mask=wins2)
        tl.store(tags_ptr + place, tag, mask=real2 & (beaten2 == 0))


def write_successors_triton(
    table: SuccessorTable,
    table_index: Tensor,  # [batch] int64
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    depths: Tensor,  # [batch, slots] int64
    contexts: Tensor,  # [batch] int64
    accepted: Tensor,  # [batch, slots] bool
    best: TopSuccessors,  # of [batch * slots] rows
) -> None:
    """Triton side of `write_successors`."""
    nodes = tokens.numel()
    _write_kernel[(nodes,)](
        table.tokens,
        table.probs,
        table.tags,
        table_index,
        tokens.contiguous(),
        parents.contiguous(),
        depths.contiguous(),
        contexts,
        accepted.contiguous(),
        best.ids,
        best.probs,
        nodes,
        table.vocab_size,
        table.num_tables,
        table.first_context_row,
        SLOTS=tokens.shape[1],
        K=table.k,
        K_BLOCK=triton.next_power_of_2(table.k),
        CONTEXT_ROWS=table.context_rows,
        CONTEXT_MASK=table.context_mask,
        FIELD=TOKEN_FIELD,
        TOKEN_MASK=TOKEN_MASK,
        MULTIPLIER=HASH_MULTIPLIER,
        SHIFT=HASH_SHIFT,
        RIVALS=RIVALS,
        num_warps=2,
    )
