"""Whether new weights serve at least as well as the ones before them, by what verifies commit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from enum import Enum

BASELINE = 800  # verifies before a swap that those after it are compared with
SOON = 24  # verifies after which a collapse is believed
COLLAPSE = 0.25  # drafts accepted per verify, as a share of before, that is a collapse
TRIAL = 400  # verifies after which a slower fall is judged
FALL = 0.05  # a fall of accept length by less is not undone
SURE = 3.0  # standard errors


class Verdict(Enum):
    NONE = "none"  # nothing is on trial
    TRIAL = "trial"
    KEEP = "keep"
    FALL = "fall"


class AcceptGuard:
    """Compares tokens committed per verify before and after a swap.

    A poisoned draft (almost nothing accepted any more) shows within `SOON` verifies; anything less needs
    `TRIAL` of them, as texts differ more than updates do.
    """

    def __init__(self) -> None:
        self._before: deque[int] = deque(maxlen=BASELINE)
        self._after: list[int] | None = None

    def observe(self, lengths: Iterable[int]) -> None:
        """Tokens that each verify committed, bonus included."""
        (self._before if self._after is None else self._after).extend(lengths)

    def swapped(self) -> None:
        """New weights serve from now on."""
        self._settle()
        self._after = []

    def undone(self) -> None:
        """The weights before the trial are back."""
        self._after = None

    def verdict(self) -> Verdict:
        """Judge what was observed since the swap; KEEP and FALL leave the trial to :meth:`kept`, `undone`."""
        if self._after is None:
            return Verdict.NONE
        if len(self._after) < SOON or not self._before:
            return Verdict.KEEP if len(self._after) >= TRIAL else Verdict.TRIAL
        before, after = _mean(self._before), _mean(self._after)
        if after - 1 < COLLAPSE * (before - 1):
            return Verdict.FALL
        if len(self._after) < TRIAL:
            return Verdict.TRIAL
        error = math.sqrt(
            _variance(self._before) / len(self._before) + _variance(self._after) / len(self._after)
        )
        fell = before - after > FALL * before and before - after > SURE * error
        return Verdict.FALL if fell else Verdict.KEEP

    def kept(self) -> None:
        """The new weights stay; what they brought is part of the next comparison."""
        self._settle()
        self._after = None

    def _settle(self) -> None:
        if self._after:
            self._before.extend(self._after)


def _mean(values: Iterable[int]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _variance(values: Iterable[int]) -> float:
    values = list(values)
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
