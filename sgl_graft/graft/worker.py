"""GRAFT inside SGLang's EAGLE worker: same requests, same slots, other nodes.

Three things differ from the stock worker. The tree that leaves the draft is the grafted one. Its verify
input allows paths deeper than the draft's steps. And the target's raw logits, before penalties and grammar
masks touch them, feed the successor table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_worker_v2 as stock
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from ..config import current_config
from ..cuda_graph.eagle_tree import draft_pool
from ..cuda_graph.top_successors import TopSuccessors
from ..cuda_graph.tree_links import TreeMaskMode, tree_links
from .calibration import load_calibration
from .keeper import TableKeeper
from .shape import GraftShape
from .startup import check_shape
from .state import GraftState
from .store import identity_of

logger = logging.getLogger(__name__)

# The engine calls its tree builders as plain functions, without the worker they run for.
_current: GraftDraftWorker | None = None


@dataclasses.dataclass(frozen=True)
class RoundTree:
    """The tree in flight between draft and commit."""

    parents: torch.Tensor  # [batch, slots]
    depths: torch.Tensor  # [batch, slots]
    sources: torch.Tensor  # [batch, slots]
    stage: torch.Tensor  # [batch]


class GraftVerifyInput(EagleVerifyInput):
    """A verify input whose tree may be deeper than the draft and has no fixed branching."""

    max_path: int = 0

    @property
    def max_tree_depth(self) -> int:
        return self.max_path

    @property
    def tree_topk(self) -> int:
        return -1


class GraftDraftWorker(stock.EagleDraftWorker):
    """The stock draft worker; its scored nodes become a grafted tree."""

    graft: GraftState
    tree: RoundTree
    draft_rows: torch.Tensor

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        target = self.target_worker.model_runner
        self.graft = create_state(self, target)
        self.keeper = TableKeeper(
            self.graft.table,
            self.graft.config.table,
            identity_of(Path(target.model_config.model_path)),
            saves=get_parallel().tp_rank == 0,
        )
        self.row_owner: dict[int, str] = {}

    # ---- draft -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _as_current(self) -> Iterator[None]:
        global _current
        former, _current = _current, self
        try:
            yield
        finally:
            _current = former

    def draft(self, batch: Any, *, with_topology: bool = False) -> Any:
        with self._as_current():
            result = super().draft(batch, with_topology=with_topology)
        verify_input = result[0] if with_topology else result
        if not batch.forward_mode.is_idle():
            deeper = _deeper(verify_input, self.graft.max_path)
            result = (deeper, *result[1:]) if with_topology else deeper
        return result

    def draft_forward(self, forward_batch: Any) -> Any:
        # Captured graphs replay this function's tensors, so the rows are read where the graph reads them.
        self.draft_rows = forward_batch.req_pool_indices
        with self._as_current():
            return super().draft_forward(forward_batch)

    # ---- prefill ---------------------------------------------------------------------------------------

    def _draft_extend_for_prefill(
        self, batch: Any, target_hidden_states: Any, next_token_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not batch.forward_mode.is_idle():
            self._observe_prompts(batch, next_token_ids)
        return super()._draft_extend_for_prefill(batch, target_hidden_states, next_token_ids, *args, **kwargs)

    def _observe_prompts(self, batch: Any, next_token_ids: torch.Tensor) -> None:
        """Seed the table from the tokens of each request's prefill chunk, which the host holds anyway."""
        state = self.graft
        last_tokens = []
        for req, prefix_len, extend_len in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            row = req.kv.req_pool_idx
            tokens = (list(req.origin_input_ids) + list(req.output_ids))[: prefix_len + extend_len]
            last_tokens.append(tokens[-1])
            start = max(prefix_len - 2, 0)  # an order-2 row needs the two tokens before the chunk
            if self.row_owner.get(row) != req.rid:
                self.row_owner[row] = req.rid
                state.begin(row)
                start = (
                    0 if state.private else start
                )  # what a cached prefix taught others is not ours to read
            state.observe(row, torch.tensor(tokens[start:], dtype=torch.int64, device=self.device))
        state.end_prefill(
            batch.req_pool_indices,
            torch.tensor(last_tokens, dtype=torch.int64, device=self.device),
            next_token_ids,
        )


class GraftWorker(stock.EAGLEWorkerV2):
    """The stock EAGLE worker with GRAFT's draft worker and a tap on the verify logits."""

    @property
    def state(self) -> GraftState:
        return self._draft_worker.graft

    def verify(self, batch: Any, pp_proxy_tensors: Any = None, grammar_barrier: Any = None) -> Any:
        if batch.forward_mode.is_idle():
            return super().verify(batch, pp_proxy_tensors, grammar_barrier)
        state, tree = self.state, self._draft_worker.tree
        rows, slots = batch.req_pool_indices, batch.spec_info.draft_token_num
        tokens = batch.spec_info.draft_token.view(-1, slots)
        target: Any = self._target_worker
        tap = _LogitsTap(target, state)
        self._target_worker: Any = tap
        try:
            result = super().verify(batch, pp_proxy_tensors, grammar_barrier)
        finally:
            self._target_worker = target
        accept_index = result.accept_index
        state.learn(rows, tokens, tree.parents, tree.depths, accept_index, tap.best)
        state.commit(rows, result.next_token_ids.view(-1, slots), result.accept_lens)
        state.counters.record(tree.sources, tree.depths, tree.stage, accept_index, result.accept_lens)
        self._draft_worker.keeper.save_when_due()
        return result

    def clear_cache_pool(self) -> None:
        """Flushing the cache forgets what was learned, too."""
        super().clear_cache_pool()
        self.state.clear()


class _LogitsTap:
    """Stands for the target worker during one verify, and looks at its logits while they are still raw."""

    best: TopSuccessors

    def __init__(self, worker: Any, state: GraftState) -> None:
        self._worker = worker
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def forward_batch_generation(self, *args: Any, **kwargs: Any) -> Any:
        output = self._worker.forward_batch_generation(*args, **kwargs)
        self.best = self._state.see(output.logits_output.next_token_logits)
        return output


def _deeper(verify_input: EagleVerifyInput, max_path: int) -> GraftVerifyInput:
    values = {field.name: getattr(verify_input, field.name) for field in dataclasses.fields(verify_input)}
    deeper = GraftVerifyInput(**values)
    deeper.max_path = max_path
    return deeper


def create_state(worker: Any, target: Any) -> GraftState:
    """Size the state from the server's arguments; the table's memory is taken before graphs are captured."""
    config = current_config().graft
    if config.table.scope is None:
        args = worker.server_args
        scope = "request" if args.api_key or args.admin_api_key else "shared"
        table = config.table.model_copy(update={"scope": scope})
        config = config.model_copy(update={"table": table})
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


# ---- the engine's tree builders -----------------------------------------------------------------------


def organize(
    original: Callable[..., Any],
    score_list: list[torch.Tensor],
    token_list: list[torch.Tensor],
    parents_list: list[torch.Tensor],
    num_draft_token: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Around ``organize_draft_results``: the last step of the draft, inside the captured graph.

    The engine carries three tensors from here to :func:`build_tree`; they hold the grafted tree's parents
    [batch, slots], its notes [batch, slots, 3] (depth, source, stage) and its tokens [batch, slots - 1].
    """
    if _current is None:
        return original(score_list, token_list, parents_list, num_draft_token)
    pool = draft_pool(score_list, token_list, parents_list)
    tree, stage = _current.graft.grow(pool, _current.draft_rows)
    notes = torch.stack((tree.depths, tree.sources, stage.unsqueeze(1).expand_as(tree.depths)), dim=2)
    return tree.parents, notes, tree.tokens[:, 1:]


def build_tree(
    original: Callable[..., Any],
    bonus_tokens: torch.Tensor,  # [batch]
    parents: torch.Tensor,  # [batch, slots], from `organize`
    notes: torch.Tensor,  # [batch, slots, 3], from `organize`
    draft_tokens: torch.Tensor,  # [batch, slots - 1]
    seq_lens: torch.Tensor,  # [batch]
    seq_lens_sum: int,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any = 0,
    tree_mask_buf: torch.Tensor | None = None,
    fill_prefix_mask: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Around ``build_tree_kernel_efficient``: mask, positions and links of the grafted tree."""
    if _current is None:
        return original(
            bonus_tokens, parents, notes, draft_tokens, seq_lens, seq_lens_sum, topk, spec_steps,
            num_verify_tokens, tree_mask_mode, tree_mask_buf, fill_prefix_mask,
        )  # fmt: skip
    _current.tree = RoundTree(parents, notes[:, :, 0], notes[:, :, 1], notes[:, 0, 2])
    mode = TreeMaskMode(int(tree_mask_mode))
    if mode == TreeMaskMode.FULL_MASK and tree_mask_buf is None:
        batch = seq_lens.numel()
        cells = seq_lens_sum * num_verify_tokens + batch * num_verify_tokens**2
        tree_mask_buf = torch.empty(cells, dtype=torch.bool, device=seq_lens.device)
    links = tree_links(parents, seq_lens.long(), mode, tree_mask_buf, fill_prefix_mask)
    tokens = torch.cat((bonus_tokens.unsqueeze(1), draft_tokens), dim=1).flatten()
    mask = links.tree_mask if tree_mask_buf is None else tree_mask_buf
    return (mask, *links[1:], tokens)
