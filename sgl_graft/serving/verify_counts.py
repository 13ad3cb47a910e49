"""How far verifies got, counted on the host from what the scheduler reads back anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_DEPTH = 64


class VerifyCounts:
    """Running totals since start of one rank.

    Attributes:
        rounds: verifies, counted per request.
        committed: tokens committed by them, bonus included.
        accepted_at: accepted drafts by their depth below the root, the root's own entry being 0.
        told: called after every round while it is set.
    """

    def __init__(self) -> None:
        self.rounds = self.committed = 0
        self.accepted_at = [0]
        self.told: Callable[[], None] | None = None

    def add(self, num_accepted: Sequence[int]) -> None:
        """One round of a batch: accepted drafts of each request, bonus left out."""
        self.rounds += len(num_accepted)
        for count in num_accepted:
            self.committed += count + 1
            count = min(count, MAX_DEPTH)
            self.accepted_at.extend([0] * (count + 1 - len(self.accepted_at)))
            for depth in range(1, count + 1):
                self.accepted_at[depth] += 1
        if self.told is not None:
            self.told()

    @property
    def accept_length(self) -> float:
        """Tokens committed per verify, bonus included; 0 before the first."""
        return self.committed / self.rounds if self.rounds else 0.0
