"""Sampling noise keyed by (request seed, absolute position, token) and by nothing else.

A token is the winner of an exponential race: ``argmax_v p_v / e_v`` with ``e_v`` exponential, which draws
exactly from ``p`` (the Gumbel-max trick without its logarithms of p). Two proposals, batches or trees that
reach the same position of the same request meet the same ``e``, so they draw the same token.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch

_WORD = (1 << 64) - 1


def race_speeds(
    keys: list[tuple[int, int]],  # [rows] (seed, position)
    vocab_size: int,
) -> torch.Tensor:  # [rows, vocab] fp32
    """``1 / e`` of every token: its speed in the race, to be multiplied by its probability.

    One counter-based stream per key (Philox, Salmon et al. 2011), so rows are independent of each other.
    """
    times = np.empty((len(keys), vocab_size))
    for row, (seed, position) in enumerate(keys):
        stream = np.random.Philox(key=np.array([seed & _WORD, position & _WORD], dtype=np.uint64))
        np.random.Generator(stream).standard_exponential(out=times[row])
    return torch.from_numpy(times).reciprocal_().float()


def seed_of(name: str) -> int:
    """A 63-bit seed made of a name, such as a request's id: the same on every rank, since ranks share it."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
