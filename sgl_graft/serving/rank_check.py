"""A debug check: every rank of a tensor-parallel server holds the same state.

Ranks that decide differently commit different lengths, and the server hangs or answers nonsense much later.
With ``graft.check_ranks: N``, every N rounds each rank digests what it decided on and
compares the digests; a difference stops the server with a message that names what differs and where.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ..config import current_config

_CHUNK = 2**20  # elements digested at once: bounds the memory that a large table takes
_PRIME = 1_000_003
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankMismatchError(RuntimeError):
    """Two ranks hold different state."""


def digest(tensor: torch.Tensor) -> int:
    """A number made of every bit of a tensor and its place. Reads the device.

    Integer arithmetic modulo 2**64, so the same bits give the same number on every rank and device.
    """
    bits = tensor.detach().contiguous().flatten()
    if bits.dtype != torch.bool:
        bits = bits.view(_INTEGER_OF_SIZE[bits.element_size()])
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        place = torch.arange(1, part.numel() + 1, device=part.device) * _PRIME + start
        total = total * _PRIME + int(((part + 1) * (2 * place + 1)).sum())
    return (total + bits.numel() + 2**63) % 2**64 - 2**63  # as a signed 64-bit integer


class RankCheck:
    """Compares named tensors across the ranks of one group, every so many rounds.

    Every rank must call it in the same rounds with the same names.

    Args:
        every: rounds between two comparisons.
        gather: gives every rank's tensor, by rank, for this rank's.

    Attributes:
        comparisons: how many rounds were compared and found equal.
    """

    def __init__(self, every: int, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        self._every = every
        self._gather = gather
        self._rounds = 0
        self.comparisons = 0

    def due(self) -> bool:
        """Count a round; whether it is one to compare."""
        self._rounds += 1
        return self._rounds % self._every == 0

    def compare(self, **tensors: torch.Tensor) -> None:
        """Compare the tensors with the other ranks'.

        Raises:
            RankMismatchError: on every rank, naming the tensors and the ranks that differ from the first.
        """
        mine = torch.tensor([digest(tensor) for tensor in tensors.values()], dtype=torch.int64)
        everyones = self._gather(mine)
        differing = [
            f"{name} of rank {rank}"
            for rank, others in enumerate(everyones)
            for name, same in zip(tensors, (others == everyones[0]).tolist(), strict=True)
            if not same
        ]
        if differing:
            raise RankMismatchError(
                f"ranks differ in round {self._rounds}: {', '.join(differing)} differs from rank 0's. The "
                "ranks would commit different tokens, so the server stops (graft.check_ranks). Report it "
                "with the log; until it is found, serve with --tp 1."
            )
        self.comparisons += 1


def rank_check() -> RankCheck | None:
    """The check that the configuration asks for; None when it is off or there is one rank only."""
    every = current_config().graft.check_ranks
    if not every:
        return None
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size == 1:
        return None

    def gather(mine: torch.Tensor) -> list[torch.Tensor]:
        everyones = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(everyones, mine, group=group.cpu_group)
        return everyones

    return RankCheck(every, gather)
