"""Soft cross-entropy of a draft's LM head against the target's top probabilities, fused to save memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 256  # rows whose logits exist at once: 256 x 8192 floats stay in the last-level cache


class SoftHeadLoss(torch.autograd.Function):
    """Weighted sum over rows of -sum_k p_k log q(k), with gradients computed during the forward.

    The logits `[rows, draft_vocab]` never exist as a whole, forward or backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        probs: Tensor,
        row_weight: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None,
    ) -> Tensor:
        """
        hidden `[rows, hidden]` after the final norm; weight `[draft_vocab, hidden]`; ids `[rows, k]` draft
        token ids, probs `[rows, k]` (0 where the token has no draft id); row_weight `[rows]`; dtype of the
        matrix products; bias `[draft_vocab]` is added to the logits and gets no gradient. Returns a scalar.
        """
        low_weight = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden)
        frozen = not ctx.needs_input_grad[1]
        grad_weight = None if frozen else torch.zeros(weight.shape, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], _CHUNK):
            rows = slice(start, start + _CHUNK)
            low_hidden = hidden[rows].to(dtype)
            logits = F.linear(low_hidden, low_weight).float()  # [chunk, draft_vocab]
            if bias is not None:
                logits += bias
            target, scale = probs[rows], row_weight[rows, None]
            mass = target.sum(-1, keepdim=True)  # [chunk, 1]
            log_norm = logits.logsumexp(-1, keepdim=True)
            total += (
                scale * (mass * log_norm - (target * logits.gather(1, ids[rows])).sum(-1, keepdim=True))
            ).sum()
            slope = logits.sub_(log_norm).exp_().mul_(mass)  # [chunk, draft_vocab]
            slope.scatter_add_(1, ids[rows], -target)
            low_slope = slope.mul_(scale).to(dtype)
            grad_hidden[rows] = (low_slope @ low_weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += low_slope.T @ low_hidden
        ctx.grad_weight = grad_weight
        ctx.save_for_backward(grad_hidden)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        grad_weight = None if ctx.grad_weight is None else ctx.grad_weight * grads[0]
        return grad_hidden * grads[0], grad_weight, None, None, None, None, None


def soft_head_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    probs: Tensor,
    row_weight: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Differentiable in `hidden` and, unless it is frozen, in `weight`; see `SoftHeadLoss.forward`."""
    return SoftHeadLoss.apply(hidden, weight, ids, probs, row_weight, dtype, bias)
