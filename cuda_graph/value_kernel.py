# ruff: noqa: N803 (Triton's compile-time arguments are in capitals)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `value_weights`: look up the map of each node's depth and interpolate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .value_rule import ValueMaps

BLOCK = 128


@triton.jit
def float_bits(values):
    """`value_rule.float_weights`: bits of the values clipped to 0..1, NaN as 0."""
    clipped = tl.minimum(tl.where(values > 0, values, 0.0), 1.0)
    return clipped.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _value_weights_kernel(
    x_ptr,  # [MAP_DEPTHS, KNOTS] float32
    y_ptr,  # [MAP_DEPTHS, KNOTS] float32
    depths_ptr,  # [nodes] int64
    probs_ptr,  # [batch, nodes] float32
    tokens_ptr,  # [batch, nodes] int64
    weights_ptr,  # [batch, nodes] int64
    nodes,
    MAP_DEPTHS: tl.constexpr,
    KNOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = node < nodes
    probs = tl.load(probs_ptr + row * nodes + node, mask=there, other=0.0)
    probs = tl.where(probs == float("inf"), 1.0, tl.where(probs > float("-inf"), probs, 0.0))
    tokens = tl.load(tokens_ptr + row * nodes + node, mask=there, other=-1)
    depth = tl.minimum(tl.load(depths_ptr + node, mask=there, other=1), MAP_DEPTHS)
    first = (depth - 1) * KNOTS
    segment = tl.zeros([BLOCK], tl.int64)
    for knot in range(1, KNOTS - 1):
        edge = tl.load(x_ptr + first + knot, mask=there, other=0.0)
        segment += (probs >= edge).to(tl.int64)
    x0 = tl.load(x_ptr + first + segment, mask=there, other=0.0)
    x1 = tl.load(x_ptr + first + segment + 1, mask=there, other=1.0)
    y0 = tl.load(y_ptr + first + segment, mask=there, other=0.0)
    y1 = tl.load(y_ptr + first + segment + 1, mask=there, other=0.0)
    # A plain division is an approximation on a GPU.
    share = tl.minimum(tl.maximum(tl.div_rn(probs - x0, x1 - x0), 0.0), 1.0)
    weights = tl.where(tokens < 0, -1, float_bits(y0 + share * (y1 - y0)))
    tl.store(weights_ptr + row * nodes + node, weights, mask=there)


def value_weights_triton(
    maps: ValueMaps,
    source: int,
    depths: Tensor,  # [nodes] int64
    path_probs: Tensor,  # [batch, nodes] float32
    tokens: Tensor,  # [batch, nodes] int64
) -> Tensor:  # [batch, nodes] int64
    """Triton side of `value_weights`."""
    batch, nodes = tokens.shape
    weights = torch.empty((batch, nodes), dtype=torch.long, device=tokens.device)
    if not nodes:
        return weights
    _value_weights_kernel[(batch, triton.cdiv(nodes, BLOCK))](
        maps.x[source].contiguous(),
        maps.y[source].contiguous(),
        depths,
        path_probs.contiguous(),
        tokens.contiguous(),
        weights,
        nodes,
        MAP_DEPTHS=maps.x.shape[1],
        KNOTS=maps.x.shape[2],
        BLOCK=BLOCK,
        num_warps=2,
    )
    return weights
