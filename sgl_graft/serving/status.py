"""What GRAFT did, for people and dashboards: ``internal_states[].graft`` of ``GET /server_info``."""

from __future__ import annotations

from typing import Any

from ..algorithms import selected_algorithm
from ..cuda_graph.merge import FROM_DRAFT, FROM_TABLE

SOURCES = {"draft": FROM_DRAFT, "table": FROM_TABLE, "both": FROM_DRAFT | FROM_TABLE}


def graft_status(state: Any) -> dict[str, Any]:
    """Totals since start of one :class:`GraftState`.

    Reads the device, so it belongs to a request for status and never to a decode round.

    Returns:
        ``accept_length`` (tokens committed per verify, bonus included), slots used and accepted by source
        and depth, how full the table is, and requests by gate stage.
    """
    totals = state.counters.snapshot()
    table = state.table
    hits = state.counters.hits(totals)
    rows = table.tokens[:, 0] >= 0
    rounds = max(totals["rounds"], 1)
    return {
        "rule": state.config.rule,
        "slots": state.shape.slots,
        "depth": state.max_path - 1,
        "rounds": totals["rounds"],
        "accept_length": totals["committed"] / rounds,
        "stages": totals["stages"],
        "used_by_depth": {name: [0, *totals["used"][source][1:]] for name, source in SOURCES.items()},
        "accepted_by_depth": {name: totals["accepted"][source] for name, source in SOURCES.items()},
        "table": {
            "scope": state.scope,
            "bytes": table.num_bytes,
            "hit_rate": hits / rounds,
            "order1_rows_filled": int(rows[: table.first_context_row].sum()),
            "context_rows_filled": int((table.tags[:-1] >= 0).sum()),
        },
    }


def worker_status(worker: Any) -> dict[str, Any]:
    """What the host counted on this rank: no device is read."""
    draft = worker.draft_worker
    return {
        "draft_steps": {"run": draft.steps_run, "saved": draft.steps_saved},
        "op_seconds": dict(worker.state.clock.seconds),
        "rank_checks": draft.rank_check.comparisons if draft.rank_check else 0,
        "groups_turned_away": draft.tenancy.turned_away,
        "load_cap": worker.cap_status(),
    }


def add_graft_state(result: Any, scheduler: Any, *_: Any) -> Any:
    """After ``Scheduler.get_internal_state``: add what our worker did on this rank."""
    worker = scheduler.draft_worker
    if selected_algorithm() == "BLOCKPILOT":
        from ..blockpilot.status import blockpilot_status

        result.internal_state["blockpilot"] = blockpilot_status(worker.blockpilot)
        return result
    from ..graft.worker import GraftWorker

    if isinstance(worker, GraftWorker):
        result.internal_state["graft"] = graft_status(worker.state) | worker_status(worker)
    return result
