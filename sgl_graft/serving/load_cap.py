"""The load cap: in which batches speculation pays. Pure decisions; nothing here knows an engine.

A round of the whole tree brings ``accept length`` tokens per request and costs what the table says for its
batch; a plain round brings one. The cap compares the two and moves between two tiers, the whole tree and one
slot per request. It moves late rather than often: a gain within the margin changes nothing, and no tier is
left before it has run for ``hold`` rounds, so a batch that swings around the crossing point cannot make it
flap; only where whole trees lose several margins are they left at once. All inputs are known alike to every
rank, and so is the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

PLAIN = 1  # slots per request without speculation
CLEAR = 4  # margins; whole trees that lose more are left at once


class RoundCosts(Protocol):
    """Seconds of a round, by batch and slots per request."""

    def cost(self, batch: int, width: int) -> float: ...


@dataclass
class AcceptLength:
    """Running mean of tokens per request and round of whole trees.

    Attributes:
        prior: what is believed before anything was seen.
        memory: requests' rounds after which an observation is mostly forgotten.
        trust: requests' rounds that the prior is worth; None for all of ``memory``, 0 for none: a plain mean
            of the first ``memory``.
    """

    prior: float
    memory: float = 256.0
    trust: float | None = None
    mean: float = field(init=False)
    _seen: float = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.mean = self.prior
        self._seen = self.memory if self.trust is None else self.trust

    def observe(self, batch: int, num_tokens: int) -> None:
        """A round of ``batch`` requests committed ``num_tokens``."""
        if batch:
            self._seen = min(self._seen + batch, max(self.memory, batch))
            self.mean += batch / self._seen * (num_tokens / batch - self.mean)


class LoadCap:
    """Chooses the slots of every round.

    Args:
        slots: of the whole tree.
        costs: what rounds cost on this machine; None leaves the choice to ``above`` alone.
        accept_len: tokens per request and round to expect before any was seen.
        above: batches larger than this are never speculated; None for no such bound.
        margin: share of speed below which a difference counts as none.
        hold: rounds that a tier runs at least; whole trees that lose clearly run shorter.
        retry: plain rounds after which what was learned about acceptance is doubted, since plain rounds teach
            nothing about it.

    Attributes:
        switches: changes of tier so far.
        rounds: rounds by slots.
    """

    def __init__(
        self,
        slots: int,
        costs: RoundCosts | None,
        accept_len: float,
        *,
        above: int | None = None,
        margin: float = 0.05,
        hold: int = 8,
        retry: int = 1024,
    ) -> None:
        self._whole = slots
        self._costs = costs
        self._above = above
        self._margin = margin
        self._hold = hold
        self._retry = retry
        self._in_tier = hold  # the first tier is nobody's choice
        self.slots = slots
        self.accepted = AcceptLength(accept_len)
        self.switches = 0
        self.rounds = {PLAIN: 0, slots: 0}

    def choose(self, batch: int) -> int:
        """Slots per request of the next round, which has ``batch`` requests."""
        wanted = self._wanted(batch)
        if wanted != self.slots and (self._in_tier >= self._hold or self._loses_clearly(batch)):
            self.slots = wanted
            self.switches += 1
            self._in_tier = 0
        self._in_tier += 1
        self.rounds[self.slots] += 1
        if self.slots == PLAIN and self._in_tier % self._retry == 0:
            self.accepted.forget()
        return self.slots

    def observe(self, batch: int, num_tokens: int) -> None:
        """What a round of whole trees committed, bonus tokens included; plain rounds are not observed."""
        self.accepted.observe(batch, num_tokens)

    def gain(self, batch: int) -> float:
        """How many times as fast the whole tree is as plain rounds."""
        if self._costs is None:
            return float("inf")
        return self.accepted.mean * self._costs.cost(batch, PLAIN) / self._costs.cost(batch, self._whole)

    def _loses_clearly(self, batch: int) -> bool:
        """Whether whole trees are so slow here that waiting costs more than a change too many."""
        return self.slots != PLAIN and self.gain(batch) < 1.0 - CLEAR * self._margin

    def _wanted(self, batch: int) -> int:
        speculating = self.slots != PLAIN
        if self._above is not None:
            # To come back, a batch must fall below the bound, where there is anything below it.
            bound = self._above if speculating else max(self._above - 1, min(self._above, 1))
            if batch > bound:
                return PLAIN
        threshold = 1.0 - self._margin if speculating else 1.0 + self._margin
        return self._whole if self.gain(batch) >= threshold else PLAIN


class Alternating:
    """Both tiers in turn, whatever the load: how a cost table is measured."""

    def __init__(self, slots: int, period: int = 9) -> None:
        self._tiers = (slots, PLAIN)
        self._period = period
        self._round = 0
        self.slots = slots
        self.switches = 0
        self.rounds = {PLAIN: 0, slots: 0}
        self.accepted = AcceptLength(1.0, memory=4096.0, trust=0.0)

    def choose(self, batch: int) -> int:
        slots = self._tiers[self._round // self._period % 2]
        self._round += 1
        self.switches += slots != self.slots
        self.slots = slots
        self.rounds[slots] += 1
        return slots

    def observe(self, batch: int, num_tokens: int) -> None:
        self.accepted.observe(batch, num_tokens)
