"""Coupled draws: the right distribution, and nothing but seed, position and token decides."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from sgl_graft.cuda_graph.race import murmur_hash, race_tokens


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, as its author describes it, for whole words."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= word
        state = (state << 13 | state >> 19) % 2**32
        state = (state * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_the_restated_hash_is_murmur3() -> None:
    assert murmur3(b"test") == 0xBA6BD213 and murmur3(b"") == 0  # published values


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))
def test_hash(seed: int, position: int) -> None:
    found = murmur_hash(torch.tensor([seed]), torch.tensor([position]), 4)[0].tolist()
    head = struct.pack("<qI", seed, position)
    assert found == [murmur3(head + struct.pack("<I", token)) for token in range(4)]


def draws(probs: torch.Tensor, seed: int, count: int) -> torch.Tensor:
    seeds = torch.full((count,), seed)
    return race_tokens(probs.expand(count, -1), seeds, torch.arange(count), torch.zeros(count))


def test_the_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.15, 0.1, 0.05])
    counts = draws(probs, seed=11, count=20_000).bincount(minlength=6)
    assert counts[1] == 0
    others = probs > 0
    assert chisquare(counts[others], 20_000 * probs[others]).pvalue > 1e-3
    skewed = torch.tensor([0.47, 0.0, 0.23, 0.15, 0.1, 0.05])  # the test would notice three hundredths
    assert chisquare(counts[others], 20_000 * skewed[others]).pvalue < 1e-6


def test_positions_and_seeds_are_independent() -> None:
    """Pairs of draws at neighbouring positions, and of two seeds at one position, fill a table evenly."""
    probs = torch.full((4,), 0.25)
    first, second = draws(probs, 1, 20_000), draws(probs, 2, 20_000)
    for pairs in (first[1:] * 4 + first[:-1], first * 4 + second):
        assert chisquare(pairs.bincount(minlength=16)).pvalue > 1e-3


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_rows_do_not_depend_on_each_other(seed: int, rows: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    probs = torch.rand(rows, 50, generator=gen)
    seeds, positions = torch.randint(0, 2**40, (2, rows), generator=gen)
    cuts = torch.rand(rows, generator=gen) * 0.5
    together = race_tokens(probs, seeds, positions, cuts)
    scaled = race_tokens(probs * 3, seeds, positions, cuts * 3)  # need not be normalized
    assert torch.equal(together, scaled)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = race_tokens(probs[one], seeds[one], positions[one], cuts[one])
        assert alone == together[row] and probs[row, alone] >= cuts[row]


@pytest.mark.parametrize("probs", [[0.0, 0.0], [float("nan"), 0.0]])
def test_a_row_without_runners_gives_token_0(probs: list[float]) -> None:
    one = torch.ones(1, dtype=torch.long)
    assert race_tokens(torch.tensor([probs]), one, one, torch.zeros(1)).tolist() == [0]
