"""The target's k likeliest next tokens and their probabilities, for every row of verify logits.

Ties are ordered by token id, so equal logits give equal tables on every device and rank. `ids[:, 0]` is the
argmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import host_op, use_triton

BLOCK = 64
ID_LIMIT = 2**31 - 1


class TopSuccessors(NamedTuple):
    """Best first; ties by token id."""

    ids: Tensor  # [rows, k] int32
    probs: Tensor  # [rows, k] float16, softmax over the vocabulary; 0 where the row held a NaN


def top_successors(
    logits: Tensor,  # [rows, columns] float32, bfloat16 or float16
    k: int,
    vocab_size: int,  # columns beyond are padding
) -> TopSuccessors:
    """Top k of each row's softmax, in one pass over the logits and without a full sort.

    Raises ValueError when the vocabulary holds fewer than `k` tokens or is wider than the logits.
    """
    if not k <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"k {k}, vocab_size {vocab_size} and {logits.shape[1]} logit columns must not fall in that order"
        )
    if use_triton(logits):
        from .top_successors_kernel import top_successors_triton

        return top_successors_triton(logits, k, vocab_size)
    return host_op(top_successors_torch)(logits, k, vocab_size)


def top_successors_torch(
    logits: Tensor,  # [rows, columns] float
    k: int,
    vocab_size: int,
) -> TopSuccessors:
    """Reference of `top_successors`.

    Only the blocks with the k largest maxima can hold the top k (with ties going to the lower block, also
    the right ones among equals). So two passes run over all logits, this maximum and the softmax; on a CPU
    they cost about as much as the `torch.argmax` that column 0 makes unnecessary.
    """
    logits = logits[:, :vocab_size]
    tail = vocab_size % BLOCK
    whole = vocab_size - tail
    maxima = logits[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).amax(2) if whole else logits[:, :0]
    if tail:
        maxima = torch.cat([maxima, logits[:, whole:].amax(1, keepdim=True)], dim=1)
    block_ids = torch.arange(maxima.shape[1], device=logits.device)
    block_keys = descending_keys(maxima, block_ids).topk(min(k, maxima.shape[1]), dim=1).values
    offsets = torch.arange(BLOCK, device=logits.device)
    ids = (key_ids(block_keys).unsqueeze(2) * BLOCK + offsets).flatten(1)  # [rows, candidates]
    beyond = ids >= vocab_size
    values = logits.gather(1, ids.clamp(max=vocab_size - 1))
    keys = descending_keys(values, ids).masked_fill(beyond, torch.iinfo(torch.int64).min)
    best = key_ids(keys.topk(k, dim=1).values)  # [rows, k]
    probs = torch.softmax(logits, dim=1, dtype=torch.float32).gather(1, best)
    return TopSuccessors(best.to(torch.int32), probs.nan_to_num(0.0).to(torch.float16))


def descending_keys(
    values: Tensor,  # [rows, n] float
    ids: Tensor,  # [n] or [rows, n] int64, in 0..ID_LIMIT
) -> Tensor:  # [rows, n] int64
    """Keys whose descending order is (value descending, id ascending)."""
    # Adding 0 makes the two zeros equal. Negative floats have their bits reversed to sort like integers.
    bits = (values.float() + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) + (ID_LIMIT - ids)


def key_ids(keys: Tensor) -> Tensor:
    """The ids inside `descending_keys`."""
    return ID_LIMIT - (keys & 0xFFFFFFFF)
