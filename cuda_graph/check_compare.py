"""Comparison of an op's two implementations: integers exactly, floats in units of the last place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import forced_backend

MAX_ULP = 4
INTEGER_OF_FLOAT = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


@dataclass(frozen=True)
class Comparison:
    """How far a kernel is from its reference."""

    name: str
    mismatches: int  # integers or booleans that differ
    max_ulp: int  # largest distance of two floats

    @property
    def passed(self) -> bool:
        return self.mismatches == 0 and self.max_ulp <= MAX_ULP


def compare_op(name: str, op: Callable[[], Sequence[Tensor]]) -> Comparison:
    """Run an op on both implementations and compare everything it returns."""
    with forced_backend("torch"):
        reference = [tensor.clone() for tensor in op()]
    with forced_backend("triton"):
        kernel = op()
    return compare_tensors(name, reference, kernel)


def compare_tensors(name: str, reference: Sequence[Tensor], kernel: Sequence[Tensor]) -> Comparison:
    """Compare two results. Raises ValueError when they differ in number, shape or type."""
    mismatches = max_ulp = 0
    for left, right in zip(reference, kernel, strict=True):
        if left.shape != right.shape or left.dtype != right.dtype:
            raise ValueError(f"{name}: {left.shape} {left.dtype} against {right.shape} {right.dtype}")
        if not left.numel():
            continue
        if left.is_floating_point():
            max_ulp = max(max_ulp, int(ulp_distance(left, right).max()))
        else:
            mismatches += int((left.long() != right.long()).sum())
    return Comparison(name, mismatches, max_ulp)


def ulp_distance(
    left: Tensor,  # float
    right: Tensor,  # float, same shape and type
) -> Tensor:  # int64, same shape
    """Number of representable floats between two values; two NaN are equal, one NaN is far from anything."""
    distance = (_ordered_bits(left) - _ordered_bits(right)).abs()
    distance = distance.masked_fill(left.isnan() & right.isnan(), 0)
    return distance.masked_fill(left.isnan() ^ right.isnan(), 2**31)


def _ordered_bits(values: Tensor) -> Tensor:
    """Integers in which neighbouring floats differ by one, and both zeros are 0."""
    integer = INTEGER_OF_FLOAT[values.dtype]
    bits = (values + 0.0).view(integer).long()
    return torch.where(bits < 0, -(bits & torch.iinfo(integer).max), bits)
