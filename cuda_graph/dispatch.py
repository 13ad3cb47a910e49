"""Which of an op's two implementations runs: Triton for CUDA tensors, the torch reference for all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Backend = Literal["torch", "triton"]

_forced: Backend | None = None


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an op over `tensor` runs its Triton kernel."""
    if _forced is not None:
        return _forced == "triton"
    return tensor.is_cuda


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
