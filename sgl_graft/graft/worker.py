"""GRAFT inside SGLang's EAGLE worker: same requests, same slots, other nodes.

Three things differ from the stock worker. The tree that leaves the draft is the grafted one. Its verify
input allows paths deeper than the draft's steps. And the target's raw logits, before penalties and grammar
masks touch them, feed the successor table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_worker_v2 as stock

from ..config import current_config
from ..cpu.noise import seed_of
from ..cuda_graph.eagle_tree import DraftPool, pad_pool
from ..cuda_graph.fork import Forked, fork
from ..cuda_graph.retrieve import Retrieved
from ..cuda_graph.select import GraftedTree
from ..serving.camera import Camera, on_path
from ..serving.metrics import Reporter
from ..serving.rank_check import rank_check
from ..serving.ranks import from_first_rank
from ..serving.request_counts import RequestCounts, count_slots
from ..serving.verify_counts import VerifyCounts
from .calibration import load_calibration
from .capped import CappedWorker
from .coupled_verify import Draws, drawing
from .early_stop import DraftLevels
from .keeper import TableKeeper
from .logits_tap import LogitsTap
from .prompt_seed import observe_prompts
from .shape import GraftShape
from .startup import check_shape, with_scope
from .state import GraftState
from .store import identity_of
from .tenancy import Tenancy
from .trees import RoundTree, deeper, growing

logger = logging.getLogger(__name__)


class GraftDraftWorker(stock.EagleDraftWorker):
    """The stock draft worker; its scored nodes become a grafted tree."""

    graft: GraftState
    tree: RoundTree
    beside: Forked[Retrieved]
    speculative_num_steps: int
    draft_rows: torch.Tensor

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        target = self.target_worker.model_runner
        self.graft = create_state(self, target)
        self.graft.writes_counts = get_parallel().tp_rank == 0
        self.keeper = TableKeeper(
            self.graft.table,
            self.graft.config.table,
            identity_of(Path(target.model_config.model_path)),
            saves=get_parallel().tp_rank == 0,
            agree=from_first_rank,
        )
        self.tenancy = Tenancy(
            self.graft.scope, self.graft.table.num_tables, running=lambda req: not req.finished()
        )
        self.rank_check = rank_check()
        self.seed_buf = torch.zeros(self.graft.shape.num_rows, dtype=torch.int64, device=self.device)
        # Ranks that disagreed about the end of a draft would wait for each other's collectives for ever.
        self.may_stop_early = self.seed_buf.device.type == "cpu" and get_parallel().tp_group.world_size == 1
        self.levels: DraftLevels | None = None
        self.steps_run = self.steps_saved = self.steps_saved_now = 0

    # ---- draft -----------------------------------------------------------------------------------------

    def draft(self, batch: Any, *, with_topology: bool = False) -> Any:
        self.steps_saved_now = 0
        with growing(self):
            result = super().draft(batch, with_topology=with_topology)
        self.steps_saved += self.steps_saved_now
        self.steps_run += self.speculative_num_steps - 1 - self.steps_saved_now
        verify_input = result[0] if with_topology else result
        if not batch.forward_mode.is_idle():
            deep = deeper(verify_input, self.graft.max_path)
            result = (deep, *result[1:]) if with_topology else deep
        return result

    def draft_forward(self, forward_batch: Any) -> Any:
        # Captured graphs replay this function's tensors, so the rows are read where the graph reads them.
        self.draft_rows = rows = forward_batch.req_pool_indices
        self.levels, steps = None, self.speculative_num_steps
        if not forward_batch.forward_mode.is_idle():
            # What the table holds depends on nothing that is drafted, so it is looked up beside the draft.
            self.beside = fork(lambda: self.graft.look_up(rows), rows.device)
            if self.may_stop_early:
                self.levels = DraftLevels(self.graft, rows, self.beside.result)
        try:
            with growing(self):
                return super().draft_forward(forward_batch)
        finally:
            self.speculative_num_steps = steps

    def level_drafted(
        self,
        level: int,
        scores: torch.Tensor,  # [batch, 1 or topk, topk]
        tokens: torch.Tensor,  # [batch, topk or topk**2]
        parents: torch.Tensor,  # [batch, topk + 1 or topk]
    ) -> None:
        """One more level has its scores; the engine's loop ends at its ``speculative_num_steps``."""
        if self.levels is not None and self.levels.add(scores, tokens, parents):
            self.speculative_num_steps = level + 1

    def grown(self, pool: DraftPool) -> tuple[GraftedTree, torch.Tensor]:
        """The tree and the stages [batch], when the draft has ended."""
        steps, levels = self.graft.shape.steps, self.levels
        self.steps_saved_now = steps - self.speculative_num_steps
        self.levels = None
        if levels is not None and levels.tree is not None:
            return levels.tree
        return self.graft.graft(pad_pool(pool, self.topk, steps), self.draft_rows, self.beside.join())

    # ---- prefill ---------------------------------------------------------------------------------------

    def _draft_extend_for_prefill(
        self, batch: Any, target_hidden_states: Any, next_token_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not batch.forward_mode.is_idle():
            observe_prompts(self.graft, self.tenancy, batch, next_token_ids, self._begun)
        return super()._draft_extend_for_prefill(batch, target_hidden_states, next_token_ids, *args, **kwargs)

    def _begun(self, row: int, req: Any) -> None:
        seed = req.sampling_params.sampling_seed
        self.seed_buf[row] = seed_of(req.rid) if seed is None else seed


class GraftWorker(CappedWorker):
    """The stock EAGLE worker with GRAFT's draft worker, a tap on the verify logits, and a load cap."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reporter = Reporter(self)
        self.request_counts = RequestCounts()
        self.verifies = VerifyCounts()
        self.camera = Camera()

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        if self.state.collector is not None and self._draft_worker.cuda_graph_runner is not None:
            raise ValueError(
                f"graft.collect {self.state.config.collect} counts what the draft proposes, which replays of "
                "captured draft graphs do not show: add --cuda-graph-backend-decode=disabled"
            )

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        if self.state.collector is None:  # counters want candidates in every round
            draft_path = self._draft_worker.draft_runner.model_config.model_path
            self.set_up_cap(current_config().graft.load_cap, draft_path)

    @property
    def state(self) -> GraftState:
        return self._draft_worker.graft

    def verify(self, batch: Any, pp_proxy_tensors: Any = None, grammar_barrier: Any = None) -> Any:
        if batch.forward_mode.is_idle():
            return super().verify(batch, pp_proxy_tensors, grammar_barrier)
        state, rows, slots = self.state, batch.req_pool_indices, batch.spec_info.draft_token_num
        plain = slots != state.shape.slots
        tree = RoundTree.lone_roots(rows) if plain else self._draft_worker.tree
        tokens = batch.spec_info.draft_token.view(-1, slots)
        target: Any = self._target_worker
        tap = LogitsTap(target, state)
        self._target_worker: Any = tap
        try:
            with drawing(self._draws_of(batch) if state.config.verify == "coupled" else None):
                result = super().verify(batch, pp_proxy_tensors, grammar_barrier)
        finally:
            self._target_worker = target
        accept_index = result.accept_index
        state.learn(rows, tokens, tree.parents, tree.depths, accept_index, tap.best)
        if plain:  # nothing was proposed, so nothing is counted
            state.follow(rows, result.next_token_ids.view(-1, slots), result.accept_lens)
        else:
            state.commit(rows, result.next_token_ids.view(-1, slots), result.accept_lens)
            state.counters.record(tree.sources, tree.depths, tree.stage, accept_index, result.accept_lens)
        self.request_counts.verified(batch.reqs, count_slots(tree.sources, accept_index))
        if self.camera.wanted:
            committed = result.next_token_ids.view(-1, slots)
            accepted = on_path(accept_index, *tokens.shape)
            self.camera.take(tokens, tree.parents, tree.sources, accepted, committed, result.accept_lens)
        self._draft_worker.keeper.save_when_due()
        self._compare_ranks(tokens, tree)
        self.reporter.round_done()
        return result

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size=batch_size)
        self.request_counts.processed(batch_size)
        if not self.processed_plain:
            self.verifies.add(num_correct_drafts_per_req)

    def _draws_of(self, batch: Any) -> Callable[[], Draws]:
        """What the draws of a verify are keyed by; called by an engine that has a sampling kernel."""
        positions = batch.spec_info.positions

        def draws() -> Draws:
            info = batch.sampling_info
            seeds = self._draft_worker.seed_buf[batch.req_pool_indices.long()]
            return Draws(seeds, positions, info.min_ps if info.need_min_p_sampling else None)

        return draws

    def _compare_ranks(self, tokens: torch.Tensor, tree: RoundTree) -> None:
        check, table = self._draft_worker.rank_check, self.state.table
        if check is not None and check.due():
            check.compare(
                tree_tokens=tokens, tree_parents=tree.parents,
                table_tokens=table.tokens, table_probs=table.probs, table_tags=table.tags,
            )  # fmt: skip

    def clear_cache_pool(self) -> None:
        """Flushing the cache forgets what was learned, too, on disk as well."""
        super().clear_cache_pool()
        self.state.clear()
        self._draft_worker.keeper.forgotten()


def create_state(worker: Any, target: Any) -> GraftState:
    """Size the state from the server's arguments; the table's memory is taken before graphs are captured."""
    config = with_scope(current_config().graft, worker.server_args)
    shape = GraftShape(
        slots=worker.speculative_num_draft_tokens,
        topk=worker.topk,
        steps=worker.speculative_num_steps,
        num_rows=worker.req_to_token_pool.req_to_token.shape[0],
        vocab_size=target.model_config.vocab_size,
    )
    check_shape(config, shape)
    draft_path = worker.draft_runner.model_config.model_path
    calibration = load_calibration(config, draft_path, shape.vocab_size)
    state = GraftState(config, shape, calibration, worker.device)
    logger.info(
        "GRAFT: rule=%s slots=%d depth=%d table=%.1f MB scope=%s",
        config.rule,
        shape.slots,
        state.max_path - 1,
        state.table.num_bytes / 2**20,
        config.table.scope,
    )
    return state
