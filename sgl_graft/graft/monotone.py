"""Isotonic regression by pooling adjacent violators (Ayer et al. 1955)."""

from __future__ import annotations

from collections.abc import Sequence


def fit_rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never-falling sequence nearest to ``values`` in weighted squares.

    Raises:
        ValueError: lengths differ, or a weight is not positive.
    """
    if len(values) != len(weights):
        raise ValueError(f"{len(values)} values but {len(weights)} weights")
    if any(weight <= 0 for weight in weights):
        raise ValueError("weights must be positive")
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        block = (float(value), float(weight), 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, mass, length = blocks.pop()
            total = mass + block[1]
            block = ((mean * mass + block[0] * block[1]) / total, total, length + block[2])
        blocks.append(block)
    return [mean for mean, _, length in blocks for _ in range(length)]
