"""Sampling noise keyed by (request seed, absolute position, token) and by nothing else.

A token is the winner of an exponential race: ``argmax_v p_v / e_v`` with ``e_v`` exponential, which draws
exactly from ``p`` (the Gumbel-max trick without its logarithms of p). Two proposals, batches or trees that
reach the same position of the same request meet the same ``e``, so they draw the same token.
"""

from __future__ import annotations

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, in place (Steele, Lea and Flood 2014)."""
    x ^= _shift_right(x, 30)
    x *= _MIX_1
    x ^= _shift_right(x, 27)
    x *= _MIX_2
    x ^= _shift_right(x, 31)
    return x


def race_speeds(
    seeds: torch.Tensor,  # [rows] int64
    positions: torch.Tensor,  # [rows] int64
    vocab_size: int,
) -> torch.Tensor:  # [rows, vocab] fp32
    """``1 / e`` of every token: its speed in the race, to be multiplied by its probability."""
    key = _mix(_mix(seeds.long() * 1) + positions.long() * _GOLDEN)
    token = torch.arange(1, vocab_size + 1, dtype=torch.int64) * _GOLDEN
    bits = _mix(key.unsqueeze(1) + token)
    # 53 random bits, centred in their cell: never 0, never 1.
    uniform = _shift_right(bits, 11).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().reciprocal_().float()


def seed_of(request_id: str) -> int:
    """A 63-bit seed for a request that names none; the same on every rank, since ranks share the id."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1
