"""Every request gets a seed, so that every draw is keyed by (seed, position)."""

from __future__ import annotations

import copy
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


_half_sent: dict[int, tuple[Any, int]] = {}  # id of sampling parameters -> (they themselves, samples sent)


def give_every_sample_its_own_seed(_manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Sample ``k`` > 0 of a seeded request with ``n`` > 1 draws by a seed made of the request's and ``k``.

    Runs before ``TokenizerManager._send_one_request``, which is called once per sample; the samples of one
    prompt share one object of sampling parameters.
    """
    params = getattr(request, "sampling_params", None)
    if params is None or params.n == 1 or params.sampling_seed is None:
        return
    if params.max_new_tokens == 0:  # the prompt alone, sent ahead to be cached
        return
    _, sample = _half_sent.pop(id(params), (params, 0))
    if sample + 1 < params.n:
        _half_sent[id(params)] = (params, sample + 1)
    if sample > 0:
        request.sampling_params = copy.copy(params)
        request.sampling_params.sampling_seed = seed_of(f"{params.sampling_seed}/{sample}")
