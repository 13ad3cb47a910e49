"""Tensor-parallel ranks commit the same tokens, or the server stops.

Every rank drafts and verifies for itself, from data that all of them hold. Upstream broadcasts rank 0's
decision, so that lengths cannot differ. That alone hides a rank that verified *another tree*: it keeps the
KV of tokens that were never committed, and every later answer is wrong without a sign. So here the tree
travels with the decision, in one message, and a rank that held other data says so and ends the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

REMEDY = (
    "Its KV cache no longer belongs to the committed tokens, so the server stops rather than answer wrongly. "
    "Start it again. If it happens again: give every rank equally many cores (SGLANG_CPU_OMP_THREADS_BIND), "
    "since sums over other numbers of threads round differently; then suspect the machine's memory"
)


class RankDisagreementError(RuntimeError):
    """A rank held other data than rank 0 where all ranks must hold the same."""


def follow_rank_0(
    group: Any,
    inputs: Mapping[str, torch.Tensor],
    decision: Mapping[str, torch.Tensor],
) -> None:
    """Receive rank 0's view of this round and hold this rank's own against it; changes nothing.

    Args:
        group: SGLang's tensor-parallel group (``broadcast(tensor, src)``, ``rank_in_group``).
        inputs: integer tensors that the round started from, the same on all ranks, by what they are.
        decision: integer tensors that this rank decided, likewise.

    Raises:
        RankDisagreementError: on the rank that differs, naming the first tensor that does.
    """
    tensors = {**inputs, **decision}
    own = torch.cat([tensor.flatten().to(torch.int64) for tensor in tensors.values()])  # [elements]
    shared = own.clone()
    group.broadcast(shared, src=0)
    if torch.equal(own, shared):
        return
    different = own != shared
    start = 0
    for name, tensor in tensors.items():
        part = different[start : start + tensor.numel()]
        if bool(part.any()):
            at = start + int(part.int().argmax())
            raise RankDisagreementError(
                f"tensor-parallel rank {group.rank_in_group} disagrees with rank 0 about {name}: "
                f"{int(part.sum())} of {part.numel()} entries, the first is {int(own[at])} here and "
                f"{int(shared[at])} there. {REMEDY}"
            )
        start += tensor.numel()
