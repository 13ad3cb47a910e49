"""What calibration is fitted to: which candidates came true, and how far drafts went from each confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cuda_graph.chain import GraftChain
from ..cuda_graph.eagle_tree import DraftPool
from ..cuda_graph.gate import path_confidence
from ..cuda_graph.retrieve import Retrieved
from .counters import CandidateCounters


@dataclass(frozen=True)
class GateCounters:
    """How often a draft of some confidence at some depth turned out right beyond that depth.

    Counted only when it is known: a round that committed little says nothing about a draft that agrees with
    all of it. Bins are equal steps of confidence.
    """

    seen: torch.Tensor  # [2, steps, bins], row 1 where the draft was right beyond the depth

    NUM_BINS = 100

    @classmethod
    def create(cls, steps: int, device: torch.device | str = "cpu") -> GateCounters:
        return cls(torch.zeros((2, steps, cls.NUM_BINS), dtype=torch.int64, device=device))

    def record(
        self,
        confidence: torch.Tensor,  # [batch, steps]
        right: torch.Tensor,  # [batch] levels of the draft that hold what was committed
        accept_lens: torch.Tensor,  # [batch] tokens committed, bonus included
    ) -> None:
        """Count one round. At the last depth nothing lies beyond: there, being right up to it counts."""
        steps = confidence.shape[1]
        wanted = torch.arange(2, steps + 2, device=right.device).clamp(max=steps)  # [steps] levels
        beyond = right.unsqueeze(1) >= wanted  # [batch, steps]
        known = beyond | (right < accept_lens).unsqueeze(1) | (accept_lens.unsqueeze(1) >= wanted)
        bins = (confidence * self.NUM_BINS).long().clamp(0, self.NUM_BINS - 1)
        depth = torch.arange(steps, device=right.device)
        cell = (beyond.long() * steps + depth) * self.NUM_BINS + bins
        self.seen.view(-1).scatter_add_(0, cell.view(-1), known.long().view(-1))


class Collector:
    """Both counters over one chain's rounds."""

    def __init__(self, chain: GraftChain, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.chain = chain
        self.vocab_size = vocab_size
        self.rounds = 0
        self.candidates = CandidateCounters.create(chain.max_path - 1, device)
        self.gates = GateCounters.create(chain.steps, device)

    def record(
        self,
        pool: DraftPool,
        retrieved: Retrieved,
        committed: torch.Tensor,  # [batch, slots] tokens committed this round, packed to the front
        accept_lens: torch.Tensor,  # [batch]
    ) -> None:
        """Count one round."""
        chain, layout = self.chain, self.chain.layout
        right = self.candidates.record(
            pool,
            layout.pool_depths,
            retrieved,
            chain.template,
            layout.retrieved_depths,
            committed.long(),
            accept_lens.long(),
        )
        confidence = path_confidence(pool.scores, chain.topk, chain.steps)
        self.gates.record(confidence, right, accept_lens.long())
        self.rounds += 1

    def content(self) -> dict[str, Any]:
        """What `calibration.fit` reads; plain lists."""
        return {
            "seen": self.candidates.seen.tolist(),
            "true": self.candidates.true.tolist(),
            "gates": self.gates.seen.tolist(),
            "vocab_size": self.vocab_size,
            "rounds": self.rounds,
            "steps": self.chain.steps,
            "topk": self.chain.topk,
        }
