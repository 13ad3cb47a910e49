# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the gate: confidence per request and depth, and the stage it leads to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _path_confidence_kernel(
    scores_ptr,  # [batch, pool] float32
    confidence_ptr,  # [batch, STEPS] float32
    pool: tl.constexpr,
    TOPK: tl.constexpr,
    STEPS: tl.constexpr,
    LEVEL_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    size = tl.where(step == 0, TOPK, TOPK * TOPK)
    start = tl.where(step == 0, 0, TOPK + (step - 1) * TOPK * TOPK)
    node = tl.arange(0, LEVEL_BLOCK)
    scores = tl.load(scores_ptr + row * pool + start + node, mask=node < size, other=float("-inf"))
    # A hardware maximum skips NaN; torch's does not, and the gate must not pass it.
    is_nan = tl.max((scores != scores).to(tl.int32), axis=0) > 0
    best = tl.where(is_nan, float("nan"), tl.max(scores, axis=0))
    tl.store(confidence_ptr + row * STEPS + step, best)


@triton.jit
def _staged_gate_kernel(
    confidence_ptr,  # [batch, STEPS] float32
    thresholds_ptr,  # [checkpoints] float32
    stage_ptr,  # [batch] int64
    STEPS: tl.constexpr,
    CHECKPOINT_BITS: tl.constexpr,  # bit d is set when depth d is a checkpoint
):
    row = tl.program_id(0).to(tl.int64)
    passed = tl.full([], 1, tl.int64)
    stage = tl.zeros([], tl.int64)
    checkpoint = 0
    for depth in tl.static_range(STEPS):
        if (CHECKPOINT_BITS >> depth) & 1:
            confidence = tl.load(confidence_ptr + row * STEPS + depth)
            threshold = tl.load(thresholds_ptr + checkpoint)
            passed = passed * (confidence > threshold).to(tl.int64)
            stage += passed
            checkpoint += 1
    tl.store(stage_ptr + row, stage)


def path_confidence_triton(
    scores: Tensor,  # [batch, pool] float32
    topk: int,
    steps: int,
) -> Tensor:  # [batch, steps] float32
    """Triton side of `path_confidence`."""
    batch, pool = scores.shape
    confidence = torch.empty((batch, steps), dtype=torch.float32, device=scores.device)
    _path_confidence_kernel[(batch, steps)](
        scores.contiguous(),
        confidence,
        pool=pool,
        TOPK=topk,
        STEPS=steps,
        LEVEL_BLOCK=triton.next_power_of_2(topk * topk),
        num_warps=1,
    )
    return confidence


def staged_gate_triton(
    confidence: Tensor,  # [batch, steps] float32
    checkpoints: tuple[int, ...],
    thresholds: Tensor,  # [checkpoints] float32
) -> Tensor:  # [batch] int64
    """Triton side of `staged_gate`."""
    batch, steps = confidence.shape
    stage = torch.empty(batch, dtype=torch.long, device=confidence.device)
    _staged_gate_kernel[(batch,)](
        confidence.contiguous(),
        thresholds,
        stage,
        STEPS=steps,
        CHECKPOINT_BITS=sum(1 << depth for depth in checkpoints),
        num_warps=1,
    )
    return stage
