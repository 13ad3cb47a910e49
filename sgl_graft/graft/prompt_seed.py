"""What a prefill chunk teaches: its own next tokens are observed successors, which the host holds anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..serving.request_settings import settings_of
from .state import GraftState
from .tenancy import Tenancy

CONTEXT = 3  # tokens before a chunk that its first rows of the table are keyed by


def observe_prompts(
    state: GraftState,
    tenancy: Tenancy,
    batch: Any,
    next_tokens: torch.Tensor,  # [batch] what the prefill sampled
    begun: Callable[[int, Any], None] = lambda row, request: None,
) -> None:
    """Seed the table from every request's chunk; ``begun`` is told each row that a new request took."""
    device, last_tokens = next_tokens.device, []
    for req, prefix_len, extend_len in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        row = req.kv.req_pool_idx
        tokens = (list(req.origin_input_ids) + list(req.output_ids))[: prefix_len + extend_len]
        last_tokens.append([-1, *tokens][-2:])
        start = max(prefix_len - CONTEXT, 0)
        if not tenancy.owns(row, req):
            settings = settings_of(req.sampling_params.custom_params)
            state.begin(row, tenancy.begin(row, req, settings))
            begun(row, req)
            # What a cached prefix taught others is not this request's to read.
            start = 0 if state.private else start
        state.observe(row, torch.tensor(tokens[start:], dtype=torch.int64, device=device))
    last = torch.tensor(last_tokens, dtype=torch.int64, device=device)
    state.end_prefill(batch.req_pool_indices, last, next_tokens)
