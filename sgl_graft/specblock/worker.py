"""SPECBLOCK inside SGLang: EAGLE's verify, another draft."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_device, get_schedule, get_spec
from sglang.srt.speculative import eagle_worker_v2 as stock
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import get_plan_stream

from ..cuda_graph.merge import FROM_DRAFT
from ..graft.logits_tap import LogitsTap
from ..serving.adaptation_metrics import AdaptationMetrics
from ..serving.camera import NOT_TOLD_APART, Camera, on_path
from ..serving.verify_counts import VerifyCounts
from .adaptation.adaptation import Adaptation
from .draft_worker import SpecBlockDraftWorker


class SpecBlockWorker(stock.EAGLEWorkerV2):
    """EAGLE's worker around our draft worker."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        # EAGLE's own constructor would build EAGLE's draft worker.
        BaseSpecWorker.__init__(self)
        spec = get_spec()
        self.server_args, self.gpu_id, self.device = server_args, gpu_id, get_device().device
        self.topk, self.speculative_num_steps = spec.speculative_eagle_topk, spec.speculative_num_steps
        self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.page_size = get_schedule().page_size
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(spec.speculative_algorithm)
        self.enable_dp_spec_prefill_coordination = False
        self.adaptive_controller = None
        self.verifies = VerifyCounts()
        self.camera = Camera()
        self._hosts_draft = True
        self._target_worker: Any = target_worker
        self._draft_worker = SpecBlockDraftWorker(server_args, gpu_id, nccl_port, target_worker)
        self.plan_stream, self.plan_stream_ctx = get_plan_stream(self.device)

    @property
    def adaptation(self) -> Adaptation | None:
        """Online adaptation, None where it is off."""
        return self._draft_worker.adaptation

    @property
    def adaptation_metrics(self) -> AdaptationMetrics | None:
        return None if self.adaptation is None else self._draft_worker.adaptation_metrics

    def verify(self, batch: Any, pp_proxy_tensors: Any = None, grammar_barrier: Any = None) -> Any:
        grafting = self._draft_worker.grafting
        if batch.forward_mode.is_idle():
            return super().verify(batch, pp_proxy_tensors, grammar_barrier)
        if grafting is None:
            result = super().verify(batch, pp_proxy_tensors, grammar_barrier)
            self._take_picture(FROM_DRAFT, result)
            return result
        rows, tree = batch.req_pool_indices, self._draft_worker.tree
        depths = batch.spec_info.positions.view(tree.tokens.shape) - batch.seq_lens.long().unsqueeze(1)
        target = self._target_worker
        tap: Any = LogitsTap(target, grafting.state)
        self._target_worker = tap
        try:
            result = super().verify(batch, pp_proxy_tensors, grammar_barrier)
        finally:
            self._target_worker = target
        grafting.learn(rows, tree.tokens, tree.parents, depths, result, tap.best)
        self._take_picture(NOT_TOLD_APART, result)
        return result

    def _take_picture(self, source: int, result: Any) -> None:
        if self.camera.wanted:
            tree = self._draft_worker.tree
            sources = torch.full_like(tree.tokens, source)
            accepted = on_path(result.accept_index, *tree.tokens.shape)
            committed = result.next_token_ids.view(tree.tokens.shape)
            self.camera.take(tree.tokens, tree.parents, sources, accepted, committed, result.accept_lens)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size=batch_size)
        self.verifies.add(num_correct_drafts_per_req)

    def clear_cache_pool(self) -> None:
        """Flushing the cache forgets what was learned, too."""
        super().clear_cache_pool()
        if self._draft_worker.grafting is not None:
            self._draft_worker.grafting.state.clear()
        if self._draft_worker.adaptation is not None:
            self._draft_worker.adaptation.forget()

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self._target_worker.model_runner.attn_backend,)
