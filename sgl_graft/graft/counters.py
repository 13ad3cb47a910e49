"""What the rounds did, counted on the device; nothing here is read back during a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cuda_graph.eagle_tree import DraftPool
from ..cuda_graph.merge import FROM_TABLE
from ..cuda_graph.retrieve import DeviceTemplate, Retrieved

NUM_SOURCES = 4  # FROM_DRAFT | FROM_TABLE as an index; 0 counts the empty slots


@dataclass(frozen=True)
class RoundCounters:
    """Running totals since start.

    Attributes:
        used: slots by source and depth; depth 0 is the root, whose source says whether the table knew what
            follows it. [sources, depths]
        accepted: accepted slots by source and depth. [sources, depths]
        stages: requests by stage. [stages]
        rounds: verifies, counted per request. []
        committed: tokens committed by verifies, bonus included. []
    """

    used: torch.Tensor
    accepted: torch.Tensor
    stages: torch.Tensor
    rounds: torch.Tensor
    committed: torch.Tensor

    @classmethod
    def create(cls, depth: int, num_stages: int, device: torch.device | str = "cpu") -> RoundCounters:
        """Zeroed counters for trees of ``depth`` levels below the root."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            used=zeros(NUM_SOURCES, depth + 1),
            accepted=zeros(NUM_SOURCES, depth + 1),
            stages=zeros(num_stages),
            rounds=zeros(),
            committed=zeros(),
        )

    def record(
        self,
        sources: torch.Tensor,  # [batch, slots]
        depths: torch.Tensor,  # [batch, slots]
        stage: torch.Tensor,  # [batch]
        accept_index: torch.Tensor,  # [batch, path] flat node indices, root first, -1 padded
        accept_lens: torch.Tensor,  # [batch]
    ) -> None:
        """Add one round."""
        width = self.used.shape[1]
        cell = (sources * width + depths).view(-1)  # empty slots fall into (0, 0)
        self.used.view(-1).scatter_add_(0, cell, torch.ones_like(cell))
        path = accept_index[:, 1:].long()
        hit = (path >= 0).view(-1)
        index = path.clamp(min=0).view(-1)
        self.accepted.view(-1).scatter_add_(0, cell[index], hit.to(cell.dtype))
        self.stages.scatter_add_(0, stage, torch.ones_like(stage))
        self.rounds.add_(sources.shape[0])
        self.committed.add_(accept_lens.sum())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The totals by name, still on the device."""
        return {
            "used": self.used,
            "accepted": self.accepted,
            "stages": self.stages,
            "rounds": self.rounds,
            "committed": self.committed,
        }

    def snapshot(self) -> dict[str, Any]:
        """Totals as plain lists. Reads the device: for a request for status, never for a round."""
        return {name: tensor.tolist() for name, tensor in self.tensors().items()}

    @staticmethod
    def hits(totals: dict[str, Any]) -> int:
        """Of a snapshot: rounds in which the table knew what follows the root."""
        hits: int = totals["used"][FROM_TABLE][0]
        return hits


@dataclass(frozen=True)
class CandidateCounters:
    """How often candidates of a given source, depth and path probability lay on the path that was committed.

    Every candidate is counted, verified or not, so the statistics do not depend on the rule that chose the
    slots. Bins are equal steps of log-probability; the last one holds the likeliest paths.
    """

    seen: torch.Tensor  # [2, depths, bins], row 0 draft, row 1 table
    true: torch.Tensor  # [2, depths, bins]

    NUM_BINS = 40
    LOWEST_LOG_PROB = -10.0

    @classmethod
    def create(cls, depth: int, device: torch.device | str = "cpu") -> CandidateCounters:
        shape = (2, depth, cls.NUM_BINS)
        return cls(
            seen=torch.zeros(shape, dtype=torch.int64, device=device),
            true=torch.zeros(shape, dtype=torch.int64, device=device),
        )

    @classmethod
    def bins_of(cls, probs: torch.Tensor) -> torch.Tensor:  # int64, like ``probs``
        """Bin of each path probability."""
        share = 1.0 - probs.clamp(min=1e-30).log() / cls.LOWEST_LOG_PROB
        return (share * cls.NUM_BINS).long().clamp(0, cls.NUM_BINS - 1)

    def record_level_order(
        self,
        source: int,
        tokens: torch.Tensor,  # [batch, nodes], -1 where there is no node
        parents: torch.Tensor,  # [batch, nodes] index of the parent node, -1 for the root
        probs: torch.Tensor,  # [batch, nodes] path probability
        depths: torch.Tensor,  # [nodes], never falling along the nodes
        committed: torch.Tensor,  # [batch, slots] tokens committed this round, packed to the front
        accept_lens: torch.Tensor,  # [batch]
    ) -> torch.Tensor:  # [batch] depth of the deepest candidate that came true
        """Count one round's candidates of one source.

        A node deeper than what was committed is left out when its ancestors all match: nobody knows.
        """
        depth_of = depths.expand_as(tokens)
        wanted = committed.gather(1, (depth_of - 1).clamp(max=committed.shape[1] - 1))
        known = depth_of <= accept_lens.unsqueeze(1)
        own = (tokens == wanted) & known  # [batch, nodes]
        matches = own.clone()
        undecided = ~known
        for _ in range(int(self.seen.shape[1]) - 1):
            parent = parents.clamp(min=0)
            top = parents < 0
            matches = own & (top | matches.gather(1, parent))
            undecided = ~known & (top | matches.gather(1, parent) | undecided.gather(1, parent))
        counted = ((tokens >= 0) & ~undecided).to(torch.int64)
        cell = ((source * self.seen.shape[1] + depth_of - 1) * self.NUM_BINS + self.bins_of(probs)).view(-1)
        self.seen.view(-1).scatter_add_(0, cell, counted.view(-1))
        self.true.view(-1).scatter_add_(0, cell, (counted * matches).view(-1))
        return (matches * depth_of).amax(1)

    def record(
        self,
        pool: DraftPool,
        pool_depths: torch.Tensor,  # [pool]
        retrieved: Retrieved,
        template: DeviceTemplate,
        retrieved_depths: torch.Tensor,  # [retrieved]
        committed: torch.Tensor,
        accept_lens: torch.Tensor,
    ) -> torch.Tensor:  # [batch] depth of the deepest drafted candidate that came true
        """Count one round's candidates of both sources."""
        batch = pool.tokens.shape[0]
        fathers = template.fathers.expand(batch, -1)
        outcome = (committed, accept_lens)
        self.record_level_order(1, retrieved.tokens, fathers, retrieved.probs, retrieved_depths, *outcome)
        return self.record_level_order(0, pool.tokens, pool.parents, pool.scores, pool_depths, *outcome)
