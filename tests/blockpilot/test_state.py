"""Block sizes per request on the device: own choices, bounds, widths, counts."""

import torch

from sgl_graft.blockpilot.costs import CostTable
from sgl_graft.blockpilot.ewma import AcceptHistory
from sgl_graft.blockpilot.policy import FixedPolicy, Prefilled, Round
from sgl_graft.blockpilot.shape import BlockShape
from sgl_graft.blockpilot.state import BlockPilotState, mask_beyond

SHAPE = BlockShape(b_max=10, default=8, candidates=(6, 7, 8, 9, 10), widths=(1, 2, 4, 8, 10))


class Growing(FixedPolicy):
    """Adds one every round."""

    def again(self, finished):
        return finished.block_lens + 1


def make(policy=None, **kwargs):
    history = AcceptHistory(6, SHAPE.b_max)
    return BlockPilotState(SHAPE, policy or FixedPolicy(8), 6, history, **kwargs)


def begin(state, rows, wishes):
    names = tuple(map(str, rows))
    return state.begin(Prefilled(torch.tensor(rows), None, torch.zeros(len(rows)), names), wishes).tolist()


def finish(state, rows, accepted):
    at = torch.tensor(rows)
    state.finish(Round(at, state.sizes(at), torch.tensor(accepted), len(rows), tuple(map(str, rows))))


def test_a_request_may_choose_for_itself_and_keeps_its_choice():
    state = make(Growing(8))
    assert begin(state, [1, 2, 3], [None, 3, 1]) == [8, 3, 1]
    finish(state, [1, 2, 3], [0, 2, 0])
    assert state.sizes(torch.tensor([1, 2, 3])).tolist() == [9, 3, 1]


def test_the_next_owner_of_a_row_starts_afresh():
    state = make(Growing(8))
    begin(state, [2], [3])
    begin(state, [2], [None])
    finish(state, [2], [0])
    assert state.sizes(torch.tensor([2])).tolist() == [9]


def test_sizes_stay_within_bounds():
    state = make(Growing(10))
    begin(state, [1], [None])
    finish(state, [1], [9])
    assert state.sizes(torch.tensor([1])).tolist() == [10]


def test_requests_prefilled_elsewhere_get_the_default():
    state = make()
    begin(state, [4], [2])
    state.adopt(torch.tensor([4]))
    assert state.sizes(torch.tensor([4])).tolist() == [8] and not state.own_buf[4]


def test_without_costs_a_round_is_as_wide_as_its_largest_block():
    state = make()
    rows = torch.tensor([1, 2])
    for sizes, width in (((1, 1), 1), ((1, 2), 2), ((3, 2), 4), ((8, 1), 8), ((9, 1), 10)):
        assert state.width(rows, torch.tensor(sizes)) == width


def test_with_costs_a_large_batch_runs_shorter_rounds():
    flat = {1: 1.0, 10: 1.05}
    steep = {1: 1.0, 10: 9.0}
    state = make(costs=CostTable(seconds={1: flat, 4: steep}))
    state.history.hits += 60.0
    state.history.trials += 100.0
    one, four = torch.tensor([1]), torch.tensor([1, 2, 3, 4])
    assert state.width(one, torch.tensor([8])) == 8
    assert state.width(four, torch.tensor([8, 8, 8, 8])) < 4


def test_a_size_that_a_request_chose_itself_is_not_capped():
    state = make(costs=CostTable(seconds={1: {1: 1.0, 10: 90.0}}))
    begin(state, [1], [9])
    assert state.width(torch.tensor([1]), torch.tensor([9])) == 10


def test_counts():
    state = make()
    begin(state, [1, 2], [None, 1])
    finish(state, [1, 2], [5, 0])
    finish(state, [1, 2], [1, 0])
    assert state.rounds[8] == 2 and state.rounds[1] == 2 and state.rounds.sum() == 4
    assert state.accepted[8] == 6 and state.accepted.sum() == 6


def test_rows_beyond_a_block_are_never_a_token():
    candidates = torch.arange(12).view(3, 4)
    masked = mask_beyond(candidates, torch.tensor([1, 4, 2], dtype=torch.int32))
    assert masked.tolist() == [[0, -1, -1, -1], [4, 5, 6, 7], [8, 9, -1, -1]]
    assert candidates.tolist()[0] == [0, 1, 2, 3]
