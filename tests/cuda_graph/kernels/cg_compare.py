"""Run an op on both of its implementations and compare everything it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from sgl_graft.cuda_graph.dispatch import forced_backend

# The interpreter runs one program at a time in numpy: few examples, small shapes.
kernel_test = settings(max_examples=12, deadline=None, derandomize=True)


def both(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The op's results, torch first."""
    results = []
    for backend in ("torch", "triton"):
        with forced_backend(backend):  # type: ignore[arg-type]
            results.append(op(*args, **kwargs))
    return results[0], results[1]


def assert_equal(reference: Any, kernel: Any) -> None:
    """Integers and booleans exactly; floats within 4 units in the last place."""
    for left, right in zip(_tensors(reference), _tensors(kernel), strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        if left.is_floating_point():
            assert torch.equal(left.isnan(), right.isnan())
            distance = (ordered_bits(left) - ordered_bits(right)).abs()
            assert int(distance[~left.isnan()].max() if distance.numel() else 0) <= 4, distance
        else:
            assert torch.equal(left, right), (left, right)


def ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Integers in which neighbouring floats differ by one."""
    width = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}[
        values.dtype
    ]
    bits = (values + 0.0).view(width).long()
    return torch.where(bits < 0, -(bits & torch.iinfo(width).max), bits)


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
