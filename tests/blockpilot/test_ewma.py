"""`ewma` with the load-aware cap, as a server runs them: what a try is, and that it is not capped away."""

from pathlib import Path

import pytest
import torch

from sgl_graft.blockpilot.costs import FILE_NAME, read_costs
from sgl_graft.blockpilot.ewma import AcceptHistory, EwmaPolicy
from sgl_graft.blockpilot.policy import Prefilled, Round
from sgl_graft.blockpilot.shape import BlockShape
from sgl_graft.blockpilot.state import BlockPilotState

COSTS = read_costs(Path(__file__).parents[2] / "sgl_graft/drafts/smollm2-135m-instruct-dflash" / FILE_NAME)
SHAPE = BlockShape(b_max=8, default=8, candidates=(2, 3, 4, 6, 8), widths=tuple(range(1, 9)))
PROBE_EVERY = 32


class Server:
    """Requests that run for ever, with a draft that is right with one chance at every offset."""

    def __init__(self, requests: int) -> None:
        history = AcceptHistory(requests, SHAPE.b_max)
        policy = EwmaPolicy(history, SHAPE.candidates, SHAPE.default, COSTS, PROBE_EVERY)
        self.state = BlockPilotState(SHAPE, policy, requests, history, COSTS)
        self.rows = torch.arange(requests)
        self.names = tuple(map(str, range(requests)))
        self.generator = torch.Generator().manual_seed(1)
        self.begin(self.rows)

    def begin(self, rows: torch.Tensor) -> None:
        names = tuple(self.names[row] for row in rows.tolist())
        self.state.begin(Prefilled(rows, None, torch.zeros(len(rows)), names), [None] * len(rows))

    def run(self, rounds: int, right: float) -> list[int]:
        """Widths of the rounds."""
        widths = []
        for _ in range(rounds):
            sizes = self.state.sizes(self.rows)
            width = self.state.width(self.rows, sizes)
            sizes = sizes.clamp(max=width)
            wrong = torch.rand(len(self.rows), SHAPE.b_max, generator=self.generator) >= right
            wrong |= torch.arange(SHAPE.b_max) >= (sizes - 1).unsqueeze(1)
            accepted = wrong.int().argmax(1).int()
            self.state.finish(Round(self.rows, sizes, accepted, len(self.rows), self.names))
            widths.append(width)
        return widths


@pytest.mark.parametrize("requests", [1, 8])
def test_a_new_server_looks_before_it_decides(requests: int) -> None:
    good = Server(requests)
    assert good.run(40, right=0.99)[0] == SHAPE.default
    assert min(good.run(40, right=0.99)) >= 6
    bad = Server(requests)
    assert bad.run(60, right=0.02)[0] == SHAPE.default
    assert sorted(bad.run(40, right=0.02))[-3] == 1


@pytest.mark.parametrize("requests", [1, 8])
def test_a_server_that_is_off_tries_cheaply_and_comes_back(requests: int) -> None:
    server = Server(requests)
    server.run(100, right=0.02)
    tries = [width for width in server.run(10 * PROBE_EVERY, right=0.02) if width > 1]
    assert 8 <= len(tries) <= 12 and set(tries) == {2}
    server.run(60 * PROBE_EVERY, right=1.0)
    assert min(server.run(40, right=1.0)) > 1


def test_a_new_request_of_a_known_server_does_not_try() -> None:
    server = Server(8)
    server.run(60, right=0.02)
    server.begin(torch.tensor([3]))
    assert not server.state.policy.tries[3]
    assert server.run(1, right=0.02) == [1]
