"""The whole chain from a draft's scores to the tree to verify, as one object made before capture.

retrieved = chain.retrieve(table, table_index, root_tokens, contexts)  # may run beside the draft
tree = chain.graft_staged(pool, retrieved, root_tokens, chain.stage(pool.scores, thresholds))  # or
tree = chain.graft_value(pool, retrieved, root_tokens, maps)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .eagle_tree import DraftPool, pool_level_sizes
from .gate import path_confidence, staged_gate
from .merge import TrieLayout, merge_trie
from .retrieve import DeviceTemplate, Retrieved, retrieve
from .select import MAX_DEPTH, GraftedTree, select_tree
from .staged_rule import DeviceStages, staged_weights
from .stages import StagePlan
from .successor_table import SuccessorTable
from .value_rule import DRAFT, TABLE, ValueMaps, value_weights


@dataclass(frozen=True)
class GraftChain:
    """Constants and shapes of one captured chain."""

    slots: int
    topk: int
    steps: int
    template: DeviceTemplate
    layout: TrieLayout
    stages: DeviceStages

    @classmethod
    def create(cls, plan: StagePlan, topk: int, steps: int, device: torch.device | str = "cpu") -> GraftChain:
        """Lay out a chain for drafts of `steps` steps and `topk` beams, and the plan's slots and envelope.

        Raises ValueError when the plan's checkpoints or depth are out of reach.
        """
        if plan.checkpoints and max(plan.checkpoints) >= steps:
            raise ValueError(
                f"checkpoint {max(plan.checkpoints)} is beyond a draft of {steps} steps: drop it"
            )
        template = plan.envelope
        depth = max(steps, len(template.level_sizes))
        if depth > MAX_DEPTH:
            raise ValueError(
                f"trees of depth {depth} are beyond the limit {MAX_DEPTH}: lower steps or max_depth"
            )
        return cls(
            slots=plan.slots,
            topk=topk,
            steps=steps,
            template=DeviceTemplate.create(template, device),
            layout=TrieLayout.create(
                pool_level_sizes(topk, steps), template.level_sizes, template.fathers, device
            ),
            stages=DeviceStages.create(plan, device),
        )

    @property
    def max_path(self) -> int:
        """Longest path a tree of this chain can hold, root included: SGLang's max_tree_depth."""
        return len(self.layout.draft_levels) + 1

    def retrieve(
        self,
        table: SuccessorTable,
        table_index: Tensor,  # [batch] int64
        root_tokens: Tensor,  # [batch] int64
        contexts: Tensor,  # [batch] int64
    ) -> Retrieved:
        """See `retrieve.retrieve`."""
        return retrieve(table, self.template, table_index, root_tokens, contexts)

    def stage(
        self,
        scores: Tensor,  # [batch, pool] float32
        thresholds: Tensor,  # [checkpoints] float32
    ) -> Tensor:  # [batch] int64
        """Stage of each request under the path-confidence gate."""
        confidence = path_confidence(scores, self.topk, self.steps)
        return staged_gate(confidence, self.stages.plan.checkpoints, thresholds)

    def graft_value(
        self,
        pool: DraftPool,
        retrieved: Retrieved,
        root_tokens: Tensor,  # [batch] int64
        maps: ValueMaps,
    ) -> GraftedTree:
        """The tree of the `value` rule."""
        draft = value_weights(maps, DRAFT, self.layout.pool_depths, pool.scores, pool.tokens)
        table = value_weights(maps, TABLE, self.layout.retrieved_depths, retrieved.probs, retrieved.tokens)
        return self._merge_and_select(pool, retrieved, root_tokens, draft, table)

    def graft_staged(
        self,
        pool: DraftPool,
        retrieved: Retrieved,
        root_tokens: Tensor,  # [batch] int64
        stage: Tensor,  # [batch] int64
    ) -> GraftedTree:
        """The tree of the `staged` rule, for a stage from `stage` or another gate."""
        draft, table = staged_weights(
            self.stages, self.layout, stage, pool.tokens, pool.scores, retrieved.tokens
        )
        return self._merge_and_select(pool, retrieved, root_tokens, draft, table)

    def _merge_and_select(
        self,
        pool: DraftPool,
        retrieved: Retrieved,
        root_tokens: Tensor,  # [batch] int64
        draft_weights: Tensor,  # [batch, pool] int64
        retrieved_weights: Tensor,  # [batch, envelope nodes] int64
    ) -> GraftedTree:
        trie = merge_trie(
            self.layout, pool.tokens, pool.parents, draft_weights, retrieved.tokens, retrieved_weights
        )
        return select_tree(self.layout, trie, root_tokens, self.slots)
