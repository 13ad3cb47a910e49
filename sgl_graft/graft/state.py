"""What GRAFT keeps on the device: the successor table, each request's last two tokens, and the counters.

Torch only; the worker connects it to the engine. Everything here changes speed, never output.
"""

from __future__ import annotations

import json

import torch

from ..config import GraftConfig
from ..cuda_graph.chain import GraftChain
from ..cuda_graph.eagle_tree import DraftPool
from ..cuda_graph.prompt_update import observe_prompt
from ..cuda_graph.select import GraftedTree
from ..cuda_graph.stages import paper_stage_plan
from ..cuda_graph.successor_table import SuccessorTable
from ..cuda_graph.table_update import accepted_slots, write_successors
from ..cuda_graph.top_successors import TopSuccessors, top_successors
from ..cuda_graph.value_rule import ValueMaps
from .calibration import Calibration
from .counters import CandidateCounters, RoundCounters
from .shape import GraftShape, rank_prior

COLLECT_EVERY = 20  # rounds between two writes of the calibration counters
VALUE_ENVELOPE = 48  # retrieved candidates the value rule chooses from


class GraftState:
    """The table and the trees of one server rank."""

    def __init__(
        self,
        config: GraftConfig,
        shape: GraftShape,
        calibration: Calibration,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.shape = shape
        self.private = config.table.scope == "request"
        self.table = SuccessorTable.create(
            shape.vocab_size,
            k=config.table.row_width,
            num_tables=shape.num_rows if self.private else 1,
            order2_rows=config.table.order2_rows,
            device=device,
        )
        plan = paper_stage_plan(
            shape.slots,
            shape.steps,
            shape.depth(config.depth),
            rank_prior=rank_prior(config),
            min_envelope=VALUE_ENVELOPE if config.rule == "value" else 0,
        )
        self.chain = GraftChain.create(plan, shape.topk, shape.steps, device)
        thresholds = config.thresholds or calibration.thresholds_for(plan.checkpoints)
        self.thresholds = torch.tensor(thresholds, dtype=torch.float32, device=device)
        self.maps: ValueMaps = calibration.value_maps(device)
        depth = self.chain.max_path - 1
        self.counters = RoundCounters.create(depth, plan.num_stages, device)
        self.rounds_collected = 0
        self.candidates = CandidateCounters.create(depth, device) if config.collect else None
        # One entry per row of the request pool: the last committed token, and the one before it.
        self.root_buf = torch.zeros(shape.num_rows, dtype=torch.int64, device=device)
        self.previous_buf = torch.full((shape.num_rows,), -1, dtype=torch.int64, device=device)

    @property
    def max_path(self) -> int:
        """Longest accepted path, root included: the engine's ``max_tree_depth``."""
        return self.chain.max_path

    def table_index(self, rows: torch.Tensor) -> torch.Tensor:  # [batch] -> [batch]
        """Which table each request reads and writes."""
        return rows.long() if self.private else torch.zeros_like(rows, dtype=torch.int64)

    # ---- a round ---------------------------------------------------------------------------------------

    def grow(self, pool: DraftPool, rows: torch.Tensor) -> tuple[GraftedTree, torch.Tensor]:
        """The tree to verify and the stage of each request [batch], from the draft's scored nodes."""
        rows = rows.long()
        root, previous = self.root_buf[rows], self.previous_buf[rows]
        retrieved = self.chain.retrieve(self.table, self.table_index(rows), root, previous)
        self.proposed = (pool, retrieved)
        if self.config.rule == "staged":
            stage = self.chain.stage(pool.scores, self.thresholds)
            return self.chain.graft_staged(pool, retrieved, root, stage), stage
        tree = self.chain.graft_value(pool, retrieved, root, self.maps)
        return tree, torch.zeros_like(rows)

    def see(self, logits: torch.Tensor) -> TopSuccessors:
        """The target's likeliest successors after every node, from its raw logits [batch * slots, vocab]."""
        return top_successors(logits, self.table.k, self.shape.vocab_size)

    def learn(
        self,
        rows: torch.Tensor,  # [batch]
        tokens: torch.Tensor,  # [batch, slots]
        parents: torch.Tensor,  # [batch, slots]
        depths: torch.Tensor,  # [batch, slots]
        accept_index: torch.Tensor,  # [batch, path] flat node indices, -1 padded
        best: TopSuccessors,
    ) -> None:
        """Write the successors of every real node into the table, accepted nodes first."""
        write_successors(
            self.table,
            self.table_index(rows),
            tokens,
            parents,
            depths,
            self.previous_buf[rows.long()],
            accepted_slots(accept_index, self.shape.slots),
            best,
        )

    def commit(
        self,
        rows: torch.Tensor,  # [batch]
        tokens: torch.Tensor,  # [batch, slots] tokens committed this round, packed to the front
        accept_lens: torch.Tensor,  # [batch], bonus included
    ) -> None:
        """Remember the last two committed tokens of each request."""
        if self.candidates is not None:
            pool, retrieved = self.proposed
            layout = self.chain.layout
            self.candidates.record(
                pool,
                layout.pool_depths,
                retrieved,
                self.chain.template,
                layout.retrieved_depths,
                tokens.long(),
                accept_lens.long(),
            )
            self._write_candidates()
        rows, last = rows.long(), accept_lens.long().unsqueeze(1) - 1
        before = tokens.gather(1, (last - 1).clamp(min=0)).squeeze(1).long()
        self.previous_buf[rows] = torch.where(accept_lens == 1, self.root_buf[rows], before)
        self.root_buf[rows] = tokens.gather(1, last).squeeze(1).long()

    def _write_candidates(self) -> None:
        """Every so often, put the calibration counters where ``sgl-graft calibrate`` finds them."""
        assert self.candidates is not None and self.config.collect is not None
        self.rounds_collected += 1
        if self.rounds_collected % COLLECT_EVERY == 0:
            content = {
                "seen": self.candidates.seen.tolist(),
                "true": self.candidates.true.tolist(),
                "vocab_size": self.shape.vocab_size,
                "rounds": self.rounds_collected,
            }
            self.config.collect.write_text(json.dumps(content))

    # ---- a prefill -------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        """A new request owns this row of the pool: nothing of the former owner may be read."""
        if self.private:
            self.table.clear_table(row)

    def observe(
        self,
        row: int,
        tokens: torch.Tensor,  # [length] consecutive tokens of one request
    ) -> None:
        """Learn the observed successors of a stretch of prompt; they cost no forward."""
        if not self.config.table.seed_prompts or tokens.numel() < 2:
            return
        index = torch.full_like(tokens, row if self.private else 0)
        previous = torch.cat((tokens.new_full((1,), -1), tokens[:-1]))
        following = torch.cat((tokens[1:], tokens.new_full((1,), -1)))
        observe_prompt(self.table, index, previous, tokens, following)

    def end_prefill(
        self,
        rows: torch.Tensor,  # [batch]
        last_tokens: torch.Tensor,  # [batch] last prompt token
        next_tokens: torch.Tensor,  # [batch] first generated token
    ) -> None:
        """The first generated token is the next round's root."""
        rows = rows.long()
        self.previous_buf[rows] = last_tokens.long()
        self.root_buf[rows] = next_tokens.long()

    def clear(self) -> None:
        """Forget everything learned."""
        self.table.clear()
