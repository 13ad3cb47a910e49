"""The race's noise: keyed by (seed, position) and nothing else, and exponential."""

from __future__ import annotations

import torch
from scipy import stats

from sgl_graft.cpu.noise import race_speeds, seed_of

VOCAB = 500


def test_a_key_has_the_same_noise_in_any_batch_and_order() -> None:
    keys = [(7, 3), (7, 4), (8, 3), (2**62, 10**6)]
    together = race_speeds(keys, VOCAB)
    backwards = race_speeds(keys[::-1], VOCAB)
    for row, key in enumerate(keys):
        assert torch.equal(together[row], race_speeds([key], VOCAB)[0])
        assert torch.equal(together[row], backwards[-1 - row])


def test_seed_and_position_both_change_the_noise_and_do_not_stand_for_each_other() -> None:
    keys = [(seed, position) for seed in range(-3, 20) for position in range(20)]
    noise = race_speeds(keys, 8)
    assert torch.unique(noise, dim=0).shape[0] == len(keys)


def test_race_times_are_exponential_and_rows_uncorrelated() -> None:
    times = race_speeds([(seed, 17) for seed in range(400)], VOCAB).double().reciprocal()
    assert stats.kstest(times.flatten().numpy(), "expon").pvalue > 0.01
    neighbours = stats.pearsonr(times[:-1].flatten().numpy(), times[1:].flatten().numpy())
    assert abs(neighbours.statistic) < 0.01


def test_neighbouring_positions_and_tokens_are_uncorrelated() -> None:
    times = race_speeds([(11, position) for position in range(400)], VOCAB).double().reciprocal()
    positions = stats.pearsonr(times[:-1].flatten().numpy(), times[1:].flatten().numpy())
    tokens = stats.pearsonr(times[:, :-1].flatten().numpy(), times[:, 1:].flatten().numpy())
    assert abs(positions.statistic) < 0.01
    assert abs(tokens.statistic) < 0.01


def test_the_seed_of_a_request_without_one_depends_on_its_id_alone() -> None:
    seeds = [seed_of(f"request-{i}") for i in range(1000)]
    assert seeds == [seed_of(f"request-{i}") for i in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
