"""The label analysis reproduces what was computed from the released measurements (table A6 of the design)."""

import json
from pathlib import Path

import pytest
import torch

from sgl_graft.blockpilot.analysis import (
    judge,
    label_statistics,
    majority_choice,
    split_by_prompt,
)
from sgl_graft.blockpilot.costs import CostTable
from sgl_graft.blockpilot.labels import Run, Scores, best_sizes, can_still_win, scores_of, soft_targets

RELEASED = Path(__file__).parent / "data" / "released.json"
SIZES = (4, 8, 13, 14, 15, 16, 17, 18, 19, 32)
CANDIDATES = (14, 15, 16, 17, 18)
TABLE = {
    "gsm8k": ((3.282, 5.019, 5.989, 6.212, 6.406, 6.509, 6.528, 6.278, 5.851, 4.169), 6.735),
    "math500": ((3.502, 5.659, 7.331, 7.696, 7.915, 8.200, 8.171, 8.087, 7.714, 5.040), 8.532),
}


def released(name, sizes):
    data = json.loads(RELEASED.read_text())[name]
    prompts = sorted(data["16"], key=int)
    rows = [[data[str(size)][prompt] for size in sizes] for prompt in prompts]
    return Scores(tuple(prompts), tuple(sizes), torch.tensor(rows, dtype=torch.float64)), data["1"]


@pytest.mark.parametrize("name", TABLE)
def test_means_and_oracle_of_the_released_measurements(name):
    means, oracle = TABLE[name]
    scores, _ = released(name, SIZES)
    assert [round(float(x), 3) for x in scores.accept.mean(0)] == list(means)
    five, _ = released(name, CANDIDATES)
    assert round(float(five.accept.amax(1).mean()), 3) == oracle


@pytest.mark.parametrize("name", TABLE)
def test_released_predictions_are_the_first_maximum(name):
    """32 of 32 in both files: the shipped "predictions" are the oracle."""
    scores, predicted = released(name, CANDIDATES)
    labels = best_sizes(scores.accept, CANDIDATES, 16, ties="first")
    assert [CANDIDATES[i] for i in labels] == [predicted[prompt] for prompt in scores.prompts]


@pytest.mark.parametrize(
    ("name", "counts", "other"), [("gsm8k", (2, 3, 11, 9, 7), 21), ("math500", (2, 4, 14, 7, 5), 18)]
)
def test_label_counts(name, counts, other):
    scores, _ = released(name, CANDIDATES)
    labels = best_sizes(scores.accept, CANDIDATES, 16, ties="first")
    statistics = label_statistics(scores.accept, labels, CANDIDATES, 16)
    assert tuple(statistics.histogram.values()) == counts
    assert round(statistics.not_default * 32) == other
    assert statistics.within[1] == pytest.approx(sum(counts[1:4]) / 32)
    assert statistics.within[2] == statistics.within[3] == 1.0
    assert statistics.loss_by_distance[0] == 0.0
    assert list(statistics.loss_by_distance) == sorted(statistics.loss_by_distance)


def test_median_advantage_of_the_released_labels():
    for name, share in (("gsm8k", 0.045), ("math500", 0.064)):
        scores, _ = released(name, CANDIDATES)
        labels = best_sizes(scores.accept, CANDIDATES, 16, ties="first")
        statistics = label_statistics(scores.accept, labels, CANDIDATES, 16)
        assert statistics.median_advantage == pytest.approx(share, abs=0.002)


@pytest.mark.parametrize("name", TABLE)
def test_no_fixed_size_beats_sixteen_on_the_released_measurements(name):
    scores, _ = released(name, CANDIDATES)
    seventeen = judge(scores.accept, torch.full((32,), 3), CANDIDATES)
    assert not seventeen.recommended
    assert seventeen.gain.low < 0 < seventeen.gain.high or seventeen.gain.high <= 0


def test_the_oracle_is_recommended_and_reaches_itself():
    scores, _ = released("gsm8k", CANDIDATES)
    oracle = best_sizes(scores.accept, CANDIDATES, 16)
    verdict = judge(scores.accept, oracle, CANDIDATES)
    assert verdict.recommended and verdict.fraction.mean == pytest.approx(1.0)
    assert verdict.fraction.low == pytest.approx(1.0) and verdict.best_fixed == 17


def test_a_random_choice_is_not_recommended():
    scores, _ = released("gsm8k", CANDIDATES)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(5, (32,), generator=generator)
    verdict = judge(scores.accept, chosen, CANDIDATES)
    assert not verdict.recommended and verdict.gain.mean < 0


def test_ties_go_to_the_default_then_to_its_neighbours():
    value = torch.tensor([[2.0, 2.0, 2.0], [2.0, 1.0, 2.0], [1.0, 1.0, 3.0], [3.0, 1.0, 1.0]])
    assert best_sizes(value, (7, 8, 10), 8).tolist() == [1, 0, 2, 0]
    assert best_sizes(value, (7, 8, 10), 8, ties="first").tolist() == [0, 0, 2, 0]
    close = torch.tensor([[2.01, 2.0, 1.0]])
    assert best_sizes(close, (7, 8, 10), 8).tolist() == [0]
    assert best_sizes(close, (7, 8, 10), 8, tolerance=0.01).tolist() == [1]


def test_soft_targets_share_near_ties():
    soft = soft_targets(torch.tensor([[2.0, 2.0, 1.0], [2.0, 1.9, 1.0]], dtype=torch.float64))
    assert soft.sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert soft[0, 0] == soft[0, 1] and soft[0, 2] < 1e-6
    assert soft[1, 0] > soft[1, 1] > soft[1, 2]


def test_scores_average_seeds_and_leave_out_what_was_not_run():
    runs = [Run("a", 4, 10, 5, seed=0), Run("a", 4, 10, 2, seed=1), Run("a", 8, 12, 4)]
    runs += [Run("b", 4, 10, 5)]  # never run at 8: a size is not guessed from another
    scores = scores_of(runs, (4, 8))
    assert scores.prompts == ("a",) and scores.accept.tolist() == [[3.5, 3.0]]
    with pytest.raises(ValueError, match="no prompt was run at all"):
        scores_of(runs, (4, 16))


def test_time_labels_need_not_be_accept_labels():
    scores = Scores(("a",), (4, 16), torch.tensor([[2.5, 3.0]], dtype=torch.float64))
    costs = CostTable(seconds={1: {1: 1.0, 16: 1.1}, 8: {1: 1.0, 16: 4.0}})
    assert best_sizes(scores.speed(None), (4, 16), 4).tolist() == [1]
    assert best_sizes(scores.speed(costs, 1), (4, 16), 4).tolist() == [1]
    assert best_sizes(scores.speed(costs, 8), (4, 16), 4).tolist() == [0]


def test_a_size_is_stopped_only_when_it_cannot_win():
    # 10 rounds of cost 1 finished first; 8 tokens are missing after 4 rounds of cost 2.
    assert can_still_win(4, 24, 8, 32, 10.5, 2.0)  # one full block would end it at cost 10
    assert not can_still_win(4, 24, 8, 32, 10.0, 2.0)
    assert not can_still_win(4, 23, 8, 32, 10.5, 2.0)  # two rounds are missing


def test_majority_by_data_set():
    labels = torch.tensor([0, 0, 1, 1, 1, 0])
    groups = ["x", "x", "x", "y", "y", "y"]
    assert majority_choice(labels, groups, ["y", "x", "z"]).tolist() == [1, 0, int(torch.mode(labels).values)]


def test_splits_are_disjoint_and_complete():
    train, held = split_by_prompt([str(i) for i in range(50)], 0.3, seed=2)
    assert len(held) == 15 and sorted([*train.tolist(), *held.tolist()]) == list(range(50))
