"""Per request, in ``meta_info``: how many slots each source filled, how many of them were accepted, and what
else is noted.

``meta_info.graft`` of a complete answer is a list with one entry, ``{"proposed": {"draft": .., "table": ..,
"both": ..}, "accepted": {..}}``. Upstream's ``spec_num_proposed_drafts`` counts every slot but the root, also
the empty ones.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from ..graft.counters import NUM_SOURCES
from .metrics import HostCopy
from .request_notes import notes_of
from .status import SOURCES

KEY = "graft"
WIDTH = 2 * NUM_SOURCES

_counts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # request -> its totals


def count_slots(
    sources: torch.Tensor,  # [batch, slots], the root first
    accept_index: torch.Tensor,  # [batch, path] flat node indices, root first, -1 padded
) -> torch.Tensor:  # [batch, 2 * sources]: used by source, then accepted by source
    """One round's slots of every request, by source; the root is left out, and source 0 means empty."""
    path = accept_index[:, 1:].long()
    hit = path >= 0
    on_path = sources.flatten()[path.clamp(min=0)] + NUM_SOURCES  # [batch, path - 1]
    below = sources[:, 1:]
    counts = torch.zeros((sources.shape[0], WIDTH), dtype=torch.long, device=sources.device)
    counts.scatter_add_(1, below, torch.ones_like(below))
    return counts.scatter_add_(1, on_path, hit.long())


class RequestCounts:
    """Rounds whose counts are on their way to the host, oldest first.

    The scheduler processes results in the order of the verifies, and waits for each one's copies to the host.
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[list[weakref.ref[Any]], HostCopy]] = deque()

    def verified(self, requests: Sequence[Any], counts: torch.Tensor) -> None:
        """A round's counts [batch, 2 * sources] exist on the device."""
        self._rounds.append(([weakref.ref(request) for request in requests], HostCopy({"counts": counts})))

    def processed(self, batch_size: int) -> None:
        """The scheduler processes the oldest round, so its copies have arrived."""
        if not self._rounds:
            return
        requests, copy = self._rounds.popleft()
        fetched = copy.arrived()
        if fetched is None or len(requests) != batch_size:  # not the round that we think it is
            self._rounds.clear()
            return
        for reference, counts in zip(requests, fetched["counts"], strict=True):
            request = reference()
            if request is not None:
                totals = _counts.setdefault(request, [0] * WIDTH)
                totals[:] = [total + count for total, count in zip(totals, counts, strict=True)]


def counts_of(request: Any) -> list[dict[str, dict[str, int]]]:
    """What ``meta_info.graft`` says of a request; empty when it was never verified."""
    totals, notes = _counts.get(request), notes_of(request)
    if totals is None:
        return [notes] if notes else []
    proposed = {name: totals[source] for name, source in SOURCES.items()}
    accepted = {name: totals[NUM_SOURCES + source] for name, source in SOURCES.items()}
    return [{"proposed": proposed, "accepted": accepted} | notes]


class GraftOutputStreamer(SchedulerOutputStreamer):
    """SGLang's streamer, with our counts in the output of finished requests."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        if not any(req.finished() for req in reqs):
            return {}
        return {KEY: [counts_of(req) if req.finished() else [] for req in reqs]}


def choose_streamer(streamer: type, scheduler: Any, *_: Any) -> type:
    """After ``Scheduler.get_output_streamer_class``; SGLang's Rust front end has no place for such fields."""
    from ..algorithms import selected_algorithm
    from ..config import current_config

    tells = selected_algorithm() == "GRAFT" or (
        selected_algorithm() == "SPECBLOCK" and current_config().specblock.adaptation.enabled
    )
    if not tells:
        return streamer
    plain = streamer is SchedulerOutputStreamer and getattr(scheduler, "rust_server", None) is None
    return GraftOutputStreamer if plain else streamer
