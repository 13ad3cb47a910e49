"""Whole rows of logits: argmax, the best few, softmax; and rows of the KV pool moved in one call.

Each gives what the torch call it stands for gives, faster: most rows here are 49,152 wide and there are a few
dozen of them in every round. Whatever the kernels do not take goes to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cuda_graph.top_successors import TopSuccessors, top_successors_torch
from . import kernels
from .library import INT, function

MOST = 64  # `MOST` in native/rows.cpp


def _fits(x: torch.Tensor) -> bool:
    return (
        x.dim() == 2
        and x.numel() > 0
        and x.dtype == torch.float32
        and x.stride(1) == 1
        and kernels.available(x.dtype)
    )


def _best(
    x: torch.Tensor,  # [rows, n]
    n: int,
    k: int,
    softmax: bool,
    with_probs: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # [rows, k] int64, [rows, k] fp32
    """The best ``k`` of the first ``n`` columns; None where a row holds a NaN."""
    rows = x.shape[0]
    ids = torch.empty((rows, k), dtype=torch.int64)
    probs = torch.empty((rows, k), dtype=torch.float32) if with_probs else None
    broken = function("graft_best_of_rows", "piiiippi", INT)(
        x.data_ptr(),
        x.stride(0),
        rows,
        n,
        k,
        ids.data_ptr(),
        None if probs is None else probs.data_ptr(),
        softmax,
    )
    return None if broken else (ids, probs)


def argmax(x: torch.Tensor) -> torch.Tensor:  # [rows, n] -> [rows] int64
    """``x.argmax(1)``: the first of equals."""
    found = _best(x, x.shape[1], 1, softmax=False, with_probs=False) if _fits(x) else None
    return x.argmax(1) if found is None else found[0].squeeze(1)


def top_successors(logits: torch.Tensor, k: int, vocab_size: int) -> TopSuccessors:
    """``cuda_graph.top_successors`` on a CPU."""
    found = _best(logits, vocab_size, k, softmax=True) if k <= MOST and _fits(logits) else None
    if found is None:
        return top_successors_torch(logits, k, vocab_size)
    ids, probs = found
    assert probs is not None
    return TopSuccessors(ids.to(torch.int32), probs.to(torch.float16))


def fast_topk(original: Callable[..., Any], values: torch.Tensor, topk: int, dim: int) -> Any:
    """Around the engine's ``fast_topk``: values and indices [rows, topk], best first."""
    fits = 1 < topk <= min(MOST, values.shape[-1]) and dim in (-1, 1) and _fits(values)
    found = _best(values, values.shape[1], topk, softmax=False) if fits else None
    return original(values, topk, dim) if found is None else (found[1], found[0])


def draft_probs(
    original: Callable[..., Any], logits: torch.Tensor, sampling_info: Any, use_rejection_sampling: bool
) -> torch.Tensor:  # [rows, vocab]
    """Around the engine's ``renorm_draft_probs``: a plain softmax, unless drafts are sampled."""
    if use_rejection_sampling or not _fits(logits):
        result: torch.Tensor = original(logits, sampling_info, use_rejection_sampling)
        return result
    probs = torch.empty(logits.shape, dtype=torch.float32)
    rows, width = logits.shape
    function("graft_softmax_rows", "piiip")(
        logits.data_ptr(), logits.stride(0), rows, width, probs.data_ptr()
    )
    return probs


class RowMover:
    """Moves rows within each of several buffers of one shape; the buffers are never replaced."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)
        self._addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)
        self._bytes = buffers[0].stride(0) * buffers[0].element_size()

    @staticmethod
    def fits(buffers: Sequence[torch.Tensor]) -> bool:
        plain = all(buffer.is_contiguous() and buffer.shape == buffers[0].shape for buffer in buffers)
        return plain and kernels.available(torch.float32)

    def move(
        self,
        to: torch.Tensor,  # [rows] int64
        source: torch.Tensor,  # [rows] int64
    ) -> None:
        """Row ``source[i]`` to row ``to[i]``; all are read before any of a buffer is written."""
        to, source = to.contiguous(), source.contiguous()
        function("graft_move_rows", "piippi")(
            self._addresses.data_ptr(),
            len(self._buffers),
            self._bytes,
            to.data_ptr(),
            source.data_ptr(),
            to.numel(),
        )
