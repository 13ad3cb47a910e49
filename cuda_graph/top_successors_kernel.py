# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `top_successors`: one streaming pass over the logits, then a merge of each row's chunks.

Every program keeps the k best keys of its chunk and looks inside a tile only when the tile's maximum beats
the worst of them; the softmax denominator is accumulated in the same pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .top_successors import TopSuccessors

TILE = 2048
TARGET_PROGRAMS = 1024  # enough to fill a large GPU several times over
LOWEST_KEY = -(2**63)


@triton.jit
def _descending_key(values, ids):
    """`top_successors.descending_keys`; NaN sorts last."""
    values = tl.where(values == values, values, float("-inf")) + 0.0
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) + (0x7FFFFFFF - ids)


@triton.jit
def _key_value(keys):
    """The float inside a key."""
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _chunk_kernel(
    logits_ptr,  # [rows, columns] float
    keys_ptr,  # [rows, chunks, K_BLOCK] int64
    maxima_ptr,  # [rows, chunks] float32
    sums_ptr,  # [rows, chunks] float32
    row_stride,
    vocab_size,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LOWEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, K_BLOCK)
    best = tl.full([K_BLOCK], LOWEST, tl.int64) + lane  # unique, so that one entry is replaced at a time
    worst = tl.min(tl.where(lane < K, best, 2**63 - 1), axis=0)
    running_max = tl.full([], float("-inf"), tl.float32)
    running_sum = tl.zeros([], tl.float32)
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, TILE):
        column = start + tl.arange(0, TILE)
        there = column < vocab_size
        raw = tl.load(logits_ptr + row * row_stride + column, mask=there, other=float("-inf")).to(tl.float32)
        tile_max = tl.max(tl.where(raw == raw, raw, float("-inf")), axis=0)
        new_max = tl.maximum(running_max, tile_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        # A NaN logit makes the sum NaN on purpose: the row's probabilities are then meaningless.
        running_sum = running_sum * tl.exp(running_max - shift) + tl.sum(tl.exp(raw - shift), axis=0)
        running_max = new_max
        if tile_max >= _key_value(worst) or start == chunk * CHUNK:
            keys = tl.where(there, _descending_key(raw, column), LOWEST)
            top = tl.max(keys, axis=0)
            while top > worst:
                best = tl.where(best == worst, top, best)
                worst = tl.min(tl.where(lane < K, best, 2**63 - 1), axis=0)
                keys = tl.where(keys == top, LOWEST, keys)
                top = tl.max(keys, axis=0)
    out = row * tl.num_programs(1) + chunk
    tl.store(keys_ptr + out * K_BLOCK + lane, tl.where(lane < K, best, LOWEST))
    tl.store(maxima_ptr + out, running_max)
    tl.store(sums_ptr + out, running_sum)


@triton.jit
def _join_kernel(
    keys_ptr,  # [rows, CHUNKS, K_BLOCK] int64
    maxima_ptr,  # [rows, CHUNKS] float32
    sums_ptr,  # [rows, CHUNKS] float32
    ids_ptr,  # [rows, K] int32
    probs_ptr,  # [rows, K] float16
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    LOWEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNK_BLOCK)
    maxima = tl.load(maxima_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    sums = tl.load(sums_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    top = tl.max(maxima, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp(maxima - shift), axis=0)
    entry = tl.arange(0, CHUNK_BLOCK * K_BLOCK)
    keys = tl.load(keys_ptr + row * CHUNKS * K_BLOCK + entry, mask=entry < CHUNKS * K_BLOCK, other=LOWEST)
    for rank in range(K):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, LOWEST, keys)
        prob = tl.exp(_key_value(best) - shift) / total
        prob = tl.where(prob == prob, prob, 0.0)
        tl.store(ids_ptr + row * K + rank, (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32))
        tl.store(probs_ptr + row * K + rank, prob.to(tl.float16))


def top_successors_triton(
    logits: Tensor,  # [rows, columns] float
    k: int,
    vocab_size: int,
) -> TopSuccessors:
    """Triton side of `top_successors`."""
    rows = logits.shape[0]
    tiles = triton.cdiv(vocab_size, TILE)
    tiles_per_chunk = triton.cdiv(tiles, min(tiles, max(1, TARGET_PROGRAMS // rows)))
    chunks = triton.cdiv(tiles, tiles_per_chunk)
    k_block = triton.next_power_of_2(k)
    keys = torch.empty((rows, chunks, k_block), dtype=torch.long, device=logits.device)
    statistics = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    probs = torch.empty((rows, k), dtype=torch.float16, device=logits.device)
    _chunk_kernel[(rows, chunks)](
        logits,
        keys,
        *statistics,
        logits.stride(0),
        vocab_size,
        K=k,
        K_BLOCK=k_block,
        TILE=TILE,
        CHUNK=tiles_per_chunk * TILE,
        LOWEST=LOWEST_KEY,
    )
    _join_kernel[(rows,)](
        keys,
        *statistics,
        ids,
        probs,
        K=k,
        K_BLOCK=k_block,
        CHUNKS=chunks,
        CHUNK_BLOCK=triton.next_power_of_2(chunks),
        LOWEST=LOWEST_KEY,
        num_warps=2,
    )
    return TopSuccessors(ids, probs)
