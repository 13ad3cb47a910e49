"""Runs an attention plan with the CPU kernel, which reads every key where it lies in the pool."""

from __future__ import annotations

from typing import Any

import torch

from . import kernels
from .attention_plan import AttentionPlan


def attend(
    q: torch.Tensor,  # [tokens, heads * head_dim]
    keys: torch.Tensor,  # [slots, kv_heads, head_dim]
    values: torch.Tensor,  # [slots, kv_heads, value_dim]
    heads: int,
    scale: float,
    causal: bool,
    plan: AttentionPlan,
) -> torch.Tensor:  # [tokens, heads * value_dim]
    problem = problem_of(plan, keys, values, heads, scale, causal)
    problem.q_stride = q.stride(0)
    return kernels.attention(problem, q, keys, values)


def problem_of(
    plan: AttentionPlan,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    scale: float,
    causal: bool,
) -> kernels.AttentionProblem:
    """The plan as the kernel reads it, made once per forward for every geometry of layers."""
    kind = (heads, keys.shape, values.shape, scale, causal)
    problem = plan.scratch.get(kind)
    if problem is None:
        problem = plan.scratch[kind] = _problem(plan, keys, values, heads, scale, causal)
    return problem


def _problem(
    plan: AttentionPlan,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    scale: float,
    causal: bool,
) -> kernels.AttentionProblem:
    prefix, window, mask = plan.prefix, plan.window, plan.mask
    if not causal:
        prefix, window, mask = prefix + window, torch.zeros_like(window), None
    # The structure holds bare addresses: the tensors must live as long as it does.
    plan.scratch[heads, "alive", causal] = prefix, window
    return kernels.AttentionProblem(
        batch=plan.batch_size,
        kv_heads=keys.shape[1],
        group=heads // keys.shape[1],
        dim=keys.shape[2],
        value_dim=values.shape[2],
        k_stride=keys.stride(0),
        v_stride=values.stride(0),
        table=plan.table.data_ptr(),
        table_stride=plan.table.stride(0),
        table_rows=plan.rows.data_ptr(),
        query_start=plan.query_start.data_ptr(),
        prefix=prefix.data_ptr(),
        window=window.data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        mask_stride=0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
        mask_width=0 if mask is None else mask.shape[2],
        scale=scale,
    )


def write(k: Any, v: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> bool:
    """Write new rows into the pool if their layout allows plain row copies; whether it did."""
    plain = (
        k.dtype == keys.dtype
        and v.dtype == values.dtype
        and keys.is_contiguous()
        and values.is_contiguous()
        and k.stride()[1:] == keys.stride()[1:]
        and v.stride()[1:] == values.stride()[1:]
        and slots.dtype == torch.int64
        and slots.is_contiguous()
    )
    if plain:
        kernels.write_rows(k, v, keys, values, slots)
    return plain
