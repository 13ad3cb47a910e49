"""Which of an op's implementations runs: Triton for CUDA tensors, for all others the torch reference or what
a platform registered in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast

import torch

Backend = Literal["torch", "triton"]

Reference = TypeVar("Reference", bound=Callable[..., Any])

_forced: Backend | None = None
_host_ops: dict[str, Callable[..., Any]] = {}


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an op over `tensor` runs its Triton kernel."""
    if _forced is not None:
        return _forced == "triton"
    return tensor.is_cuda


def register_host_op(reference: str, function: Callable[..., Any]) -> None:
    """Run `function` for host tensors in place of the reference so named; it must give the same result."""
    _host_ops[reference] = function


def host_op(reference: Reference) -> Reference:
    """What runs for tensors that no Triton kernel takes."""
    if _forced is not None:
        return reference
    return cast(Reference, _host_ops.get(reference.__name__, reference))


@contextmanager
def forced_backend(backend: Backend) -> Iterator[None]:
    """Run every op on one implementation, whatever the device: for tests and checks, not for threads.

    Triton on CPU tensors needs its interpreter (`TRITON_INTERPRET=1` before triton is first imported).
    """
    global _forced
    if backend not in ("torch", "triton"):
        raise ValueError(f"backend {backend!r} is unknown: use 'torch' or 'triton'")
    previous, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = previous
