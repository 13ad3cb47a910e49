"""What GRAFT did, for people and dashboards: ``internal_states[].graft`` of ``GET /server_info``."""

from __future__ import annotations

from typing import Any

from ..cuda_graph.merge import FROM_DRAFT, FROM_TABLE

_SOURCES = {"draft": FROM_DRAFT, "table": FROM_TABLE, "both": FROM_DRAFT | FROM_TABLE}


def graft_status(state: Any) -> dict[str, Any]:
    """Totals since start of one :class:`GraftState`.

    Reads the device, so it belongs to a request for status and never to a decode round.

    Returns:
        ``accept_length`` (tokens committed per verify, bonus included), slots used and accepted by source
        and depth, how full the table is, and requests by gate stage.
    """
    totals = state.counters.snapshot()
    table = state.table
    rows = table.tokens[:, 0] >= 0
    rounds = max(totals["rounds"], 1)
    return {
        "rule": state.config.rule,
        "slots": state.shape.slots,
        "depth": state.max_path - 1,
        "rounds": totals["rounds"],
        "accept_length": totals["committed"] / rounds,
        "stages": totals["stages"],
        "used_by_depth": {name: totals["used"][source] for name, source in _SOURCES.items()},
        "accepted_by_depth": {name: totals["accepted"][source] for name, source in _SOURCES.items()},
        "table": {
            "scope": "request" if state.private else "shared",
            "bytes": table.num_bytes,
            "order1_rows_filled": int(rows[: table.first_order2_row].sum()),
            "order2_rows_filled": int((table.pairs[:-1] >= 0).sum()),
        },
    }


def add_graft_state(result: Any, scheduler: Any, *_: Any) -> Any:
    """After ``Scheduler.get_internal_state``: add what GRAFT did on this rank."""
    from ..graft.worker import GraftWorker

    worker = scheduler.draft_worker
    if isinstance(worker, GraftWorker):
        result.internal_state["graft"] = graft_status(worker.state)
    return result
