"""What GET /server_info shows of GRAFT."""

import torch

from sgl_graft.config import GraftConfig
from sgl_graft.graft.calibration import Calibration
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import Assignment
from sgl_graft.serving.status import graft_status


def test_status_counts_sources_and_the_table():
    shape = GraftShape(slots=4, topk=2, steps=2, num_rows=2, vocab_size=10)
    state = GraftState(GraftConfig(), shape, Calibration())
    state.begin(0, Assignment(0))
    state.observe(0, torch.tensor([1, 2, 3]))
    sources, depths = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 1, 2]])
    accept_index = torch.tensor([[0, 2, 3]], dtype=torch.int32)
    state.counters.record(sources, depths, torch.tensor([0]), accept_index, torch.tensor([3]))
    status = graft_status(state)
    assert status["accept_length"] == 3.0 and status["rounds"] == 1
    assert status["used_by_depth"]["draft"][1] == 1 and status["accepted_by_depth"]["draft"][1] == 0
    assert status["accepted_by_depth"]["table"][1] == 1 and status["accepted_by_depth"]["both"][2] == 1
    assert status["table"]["order1_rows_filled"] == 2
    assert status["table"]["context_rows_filled"] == 1
