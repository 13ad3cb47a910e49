"""The load cap's decisions: right in the long run, never flapping, alike on every rank."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_graft.serving.load_cap import CLEAR, PLAIN, AcceptLength, Alternating, LoadCap
from sgl_graft.serving.load_costs import LoadCosts, RoundTimes, read_load_costs

SLOTS = 8
unhurried = settings(deadline=None)  # the machine has other things to do
# Whole trees of 2.5 tokens pay up to a batch of about 4: their rounds grow dearer with the batch.
COSTS = LoadCosts(
    slots=SLOTS,
    steps=2,
    accept_len=2.5,
    device="cpu",
    seconds={b: {1: 0.03 + 0.002 * b, SLOTS: 0.04 + 0.012 * b} for b in (1, 2, 4, 8, 16)},
)


def pays(batch: int, accept_len: float = 2.5) -> float:
    return accept_len * COSTS.cost(batch, PLAIN) / COSTS.cost(batch, SLOTS)


def run(cap: LoadCap, batches: list[int], accept_len: float = 2.5) -> list[int]:
    """Slots of every round, where whole trees bring ``accept_len`` tokens each."""
    chosen = []
    for batch in batches:
        slots = cap.choose(batch)
        chosen.append(slots)
        if slots != PLAIN:
            cap.observe(batch, round(batch * accept_len))
    return chosen


def test_the_example_crosses_between_four_and_eight() -> None:
    assert pays(4) > 1.05 and pays(8) < 0.95


@unhurried
@given(st.integers(1, 32), st.floats(1.0, 6.0))
def test_a_steady_load_settles_at_once_and_for_good(batch: int, accept_len: float) -> None:
    cap = LoadCap(SLOTS, COSTS, accept_len, retry=10**9)
    chosen = []
    for _ in range(400):
        chosen.append(cap.choose(batch))
        if chosen[-1] != PLAIN:  # fractions of tokens: the mean is meant to be exact
            cap.accepted.mean = accept_len
    assert cap.switches <= 1 and len(set(chosen[1:])) == 1
    gain = pays(batch, accept_len)
    if abs(gain - 1) > 0.06:
        assert chosen[-1] == (SLOTS if gain > 1 else PLAIN)


@unhurried
@given(st.lists(st.integers(1, 16), min_size=1, max_size=300), st.integers(1, 20))
def test_a_tier_is_held_but_whole_trees_that_lose_clearly(batches: list[int], hold: int) -> None:
    cap, margin = LoadCap(SLOTS, COSTS, 2.5, hold=hold, retry=64, margin=0.05), 0.05
    chosen, gains = [], []
    for batch in batches:
        gains.append(cap.gain(batch))
        chosen += run(cap, [batch])
    end = 0
    for index, (slots, same) in enumerate(itertools.groupby(chosen)):
        stay = len(list(same))
        end += stay
        if index > 0 and end < len(batches) and stay < hold:
            assert slots == SLOTS
            assert gains[end] < 1.0 - CLEAR * margin
    assert cap.switches <= 2 * len(batches) / (hold + 1) + 2
    assert cap.rounds == {PLAIN: chosen.count(PLAIN), SLOTS: chosen.count(SLOTS)}


def test_fifty_crossings_switch_once_each_way_and_promptly() -> None:
    cap = LoadCap(SLOTS, COSTS, 2.5)
    for _ in range(50):
        up, down = run(cap, [1, 2, 4, 8, 16, *[16] * 40]), run(cap, [8, 4, 2, *[1] * 40])
        assert up[-30:] == [PLAIN] * 30 and down[-30:] == [SLOTS] * 30
    assert cap.switches == 100 - 1 + 1  # down from the whole tree, and back, each time


@pytest.mark.parametrize("around", [(5, 6), (4, 8)])
def test_a_batch_that_swings_around_the_crossing_does_not_flap(around: tuple[int, int]) -> None:
    cap = LoadCap(SLOTS, COSTS, 2.5, hold=8)
    run(cap, list(around) * 400)
    assert cap.switches <= 800 / 8 + 1


def test_a_batch_that_swings_far_comes_back_after_the_hold_only() -> None:
    cap = LoadCap(SLOTS, COSTS, 2.5, hold=8)
    chosen = run(cap, [1, 16] * 400)
    stays = [len(list(same)) for slots, same in itertools.groupby(chosen) if slots == PLAIN]
    assert len(stays) > 10 and all(stay >= 8 for stay in stays[:-1])


def test_whole_trees_that_lose_clearly_are_left_at_once() -> None:
    cap = LoadCap(SLOTS, COSTS, 2.5, hold=8)
    assert run(cap, [1, 1, 16, 16, 1]) == [SLOTS, SLOTS, PLAIN, PLAIN, PLAIN]


def test_the_margin_keeps_the_tier_where_neither_is_faster() -> None:
    even = LoadCosts(slots=8, steps=2, accept_len=2.0, device="cpu", seconds={1: {1: 1.0, 8: 2.0}})
    cap = LoadCap(SLOTS, even, 2.0, hold=1)
    for mean in (1.97, 2.03) * 50:
        cap.accepted.mean = mean
        cap.choose(1)
    assert cap.switches == 0


def test_speculation_that_stops_paying_is_left_and_tried_again() -> None:
    cap = LoadCap(SLOTS, COSTS, 2.5, retry=128)
    bad = run(cap, [2] * 600, accept_len=1.0)
    assert bad[0] == SLOTS and bad.count(PLAIN) > 300
    assert SLOTS in bad[-200:], "it never looked again"
    good = run(cap, [2] * 2000, accept_len=3.0)
    assert good[-1] == SLOTS and good.count(SLOTS) > 1800


def test_a_bound_alone_needs_no_costs() -> None:
    cap = LoadCap(SLOTS, None, 1.0, above=4, hold=1)
    assert run(cap, [1, 4, 5, 4, 3, 5, 1]) == [SLOTS, SLOTS, PLAIN, PLAIN, SLOTS, PLAIN, SLOTS]
    assert run(LoadCap(SLOTS, None, 1.0, above=1, hold=1), [1, 2, 1]) == [SLOTS, PLAIN, SLOTS]
    assert set(run(LoadCap(SLOTS, None, 1.0, above=0, hold=1), [1, 2, 1])) == {PLAIN}


@unhurried
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 5)), max_size=200))
def test_ranks_decide_alike(rounds: list[tuple[int, int]]) -> None:
    caps = [LoadCap(SLOTS, COSTS, 2.5, hold=2, retry=32) for _ in range(2)]
    for batch, correct in rounds:
        slots = {cap.choose(batch) for cap in caps}
        assert len(slots) == 1
        if slots != {PLAIN}:
            for cap in caps:
                cap.observe(batch, batch + correct)


@unhurried
@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1, 9)), min_size=1, max_size=50))
def test_the_mean_stays_within_what_was_seen(seen: list[tuple[int, float]]) -> None:
    mean = AcceptLength(2.0)
    for batch, each in seen:
        mean.observe(batch, round(batch * each))
    values = [2.0, *(round(batch * each) / batch for batch, each in seen)]
    assert min(values) - 1e-9 <= mean.mean <= max(values) + 1e-9
    mean.forget()
    assert mean.mean == 2.0


def test_measuring_runs_both_kinds_of_rounds() -> None:
    cap = Alternating(SLOTS, period=3)
    chosen = [cap.choose(1) for _ in range(12)]
    assert chosen == ([SLOTS] * 3 + [PLAIN] * 3) * 2
    assert cap.switches == 3 and cap.rounds == {PLAIN: 6, SLOTS: 6}


def test_measuring_reports_the_plain_mean_of_whole_trees() -> None:
    cap = Alternating(SLOTS)
    for batch, num_tokens in ((1, 3), (4, 8), (2, 3)):
        cap.observe(batch, num_tokens)
    assert cap.accepted.mean == pytest.approx(14 / 7)


# ---- the file ------------------------------------------------------------------------------------------


def test_costs_between_measured_batches_lie_between_theirs() -> None:
    for width in (1, SLOTS):
        assert COSTS.cost(4, width) < COSTS.cost(6, width) < COSTS.cost(8, width)
        assert COSTS.cost(99, width) == COSTS.cost(16, width)


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    times, now = RoundTimes(), 0.0
    for batch, slots, seconds in ((1, 1, 0.5), (1, SLOTS, 1.0), (3, 1, 0.75), (3, SLOTS, 2.0), (7, 1, 0.1)):
        times.interrupted()  # what passes between two kinds of rounds belongs to neither
        now += 100.0
        for _ in range(12):
            times.round(batch, slots, now)
            now += seconds
    path = tmp_path / "costs.json"
    times.write(path, SLOTS, 2, 2.2, "cpu", "a machine")
    costs = read_load_costs(path)
    assert costs.seconds == {1: {1: 0.5, SLOTS: 1.0}, 3: {1: 0.75, SLOTS: 2.0}}
    assert costs.accept_len == 2.2


def test_nothing_is_written_before_there_is_something_to_say(tmp_path: Path) -> None:
    RoundTimes().write(tmp_path / "costs.json", SLOTS, 2, 2.0, "cpu", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"seconds": {}}, {"seconds": {"1": {"1": 1.0}}},
        {"seconds": {"0": {"1": 1.0, "8": 1.0}}},
        {"seconds": {"1": {"1": 0.0, "8": 1.0}}}, {"accept_len": 0.5}, {"accept_len": "NaN"}, {"more": 1},
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_the_remedy(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS.model_dump() | change))
    with pytest.raises(ValueError, match="sgl-graft calibrate-load"):
        read_load_costs(path)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_a_truncated_file_is_refused(at: int) -> None:
    text = json.dumps(COSTS.model_dump())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        path.write_text(text[: at % len(text)])
        with pytest.raises(ValueError, match=r"load_cap\.costs"):
            read_load_costs(path)
