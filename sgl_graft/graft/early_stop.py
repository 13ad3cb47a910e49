"""Stops drafting when deeper draft steps could not be used.

The `staged` rule stops where the paper does: once every request has failed a gate (Graft, section 3.1). The
`value` rule has no gates, but an exact criterion: a path's value never rises along it, so when the best node
that could be expanded is worth less than the worst node already in the tree, in every request, no deeper
node can enter any tree. Trees, and so answers and their accept lengths, stay the same.

Asking costs a look at the values on the host. That is free on a CPU; on a GPU it would stall the round, so
there the draft always runs all its steps, and so it does with several ranks.
"""

from __future__ import annotations

import torch

from ..cuda_graph.eagle_tree import draft_pool, pad_pool
from ..cuda_graph.retrieve import Retrieved
from ..cuda_graph.select import GraftedTree
from ..cuda_graph.value_rule import DRAFT, TABLE, value_weights
from .state import GraftState

# All requests must agree, and with more of them they rarely do: replayed rounds of the embedded model stop
# early in 66, 44, 19, 4 and 0.2 % of the cases at 1, 2, 4, 8 and 16 requests.
MAX_BATCH = {"value": 2, "staged": 64}
FIRST_LEVEL = {"value": 3, "staged": 1}  # levels drafted before the answer is yes often enough to ask


class DraftLevels:
    """The levels drafted so far in one round, and whether they are enough.

    Attributes:
        tree: the grafted tree and the stages, once they are known before the last step.
    """

    def __init__(
        self,
        state: GraftState,
        rows: torch.Tensor,  # [batch]
        retrieved: Retrieved,
    ) -> None:
        self._state = state
        self._rows = rows
        self._scores: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._failed = torch.zeros(rows.shape[0], dtype=torch.bool)
        self._retrieved = retrieved
        self.tree: tuple[GraftedTree, torch.Tensor] | None = None

    def add(
        self,
        scores: torch.Tensor,  # [batch, 1 or topk, topk] path probabilities of the level's nodes
        tokens: torch.Tensor,  # [batch, topk or topk**2]
        parents: torch.Tensor,  # [batch, topk + 1 or topk]
    ) -> bool:
        """Take a level; whether the draft may stop here."""
        self._scores.append(scores)
        self._tokens.append(tokens)
        self._parents.append(parents)
        state, level = self._state, len(self._scores)
        rule = state.config.rule
        if level == state.shape.steps or len(self._rows) > MAX_BATCH[rule] or state.collecting:
            return False
        if rule == "staged":
            return self._all_gates_failed(scores, level - 1)
        return level >= FIRST_LEVEL[rule] and self._nothing_deeper_fits()

    def _all_gates_failed(self, scores: torch.Tensor, depth: int) -> bool:
        checkpoints = self._state.chain.stages.plan.checkpoints
        if depth not in checkpoints:
            return bool(self._failed.all())
        threshold = self._state.thresholds[checkpoints.index(depth)]
        self._failed |= ~(scores.flatten(1).amax(1) > threshold)
        return bool(self._failed.all())

    def _nothing_deeper_fits(self) -> bool:
        state = self._state
        pool = draft_pool(self._scores, self._tokens, self._parents)
        depths = state.chain.layout.pool_depths[: pool.tokens.shape[1]]
        drafted = value_weights(state.maps, DRAFT, depths, pool.scores, pool.tokens)
        frontier = drafted[:, -self._tokens[-1].shape[1] :].amax(1)  # [batch]
        if not bool((frontier < self._worst_place(drafted)).all()):
            return False
        tree, stage = state.graft(
            pad_pool(pool, state.shape.topk, state.shape.steps), self._rows, self._retrieved
        )
        full = bool((tree.parents[:, 1:] >= 0).all())
        if full and bool((frontier < tree.weights[:, 1:].amin(1)).all()):
            self.tree = (tree, stage)
        return self.tree is not None

    def _worst_place(self, drafted: torch.Tensor) -> torch.Tensor:  # [batch, pool] -> [batch]
        """Value of the last place in the tree if no candidate came twice: cheap, and never too low."""
        state = self._state
        retrieved = value_weights(
            state.maps,
            TABLE,
            state.chain.layout.retrieved_depths,
            self._retrieved.probs,
            self._retrieved.tokens,
        )
        places = state.shape.slots - 1
        candidates = torch.cat((drafted, retrieved), dim=1)
        if candidates.shape[1] < places:
            return torch.full_like(candidates[:, 0], -1)
        return candidates.topk(places, dim=1).values[:, -1]
