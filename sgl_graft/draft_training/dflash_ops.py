"""The parts of DFlash's training step that are not matrix products of layers.

Eager PyTorch walks memory a dozen times for a norm and again for its gradient, and slicing keys per block
makes autograd fill and add whole gradients per slice: together more time than the layers' products. The
pointwise functions can be compiled; attention has its gradient written out.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NormFunction = Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
RotateFunction = Callable[[Tensor, Tensor, float, Tensor, Tensor, torch.dtype], Tensor]


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32, given out in `dtype`."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)


def norm_rotate(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> Tensor:
    """Norm of every head of x `[rows, heads, dim]`, then rotary embedding; cos, sin `[rows, 1, dim / 2]`."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(dtype)


def gate(gated: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product."""
    return F.silu(gated) * up


@dataclass(frozen=True)
class Ops:
    norm: NormFunction
    norm_rotate: RotateFunction
    gate: Callable[[Tensor, Tensor], Tensor]


EAGER = Ops(norm, norm_rotate, gate)


def can_compile() -> bool:
    """Whether there are a C++ compiler and Python's headers (a plain Debian has neither)."""
    return shutil.which("g++") is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def compiled() -> Ops:
    """The same functions through torch.compile, which takes a minute at the first step."""
    options: dict[str, Any] = {"dynamic": True, "fullgraph": True}
    return Ops(*(torch.compile(f, **options) for f in (norm, norm_rotate, gate)))


@dataclass(frozen=True)
class Chunk:
    """Some blocks of one dialogue: which queries, context rows and block rows take part, and what each query
    must not see (`bias` `[queries, ctx + own]`, 0 or -inf)."""

    queries: slice
    context: slice
    own: slice
    bias: Tensor


class BlockAttention(torch.autograd.Function):
    """Attention of blocks over context and themselves, `[queries, heads * dim]`.

    queries `[queries, heads, dim]`; ctx_keys, ctx_values `[tokens, kv_heads, dim]`; keys, values
    `[block rows, kv_heads, dim]`. Every query is in exactly one chunk, chunks are in query order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        ctx_keys: Tensor,
        ctx_values: Tensor,
        keys: Tensor,
        values: Tensor,
        chunks: list[Chunk],
    ) -> Tensor:
        count, heads, dim = queries.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        q = queries.view(count, kv_heads, group, dim).permute(1, 2, 0, 3).contiguous()
        ck, cv, k, v = (t.transpose(0, 1).contiguous() for t in (ctx_keys, ctx_values, keys, values))
        out = torch.empty_like(q)  # [kv_heads, group, queries, dim]
        probs = []
        for c in chunks:
            rows = q[:, :, c.queries].reshape(kv_heads, -1, dim)
            seen = torch.cat([ck[:, c.context], k[:, c.own]], dim=1)
            scores = torch.baddbmm(c.bias.repeat(group, 1), rows, seen.transpose(1, 2), alpha=dim**-0.5)
            p = scores.softmax(-1).to(q.dtype)
            mixed = torch.bmm(p, torch.cat([cv[:, c.context], v[:, c.own]], dim=1))
            out[:, :, c.queries] = mixed.view(kv_heads, group, -1, dim)
            probs.append(p)
        ctx.chunks, ctx.probs = chunks, probs
        ctx.save_for_backward(q, ck, cv, k, v)
        return out.permute(2, 0, 1, 3).reshape(count, heads * dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, ck, cv, k, v = ctx.saved_tensors
        kv_heads, group, count, dim = q.shape
        scale = dim**-0.5
        grad = grads[0].view(count, kv_heads, group, dim).permute(1, 2, 0, 3).to(q.dtype).contiguous()
        grad_q = torch.empty_like(q)
        # Many chunks add to the same context rows: their sum is kept in fp32.
        grad_ck, grad_cv = (torch.zeros(t.shape, dtype=torch.float32) for t in (ck, cv))
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        for c, p in zip(ctx.chunks, ctx.probs, strict=True):
            rows = q[:, :, c.queries].reshape(kv_heads, -1, dim)
            slope = grad[:, :, c.queries].reshape(kv_heads, -1, dim)
            seen = torch.cat([ck[:, c.context], k[:, c.own]], dim=1)
            known = c.context.stop - c.context.start
            dv = torch.bmm(p.transpose(1, 2), slope)
            dp = torch.bmm(slope, torch.cat([cv[:, c.context], v[:, c.own]], dim=1).transpose(1, 2))
            # sum_j p_j dp_j of a row is the product of the row's output and its gradient.
            ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p)
            dq = torch.bmm(ds, seen).mul_(scale)
            dk = torch.bmm(ds.transpose(1, 2), rows).mul_(scale)
            grad_q[:, :, c.queries] = dq.view(kv_heads, group, -1, dim)
            grad_ck[:, c.context] += dk[:, :known]
            grad_cv[:, c.context] += dv[:, :known]
            grad_k[:, c.own] = dk[:, known:]
            grad_v[:, c.own] = dv[:, known:]
        return (
            grad_q.permute(2, 0, 1, 3).reshape(count, -1, dim),
            grad_ck.transpose(0, 1).to(ck.dtype),
            grad_cv.transpose(0, 1).to(cv.dtype),
            grad_k.transpose(0, 1),
            grad_v.transpose(0, 1),
            None,
        )
