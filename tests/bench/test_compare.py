import numpy as np
import pytest

from sgl_graft.bench.compare import compare_variants, ratio_of_sums
from sgl_graft.bench.plan import Cell
from sgl_graft.bench.records import CellRecord, MachineUse, RequestRecord


def ratio(slow: np.ndarray, fast: np.ndarray) -> tuple[float, float, float, bool]:
    tokens = np.full_like(slow, 100.0)
    result = ratio_of_sums((tokens, tokens), (slow, fast))
    return result.value, result.low, result.high, result.within_noise


def test_pairing_cancels_the_spread_between_prompts() -> None:
    generator = np.random.default_rng(1)
    base = generator.uniform(1, 50, size=60)  # prompts differ fiftyfold
    value, low, high, within = ratio(base, base / 1.1 * generator.uniform(0.99, 1.01, size=60))
    assert value == pytest.approx(1.1, rel=0.01)
    assert 1.09 < low < high < 1.11
    assert within
    unpaired = ratio(base, generator.permutation(base) / 1.1)
    assert unpaired[2] - unpaired[1] > 10 * (high - low)


def test_a_real_loss_is_not_within_noise() -> None:
    base = np.linspace(1, 3, 40)
    assert not ratio(base, base * 1.05)[3]
    assert ratio(base, base * 1.005)[3]


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(100):
        base = generator.gamma(4, size=40)
        _, low, high, _ = ratio(base, base * generator.normal(1.0, 0.2, size=40).clip(0.2))
        covered += low <= 1.0 <= high
    assert 86 <= covered <= 100


def cell(variant: str, repeat: int, seconds: list[float], verifies: int | None) -> CellRecord:
    requests = tuple(
        RequestRecord(i, tuple(range(9)), ((1.0, 1), (s * 1000, 8)), verifies, "length", 4, 0)
        for i, s in enumerate(seconds)
    )
    use = MachineUse(None, 0.0, 0.0, 0.0, 0.0)
    return CellRecord(Cell(variant, "qa", 0.0, 1, repeat), "d", "now", 1.0, False, requests, use)


def test_repeats_enter_as_medians_and_accept_length_needs_verifies() -> None:
    records = [cell("none", r, [2.0, 4.0], None) for r in range(3)]
    records += [cell("E", r, s, 4) for r, s in enumerate([[1.0, 2.0], [1.0, 2.0], [90.0, 90.0]])]
    records += [cell("G", r, [1.0, 2.0], 2) for r in range(3)]
    rows = {
        (row["variant"], row["over"], row["metric"]): row["ratio"]
        for row in compare_variants(records, ["none", "E", "G"])
        if row["dataset"] == "all"
    }
    assert rows == {
        ("E", "none", "tokens_per_s"): 2.0,
        ("G", "none", "tokens_per_s"): 2.0,
        ("G", "E", "tokens_per_s"): 1.0,
        ("G", "E", "accept_length"): 2.0,
    }
