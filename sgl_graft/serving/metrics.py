"""GRAFT's counters in SGLang's ``/metrics``.

Three stages, so that a decode round pays nothing: the round adds to counters on the device
(``graft/counters.py``); every second at most, they are copied to the host without waiting for the device;
what arrived is put into Prometheus metrics, which prometheus_client shares between SGLang's processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from ..graft.counters import RoundCounters
from .status import SOURCES

REPORT_EVERY_S = 1.0
PREFIX = "sgl_graft:"
COUNTERS: dict[str, tuple[str, str | None]] = {
    "rounds": ("Verifies, counted per request.", None),
    "committed_tokens": ("Tokens committed by verifies, bonus included.", None),
    "slots_used": ("Slots below the root, by who proposed their node.", "source"),
    "slots_accepted": ("Accepted slots below the root, by who proposed their node.", "source"),
    "proposed_at_position": ("Drafts proposed, by their place behind the last committed token.", "position"),
    "stage_rounds": ("Rounds by the gate's stage; the last stage passed all gates.", "stage"),
    "table_lookups": ("Rounds by whether the successor table knew what follows the root.", "result"),
    "draft_steps": ("Draft steps that ran, and that were saved because no request needed them.", "outcome"),
    "op_seconds": ("Seconds in GRAFT's operations, on a CPU.", "op"),
    "groups_turned_away": ("Requests that found every group's table in use.", None),
    "table_saves": ("Saves of the successor table.", "result"),
    "tables_set_aside": ("Saved tables that were damaged, and moved out of the way.", None),
    "rank_checks": ("Rounds in which all ranks were compared and found equal.", None),
}
GAUGES: dict[str, tuple[str, str | None]] = {
    "table_rows_filled": ("Rows of the successor table that hold successors.", "kind"),
    "table_rows": ("Rows of the successor table, of one token and of several.", "kind"),
    "table_bytes": ("Bytes of the successor table.", None),
}

Totals = dict[str, dict[str, float]]  # metric -> value of its own label ("" where it has none) -> total


class HostCopy:
    """Device tensors on their way to the host, without anybody waiting."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._on_host: dict[str, torch.Tensor] = {}
        self._done: torch.cuda.Event | None = None
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._on_host[name] = buffer.copy_(tensor, non_blocking=True)
                self._done = torch.cuda.Event()
            else:
                self._on_host[name] = tensor.clone()
        if self._done is not None:
            self._done.record()

    def arrived(self) -> dict[str, Any] | None:
        """The tensors as lists, or None while they are still under way."""
        if self._done is not None and not self._done.query():
            return None
        return {name: tensor.tolist() for name, tensor in self._on_host.items()}


def device_totals(worker: Any) -> dict[str, torch.Tensor]:
    """What has to be fetched from the device: the round counters and how full the table is."""
    state = worker.state
    table = state.table
    return state.counters.tensors() | {
        "token_rows": (table.tokens[: table.first_context_row, 0] >= 0).sum(),
        "context_rows": (table.tags[:-1] >= 0).sum(),
    }


def totals(worker: Any, fetched: dict[str, Any]) -> tuple[Totals, Totals]:
    """Counters and gauges of one rank, from what was fetched from the device and what the host knows."""
    draft = worker.draft_worker
    state, keeper = worker.state, draft.keeper
    table, check = state.table, draft.rank_check
    hits = RoundCounters.hits(fetched)
    counters = {
        "rounds": {"": fetched["rounds"]},
        "committed_tokens": {"": fetched["committed"]},
        "slots_used": {name: sum(fetched["used"][source][1:]) for name, source in SOURCES.items()},
        "slots_accepted": {name: sum(fetched["accepted"][source][1:]) for name, source in SOURCES.items()},
        "proposed_at_position": _by_depth([fetched["used"][source] for source in SOURCES.values()]),
        "stage_rounds": {str(stage): count for stage, count in enumerate(fetched["stages"])},
        "table_lookups": {"hit": hits, "miss": fetched["rounds"] - hits},
        "draft_steps": {"run": draft.steps_run, "saved": draft.steps_saved},
        "op_seconds": state.clock.seconds,
        "groups_turned_away": {"": draft.tenancy.turned_away},
        "table_saves": {"ok": keeper.saves, "failed": keeper.failed_saves},
        "tables_set_aside": {"": keeper.set_aside},
        "rank_checks": {"": check.comparisons if check else 0},
    }
    gauges = {
        "table_rows_filled": {"token": fetched["token_rows"], "context": fetched["context_rows"]},
        "table_rows": {"token": table.first_context_row, "context": table.tags.numel() - 1},
        "table_bytes": {"": table.num_bytes},
    }
    return counters, gauges


def _by_depth(used: list[list[int]]) -> dict[str, float]:  # [sources][depths]
    """Sums over the sources, the root left out."""
    return {str(depth): sum(counts) for depth, counts in enumerate(zip(*used, strict=True)) if depth}


class PrometheusMetrics:
    """The metrics of one rank.

    Args:
        labels: the labels that SGLang puts on this rank's metrics.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        # prometheus_client decides at import how processes share values; SGLang has set that up by now.
        from prometheus_client import Counter, Gauge

        def names(own: str | None) -> list[str]:
            return [*labels, own] if own else [*labels]

        self._labels = dict(labels)
        self._counters = {
            name: Counter(PREFIX + name, text, names(own)) for name, (text, own) in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(PREFIX + name, text, names(own), multiprocess_mode="mostrecent")
            for name, (text, own) in GAUGES.items()
        }
        self._published: dict[tuple[str, str], float] = {}

    def publish(self, counters: Totals, gauges: Totals) -> None:
        """Bring the metrics up to the totals."""
        for name, values in counters.items():
            for value, total in values.items():
                before = self._published.get((name, value), 0)
                self._child(self._counters[name], COUNTERS[name][1], value).inc(max(total - before, 0))
                self._published[name, value] = total
        for name, values in gauges.items():
            for value, level in values.items():
                self._child(self._gauges[name], GAUGES[name][1], value).set(level)

    def _child(self, metric: Any, own: str | None, value: str) -> Any:
        return metric.labels(**self._labels, **({own: value} if own else {}))


class Reporter:
    """Publishes one rank's metrics, every so often while it decodes and once more when it is idle."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._metrics: PrometheusMetrics | None = None
        self._under_way: HostCopy | None = None
        self._next = 0.0
        self._rounds_waiting = False

    def switch_on(self, labels: Mapping[str, Any]) -> None:
        """Report from now on, under these labels."""
        if self._metrics is None:
            self._metrics = PrometheusMetrics(labels)
            self._rounds_waiting = True

    def round_done(self) -> None:
        """After a verify; costs a clock read in most rounds."""
        if self._metrics is not None:
            self._rounds_waiting = True
            self._report_when_due()

    def idle(self) -> None:
        """While there is nothing to do: report what the last rounds left."""
        if self._metrics is not None and (self._rounds_waiting or self._under_way is not None):
            self._report_when_due()

    def _report_when_due(self) -> None:
        assert self._metrics is not None
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + REPORT_EVERY_S
        if self._under_way is None:
            self._under_way = HostCopy(device_totals(self._worker))
            self._rounds_waiting = False
        fetched = self._under_way.arrived()
        if fetched is not None:
            self._under_way = None
            self._metrics.publish(*totals(self._worker, fetched))


def report_when_idle(scheduler: Any, *_: Any) -> None:
    """Before ``Scheduler.on_idle``, which runs about once a second while a server waits.

    The age of the table is looked at here, too: it grows without any round.
    """
    from ..algorithms import selected_algorithm
    from .adaptation_metrics import report_when_idle as report_adaptation
    from .verify_metrics import report_when_idle as report_verifies

    report_verifies(scheduler)
    if selected_algorithm() == "SPECBLOCK":
        report_adaptation(scheduler)
    if selected_algorithm() != "GRAFT":
        return
    from ..graft.worker import GraftWorker

    worker = scheduler.draft_worker
    if not isinstance(worker, GraftWorker):
        return
    worker.draft_worker.keeper.forget_when_old()
    context = scheduler.metrics_collector_context
    if context.current_scheduler_metrics_enabled and context.collector is not None:
        worker.reporter.switch_on(context.collector.labels)
        worker.reporter.idle()
