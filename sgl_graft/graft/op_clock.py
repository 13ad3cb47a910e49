"""Seconds spent in each of GRAFT's operations, for dashboards.

Only where a call returns when its work is done, as on a CPU. On a GPU a call returns when its kernels are
queued, and most of them run inside captured graphs: `make gpu-check` times those.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

OPS = ("retrieve", "graft", "links", "top_successors", "learn", "prompt")


class OpClock:
    """Running totals per operation.

    Attributes:
        seconds: time spent in each of ``OPS``; stays 0 on a device that queues its work.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._runs = torch.device(device).type == "cpu"
        self.seconds = dict.fromkeys(OPS, 0.0)

    @contextmanager
    def __call__(self, op: str) -> Iterator[None]:
        """Count the time of a ``with`` block."""
        if not self._runs:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[op] += time.perf_counter() - start
