# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `walk_accepted`: one program walks one request's tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .coupled import AcceptedPath


@triton.jit
def _walk_kernel(
    tokens_ptr,  # [batch, slots] int64
    parents_ptr,  # [batch, slots] int64
    targets_ptr,  # [batch, slots] int64
    predicts_ptr,  # [batch, slots] int32, zeroed
    accept_index_ptr,  # [batch, MAX_PATH] int32
    num_correct_ptr,  # [batch] int32
    bonus_ptr,  # [batch] int64
    SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    MAX_PATH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * SLOTS
    slot = tl.arange(0, SLOT_BLOCK)
    child = (slot > 0) & (slot < SLOTS)
    tokens = tl.load(tokens_ptr + first + slot, mask=child, other=-1)
    child_of = tl.load(parents_ptr + first + slot, mask=child, other=-1)

    tl.store(accept_index_ptr + row * MAX_PATH, first.to(tl.int32))
    current = tl.zeros([], tl.int32)
    num_correct = tl.zeros([], tl.int32)
    alive = tl.full([], 1, tl.int1)
    for step in range(1, MAX_PATH):
        wanted = tl.load(targets_ptr + first + current)
        matches = (child_of == current) & (tokens == wanted) & alive
        match = tl.min(tl.where(matches, slot, SLOT_BLOCK), axis=0)
        alive = match < SLOT_BLOCK
        tl.store(predicts_ptr + first + current, wanted.to(tl.int32))
        accepted = tl.where(alive, first + match, -1)
        tl.store(accept_index_ptr + row * MAX_PATH + step, accepted.to(tl.int32))
        current = tl.where(alive, match, current)
        num_correct += alive.to(tl.int32)
    bonus = tl.load(targets_ptr + first + current)
    tl.store(predicts_ptr + first + current, bonus.to(tl.int32))
    tl.store(num_correct_ptr + row, num_correct)
    tl.store(bonus_ptr + row, bonus)


def walk_accepted_triton(
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    target_tokens: Tensor,  # [batch, slots] int64
    max_path: int,
) -> AcceptedPath:
    """Triton side of `walk_accepted`."""
    batch, slots = tokens.shape
    predicts = torch.zeros(batch * slots, dtype=torch.int32, device=tokens.device)
    accept_index = torch.empty((batch, max_path), dtype=torch.int32, device=tokens.device)
    num_correct = torch.empty(batch, dtype=torch.int32, device=tokens.device)
    bonus = torch.empty(batch, dtype=torch.long, device=tokens.device)
    _walk_kernel[(batch,)](
        tokens.contiguous(),
        parents.contiguous(),
        target_tokens.contiguous(),
        predicts,
        accept_index,
        num_correct,
        bonus,
        SLOTS=slots,
        SLOT_BLOCK=triton.next_power_of_2(slots),
        MAX_PATH=max_path,
        num_warps=1,
    )
    return AcceptedPath(predicts, accept_index, num_correct, bonus)
