"""Whatever requests come and go, a request meets only what its own group taught."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_graft.config import GraftConfig, TableConfig
from sgl_graft.graft.calibration import Calibration
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import NO_TABLE, Tenancy
from sgl_graft.serving.request_settings import RequestSettings

ROWS, VOCAB, ROOT = 5, 60, 0
LABELS = {"a": 1, "b": 2, "c": 3}  # the token that each group teaches


class Request:
    """A request that teaches one token after the root, and its group the same one."""

    def __init__(self, label, enabled, serial):
        self.settings = RequestSettings(group=label, enabled=enabled)
        self.token = LABELS.get(label, 10 + serial)
        self.done = False


def make(scope, groups=2):
    table = TableConfig(row_width=4, context_rows=0, scope=scope, groups=groups)
    shape = GraftShape(slots=8, topk=2, steps=3, num_rows=ROWS, vocab_size=VOCAB)
    state = GraftState(GraftConfig(table=table), shape, Calibration())
    return state, Tenancy(scope, state.table.num_tables, running=lambda request: not request.done)


def retrieved(state, row):
    rows, root = torch.tensor([row]), torch.tensor([ROOT])
    found = state.chain.retrieve(state.table, state.table_index(rows), root, torch.tensor([-1])).tokens
    return set(found.flatten().tolist()) - {-1}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["group", "request"]), st.integers(1, 3), st.data())
def test_no_information_crosses_groups(scope, groups, data):
    state, tenancy = make(scope, groups)
    running: dict[int, Request] = {}
    for serial in range(data.draw(st.integers(1, 25))):
        row = data.draw(st.integers(0, ROWS - 1))
        if row in running:
            running[row].done = True
        label = data.draw(st.sampled_from([None, *LABELS]))
        request = Request(label, data.draw(st.integers(0, 4)) > 0, serial)
        state.begin(row, tenancy.begin(row, request, request.settings))
        running[row] = request
        assert retrieved(state, row) <= ({request.token} if scope == "group" else set())
        state.observe(row, torch.tensor([ROOT, request.token]))
        for other, its in running.items():
            known = retrieved(state, other)
            assert known <= {its.token}
            if not its.settings.enabled:
                assert not known
    assert tenancy.turned_away == 0 or scope == "group"


def test_a_group_learns_together_and_keeps_its_table_while_it_runs():
    state, tenancy = make("group", groups=1)
    first, second, other = Request("a", True, 0), Request("a", True, 1), Request("b", True, 2)
    for row, request in enumerate((first, second)):
        state.begin(row, tenancy.begin(row, request, request.settings))
    state.observe(0, torch.tensor([ROOT, first.token]))
    assert retrieved(state, 1) == {first.token}
    state.begin(2, tenancy.begin(2, other, other.settings))
    assert state.table_of_row[2] == NO_TABLE and tenancy.turned_away == 1
    first.done = second.done = True
    late = Request("b", True, 3)
    state.begin(3, tenancy.begin(3, late, late.settings))
    assert state.table_of_row[:4] == [NO_TABLE, NO_TABLE, NO_TABLE, 0]
    assert retrieved(state, 3) == set()


def test_requests_without_a_label_are_groups_of_their_own_also_after_a_retraction():
    _, tenancy = make("group", groups=3)
    one, two = Request(None, True, 0), Request(None, True, 1)
    tables = [tenancy.begin(row, request, request.settings).table for row, request in enumerate((one, two))]
    assert tables == [0, 1]
    again = tenancy.begin(4, one, one.settings)  # the same request on another row keeps what it learned
    assert (again.table, again.clear) == (0, NO_TABLE)


def test_a_request_that_reuses_an_id_is_another_request():
    _, tenancy = make("request")
    first = Request(None, True, 0)
    tenancy.begin(1, first, first.settings)
    assert tenancy.owns(1, first) and not tenancy.owns(2, first)
    twin = Request(None, True, 0)
    assert not tenancy.owns(1, twin)
    assert tenancy.begin(1, twin, twin.settings).clear == 1
    assert tenancy.owns(1, twin) and not tenancy.owns(1, first)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_ranks_assign_the_same_tables(data):
    ranks = [make("group", groups=2)[1] for _ in range(2)]
    kept, running = [], [{}, {}]  # the first rank's requests are garbage as soon as they are replaced
    for serial in range(data.draw(st.integers(1, 25))):
        row, label = data.draw(st.integers(0, ROWS - 1)), data.draw(st.sampled_from([None, *LABELS]))
        finishes = data.draw(st.booleans())  # or vanishes, as one that was retracted and then aborted
        assigned = []
        for rank, tenancy in enumerate(ranks):
            if finishes and row in running[rank]:
                running[rank][row].done = True
            request = running[rank][row] = Request(label, True, serial)
            assigned.append(tenancy.begin(row, request, request.settings))
        kept.append(running[1][row])
        assert assigned[0] == assigned[1]


@pytest.mark.parametrize("scope", ["shared", "group", "request"])
def test_who_opts_out_neither_reads_nor_teaches(scope):
    state, tenancy = make(scope)
    request, other = Request("a", False, 0), Request("a", True, 1)
    state.begin(0, tenancy.begin(0, other, other.settings))
    state.observe(0, torch.tensor([ROOT, 9]))
    state.begin(1, tenancy.begin(1, request, request.settings))
    before = state.table.tokens.clone()
    state.observe(1, torch.tensor([ROOT, 7]))
    assert retrieved(state, 1) == set() and torch.equal(before, state.table.tokens)
    if scope == "shared":
        assert retrieved(state, 0) == {9}
