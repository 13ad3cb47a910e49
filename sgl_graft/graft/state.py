"""What GRAFT keeps on the device: the successor table, each request's last two tokens, and the counters.

Torch only; the worker connects it to the engine. Everything here changes speed, never output.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from ..config import GraftConfig
from ..cuda_graph.chain import GraftChain
from ..cuda_graph.eagle_tree import DraftPool
from ..cuda_graph.merge import FROM_TABLE
from ..cuda_graph.prompt_update import observe_prompt
from ..cuda_graph.retrieve import Retrieved
from ..cuda_graph.select import GraftedTree
from ..cuda_graph.stages import paper_stage_plan
from ..cuda_graph.successor_table import SuccessorTable, contexts_within, next_contexts
from ..cuda_graph.table_update import accepted_slots, write_successors
from ..cuda_graph.top_successors import TopSuccessors, top_successors
from ..cuda_graph.value_rule import ValueMaps
from ..files import write_or_warn
from .calibration import Calibration
from .collect import Collector
from .counters import RoundCounters
from .op_clock import OpClock
from .shape import VALUE_ENVELOPE, GraftShape, rank_prior
from .tenancy import NO_TABLE, Assignment, Scope

COLLECT_EVERY = 20  # rounds between two writes of the counters to where `sgl-graft calibrate` reads them


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
        self.scope: Scope = config.table.scope or "shared"
        self.private = self.scope != "shared"
        self.table = SuccessorTable.create(
            shape.vocab_size,
            k=config.table.row_width,
            num_tables={"shared": 1, "group": config.table.groups, "request": shape.num_rows}[self.scope],
            context_rows=config.table.context_rows,
            context_len=config.table.context_len,
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
        self.clock = OpClock(device)
        self.collector = Collector(self.chain, shape.vocab_size, device) if config.collect else None
        self.writes_counts = True  # every rank counts the same; one writes
        # Told each round's committed tokens [batch, slots] and accept lengths [batch] while it is set.
        self.on_commit: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        # One entry per row of the request pool: its table, its last committed token, what stands before that.
        self.table_buf = torch.full((shape.num_rows,), NO_TABLE, dtype=torch.int64, device=device)
        self.table_of_row = [NO_TABLE] * shape.num_rows  # the same on the host
        self.root_buf = torch.zeros(shape.num_rows, dtype=torch.int64, device=device)
        self.context_buf = torch.full((shape.num_rows,), -1, dtype=torch.int64, device=device)

    @property
    def max_path(self) -> int:
        """Longest accepted path, root included: the engine's ``max_tree_depth``."""
        return self.chain.max_path

    @property
    def collecting(self) -> bool:
        """Whether candidates are counted, for which a draft must not end early."""
        return self.collector is not None or self.on_commit is not None

    def table_index(self, rows: torch.Tensor) -> torch.Tensor:  # [batch] -> [batch]
        """Which table each request reads and writes; ``NO_TABLE`` for none."""
        return self.table_buf[rows.long()]

    # ---- a round ---------------------------------------------------------------------------------------

    def look_up(self, rows: torch.Tensor) -> Retrieved:  # [batch] -> [batch, envelope nodes] each
        """What the table holds after each request's last committed tokens."""
        rows = rows.long()
        with self.clock("retrieve"):
            return self.chain.retrieve(
                self.table, self.table_index(rows), self.root_buf[rows], self.context_buf[rows]
            )

    def graft(
        self, pool: DraftPool, rows: torch.Tensor, retrieved: Retrieved
    ) -> tuple[GraftedTree, torch.Tensor]:
        """The tree to verify and the stage of each request [batch], from the candidates of both sources."""
        self.proposed = (pool, retrieved)
        with self.clock("graft"):
            return self._graft(pool, rows.long(), retrieved)

    def grow(self, pool: DraftPool, rows: torch.Tensor) -> tuple[GraftedTree, torch.Tensor]:
        """Look up and graft."""
        return self.graft(pool, rows, self.look_up(rows))

    def _graft(
        self, pool: DraftPool, rows: torch.Tensor, retrieved: Retrieved
    ) -> tuple[GraftedTree, torch.Tensor]:
        root = self.root_buf[rows]
        if self.config.rule == "staged":
            stage = self.chain.stage(pool.scores, self.thresholds)
            tree = self.chain.graft_staged(pool, retrieved, root, stage)
        else:
            stage = torch.zeros_like(rows)
            tree = self.chain.graft_value(pool, retrieved, root, self.maps)
        if retrieved.tokens.shape[1]:
            # The root comes from neither source; its entry says whether the table knew what follows it.
            tree.sources[:, 0] = (retrieved.tokens[:, 0] >= 0) * FROM_TABLE
        return tree, stage

    def see(self, logits: torch.Tensor) -> TopSuccessors:
        """The target's likeliest successors after every node, from its raw logits [batch * slots, vocab]."""
        with self.clock("top_successors"):
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
        with self.clock("learn"):
            write_successors(
                self.table,
                self.table_index(rows),
                tokens,
                parents,
                depths,
                self.context_buf[rows.long()],
                accepted_slots(accept_index, tokens.shape[1]),
                best,
            )

    def commit(
        self,
        rows: torch.Tensor,  # [batch]
        tokens: torch.Tensor,  # [batch, slots] tokens committed this round, packed to the front
        accept_lens: torch.Tensor,  # [batch], bonus included
    ) -> None:
        """Remember the last committed token of each request and what stands before it."""
        if self.collector is not None:
            self.collector.record(*self.proposed, tokens, accept_lens)
            if self.writes_counts and self.collector.rounds % COLLECT_EVERY == 0:
                assert self.config.collect is not None
                write_or_warn(self.config.collect, json.dumps(self.collector.content()), "graft.collect")
        if self.on_commit is not None:
            self.on_commit(tokens, accept_lens)
        self.follow(rows, tokens, accept_lens)

    def follow(
        self,
        rows: torch.Tensor,  # [batch]
        tokens: torch.Tensor,  # [batch, slots], as in `commit`
        accept_lens: torch.Tensor,  # [batch]
    ) -> None:
        """Of :meth:`commit`, what a round without a draft needs, too."""
        rows, num_new = rows.long(), accept_lens.long().unsqueeze(1)  # [batch], [batch, 1]
        root, context = self.root_buf[rows].unsqueeze(1), self.context_buf[rows].unsqueeze(1)
        # A context's lowest field is a token: the one before the old root stands in front of what is new.
        known = torch.cat((context, root, tokens.long()), dim=1)  # [batch, 2 + slots]
        further, nearest, last = (known.gather(1, num_new + back).squeeze(1) for back in (-1, 0, 1))
        self.context_buf[rows] = next_contexts(self.table, further, nearest)
        self.root_buf[rows] = last

    # ---- a prefill -------------------------------------------------------------------------------------

    def begin(self, row: int, assignment: Assignment) -> None:
        """A new request owns this row of the pool: nothing of the former owner may be read."""
        if assignment.clear != NO_TABLE:
            self.table.clear_table(assignment.clear)
        for lost in assignment.evicted:
            self._use_table(lost, NO_TABLE)
        self._use_table(row, assignment.table)

    def _use_table(self, row: int, table: int) -> None:
        self.table_of_row[row] = table
        self.table_buf[row] = table

    def observe(
        self,
        row: int,
        tokens: torch.Tensor,  # [length] consecutive tokens of one request
    ) -> None:
        """Learn the observed successors of a stretch of prompt; they cost no forward."""
        table = self.table_of_row[row]
        if not self.config.table.seed_prompts or tokens.numel() < 2 or table == NO_TABLE:
            return
        index = torch.full_like(tokens, table)
        following = torch.cat((tokens[1:], tokens.new_full((1,), -1)))
        with self.clock("prompt"):
            observe_prompt(self.table, index, contexts_within(self.table, tokens), tokens, following)

    def end_prefill(
        self,
        rows: torch.Tensor,  # [batch]
        last_tokens: torch.Tensor,  # [batch, 2] last two prompt tokens, -1 where the prompt is shorter
        next_tokens: torch.Tensor,  # [batch] first generated token
    ) -> None:
        """The first generated token is the next round's root."""
        rows = rows.long()
        self.context_buf[rows] = next_contexts(self.table, last_tokens[:, 0].long(), last_tokens[:, 1].long())
        self.root_buf[rows] = next_tokens.long()

    def clear(self) -> None:
        """Forget everything learned."""
        self.table.clear()
