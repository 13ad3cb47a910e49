"""Run something beside the main stream, inside or outside a capture, and join it where its result is needed.

Retrieval needs the root token and the table only, so it can run while the drafter drafts:

    beside = fork(lambda: chain.retrieve(table, table_index, root_tokens, contexts), device)
    ...  # the draft steps
    retrieved = beside.join()

On devices without streams the work is done at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", bound=tuple[Tensor, ...])


@dataclass(frozen=True)
class Forked(Generic[Result]):
    """Work in flight on a side stream, or done already where there is none."""

    result: Result
    stream: torch.cuda.Stream | None

    def join(self) -> Result:
        """Make the current stream wait for the work, then hand out its result."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            current.wait_stream(self.stream)
            for tensor in self.result:
                tensor.record_stream(current)  # its memory belongs to the side stream's pool
        return self.result


def fork(run: Callable[[], Result], device: torch.device) -> Forked[Result]:
    """Start `run` on the device's side stream, after everything queued so far on the current one."""
    if device.type != "cuda":
        return Forked(run(), None)
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return Forked(run(), stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
