"""BLOCKPILOT inside SGLang's DFLASH worker: same requests, same slots, a block size for each of them.

Three things differ from the stock worker. The draft's keys end at each request's own block: a shorter block
is another draft, not a clipped one, because its attention is not causal. Verify rows beyond the block can
never be accepted. And at the end of a prefill, and after every round, a policy chooses sizes.

KV slots are reserved for the largest block and released beyond what was committed, as upstream does it for
its one size. Where no CUDA graph fixes the shape of a round, the round is only as wide as its blocks need.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import dflash_worker_v2 as stock
from sglang.srt.speculative.draft_worker_common import build_block_pos_offsets, make_draft_block_spec_info

from ..cuda_graph.merge import FROM_DRAFT, FROM_TABLE
from ..serving.camera import Camera
from ..serving.request_settings import settings_of
from ..serving.verify_counts import VerifyCounts
from .policy import Prefilled, Round
from .setup import Pilot, create_pilot
from .state import mask_beyond
from .tail import TailGraft

logger = logging.getLogger(__name__)

# What the stock worker sizes by its block: one set for every width of a round.
_SIZED_BY_BLOCK = (
    "block_size",
    "_block_pos_offsets",
    "_draft_block_spec_info",
    "_draft_block_ids_buf",
    "_draft_block_positions_buf",
    "_draft_block_tokens_buf",
    "_draft_verify_out_cache_loc_buf",
    "_draft_block_end_buf",
    "_draft_seq_lens_cpu_buf",
    "_accept_bonus_buffer_cap",
    "_accept_bonus_buffer_slot",
    "_accept_len_buf",
    "_commit_lens_bufs",
    "_bonus_id_bufs",
    "_out_tokens_bufs",
    "_new_seq_lens_bufs",
)


@dataclass(frozen=True)
class RoundInFlight:
    """The round between its draft and its commit."""

    rows: torch.Tensor  # [batch]
    block_lens: torch.Tensor  # [batch] int32, rows drafted together
    verify_lens: torch.Tensor  # [batch] int32, rows that may be accepted, root included
    width: int


class BlockPilotWorker(stock.DFlashWorkerV2):
    """The stock DFLASH worker with a block size per request."""

    blockpilot: Pilot
    tail: TailGraft | None = None
    in_flight: RoundInFlight | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_other_drafts(self)
        self.row_owner: dict[int, str] = {}
        self.verifies = VerifyCounts()
        self.camera = Camera()
        self._weights_changed = False
        self._sized: dict[int, dict[str, Any]] = {self.block_size: self._snapshot()}

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        backend = type(self.draft_model_runner.attn_backend).__name__
        if "Triton" in backend:
            raise ValueError(
                f"BLOCKPILOT cannot draft with {backend}: it takes a block's own keys apart from the prefix, "
                "so they cannot end at a request's block. Use --speculative-draft-attention-backend fa3 or "
                "flashinfer."
            )

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        self.blockpilot = create_pilot(self)
        self.tail = self.blockpilot.tail
        if self.tail is not None:
            self.tail.writes_counts = get_parallel().tp_rank == 0
        if self.blockpilot.state.policy.reads_hidden:
            for module in self.model_runner.model.modules():
                if isinstance(module, LogitsProcessor):
                    module.keep_last_hidden_states = True

    @property
    def state(self) -> Any:
        return self.blockpilot.state

    # ---- widths ----------------------------------------------------------------------------------------

    def _snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SIZED_BY_BLOCK}

    def _use_width(self, width: int) -> None:
        """Make the stock worker draft and verify ``width`` rows per request from now on."""
        if width == self.block_size:
            return
        self._sized[self.block_size] = self._snapshot()
        values = self._sized.get(width)
        if values is None:
            values = dict.fromkeys(_SIZED_BY_BLOCK)
            values |= {
                "block_size": width,
                "_block_pos_offsets": build_block_pos_offsets(length=width, device=self.device),
                "_draft_block_spec_info": make_draft_block_spec_info(
                    draft_token_num=width, device=self.device
                ),
                "_accept_bonus_buffer_cap": 0,
                "_accept_bonus_buffer_slot": 0,
            }
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def _shape_is_free(self) -> bool:
        """Whether a round may have any width: no graph was captured for one."""
        runners = (self.model_runner, self.draft_model_runner)
        return all(runner.decode_cuda_graph_runner in (None, runner.eager_runner) for runner in runners)

    # ---- forward ---------------------------------------------------------------------------------------

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = super().forward_batch_generation(batch, *args, **kwargs)
            if not batch.forward_mode.is_idle():
                self._end_prefill(batch, result)
            return result
        if batch.forward_mode.is_idle() or batch.spec_info is None:
            return super().forward_batch_generation(batch, *args, **kwargs)
        with self._round(batch) as flight:
            result = super().forward_batch_generation(batch, *args, **kwargs)
        self._end_round(batch, result, flight)
        return result

    def _end_prefill(self, batch: Any, result: Any) -> None:
        """Choose the first block size of every request whose last prompt token was just computed."""
        output = result.logits_output
        hidden, output.last_hidden_states = getattr(output, "last_hidden_states", None), None
        if self._weights_changed:
            self._weights_changed = False
            self.blockpilot.refresh(self)
        last, ends, end = [], [], 0
        for i, (req, prefix, extend) in enumerate(
            zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            end += extend
            if prefix + extend >= len(req.origin_input_ids) + len(req.output_ids):
                last.append(i)
                ends.append(end - 1)
        if self.tail is not None:
            self.tail.observe_prompts(batch, result.next_token_ids)
        if not last:
            return
        reqs = [batch.reqs[i] for i in last]
        index = torch.tensor(last, device=batch.req_pool_indices.device)
        rows = batch.req_pool_indices[index].long()
        if hidden is not None:
            hidden = hidden[torch.tensor(ends, device=hidden.device)]
        for req in reqs:
            self.row_owner[req.kv.req_pool_idx] = req.rid
        prefilled = Prefilled(rows, hidden, _temperatures(reqs), tuple(req.rid for req in reqs))
        sizes = self.state.begin(prefilled, [_wish(req) for req in reqs])
        group = get_parallel().tp_group
        if group.world_size > 1:
            group.broadcast(sizes, src=0)
            self.state.size_buf[rows] = sizes

    @contextlib.contextmanager
    def _round(self, batch: Any) -> Iterator[RoundInFlight]:
        """Set the stock worker up for one round of this batch."""
        self._adopt_strangers(batch)
        state = self.state
        rows = batch.req_pool_indices
        sizes = state.sizes(rows)
        width = state.width(rows, sizes) if self._shape_is_free else state.shape.b_max
        state.width_rounds[width] += 1
        block_lens = sizes.clamp(max=width)
        flight = RoundInFlight(rows, block_lens, block_lens.clamp(max=state.verify_len), width)
        runner, target = self.draft_model_runner, self._target_worker
        self._use_width(width)
        self.in_flight = flight
        self.draft_model_runner: Any = _BlockTap(runner, flight)
        if self.tail is not None:
            self._target_worker: Any = self.tail.tap(target, batch)
        try:
            yield flight
        finally:
            self.draft_model_runner, self._target_worker = runner, target
            self.in_flight = None
            self._use_width(state.shape.b_max)

    def _adopt_strangers(self, batch: Any) -> None:
        """Requests that were prefilled by another server (PD) have no size yet."""
        new = [i for i, req in enumerate(batch.reqs) if self.row_owner.get(req.kv.req_pool_idx) != req.rid]
        if new:
            for i in new:
                self.row_owner[batch.reqs[i].kv.req_pool_idx] = batch.reqs[i].rid
            index = torch.tensor(new, device=batch.req_pool_indices.device)
            self.state.adopt(batch.req_pool_indices[index].long())

    def _end_round(self, batch: Any, result: Any, flight: RoundInFlight) -> None:
        accepted = result.accept_lens - 1
        if self.tail is not None:
            self.tail.learn(flight.rows, result.next_token_ids, result.accept_lens, flight.width)
        names = tuple(req.rid for req in batch.reqs)
        self.state.finish(Round(flight.rows, flight.verify_lens, accepted, len(names), names))
        # Upstream's field for rows really verified per request; it reaches the answer's meta_info.
        result.cap_lens = flight.verify_lens
        if result.logits_output is not None:
            result.logits_output.last_hidden_states = None

    # ---- inside the stock round ------------------------------------------------------------------------

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: torch.Tensor, lm_head: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The drafted tokens [batch * (width - 1)]; with a tail from the successor table where it is on."""
        if hidden_states.shape[0] == 0:
            return torch.empty(0, dtype=torch.int64, device=hidden_states.device)
        if self.tail is None or self.in_flight is None:
            drafted: torch.Tensor = super()._greedy_sample_from_vocab_parallel_head(
                hidden_states=hidden_states, lm_head=lm_head, **kwargs
            )
            return drafted
        flight = self.in_flight
        return self.tail.propose(hidden_states, lm_head, flight.rows, flight.verify_lens)

    def _accept_block(self, *, candidates: torch.Tensor, **kwargs: Any) -> Any:
        if self.in_flight is not None:
            candidates = mask_beyond(candidates, self.in_flight.verify_lens)
        accept_len, commit_lens, bonus, out_tokens, seq_lens = super()._accept_block(
            candidates=candidates, **kwargs
        )
        if self.in_flight is not None and self.camera.wanted:
            self._take_picture(candidates, out_tokens, commit_lens)
        # Behind the committed tokens there may be -1 now; upstream looks log-probabilities up by them.
        return accept_len, commit_lens, bonus, out_tokens.clamp_min_(0), seq_lens

    def _take_picture(
        self, candidates: torch.Tensor, committed: torch.Tensor, commit_lens: torch.Tensor
    ) -> None:
        """A block is a chain: every row's parent is the row before."""
        slot = torch.arange(candidates.shape[1], device=candidates.device)
        parents = torch.where(candidates >= 0, slot - 1, -1)
        sources = torch.full_like(candidates, FROM_DRAFT)
        if self.tail is not None and candidates.shape[1] > 1:
            sources[slot > self.tail.tail_starts.unsqueeze(1)] = FROM_TABLE
        accepted = slot < commit_lens.unsqueeze(1)
        self.camera.take(
            candidates, parents, sources, accepted, committed.view(candidates.shape), commit_lens
        )

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: Sequence[int], batch_size: int = 0) -> None:
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size=batch_size)
        self.verifies.add(num_correct_drafts_per_req)

    # ---- weight updates --------------------------------------------------------------------------------

    def weight_update_runners(self) -> Any:
        """Asked for when weights are about to change: the policy is looked at again afterwards."""
        self._weights_changed = True
        return super().weight_update_runners()

    def clear_cache_pool(self) -> None:
        super().clear_cache_pool()
        self._weights_changed = True
        if self.tail is not None:
            self.tail.clear()


class _BlockTap:
    """Stands for the draft's runner during one round: its keys end at each request's own block.

    An attention backend lets a request's queries see ``seq_lens + width`` keys. Taking the rows beyond the
    block off ``seq_lens`` leaves exactly the context and the block, whatever the width; positions and cache
    slots are given apart and do not move.
    """

    def __init__(self, runner: Any, flight: RoundInFlight) -> None:
        self._runner = runner
        self._flight = flight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        flight = self._flight
        if flight.width == 1:  # nothing is drafted: the round is plain decoding
            hidden = forward_batch.input_embeds.new_empty((forward_batch.batch_size, 1))
            return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden), can_run_graph=False)
        beyond = flight.width - flight.block_lens
        forward_batch.seq_lens = forward_batch.seq_lens - beyond.to(forward_batch.seq_lens.dtype)
        return self._runner.forward(forward_batch, *args, **kwargs)


def _temperatures(reqs: list[Any]) -> torch.Tensor:  # [n] float32 on the host, 0 when greedy
    """Sampling temperature as the user gave it: the engine turns 0 into top-k 1 at temperature 1."""
    return torch.tensor(
        [0.0 if r.sampling_params.top_k == 1 else float(r.sampling_params.temperature) for r in reqs]
    )


def _wish(req: Any) -> int | None:
    """The block size a request asked for; 1 when it opted out of speculation."""
    settings = settings_of(req.sampling_params.custom_params)
    return settings.block_size if settings.speculate else 1


def _refuse_other_drafts(worker: Any) -> None:
    """Only plain DFlash drafts can be cut at any size.

    Raises:
        ValueError: the draft has a part that depends on the block's size.
    """
    from sglang.srt.layers.radix_attention import AttentionType

    reasons = {
        "a candidate selector": worker.selector is not None,
        "a LiLiCorr head": worker.lilicorr is not None,
        "a Domino head": worker._is_domino,
        "causal layers": any(
            layer.self_attn.attn.attn_type != AttentionType.ENCODER_ONLY
            for layer in worker.draft_model.layers
        ),
    }
    found = [name for name, is_so in reasons.items() if is_so]
    if found:
        raise ValueError(
            f"BLOCKPILOT drives plain DFlash drafts; this one has {' and '.join(found)}. Serve it with "
            "--speculative-algorithm DFLASH."
        )
