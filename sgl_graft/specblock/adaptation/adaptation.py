"""What a worker talks to: evidence goes in, and between rounds weights are swapped in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...serving.request_notes import note_version
from ..model import SpecBlockDraft
from .collect import CONTEXT, Heads, SegmentCollector, ranks_of, wanted_tokens
from .director import Director
from .weights import WeightArea

DEFAULT_DOMAIN = "default"
OTHER_DOMAINS = "other"  # of labels beyond the limit
HEADS_TOGETHER = 16  # verifies of one piece of evidence
AWAY = 2048  # rounds without a request after which it is followed no longer; it may come back as a new one
RANKS = 11  # of the wanted token in the draft's list, the last for "not in it"


class Ranks:
    """How the ranks of a tensor-parallel server come to the same weights: rank 0 decides, all take them over.

    Args:
        rank, count: this rank and how many there are.
        broadcast: overwrites a host tensor with rank 0's; not called for a single rank.
    """

    def __init__(self, rank: int = 0, count: int = 1, broadcast: Callable[[Tensor], None] | None = None):
        self.decides = rank == 0
        self.count = count
        self._broadcast = broadcast

    def agree(self, version: int) -> int:
        """Rank 0's version."""
        if self.count == 1:
            return version
        assert self._broadcast is not None
        agreed = torch.tensor([version], dtype=torch.int64)
        self._broadcast(agreed)
        return int(agreed[0])

    def share(self, flat: Tensor) -> None:
        """Overwrite `flat` `[weights]` with rank 0's."""
        if self.count > 1:
            assert self._broadcast is not None
            self._broadcast(flat.view(torch.uint8))


@dataclass
class Followed:
    """What is known of a request in progress."""

    request: Any
    domain: str
    learns: bool  # it has not opted out
    seen: int  # the last round that it took part in


class Adaptation:
    """
    Args:
        draft: the serving draft, changed in place.
        served: its weights.
        ranks: the ranks that serve together.
        director: rank 0's; None on the others.
        every: rounds between two decisions.
        labels: gives a request's domain label (or None) and whether it may be learned from.
        most_domains: labels told apart.
        weights_changed: called after a swap.

    Attributes:
        version: of the weights that serve.
        rank_counts: how often the wanted token stood at each of the first places of the draft's list; the
            last for none of them.
        swap_seconds: spent on swaps so far.
    """

    def __init__(
        self,
        draft: SpecBlockDraft,
        served: WeightArea,
        ranks: Ranks,
        director: Director | None,
        every: int,
        labels: Callable[[Any], tuple[str | None, bool]],
        most_domains: int = 16,
        weights_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.draft, self.served, self.ranks, self.director = draft, served, ranks, director
        self.every, self.labels, self.most_domains = every, labels, most_domains
        self.weights_changed = weights_changed
        self.version = 0
        self.swap_seconds = 0.0
        self.rank_counts = [0] * RANKS
        self.rounds = 0
        self._followed: dict[str, Followed] = {}
        self._domains: set[str] = set()
        self._heads: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by domain, not handed on yet
        self._began = 0.0
        if director is not None:
            self.collector = SegmentCollector(director.segments.add)
        if saved := ranks.agree(director.version if director is not None else 0):
            self._swap(saved)

    # ---- control, on every rank; rank 0 acts -----------------------------------------------------------

    def pause(self) -> None:
        """Learn nothing and take nothing over until :meth:`resume`; the weights that serve stay."""
        if self.director is not None:
            self.director.paused = True

    def resume(self) -> None:
        if self.director is not None:
            self.director.paused = False

    def rollback(self, version: int | None = None) -> int:
        """Serve earlier weights: None, those before the last change; 0, the shipped ones. Every rank calls it
        between the same two rounds. Returns the version then in use.

        Raises:
            ValueError: on every rank; there are no such weights.
        """
        refused: ValueError | None = None
        chosen = self.version
        if self.director is not None:
            try:
                self.director.roll_back(version)
                chosen = self.director.version
            except ValueError as error:
                refused = error
        chosen = self.ranks.agree(-1 if refused else chosen)
        if chosen < 0:
            raise refused or ValueError(f"there is no version {version} to go back to")
        self._swap(chosen)
        return chosen

    def status(self) -> dict[str, Any]:
        """On a rank other than 0 the version only."""
        own = {"version": self.version, "rounds": self.rounds, "swap_seconds": round(self.swap_seconds, 4)}
        if self.director is None:
            return own
        return self.director.status() | own | {"wanted_ranks": list(self.rank_counts)}

    def counts(self) -> dict[str, int]:
        """Arms chosen and setbacks since start, on rank 0."""
        return {} if self.director is None else self.director.counts

    def forget(self) -> None:
        """Drop what was kept of requests."""
        if self.director is not None:
            self.director.segments.clear()
            self.director.heads.clear()
            self.collector.clear()
            self._heads.clear()

    # ---- evidence --------------------------------------------------------------------------------------

    def prefilled(
        self,
        requests: Sequence[Any],
        counts: Sequence[int],
        ends: Sequence[bool],
        features: Tensor,
        embeds: Tensor,
        tokens: Tensor,
    ) -> None:
        """Prefill chunks: features `[rows, captured * hidden]`, embeds `[rows, hidden]` and tokens `[rows]`
        of the token after each row, request by request; ends: whether the chunk is its prompt's last."""
        if self.director is None:
            return
        start = 0
        for request, count, whole in zip(requests, counts, ends, strict=True):
            # Of a long prompt only the end is context enough.
            rows, start = slice(start + max(0, count - CONTEXT - 1), start + count), start + count
            known = self._follow(request)
            if known.learns:
                parts = (_kept(features[rows]), _kept(embeds[rows]), tokens[rows].cpu())
                self.collector.prompt(request.rid, known.domain, *parts, whole=whole)

    def round_begins(self) -> None:
        """The draft of a round starts."""
        self._began = time.perf_counter()

    def verified(
        self,
        requests: Sequence[Any],
        hidden: Tensor,  # [batch, K, hidden] of block 1, as it was before this verify
        proposed: Tensor,  # [batch, K, width] its tokens, likeliest first
        committed: Tensor,  # [batch, slots] accepted tokens and the bonus, at each row's front
        lengths: Sequence[int],
    ) -> None:
        """What a verify said about block 1's proposals."""
        for request in requests:
            note_version(request, self.version)
        if self.director is None:
            return
        followed = [self._follow(request) for request in requests]
        wanted = wanted_tokens(committed, torch.tensor(lengths, device=committed.device), hidden.shape[1])
        width = proposed.shape[2]
        for rank in ranks_of(proposed, wanted).flatten().tolist():
            if rank >= 0:
                self.rank_counts[RANKS - 1 if rank >= width else min(rank, RANKS - 1)] += 1
        kept, wanted = _kept(hidden), wanted.cpu()
        for i, known in enumerate(followed):
            if known.learns:
                self._add_heads(known.domain, kept[i], wanted[i])
        self.director.guard.observe(lengths)

    def committed(
        self, requests: Sequence[Any], counts: Sequence[int], features: Tensor, embeds: Tensor, tokens: Tensor
    ) -> None:
        """Newly committed rows, as :meth:`prefilled` takes them."""
        if self.director is not None:
            features, embeds, tokens = _kept(features), _kept(embeds), tokens.cpu()
            share = (time.perf_counter() - self._began) / max(1, len(requests))
            start = 0
            for request, count in zip(requests, counts, strict=True):
                rows, start = slice(start, start + count), start + count
                known = self._follow(request)
                self.director.bandit.served(known.domain, count, share)
                if known.learns:
                    self.collector.answer(request.rid, features[rows], embeds[rows], tokens[rows])

    # ---- swapping --------------------------------------------------------------------------------------

    def swap_when_due(self) -> None:
        """A round is over. Every so many rounds, rank 0 decides and all ranks take its weights over."""
        self.rounds += 1
        if self.rounds % self.every:
            return
        version = self.version
        if self.director is not None:
            self._forget_finished()
            self.director.decide()
            version = self.director.version
        version = self.ranks.agree(version)
        if version != self.version:
            self._swap(version)

    def _swap(self, version: int) -> None:
        started = time.perf_counter()
        self.ranks.share(self.served.flat)
        self.served.write_to(self.draft)
        self.weights_changed()
        self.version = version
        self.swap_seconds += time.perf_counter() - started

    # ---- inside ----------------------------------------------------------------------------------------

    def _add_heads(self, domain: str, hidden: Tensor, wanted: Tensor) -> None:
        """One verify's `[K, hidden]` and `[K]`; they are kept by the dozen, as each alone is small."""
        waiting = self._heads.setdefault(domain, [])
        waiting.append((hidden, wanted))
        if len(waiting) == HEADS_TOGETHER:
            assert self.director is not None
            together = Heads(*(torch.stack(column) for column in zip(*waiting, strict=True)))
            self.director.heads.add(domain, together, len(waiting))
            waiting.clear()

    def _follow(self, request: Any) -> Followed:
        known = self._followed.get(request.rid)
        if known is not None and known.request is not request:  # a client used its id again
            self.collector.finish(request.rid)
            known = None
        if known is None:
            label, learns = self.labels(request)
            known = Followed(request, self._domain_of(label), learns, self.rounds)
            self._followed[request.rid] = known
        known.seen = self.rounds
        return known

    def _domain_of(self, label: str | None) -> str:
        if label is None:
            return DEFAULT_DOMAIN
        if label not in self._domains and len(self._domains) >= self.most_domains:
            return OTHER_DOMAINS
        self._domains.add(label)
        return label

    def _forget_finished(self) -> None:
        """Also those that were retracted and aborted while they waited, of which nobody hears again."""
        gone = [
            rid
            for rid, known in self._followed.items()
            if known.request.finished() or self.rounds - known.seen > AWAY
        ]
        for rid in gone:
            self.collector.finish(rid)
            del self._followed[rid]


def _kept(tensor: Tensor) -> Tensor:
    """A copy on the host, in bf16."""
    return tensor.detach().to("cpu", torch.bfloat16, copy=True)
