"""In SGLang's ``/metrics``, of every algorithm: rounds, tokens, how deep drafts are accepted; block sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .metrics import PREFIX, REPORT_EVERY_S, HostCopy

# GRAFT reports these itself, with what else it fetches from the device.
SHARED = {
    "rounds": ("Verifies, counted per request.", None),
    "committed_tokens": ("Tokens committed by verifies, bonus included.", None),
    "proposed_at_position": ("Drafts proposed, by their place behind the last committed token.", "position"),
}
COUNTERS = {
    "accepted_at_position": ("Drafts accepted, by their place behind the last committed token.", "position"),
    "block_rounds": ("Rounds by block size; 1 is a round without speculation.", "size"),
}


class VerifyMetrics:
    """One rank's; told after every round, it publishes every so often.

    Args:
        worker: has ``verifies``, and BLOCKPILOT's pilot where there are blocks.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._labels: dict[str, Any] | None = None
        self._counters: dict[str, Any] = {}
        self._published: dict[tuple[str, str], float] = {}
        self._blocks: HostCopy | None = None
        self._next = 0.0

    def switch_on(self, labels: Mapping[str, Any], shared: bool) -> None:
        """Report from now on, under the labels that SGLang puts on this rank's metrics.

        Args:
            shared: report :data:`SHARED`, too.
        """
        if self._labels is not None:
            return
        # prometheus_client decides at import how processes share values; SGLang has set that up by now.
        from prometheus_client import Counter

        self._labels = dict(labels)
        self._counters = {
            name: Counter(PREFIX + name, text, [*labels, own] if own else [*labels])
            for name, (text, own) in (SHARED | COUNTERS if shared else COUNTERS).items()
        }
        self._worker.verifies.told = self.report_when_due

    def report_when_due(self) -> None:
        """Costs a clock read in most rounds."""
        if self._labels is None or (now := time.monotonic()) < self._next:
            return
        self._next = now + REPORT_EVERY_S
        verifies = self._worker.verifies
        self._bring_up("rounds", {"": verifies.rounds})
        self._bring_up("committed_tokens", {"": verifies.committed})
        self._bring_up("accepted_at_position", by_position(verifies.accepted_at))
        pilot = getattr(self._worker, "blockpilot", None)
        if pilot is not None:
            self._report_blocks(pilot)

    def _report_blocks(self, pilot: Any) -> None:
        if self._blocks is None:
            self._blocks = HostCopy({"rounds": pilot.state.rounds})
        fetched = self._blocks.arrived()
        if fetched is None:
            return
        self._blocks, sizes = None, fetched["rounds"]
        self._bring_up("block_rounds", {str(size): count for size, count in enumerate(sizes) if count})
        # A block of a size proposes one token at every place below it.
        at = [0, *(sum(sizes[place + 1 :]) for place in range(1, len(sizes) - 1))]
        self._bring_up("proposed_at_position", by_position(at))

    def _bring_up(self, name: str, totals: Mapping[str, float]) -> None:
        counter = self._counters.get(name)
        if counter is None:
            return
        own = (SHARED | COUNTERS)[name][1]
        for value, total in totals.items():
            labels = {**(self._labels or {}), **({own: value} if own else {})}
            counter.labels(**labels).inc(max(total - self._published.get((name, value), 0), 0))
            self._published[name, value] = total


def by_position(counts: list[int]) -> dict[str, float]:
    """Counts by depth as totals by position; the root's entry is left out."""
    return {str(place): float(count) for place, count in enumerate(counts) if place}


def report_when_idle(scheduler: Any) -> None:
    """While a server waits, whatever it runs."""
    worker, context = scheduler.draft_worker, scheduler.metrics_collector_context
    if not hasattr(worker, "verifies") or context.collector is None:
        return
    if context.current_scheduler_metrics_enabled:
        if not hasattr(worker, "verify_metrics"):
            worker.verify_metrics = VerifyMetrics(worker)
        worker.verify_metrics.switch_on(context.collector.labels, shared=not hasattr(worker, "reporter"))
        worker.verify_metrics.report_when_due()
