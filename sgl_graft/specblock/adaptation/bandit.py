"""When to learn, and how much: by expected gain in tokens less measured cost.

An update of a draft that serves one *domain* (a label that requests carry) is worth the share by which it
lengthens what a verify commits, times the tokens still to come; as many are expected as came so far, up to a
horizon. It costs the seconds that the learner computed, times the tokens a second of serving brings. The
paper (section "Cost-aware adaptation") names the arms and the criterion; estimates, limits and back-off are
ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SKIP, HEAD, FULL = "skip", "head", "full"
LEARNING_ARMS = (HEAD, FULL)
FORGETTING = 0.5  # weight of the newest gain: gains shrink as a domain is learned
MOST_PATIENCE = 64.0  # a wait never grows beyond so many times the first


@dataclass(frozen=True)
class BanditSettings:
    """
    Attributes:
        min_tokens: committed tokens of a domain before anything is learned for it.
        wait_tokens: tokens of a domain between two updates; doubled by each that brought nothing.
        horizon: tokens still to come are expected to be as many as came, but at most this many.
        explore: tokens that may be given up for trying arms that do not look worth it, as a share of all.
        contention: share of a second of learning that serving loses; below 1 where the learner has a core.
        arms: that it may choose from, besides skipping.
        always: for comparison: whatever an update costs.
        prior_gain, prior_seconds: what an arm is expected to bring and cost before it was tried.
    """

    min_tokens: int = 8000
    wait_tokens: int = 1500
    horizon: int = 100_000
    explore: float = 0.01
    contention: float = 1.0
    arms: tuple[str, ...] = LEARNING_ARMS
    always: bool = False
    prior_gain: Mapping[str, float] = field(default_factory=lambda: {HEAD: 0.01, FULL: 0.03})
    prior_seconds: Mapping[str, float] = field(default_factory=lambda: {HEAD: 0.5, FULL: 5.0})


@dataclass
class ArmRecord:
    """What one arm brought in one domain."""

    gain: float  # expected share by which an update lengthens accepts
    seconds: float  # measured, of one update
    trials: int = 0
    patience: float = 1.0
    next_at: float = 0.0  # tokens of the domain before which it is not tried again


@dataclass
class DomainRecord:
    arms: dict[str, ArmRecord]
    tokens: float = 0.0


@dataclass(frozen=True)
class Choice:
    """`worth` and `price` in tokens; `explores` where the price exceeds the worth."""

    domain: str
    arm: str
    worth: float
    price: float
    explores: bool


class CostAwareBandit:
    """Chooses among skip, head-only and full updates, per domain.

    Attributes:
        tokens, seconds: served so far, over all domains; a choice prices a second of learning by them.
        explored: tokens given up for exploring so far.
    """

    def __init__(self, settings: BanditSettings) -> None:
        self.settings = settings
        self.domains: dict[str, DomainRecord] = {}
        self.tokens = self.seconds = self.explored = 0.0

    def served(self, domain: str, tokens: float, seconds: float) -> None:
        """A verify committed `tokens` of this domain; `seconds` is its share of the round."""
        self._record(domain).tokens += tokens
        self.tokens += tokens
        self.seconds += seconds

    def choose(self) -> Choice | None:
        """What to do now; None is *skip* in every domain."""
        options = [
            option
            for domain, record in self.domains.items()
            if record.tokens >= self.settings.min_tokens
            for option in self._options(domain, record)
        ]
        worthy = [o for o in options if not o.explores]
        affordable = [o for o in options if o.explores and self._may_explore(o.price)]
        return max(worthy or affordable, key=lambda o: o.worth / max(o.price, 1e-9), default=None)

    def began(self, choice: Choice) -> None:
        """What was chosen is being done."""
        if choice.explores:
            self.explored += choice.price

    @property
    def ready(self) -> bool:
        """Whether some domain has had the traffic that learning needs."""
        return any(record.tokens >= self.settings.min_tokens for record in self.domains.values())

    def learned(self, domain: str, arm: str, gain: float, seconds: float) -> None:
        """An update was judged: `gain` the share by which it lengthens accepts (0 or below: not used)."""
        record, arms = self._record(domain), self._record(domain).arms[arm]
        gain = max(gain, 0.0) if math.isfinite(gain) else 0.0
        weight = FORGETTING if arms.trials else 0.75  # a prior is soon forgotten
        arms.gain += weight * (gain - arms.gain)
        arms.seconds = seconds if not arms.trials else arms.seconds + FORGETTING * (seconds - arms.seconds)
        arms.trials += 1
        patient = gain <= 0 and not self.settings.always
        arms.patience = min(2 * arms.patience, MOST_PATIENCE) if patient else 1.0
        self._wait(record, arms)

    def rolled_back(self, domain: str, arm: str) -> None:
        """An update that looked good made accepts shorter while serving."""
        record = self._record(domain)
        arms = record.arms[arm]
        arms.gain = 0.0
        arms.patience = min(4 * arms.patience, MOST_PATIENCE)
        self._wait(record, arms)

    def state(self) -> dict[str, Any]:
        """Everything learned about arms and domains, for :meth:`restore`."""
        return {
            "domains": {name: asdict(record) for name, record in self.domains.items()},
            "tokens": self.tokens,
            "seconds": self.seconds,
            "explored": self.explored,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for something that :meth:`state` never gave."""
        domains = {}
        for name, record in state["domains"].items():
            arms = {arm: ArmRecord(**record["arms"][arm]) for arm in LEARNING_ARMS}
            domains[str(name)] = DomainRecord(arms, float(record["tokens"]))
        self.tokens, self.seconds = float(state["tokens"]), float(state["seconds"])
        self.explored = float(state["explored"])
        self.domains = domains

    def _record(self, domain: str) -> DomainRecord:
        if domain not in self.domains:
            known = self.settings
            self.domains[domain] = DomainRecord(
                {arm: ArmRecord(known.prior_gain[arm], known.prior_seconds[arm]) for arm in LEARNING_ARMS}
            )
        return self.domains[domain]

    def _options(self, domain: str, record: DomainRecord) -> list[Choice]:
        to_come = min(record.tokens, self.settings.horizon)
        per_second = self.tokens / max(self.seconds, 1e-9)
        options = []
        for arm, known in record.arms.items():
            if record.tokens < known.next_at or arm not in self.settings.arms:
                continue
            worth = known.gain * to_come
            price = known.seconds * per_second * self.settings.contention
            explores = worth <= price and not self.settings.always
            options.append(Choice(domain, arm, worth, price, explores))
        return options

    def _may_explore(self, price: float) -> bool:
        return self.explored + price <= self.settings.explore * self.tokens

    def _wait(self, record: DomainRecord, arm: ArmRecord) -> None:
        arm.next_at = record.tokens + arm.patience * self.settings.wait_tokens
