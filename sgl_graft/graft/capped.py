"""An EAGLE worker with a load cap: whole trees where they pay, plain rounds where they do not.

Both tiers are ready when the server is: with CUDA graphs the verify of one slot is captured beside the one of
the whole tree. Between them nothing is rebuilt, so a change of tier costs one draft extend at most.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.speculative import eagle_worker_v2 as stock
from sglang.srt.speculative.spec_utils import draft_tp_context

from ..config import LoadCapConfig
from ..serving.load_cap import PLAIN, Alternating, LoadCap
from ..serving.load_costs import FILE_NAME, LoadCosts, RoundTimes, misfit, read_load_costs
from .plain_rounds import Waiting, catch_up, lone_roots
from .trees import GraftVerifyInput

logger = logging.getLogger(__name__)

# Rounds between two writes of what was measured. No multiple of a tier: a write delays rounds of both kinds.
MEASURED_EVERY = 8


class CappedWorker(stock.EAGLEWorkerV2):
    """The stock EAGLE worker, with rounds of one slot where the cap asks for them."""

    cap: LoadCap | Alternating | None = None
    waiting: Waiting
    speculative_num_draft_tokens: int
    catch_ups = 0
    processed_plain = False  # whether the verify whose results were processed last was plain
    _times: RoundTimes | None = None
    _one_slot_tier: Any = None

    def set_up_cap(self, config: LoadCapConfig, draft_path: str) -> None:
        """Make the cap that the configuration and the draft's cost file ask for; none where they do not."""
        slots = self.speculative_num_draft_tokens
        self._cap_config = config
        self._in_flight: deque[tuple[int, int]] = deque()  # batch and slots of verifies not yet processed
        if config.measure is not None:
            self.cap, self._times = Alternating(slots), RoundTimes()
        else:
            costs = costs_for(config, draft_path, self.device, slots, self.speculative_num_steps)
            if costs is not None or config.above is not None:
                self.cap = LoadCap(
                    slots,
                    costs,
                    costs.accept_len if costs else 1.0,
                    above=config.above,
                    margin=config.margin,
                    hold=config.hold,
                    retry=config.retry,
                )
        if self.cap is not None:
            rows = self._draft_worker.req_to_token_pool.req_to_token.shape[0]
            self.waiting = Waiting(rows, slots, self.device)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        runner = self._target_worker.model_runner
        if self.cap is None or runner.decode_cuda_graph_runner in (None, runner.eager_runner):
            return
        with self._draft_contexts():
            self._one_slot_tier = self.build_adaptive_runtime_state(0, PLAIN)

    @contextlib.contextmanager
    def _draft_contexts(self) -> Iterator[None]:
        with (
            draft_tp_context(self._draft_worker.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    # ---- a round ---------------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        def whole() -> Any:
            return super(CappedWorker, self).forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )

        if self.cap is None:
            return whole()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            for req in batch.reqs:
                self.waiting.restart(req.kv.req_pool_idx)
        is_round = batch.forward_mode.is_decode() and not batch.is_extend_in_batch
        if not is_round or batch.spec_info is None or batch.spec_info.is_verify_input():
            if self._times is not None:
                self._times.interrupted()
            return whole()
        rows = [req.kv.req_pool_idx for req in batch.reqs]
        slots = self.cap.choose(len(rows))
        self._in_flight.append((len(rows), slots))
        self._measure(len(rows), slots)
        most = max(self.waiting.counts(rows))
        if most and (slots != PLAIN or most == self.waiting.width):
            self.catch_ups += 1
            with self._draft_contexts():
                catch_up(batch, self._draft_worker, self.waiting, rows)
        return self._plain_round(batch, rows, on_publish, grammar_barrier) if slots == PLAIN else whole()

    def _plain_round(self, batch: Any, rows: list[int], on_publish: Any, grammar_barrier: Any) -> Any:
        with self._one_slot():
            verify_input = lone_roots(
                batch,
                self._target_worker.model_runner,
                GraftVerifyInput,
                self._draft_worker.tree_mask_mode,
                self.topk,
                self.device,
            )
            verify_input.max_path = 1
            batch.spec_info = verify_input
            result = self.verify(batch, grammar_barrier=grammar_barrier)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self.waiting.add(rows, result.logits_output.hidden_states, result.next_token_ids)
        self._stub_skipped_draft_extend(batch, result)
        return result

    @contextlib.contextmanager
    def _one_slot(self) -> Iterator[None]:
        """The target verifies one slot per request inside this block."""
        runner, slots = self._target_worker.model_runner, self.speculative_num_draft_tokens
        former = runner.attn_backend, runner.decode_cuda_graph_runner
        self.speculative_num_draft_tokens = PLAIN
        if self._one_slot_tier is not None:
            runner.attn_backend = self._one_slot_tier.target_attn_backend
            runner.decode_cuda_graph_runner = self._one_slot_tier.target_graph_runner
        try:
            yield
        finally:
            self.speculative_num_draft_tokens = slots
            runner.attn_backend, runner.decode_cuda_graph_runner = former

    # ---- what rounds brought ---------------------------------------------------------------------------

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size=batch_size)
        self.processed_plain = False
        if self.cap is None or not self._in_flight:
            return
        batch, slots = self._in_flight.popleft()
        if batch != len(num_correct_drafts_per_req):  # not the round that we think it is
            self._in_flight.clear()
        elif slots == PLAIN:
            self.processed_plain = True
        else:
            self.cap.observe(batch, sum(num_correct_drafts_per_req) + batch)

    def _measure(self, batch: int, slots: int) -> None:
        times, cap, config = self._times, self.cap, self._cap_config
        if times is None or cap is None:
            return
        times.round(batch, slots, time.perf_counter())
        if sum(cap.rounds.values()) % MEASURED_EVERY == 0:
            whole = self.waiting.width
            device = torch.device(self.device).type
            accept_len = max(cap.accepted.mean, 1.0)
            assert config.measure is not None
            machine = platform.processor() or platform.machine()
            times.write(config.measure, whole, self.speculative_num_steps, accept_len, device, machine)

    def cap_status(self) -> dict[str, Any] | None:
        """For ``GET /server_info``; None without a cap."""
        if self.cap is None:
            return None
        return {
            "slots": self.cap.slots,
            "plain_rounds": self.cap.rounds[PLAIN],
            "whole_rounds": self.cap.rounds[self.waiting.width],
            "switches": self.cap.switches,
            "accept_length": self.cap.accepted.mean,
            "catch_ups": self.catch_ups,
        }


def costs_for(
    config: LoadCapConfig, draft_path: str, device: Any, slots: int, steps: int
) -> LoadCosts | None:
    """The cost table that fits this server: the one that was named, else the one beside the draft.

    Raises:
        ValueError: the named file is missing, damaged, or of another tree or kind of device.
    """
    if config.off:
        return None
    beside = Path(draft_path) / FILE_NAME
    if config.costs is None and not beside.is_file():
        return None
    path = config.costs or beside
    costs = read_load_costs(path)
    why_not = misfit(costs, path, slots, steps, torch.device(device).type)
    if why_not is None:
        return costs
    if config.costs is not None:
        raise ValueError(f"{why_not}: measure them here with `sgl-graft calibrate-load`, or leave it out")
    logger.info("%s: no load cap; `sgl-graft calibrate-load` measures them here", why_not)
    return None
