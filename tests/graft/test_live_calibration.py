"""Calibration of a running server: it counts what it was told to, fits, and gives the start's values back."""

import pytest
import torch
from sgl_graft.cuda_graph.eagle_tree import DraftPool

from sgl_graft.config import GraftConfig, TableConfig
from sgl_graft.graft.calibration import NUM_KNOTS, Calibration
from sgl_graft.graft.live_calibration import LiveCalibration
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import Assignment

SHAPE = GraftShape(slots=8, topk=2, steps=3, num_rows=2, vocab_size=20)


def state_of(rule: str = "value") -> GraftState:
    state = GraftState(GraftConfig(rule=rule, table=TableConfig(context_rows=16)), SHAPE, Calibration())
    state.begin(0, Assignment(0))
    state.observe(0, torch.tensor([1, 2, 3, 4]))
    return state


def live(state: GraftState, **options: bool) -> LiveCalibration:
    return LiveCalibration(state, "target", lambda decide: decide(), **{"captured": False, **options})


def play(state: GraftState, rounds: int) -> None:
    """Rounds whose draft is right at depth 1 and wrong beyond."""
    size = state.chain.layout.pool_depths.numel()
    tokens = torch.full((1, size), 9)
    tokens[0, 0] = 5
    parents = torch.where(state.chain.layout.pool_depths == 1, -1, 0).expand(1, -1)
    scores = torch.full((1, size), 0.5)
    rows = torch.tensor([0])
    for _ in range(rounds):
        state.grow(DraftPool(tokens, parents, scores), rows)
        committed = torch.tensor([[5, 6, 0, 0, 0, 0, 0, 0]])
        state.commit(rows, committed, torch.tensor([2]))


def test_it_counts_fits_and_stops() -> None:
    state = state_of()
    calibration = live(state)
    calibration.start(4)
    assert state.collecting
    play(state, 3)
    assert calibration.status() == {
        "counting": True, "rounds_counted": 3, "rounds_wanted": 4, "fitted_on": 0
    }  # fmt: skip
    play(state, 1)
    assert not state.collecting and calibration.status()["fitted_on"] == 4
    assert tuple(state.maps.x.shape) == (2, state.max_path - 1, NUM_KNOTS)
    state.maps.check()


def test_the_start_comes_back() -> None:
    state = state_of("staged")
    maps, thresholds = state.maps, state.thresholds.clone()
    calibration = live(state)
    calibration.start(2)
    play(state, 2)
    assert state.maps is not maps
    state.thresholds.fill_(0.9)
    calibration.restore()
    assert torch.equal(state.thresholds, thresholds)
    assert torch.equal(state.maps.x, maps.x) and torch.equal(state.maps.y, maps.y)
    assert calibration.status()["fitted_on"] == 0


def test_captured_drafts_show_no_candidates() -> None:
    state = state_of()
    with pytest.raises(ValueError, match="cuda-graph-backend-decode=disabled"):
        live(state, captured=True).start(5)
    assert not state.collecting


def test_fitting_again_keeps_the_tensors() -> None:
    state = state_of()
    first = live(state)
    first.start(1)
    play(state, 1)
    maps, thresholds = state.maps, state.thresholds
    again = live(state)
    again.start(2)
    play(state, 2)
    assert state.maps is maps and state.thresholds is thresholds


def test_other_ranks_take_rank_0s_fit() -> None:
    fits = []
    first, other = state_of(), state_of()
    on_first = LiveCalibration(first, "t", lambda decide: fits.append(decide()) or fits[-1], captured=False)
    on_other = LiveCalibration(other, "t", lambda decide: fits[-1], captured=False)
    on_first.start(3)
    on_other.start(3)
    play(first, 3)
    play(other, 3)
    assert torch.equal(first.maps.y, other.maps.y) and len(fits) == 1
