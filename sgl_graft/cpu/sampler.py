"""The one seeded sampler of the CPU platform: plain decoding and the verify of any tree go through it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from .filters import thresholds
from .noise import race_speeds
from .row_kernels import argmax


def draw(
    probs: torch.Tensor,  # [rows, vocab], after temperature; overwritten
    speeds: torch.Tensor,  # [noise_rows, vocab]
    noise_row: torch.Tensor,  # [rows] which noise row a row uses
    top_ks: torch.Tensor,  # [rows]
    top_ps: torch.Tensor,  # [rows]
    min_ps: torch.Tensor,  # [rows]
) -> torch.Tensor:  # [rows] int64
    """Draw one token per row from its filtered distribution, with the noise of its (seed, position)."""
    filtered = (top_ks < TOP_K_ALL) | (top_ps < 1.0) | (min_ps > 0.0)
    rows = filtered.nonzero().squeeze(1)
    if rows.numel():
        chosen = probs[rows]
        cut = thresholds(chosen, top_ks[rows], top_ps[rows], min_ps[rows])
        probs[rows] = chosen.masked_fill_(chosen < cut.unsqueeze(1), 0.0)
    return probs.mul_(speeds.index_select(0, noise_row)).argmax(1)


class CoupledSampler(Sampler):
    """SGLang's sampler with the platform's draw in place of its own; greedy rows keep their argmax."""

    def _preprocess_logits(self, logits: torch.Tensor, sampling_info: Any) -> torch.Tensor:
        logits = super()._preprocess_logits(logits, sampling_info)
        # Taken from the logits: softmax can round two of them to the same probability.
        self._greedy_tokens = argmax(logits) if sampling_info.is_any_greedy else None
        return logits

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> tuple[torch.Tensor, None]:
        assert sampling_info.sampling_mask_batch_indices is None, "refused by request_checks"
        rows, vocab_size = probs.shape
        keys = list(zip(sampling_info.sampling_seed.tolist(), positions.tolist(), strict=True))
        speeds = race_speeds(keys, vocab_size)
        # The caller takes log-probabilities from ``probs`` afterwards.
        tokens = draw(
            probs.float().clone(),
            speeds,
            torch.arange(rows),
            sampling_info.top_ks,
            sampling_info.top_ps,
            sampling_info.min_ps,
        )
        if self._greedy_tokens is not None:
            tokens = torch.where(sampling_info.top_ks <= 1, self._greedy_tokens, tokens)
        return tokens.to(torch.int32), None
