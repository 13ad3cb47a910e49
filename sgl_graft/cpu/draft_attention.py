"""Attention of the draft's own decode steps, and the factory hooks that hand it to the engine."""

from __future__ import annotations

from typing import Any

import torch

from .attention import GraftCpuAttnBackend
from .attention_plan import uniform_plan

BACKEND = "graft_cpu"


class DraftStepBackend(GraftCpuAttnBackend):
    """Attention of draft step ``step``: ``topk`` branches per request, each seeing the prefix and itself.

    A request's draft slots follow its committed prefix branch by branch, ``num_steps`` per branch.
    """

    def __init__(self, runner: Any, topk: int, num_steps: int, step: int) -> None:
        super().__init__(runner)
        column = torch.arange(topk * num_steps)
        branch = torch.arange(topk).unsqueeze(1)
        # [topk, topk * num_steps]: a branch sees its own slots, up to the one this step writes.
        self.window = (column // num_steps == branch) & (column % num_steps <= step)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_idle():
            self.plan = None
            return
        topk, width = self.window.shape
        self.plan = uniform_plan(
            self._table,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            topk,
            window=width,
            mask=self.window.unsqueeze(0),
        )


class MultiStepDraftBackend:
    """One backend per draft forward, as the EAGLE worker expects."""

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = num_steps
        self.attn_backends = [
            DraftStepBackend(runner, topk, num_steps, step) for step in range(num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _stamp(backend: Any) -> Any:
    backend.prefill_attention_backend_str = BACKEND
    backend.decode_attention_backend_str = BACKEND
    return backend


def create_decode_backend(factory: Any) -> MultiStepDraftBackend | None:
    """Stands for ``DraftBackendFactory.create_decode_backend``; one step or none needs no draft forward."""
    if factory.speculative_num_steps <= 1:
        return None
    backend = MultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    for child in backend.attn_backends:
        _stamp(child)
    return _stamp(backend)


def create_draft_extend_backend(factory: Any) -> GraftCpuAttnBackend:
    """Stands for ``DraftBackendFactory.create_draft_extend_backend``."""
    return _stamp(GraftCpuAttnBackend(factory.draft_model_runner))
