"""Every request gets a seed, so that every draw is keyed by (seed, position)."""

from __future__ import annotations

from typing import Any

import torch

from .noise import seed_of


def give_every_request_a_seed(info: Any, _cls: Any, batch: Any, *_: Any, **__: Any) -> Any:
    """Fill ``sampling_seed`` [batch] (runs after ``SamplingBatchInfo.from_schedule_batch``)."""
    seeds = [
        seed_of(req.rid) if req.sampling_params.sampling_seed is None else req.sampling_params.sampling_seed
        for req in batch.reqs
    ]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
    return info
