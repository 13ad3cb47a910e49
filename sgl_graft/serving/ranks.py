"""What rank 0 decided, on every rank of a tensor-parallel server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Agree(Protocol):
    """Gives every rank what rank 0 decided, or its ValueError."""

    def __call__(self, decide: Callable[[], Result]) -> Result: ...


def from_first_rank(decide: Callable[[], Result]) -> Result:
    """Let rank 0 decide and give every rank its answer; every rank must call it at the same place.

    Raises:
        ValueError: on every rank, whatever rank 0 raised: the others wait for its answer, so it must come.
    """
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size == 1:
        return decide()
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if get_parallel().tp_rank == 0:
        try:
            outcome[0] = decide()
        except Exception as error:
            outcome[1] = str(error) or type(error).__name__
    dist.broadcast_object_list(outcome, src=group.ranks[0], group=group.cpu_group)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    result: Result = outcome[0]
    return result
