"""Coupled draws: each node's token, by noise keyed by (seed, position, token) and by nothing else.

A token wins an exponential race, `argmax p / e` with `e = -log(u)`, which draws exactly from `p`. Two trees
that reach the same position of the same request meet the same noise, so they draw the same token, and the
walk of `coupled.py` commits what plain decoding would have. `u` is MurmurHash3 (32 bits) of seed, position
and token, the stream that SGLang's deterministic sampler uses for plain decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton

WORD = 0xFFFFFFFF
BLOCK_FACTORS = (0xCC9E2D51, 0x1B873593)
FINAL_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
STATE_FACTOR, STATE_ADDEND = 5, 0xE6546B64
NUM_BYTES = 16  # hashed: seed, position and token
SMALLEST_TIME = 2.0**-32  # of e, where the hash is all ones
TOKEN_BITS = 0x7FFFFFFF


def race_tokens(
    probs: Tensor,  # [rows, vocab] float32, filtered and not necessarily normalized
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64, absolute position of each row's node
    cuts: Tensor,  # [rows] float32, tokens of lower probability do not run
) -> Tensor:  # [rows] int64
    """One token per row; equal values go to the lower id. A row without runners gives token 0."""
    if use_triton(probs):
        from .race_kernel import race_tokens_triton

        return race_tokens_triton(probs, seeds, positions, cuts)
    return race_tokens_torch(probs, seeds, positions, cuts)


def race_tokens_torch(
    probs: Tensor,  # [rows, vocab] float32
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64
    cuts: Tensor,  # [rows] float32
) -> Tensor:  # [rows] int64
    """Reference of `race_tokens`."""
    hashes = murmur_hash(seeds, positions, probs.shape[1])
    times = -(hashes.double() / WORD).log()
    runs = (probs > 0) & (probs >= cuts.unsqueeze(1))
    speeds = (probs / times.clamp(min=SMALLEST_TIME).float()).masked_fill(~runs, 0.0)
    return speeds.argmax(1)  # torch takes the first of equals


def murmur_hash(
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64
    vocab_size: int,
) -> Tensor:  # [rows, vocab] int64 below 2**32
    """MurmurHash3 of seed (8 bytes), position and token (4 each). Products wrap: their low words count."""
    state = torch.zeros_like(seeds)
    for block in (seeds & WORD, (seeds >> 32) & WORD, positions & WORD):
        state = _mix_block(state, block)
    tokens = torch.arange(vocab_size, device=seeds.device)
    state = _mix_block(state.unsqueeze(1), tokens) ^ NUM_BYTES
    for shift, factor in ((16, FINAL_FACTORS[0]), (13, FINAL_FACTORS[1])):
        state = ((state ^ (state >> shift)) * factor) & WORD
    return state ^ (state >> 16)


def _mix_block(state: Tensor, block: Tensor) -> Tensor:
    block = (_rotated((block * BLOCK_FACTORS[0]) & WORD, 15) * BLOCK_FACTORS[1]) & WORD
    return (_rotated(state ^ block, 13) * STATE_FACTOR + STATE_ADDEND) & WORD


def _rotated(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & WORD
