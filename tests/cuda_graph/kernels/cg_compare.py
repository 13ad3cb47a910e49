"""Run an op on both of its implementations and require that they agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import settings
from sgl_graft.cuda_graph.check_compare import compare_tensors
from sgl_graft.cuda_graph.dispatch import Backend, forced_backend
from torch import Tensor

# The interpreter runs one program at a time in numpy: few examples, small shapes.
kernel_test = settings(max_examples=8, deadline=None, derandomize=True)
BACKENDS: tuple[Backend, Backend] = ("torch", "triton")


def both(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The op's results, torch first."""
    results = []
    for backend in BACKENDS:
        with forced_backend(backend):
            results.append(op(*args, **kwargs))
    return results[0], results[1]


def assert_equal(reference: Tensor | Sequence[Tensor], kernel: Tensor | Sequence[Tensor]) -> None:
    """Integers and booleans exactly; floats within 4 units in the last place."""
    left, right = ((t,) if isinstance(t, Tensor) else tuple(t) for t in (reference, kernel))
    comparison = compare_tensors("op", left, right)
    assert comparison.passed, (comparison, left, right)
