"""Totals become Prometheus metrics, once each, under SGLang's labels."""

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY

from sgl_graft.config import GraftConfig
from sgl_graft.graft.calibration import Calibration
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import Assignment
from sgl_graft.serving import metrics
from sgl_graft.serving.metrics import COUNTERS, GAUGES, HostCopy, Reporter

LABELS = {"model_name": "m", "tp_rank": 1}


@pytest.fixture
def worker():
    shape = GraftShape(slots=4, topk=2, steps=2, num_rows=2, vocab_size=10)
    state = GraftState(GraftConfig(rule="staged"), shape, Calibration())
    state.begin(0, Assignment(0))
    state.observe(0, torch.tensor([1, 2, 3]))
    draft = SimpleNamespace(
        keeper=SimpleNamespace(saves=2, failed_saves=1, set_aside=1),
        tenancy=SimpleNamespace(turned_away=3),
        rank_check=SimpleNamespace(comparisons=5),
        steps_run=8,
        steps_saved=2,
    )
    return SimpleNamespace(state=state, draft_worker=draft)


def one_round(state):
    sources, depths = torch.tensor([[2, 1, 2, 3]]), torch.tensor([[0, 1, 1, 2]])
    accept_index = torch.tensor([[0, 2, 3]], dtype=torch.int32)
    state.counters.record(sources, depths, torch.tensor([1]), accept_index, torch.tensor([3]))


@pytest.fixture
def reporter(worker, monkeypatch):
    monkeypatch.setattr(metrics, "REPORT_EVERY_S", 0.0)
    reporter = Reporter(worker)
    reporter.switch_on(LABELS)
    yield reporter
    for metric in (*reporter._metrics._counters.values(), *reporter._metrics._gauges.values()):
        REGISTRY.unregister(metric)


def value(name, **own):
    return REGISTRY.get_sample_value(f"sgl_graft:{name}", {key: str(v) for key, v in (LABELS | own).items()})


def test_every_total_is_published_once(worker, reporter):
    for _ in range(3):
        one_round(worker.state)
        reporter.round_done()
    reporter.idle()
    assert value("rounds_total") == 3 and value("committed_tokens_total") == 9
    assert value("slots_used_total", source="draft") == 3 and value("slots_used_total", source="both") == 3
    assert value("slots_accepted_total", source="table") == 3
    assert value("slots_accepted_total", source="draft") == 0
    assert value("stage_rounds_total", stage="1") == 3
    assert (value("table_lookups_total", result="hit"), value("table_lookups_total", result="miss")) == (3, 0)
    assert value("table_rows_filled", kind="token") == 2 and value("table_rows", kind="token") == 10
    assert value("draft_steps_total", outcome="saved") == 2
    assert value("table_saves_total", result="failed") == 1 and value("tables_set_aside_total") == 1
    assert value("groups_turned_away_total") == 3 and value("rank_checks_total") == 5
    assert value("op_seconds_total", op="prompt") > 0
    published = {family.name for family in REGISTRY.collect() if family.name.startswith("sgl_graft:")}
    assert published == {f"sgl_graft:{name}" for name in (*COUNTERS, *GAUGES)}


def test_the_last_rounds_are_reported_when_the_server_is_idle(worker, reporter, monkeypatch):
    reporter.idle()
    monkeypatch.setattr(metrics, "REPORT_EVERY_S", 3600.0)
    one_round(worker.state)
    reporter.round_done()  # reports, and is not due again for long
    one_round(worker.state)
    reporter.round_done()
    assert value("rounds_total") == 1
    reporter._next = 0.0
    reporter.idle()
    assert value("rounds_total") == 2


def test_nothing_is_read_unless_metrics_are_on(worker, monkeypatch):
    monkeypatch.setattr(metrics, "device_totals", lambda _: pytest.fail("read"))
    reporter = Reporter(worker)
    reporter.round_done()
    reporter.idle()


def test_a_copy_does_not_change_after_it_was_made():
    totals = torch.zeros(3, dtype=torch.int64)
    copy = HostCopy({"totals": totals})
    totals += 1
    assert copy.arrived() == {"totals": [0, 0, 0]}
