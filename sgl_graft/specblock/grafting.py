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
from ..graft.shape import GraftShape
from ..graft.startup import with_scope
from ..graft.state import GraftState
from ..graft.tenancy import Tenancy
from ..serving.request_settings import settings_of
from .tree import ABSENT, Nodes

CONTEXT = 3  # tokens before a chunk that its first rows of the table are keyed by


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
        state, device = self.state, next_tokens.device
        last = []
        for req, prefix, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            row = req.kv.req_pool_idx
            tokens = (list(req.origin_input_ids) + list(req.output_ids))[: prefix + length]
            last.append([-1, *tokens][-2:])
            start = max(prefix - CONTEXT, 0)
            if not self.tenancy.owns(row, req):
                settings = settings_of(req.sampling_params.custom_params)
                state.begin(row, self.tenancy.begin(row, req, settings))
                # What a cached prefix taught others is not this request's to read.
                start = 0 if state.private else start
            state.observe(row, torch.tensor(tokens[start:], dtype=torch.int64, device=device))
        state.end_prefill(
            batch.req_pool_indices, torch.tensor(last, dtype=torch.int64, device=device), next_tokens
        )

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


class LogitsTap:
    """Stands for the target worker during one verify, and looks at its logits while they are still raw."""

    best: TopSuccessors

    def __init__(self, worker: Any, state: GraftState) -> None:
        self._worker, self._state = worker, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def forward_batch_generation(self, *args: Any, **kwargs: Any) -> Any:
        output = self._worker.forward_batch_generation(*args, **kwargs)
        self.best = self._state.see(output.logits_output.next_token_logits)
        return output
