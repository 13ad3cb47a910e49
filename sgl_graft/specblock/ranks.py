"""What the ranks of a server share of SPECBLOCK's draft."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.runtime_context import get_parallel

from .adaptation.adaptation import Ranks


def shared_embedding(part: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Looks tokens up in an embedding of which every rank holds as many rows, rank 0 the first.

    part `[vocab / ranks, hidden]`. Every rank must ask for the same tokens at the same time.
    """
    group = get_parallel().tp_group
    first, rows = group.rank_in_group * len(part), len(part)

    def look_up(tokens: torch.Tensor) -> torch.Tensor:
        own = (tokens >= first) & (tokens < first + rows)
        found = part[torch.where(own, tokens - first, 0)] * own.unsqueeze(-1)
        return group.all_reduce(found)

    return look_up


def all_ranks() -> Ranks:
    """The ranks that hold this server's draft."""
    group = get_parallel().tp_group

    def broadcast(tensor: torch.Tensor) -> None:
        torch.distributed.broadcast(tensor, src=group.ranks[0], group=group.cpu_group)

    return Ranks(group.rank_in_group, group.world_size, broadcast)
