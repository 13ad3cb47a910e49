"""`ewma`: choose again from the request's own accept history (ours; the paper decides once).

Every round says, for each offset it reached, whether the draft was right there. Two statistics fade
exponentially: the rate of each offset over all requests, and for each request how many acceptances it had
beside how many those rates would have given it. Their ratio, shrunk towards 1 while little has been seen,
scales the shared rates to the request; the cost table turns the result into the fastest size. Size 1, no
speculation, is always among the choices.

A size that is never run teaches nothing, so two kinds of rounds are *tries*, which the load-aware cap leaves
alone: the first rounds of a server, at the default size, and, where nobody has speculated for so many rounds,
one at the smallest size, which is the cheapest way to see that the draft is right again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .costs import CostTable
from .policy import Prefilled, Round
from .speed import expected_tokens, fastest_sizes

PRIOR_RATE = 0.5  # before anything was seen
PRIOR_WEIGHT = 8.0  # observations that it counts for
ENOUGH_TRIALS = 4.0  # of the first offset: the shared rates are known, a new request need not try
ROW_WEIGHT = 1.0  # acceptances that "like the others" counts for, of a request


class AcceptHistory:
    """What was accepted lately, by offset and by request.

    Args:
        num_rows: rows of the request pool.
        b_max: largest block size.
        memory: rounds after which an observation of a request has faded to 1/e. Shared rates keep it for 50
            times as many.
    """

    def __init__(
        self, num_rows: int, b_max: int, memory: float = 12.0, device: torch.device | str = "cpu"
    ) -> None:
        self.keep = float(torch.exp(torch.tensor(-1.0 / memory)))
        self.keep_shared = float(torch.exp(torch.tensor(-1.0 / (50.0 * memory))))
        offsets = b_max - 1
        self.hits = torch.zeros(offsets, device=device)
        self.trials = torch.zeros(offsets, device=device)
        self.got = torch.zeros(num_rows, device=device)
        self.due = torch.zeros(num_rows, device=device)
        self.offset = torch.arange(1, b_max, device=device)

    def begin(self, rows: Tensor) -> None:
        """New requests own these rows."""
        self.got[rows] = 0.0
        self.due[rows] = 0.0

    def shared_rates(self) -> Tensor:  # [offsets]
        """Rate of each offset over all requests. An offset not yet tried borrows the rate before it."""
        before = (self.hits.cumsum(0) + PRIOR_RATE * PRIOR_WEIGHT) / (self.trials.cumsum(0) + PRIOR_WEIGHT)
        return (self.hits + PRIOR_WEIGHT * before) / (self.trials + PRIOR_WEIGHT)

    def observe(
        self,
        rows: Tensor,  # [n] int64
        block_lens: Tensor,  # [n]
        accepted: Tensor,  # [n]
    ) -> None:
        """Add one round. Offsets after the first wrong one say nothing."""
        accepted, last = accepted.long().unsqueeze(1), block_lens.long().unsqueeze(1) - 1
        hit = (self.offset <= accepted) & (self.offset <= last)  # [n, offsets]
        tried = (self.offset <= accepted + 1) & (self.offset <= last)
        due = (tried * self.shared_rates()).sum(dim=1)
        seen = tried.any(dim=1)
        self.got[rows] = torch.where(seen, self.got[rows] * self.keep + hit.sum(dim=1), self.got[rows])
        self.due[rows] = torch.where(seen, self.due[rows] * self.keep + due, self.due[rows])
        any_seen = seen.any()
        self.hits = torch.where(any_seen, self.hits * self.keep_shared + hit.sum(dim=0), self.hits)
        self.trials = torch.where(any_seen, self.trials * self.keep_shared + tried.sum(dim=0), self.trials)

    def rates(self, rows: Tensor) -> Tensor:  # [n] -> [n, offsets]
        """Chance of each offset for each request, given the ones before it."""
        ratio = (self.got[rows] + ROW_WEIGHT) / (self.due[rows] + ROW_WEIGHT)
        return (self.shared_rates() * ratio.unsqueeze(1)).clamp(0.0, 0.99)

    def expected_tokens(self, rows: Tensor) -> Tensor:  # [n] -> [n, b_max]
        return expected_tokens(self.rates(rows))


class EwmaPolicy:
    """Re-decides after every round. See the module.

    Args:
        history: shared with whoever else reads it (the load-aware cap).
        candidates: sizes to choose from; 1 is added.
        costs: seconds by batch and width.
        probe_every: rounds without speculation after which it is tried once.

    Attributes:
        tries: rows of the request pool whose next block is there to learn from. [num_rows] bool
    """

    name = "ewma"
    reads_hidden = False

    def __init__(
        self,
        history: AcceptHistory,
        candidates: tuple[int, ...],
        default: int,
        costs: CostTable,
        probe_every: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.history = history
        self.default = default
        self.costs = costs
        self.widths = tuple(sorted({1, *candidates}))
        self.sizes = torch.tensor(self.widths, dtype=torch.int64, device=device)
        self.seconds: dict[int, Tensor] = {}
        self.probe_every = probe_every
        self.idle_rounds = torch.zeros_like(history.got)
        self.tries = torch.zeros_like(history.got, dtype=torch.bool)
        self.batch = 1  # running requests of the last round

    def _choose(self, rows: Tensor, batch: int) -> Tensor:
        bucket = self.costs.bucket(batch)
        if bucket not in self.seconds:
            self.seconds[bucket] = self.costs.row(bucket, self.widths, rows.device)
        tokens = self.history.expected_tokens(rows)
        return fastest_sizes(tokens, self.sizes, self.seconds[bucket], self.default)

    def first(self, prefilled: Prefilled) -> Tensor:
        rows = prefilled.rows
        self.history.begin(rows)
        self.idle_rounds[rows] = 0.0
        known = self.history.trials[0] >= ENOUGH_TRIALS
        self.tries[rows] = ~known
        return torch.where(known, self._choose(rows, max(self.batch, rows.numel())), self.default).int()

    def again(self, finished: Round) -> Tensor:
        rows = finished.rows
        self.batch = finished.batch
        choice = self._choose(rows, finished.batch)
        off = choice == 1
        idle = torch.where(off, self.idle_rounds[rows] + 1, 0.0)
        nobody = off.all()
        # Where others speculate a request's own try is free: the round has their width anyway. Where nobody
        # does, one round serves all, so it comes once in so many rounds and not once per request.
        due = torch.where(nobody, (idle >= self.probe_every).any(), off & (idle >= self.probe_every))
        self.idle_rounds[rows] = torch.where(due, 0.0, idle)
        self.tries[rows] = due & nobody
        smallest = self.sizes[1] if len(self.sizes) > 1 else self.sizes[0]
        return torch.where(due, torch.where(nobody, smallest, self.default), choice)
