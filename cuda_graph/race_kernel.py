# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `race_tokens`: one pass over the probabilities, the noise made on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .race import (
    BLOCK_FACTORS,
    FINAL_FACTORS,
    NUM_BYTES,
    SMALLEST_TIME,
    STATE_ADDEND,
    STATE_FACTOR,
    TOKEN_BITS,
    WORD,
)

TILE = 1024


@triton.jit
def _mix_block(
    state, block, FIRST: tl.constexpr, SECOND: tl.constexpr, FACTOR: tl.constexpr, ADD: tl.constexpr
):
    """`race._mix_block`, in 64-bit words of which the low half counts."""
    block = (block * FIRST) & 0xFFFFFFFF
    block = ((block << 15) | (block >> 17)) & 0xFFFFFFFF
    state = state ^ ((block * SECOND) & 0xFFFFFFFF)
    state = ((state << 13) | (state >> 19)) & 0xFFFFFFFF
    return (state * FACTOR + ADD) & 0xFFFFFFFF


@triton.jit
def _race_kernel(
    probs_ptr,  # [rows, vocab] float32
    seeds_ptr,  # [rows] int64
    positions_ptr,  # [rows] int64
    cuts_ptr,  # [rows] float32
    keys_ptr,  # [rows] int64, starts below every key
    vocab_size,
    row_stride,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    FACTOR: tl.constexpr,
    ADD: tl.constexpr,
    FINAL_1: tl.constexpr,
    FINAL_2: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    SMALLEST_TIME: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = token < vocab_size
    prob = tl.load(probs_ptr + row * row_stride + token, mask=there, other=0.0)
    cut = tl.load(cuts_ptr + row)

    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    state = tl.zeros([], tl.int64)
    state = _mix_block(state, seed & 0xFFFFFFFF, FIRST, SECOND, FACTOR, ADD)
    state = _mix_block(state, (seed >> 32) & 0xFFFFFFFF, FIRST, SECOND, FACTOR, ADD)
    state = _mix_block(state, position & 0xFFFFFFFF, FIRST, SECOND, FACTOR, ADD)
    state = _mix_block(state, token.to(tl.int64), FIRST, SECOND, FACTOR, ADD) ^ NUM_BYTES
    state = ((state ^ (state >> 16)) * FINAL_1) & 0xFFFFFFFF
    state = ((state ^ (state >> 13)) * FINAL_2) & 0xFFFFFFFF
    state = state ^ (state >> 16)

    # Double precision: near 1 the logarithm of a float32 has only a few distinct values left.
    time = -tl.log(tl.maximum(state.to(tl.float64) / WORD, 1e-300))
    time = tl.maximum(time, SMALLEST_TIME).to(tl.float32)
    speed = tl.where((prob > 0) & (prob >= cut), prob / time, 0.0)
    bits = speed.to(tl.int32, bitcast=True).to(tl.int64)  # in the order of the speeds: none is negative
    keys = tl.where(there, (bits << 32) + (TOKEN_BITS - token), -1)
    tl.atomic_max(keys_ptr + row, tl.max(keys, axis=0))  # a maximum is the same in any order


def race_tokens_triton(
    probs: Tensor,  # [rows, vocab] float32
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64
    cuts: Tensor,  # [rows] float32
) -> Tensor:  # [rows] int64
    """Triton side of `race_tokens`."""
    rows, vocab_size = probs.shape
    keys = torch.full((rows,), -1, dtype=torch.long, device=probs.device)
    if rows:
        _race_kernel[(rows, triton.cdiv(vocab_size, TILE))](
            probs,
            seeds.contiguous(),
            positions.contiguous(),
            cuts.contiguous(),
            keys,
            vocab_size,
            probs.stride(0),
            TILE=TILE,
            FIRST=BLOCK_FACTORS[0],
            SECOND=BLOCK_FACTORS[1],
            FACTOR=STATE_FACTOR,
            ADD=STATE_ADDEND,
            FINAL_1=FINAL_FACTORS[0],
            FINAL_2=FINAL_FACTORS[1],
            NUM_BYTES=NUM_BYTES,
            WORD=WORD,
            SMALLEST_TIME=SMALLEST_TIME,
            TOKEN_BITS=TOKEN_BITS,
        )
    return TOKEN_BITS - (keys & WORD)
