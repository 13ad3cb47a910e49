# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `write_successors`: a program checks one node's rivals, and writes its rows if it wins."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .retrieve_kernel import pair_place
from .successor_table import HASH_MULTIPLIER, HASH_SHIFT, SuccessorTable
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
def _token_before(tokens_ptr, previous_ptr, node, parent, there, SLOTS: tl.constexpr):
    """The token a node follows: its parent's, or for a root the one before it."""
    is_root = node % SLOTS == 0
    slot = tl.minimum(tl.maximum(parent, 0), SLOTS - 1)
    above = tl.load(tokens_ptr + node // SLOTS * SLOTS + slot, mask=there & (node % SLOTS > 0), other=-1)
    previous = tl.load(previous_ptr + node // SLOTS, mask=there & is_root, other=-1)
    return tl.where(is_root, previous, above)


@triton.jit
def _write_kernel(
    table_tokens_ptr,  # [rows, K] int32
    table_probs_ptr,  # [rows, K] float16
    pairs_ptr,  # [num_tables * ORDER2_ROWS + 1] int64
    table_index_ptr,  # [batch] int64
    tokens_ptr,  # [batch, SLOTS] int64
    parents_ptr,  # [batch, SLOTS] int64
    depths_ptr,  # [batch, SLOTS] int64
    previous_ptr,  # [batch] int64
    accepted_ptr,  # [batch, SLOTS] bool
    ids_ptr,  # [batch * SLOTS, K] int32
    probs_ptr,  # [batch * SLOTS, K] float16
    nodes,
    vocab_size,
    num_tables,
    first_order2_row,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ORDER2_ROWS: tl.constexpr,
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
    before = _token_before(tokens_ptr, previous_ptr, me, parent, me >= 0, SLOTS)
    pair = (before << 32) + token
    place = pair_place(pair, index, ORDER2_ROWS, MULTIPLIER, SHIFT)
    real2 = real & (before >= 0) & (before < vocab_size)

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
        if ORDER2_ROWS > 0:
            rival_before = _token_before(tokens_ptr, previous_ptr, rival, rival_parent, there, SLOTS)
            rival_pair = (rival_before << 32) + rival_token
            same = pair_place(rival_pair, rival_index, ORDER2_ROWS, MULTIPLIER, SHIFT) == place
            known = (rival_before >= 0) & (rival_before < vocab_size)
            beaten2 += tl.sum((better & same & known).to(tl.int32), axis=0)

    lane = tl.arange(0, K_BLOCK)
    ids = tl.load(ids_ptr + me * K + lane, mask=lane < K, other=-1)
    probs = tl.load(probs_ptr + me * K + lane, mask=lane < K, other=0.0)
    wins = real & (beaten == 0) & (lane < K)
    tl.store(table_tokens_ptr + row * K + lane, ids, mask=wins)
    tl.store(table_probs_ptr + row * K + lane, probs, mask=wins)
    if ORDER2_ROWS > 0:
        row2 = first_order2_row + place
        wins2 = real2 & (beaten2 == 0) & (lane < K)
        tl.store(table_tokens_ptr + row2 * K + lane, ids, mask=wins2)
        tl.store(table_probs_ptr + row2 * K + lane, probs, mask=wins2)
        tl.store(pairs_ptr + place, pair, mask=real2 & (beaten2 == 0))


def write_successors_triton(
    table: SuccessorTable,
    table_index: Tensor,  # [batch] int64
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    depths: Tensor,  # [batch, slots] int64
    previous_tokens: Tensor,  # [batch] int64
    accepted: Tensor,  # [batch, slots] bool
    best: TopSuccessors,  # of [batch * slots] rows
) -> None:
    """Triton side of `write_successors`."""
    nodes = tokens.numel()
    _write_kernel[(nodes,)](
        table.tokens,
        table.probs,
        table.pairs,
        table_index,
        tokens.contiguous(),
        parents.contiguous(),
        depths.contiguous(),
        previous_tokens,
        accepted.contiguous(),
        best.ids,
        best.probs,
        nodes,
        table.vocab_size,
        table.num_tables,
        table.first_order2_row,
        SLOTS=tokens.shape[1],
        K=table.k,
        K_BLOCK=triton.next_power_of_2(table.k),
        ORDER2_ROWS=table.order2_rows,
        MULTIPLIER=HASH_MULTIPLIER,
        SHIFT=HASH_SHIFT,
        RIVALS=RIVALS,
        num_warps=2,
    )
