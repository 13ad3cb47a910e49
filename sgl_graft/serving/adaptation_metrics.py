"""Online adaptation in SGLang's ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .metrics import PREFIX, REPORT_EVERY_S

COUNTERS = {
    "adaptation_decisions": ("Decisions of online adaptation that could have learned, by arm.", "arm"),
    "adaptation_setbacks": ("Updates refused for their weights, rolled back, or lost in a crash.", "kind"),
    "adaptation_wanted_ranks": ("Where the token that the target wanted stood in the draft's list.", "rank"),
    "adaptation_swap_seconds": ("Seconds spent on swapping weights.", None),
}
ARMS = ("skip", "head", "full")
SETBACKS = ("refused", "rolled_back", "crashed")


class AdaptationMetrics:
    """Publishes one rank's adaptation, every so often."""

    def __init__(self, adaptation: Any) -> None:
        self._adaptation = adaptation
        self._labels: dict[str, Any] | None = None
        self._next = 0.0
        self._published: dict[tuple[str, str], float] = {}

    def switch_on(self, labels: Mapping[str, Any]) -> None:
        """Report from now on, under the labels that SGLang puts on this rank's metrics."""
        if self._labels is not None:
            return
        # prometheus_client decides at import how processes share values; SGLang has set that up by now.
        from prometheus_client import Counter, Gauge

        self._labels = dict(labels)
        self._counters = {
            name: Counter(PREFIX + name, text, [*labels, own] if own else [*labels])
            for name, (text, own) in COUNTERS.items()
        }
        self._version = Gauge(
            PREFIX + "draft_version",
            "Number of the draft's weights that serve; 0 are the shipped ones.",
            [*labels],
            multiprocess_mode="mostrecent",
        )

    def report_when_due(self) -> None:
        """Costs a clock read in most rounds."""
        if self._labels is None or (now := time.monotonic()) < self._next:
            return
        self._next = now + REPORT_EVERY_S
        self._version.labels(**self._labels).set(self._adaptation.version)
        counts = self._adaptation.counts()
        self._bring_up("adaptation_decisions", {arm: counts.get(arm, 0) for arm in ARMS})
        self._bring_up("adaptation_setbacks", {kind: counts.get(kind, 0) for kind in SETBACKS})
        places = self._adaptation.rank_counts
        names = [*(str(place) for place in range(1, len(places))), "none"]
        self._bring_up("adaptation_wanted_ranks", dict(zip(names, places, strict=True)))
        self._bring_up("adaptation_swap_seconds", {"": self._adaptation.swap_seconds})

    def _bring_up(self, name: str, totals: Mapping[str, float]) -> None:
        own = COUNTERS[name][1]
        for value, total in totals.items():
            labels = {**(self._labels or {}), **({own: value} if own else {})}
            self._counters[name].labels(**labels).inc(max(total - self._published.get((name, value), 0), 0))
            self._published[name, value] = total


def report_when_idle(scheduler: Any) -> None:
    """While a SPECBLOCK server waits."""
    metrics = getattr(scheduler.draft_worker, "adaptation_metrics", None)
    context = scheduler.metrics_collector_context
    if metrics is not None and context.current_scheduler_metrics_enabled and context.collector is not None:
        metrics.switch_on(context.collector.labels)
        metrics.report_when_due()
