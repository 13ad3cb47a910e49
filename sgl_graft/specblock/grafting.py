"""``specblock.graft``: nodes from GRAFT's successor table compete with the draft's for the tree's slots.

The table gives each of its nodes the product of the probabilities the target had on the way when it was
there last; the draft gives the product of its own. Both are chances of being accepted, so the tree takes the
best of all, and weak drafts give way.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config import current_config
from ..cuda_graph.top_successors import TopSuccessors
from ..graft.calibration import Calibration
from ..graft.prompt_seed import observe_prompts
from ..graft.shape import GraftShape
from ..graft.startup import with_scope
from ..graft.state import GraftState
from ..graft.tenancy import Tenancy
from .tree import ABSENT, Nodes


class Grafting:
    """The table of one server rank, and what each round does with it."""

    def __init__(
        self, server_args: Any, slots: int, steps: int, num_rows: int, vocab_size: int, device: Any
    ) -> None:
        config = with_scope(current_config().graft, server_args)
        shape = GraftShape(slots=slots, topk=2, steps=steps, num_rows=num_rows, vocab_size=vocab_size)
        self.state = GraftState(config, shape, Calibration(), device)
        self.tenancy = Tenancy(
            self.state.scope, self.state.table.num_tables, running=lambda req: not req.finished()
        )
        template = self.state.chain.template
        self.fathers = template.fathers  # [nodes], -1 for the root's children
        self.levels = len(template.level_sizes)

    def nodes(self, rows: torch.Tensor) -> Nodes:
        """What the table holds behind the requests' last tokens; rows `[batch]` of the request pool."""
        found = self.state.look_up(rows)
        there = (found.tokens >= 0) & (found.probs > 0)
        scores = torch.where(there, found.probs.clamp_min(1e-30).log(), ABSENT)
        return Nodes(found.tokens.clamp_min(0), self.fathers.expand_as(found.tokens), scores, self.levels)

    def observe_prompts(self, batch: Any, next_tokens: torch.Tensor) -> None:
        """Seed the table from each request's prefill chunk."""
        observe_prompts(self.state, self.tenancy, batch, next_tokens)

    def learn(
        self,
        rows: torch.Tensor,  # [batch]
        tokens: torch.Tensor,  # [batch, slots]
        parents: torch.Tensor,  # [batch, slots]
        depths: torch.Tensor,  # [batch, slots]
        result: Any,
        best: TopSuccessors,
    ) -> None:
        """Take in what one verify showed."""
        self.state.learn(rows, tokens, parents, depths, result.accept_index, best)
        self.state.commit(rows, result.next_token_ids.view(tokens.shape), result.accept_lens)
