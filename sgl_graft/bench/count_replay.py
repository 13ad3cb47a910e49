"""Calibration counters from a recording: replays both rules, every candidate decided, every stage tried."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_graft.bench.recording import Answer, Recording
from sgl_graft.bench.replay import Calibrated, Replay, Setting, accepted_path
from sgl_graft.cuda_graph.eagle_tree import DraftPool
from sgl_graft.cuda_graph.gate import path_confidence
from sgl_graft.graft.collect import Collector


def count_recording(recording: Recording, slots: int = 16) -> dict[str, Any]:
    """What a server that collects would have counted, and more: a known answer leaves nothing undecided."""
    candidates, stages = CandidateReplay(recording, slots), StageReplay(recording, slots)
    for runner in (candidates, stages):
        runner.run_all(recording)
    return candidates.collector.content() | {"staged": stages.content()}


class CandidateReplay(Replay):
    """The `value` rule; counts which candidates came true."""

    def __init__(self, recording: Recording, slots: int) -> None:
        setting = Setting("value", "value", slots)
        super().__init__(setting, recording.shape, recording.vocab_size, Calibrated.none())
        self.collector = Collector(self.chain, recording.vocab_size)

    def _grow(self, pool: DraftPool, root: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._proposed = pool, self.chain.retrieve(self.table, torch.zeros_like(root), root, context)
        return super()._grow(pool, root, context)

    def _learn(self, answer: Answer, position: int, *round_: Any) -> None:
        ahead = answer.tokens[position + 1 : position + self.chain.max_path]
        committed = torch.nn.functional.pad(ahead, (0, self.chain.max_path - len(ahead)), value=-1)
        self.collector.record(*self._proposed, committed.unsqueeze(0), torch.tensor([len(ahead)]))
        super()._learn(answer, position, *round_)


class StageReplay(Replay):
    """The `staged` rule; at every round also asks what each stage's tree would have accepted."""

    def __init__(self, recording: Recording, slots: int) -> None:
        setting = Setting("staged", "staged", slots)
        super().__init__(setting, recording.shape, recording.vocab_size, Calibrated.none())
        self.confidence: list[list[float]] = []  # [rounds][checkpoints]
        self.lengths: list[list[int]] = []  # [rounds][stages]

    def content(self) -> dict[str, Any]:
        return {
            "checkpoints": list(self.plan.checkpoints),
            "confidence": self.confidence,
            "lengths": self.lengths,
        }

    def _grow(self, pool: DraftPool, root: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        retrieved = self.chain.retrieve(self.table, torch.zeros_like(root), root, context)
        stages = [torch.tensor([stage]) for stage in range(self.plan.num_stages)]
        self._trees = [self.chain.graft_staged(pool, retrieved, root, stage) for stage in stages]
        confidence = path_confidence(pool.scores, self.chain.topk, self.chain.steps)[0].tolist()
        self.confidence.append([confidence[depth] for depth in self.plan.checkpoints])
        return super()._grow(pool, root, context)

    def _learn(self, answer: Answer, position: int, *round_: Any) -> None:
        truth = answer.tokens.tolist()[position + 1 :]
        trees = [(tree.tokens[0].tolist(), tree.parents[0].tolist()) for tree in self._trees]
        self.lengths.append([len(accepted_path(*tree, truth)) for tree in trees])
        super()._learn(answer, position, *round_)
