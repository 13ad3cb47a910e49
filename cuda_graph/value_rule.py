"""The `value` rule: a node is worth the calibrated chance that the target accepts its whole path.

Drafted and retrieved path probabilities are not comparable as they stand; a small monotone piecewise-linear
map per source and depth, fitted in calibration, turns both into acceptance probabilities. A node proposed
by both sources is worth the larger of its two values (`merge.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import host_op, use_triton

DRAFT, TABLE = 0, 1

# Bits of a float32 in 0..1 are non-negative, in the same order as the floats, and fit in 30 bits.
WEIGHT_BITS = 30


@dataclass(frozen=True)
class ValueMaps:
    """Piecewise-linear maps from path probability to acceptance probability, clamped at their ends."""

    x: Tensor  # [2, depths, knots] float32, strictly rising along the knots; row 0 draft, row 1 table
    y: Tensor  # [2, depths, knots] float32 in 0..1, never falling along the knots

    @classmethod
    def identity(cls, depths: int, device: torch.device | str = "cpu") -> ValueMaps:
        """Take probabilities as they are: what an uncalibrated server uses."""
        ends = torch.tensor([0.0, 1.0], device=device).expand(2, depths, 2).contiguous()
        return cls(ends, ends.clone())

    def check(self) -> None:
        """Raise ValueError unless the maps are well formed. Reads values: for load time, not for a round."""
        if self.x.shape != self.y.shape or self.x.dim() != 3 or self.x.shape[0] != 2 or self.x.shape[2] < 2:
            raise ValueError(
                f"value maps have shapes {tuple(self.x.shape)} and {tuple(self.y.shape)}, not [2, d, >1]"
            )
        rising = bool((self.x.diff(dim=2) > 0).all()) and bool((self.y.diff(dim=2) >= 0).all())
        if not rising or not bool(((self.y >= 0) & (self.y <= 1)).all()):
            raise ValueError(
                "value maps must rise in x, never fall in y, and keep y within 0..1: calibrate again"
            )


def value_weights(
    maps: ValueMaps,
    source: int,  # DRAFT or TABLE
    depths: Tensor,  # [nodes] int64, 1 for the root's children
    path_probs: Tensor,  # [batch, nodes] float32; NaN counts as 0
    tokens: Tensor,  # [batch, nodes] int64, negative where there is no node
) -> Tensor:  # [batch, nodes] int64
    """Merge weights of the value rule: the float32 bits of each node's value, -1 for absent nodes.

    Depths beyond the maps use the deepest one.
    """
    if use_triton(path_probs):
        from .value_kernel import value_weights_triton

        return value_weights_triton(maps, source, depths, path_probs, tokens)
    return host_op(value_weights_torch)(maps, source, depths, path_probs, tokens)


def value_weights_torch(
    maps: ValueMaps,
    source: int,
    depths: Tensor,  # [nodes] int64
    path_probs: Tensor,  # [batch, nodes] float32
    tokens: Tensor,  # [batch, nodes] int64
) -> Tensor:  # [batch, nodes] int64
    """Reference of `value_weights`."""
    row = (depths - 1).clamp(max=maps.x.shape[1] - 1)
    x, y = maps.x[source].index_select(0, row), maps.y[source].index_select(0, row)  # [nodes, knots]
    probs = path_probs.nan_to_num(0.0, 1.0, 0.0)
    above = (probs.unsqueeze(2) >= x[:, 1:-1]).sum(2, keepdim=True)  # [batch, nodes, 1], segment of each node
    x0, x1, y0, y1 = (_knot(t, above + step) for t in (x, y) for step in (0, 1))
    share = ((probs - x0) / (x1 - x0)).clamp(0.0, 1.0)
    return float_weights(y0 + share * (y1 - y0)).masked_fill(tokens < 0, -1)


def float_weights(
    values: Tensor,  # float32
) -> Tensor:  # int64, like `values`
    """Integers in the order of the values clipped to 0..1; NaN counts as 0."""
    clipped = values.nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0)
    # Adding 0 turns a negative zero, whose bits are negative, into a positive one.
    return (clipped + 0.0).view(torch.int32).long()


def weights_to_floats(
    weights: Tensor,  # int64
) -> Tensor:  # float32, like `weights`
    """The values behind `float_weights`; 0 for absent nodes. For metrics."""
    bits = torch.where(weights < 0, 0, weights & (2**WEIGHT_BITS - 1))
    return bits.to(torch.int32).view(torch.float32)


def _knot(
    knots: Tensor,  # [nodes, knots] float32
    index: Tensor,  # [batch, nodes, 1] int64
) -> Tensor:  # [batch, nodes] float32
    return knots.expand(index.shape[0], -1, -1).gather(2, index).squeeze(2)
