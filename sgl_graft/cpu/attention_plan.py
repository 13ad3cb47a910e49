"""Who sees which keys in one forward, in terms that every executor can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class AttentionPlan:
    """One forward of a batch.

    A request's keys are its first ``prefix`` tokens, which all its queries see, and a window of slots behind
    them, which its queries see as the mask says; without a mask, query ``i`` sees window keys ``0..i``.

    Attributes:
        table: the engine's table of pool slots by request row and position. [rows, positions] int32
        rows: the table row of every request. [batch] int64
        prefix: keys that all queries of the request see. [batch] int64
        window: keys behind them. [batch] int64
        query_start: first query of every request, and the end. [batch + 1] int64
        num_queries: queries per request where all have the same number, else None.
        mask: visibility of the window, True where seen. [batch or 1, queries, window] bool
        scratch: what an executor keeps for the length of the forward.
    """

    table: torch.Tensor
    rows: torch.Tensor
    prefix: torch.Tensor
    window: torch.Tensor
    query_start: torch.Tensor
    num_queries: int | None = None
    mask: torch.Tensor | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return self.rows.shape[0]

    def of_first_queries(self, lengths: torch.Tensor) -> AttentionPlan:
        """The same forward for the first ``lengths`` [batch] queries of every request; it has no mask."""
        assert self.mask is None
        return AttentionPlan(self.table, self.rows, self.prefix, lengths, _starts(lengths))


def uniform_plan(
    table: torch.Tensor,
    rows: torch.Tensor,  # [batch]
    prefix: torch.Tensor,  # [batch]
    num_queries: int,
    window: int | None = None,
    mask: torch.Tensor | None = None,  # [batch or 1, num_queries, window]
) -> AttentionPlan:
    """Every request has ``num_queries`` queries; the window is as wide, unless given."""
    batch = rows.shape[0]
    return AttentionPlan(
        table=table,
        rows=rows.long(),
        prefix=prefix.long(),
        window=torch.full((batch,), num_queries if window is None else window),
        query_start=torch.arange(0, (batch + 1) * num_queries, num_queries),
        num_queries=num_queries,
        mask=None if mask is None else mask.contiguous(),
    )


def ragged_plan(
    table: torch.Tensor,
    rows: torch.Tensor,  # [batch]
    totals: torch.Tensor,  # [batch] keys after this forward
    lengths: torch.Tensor,  # [batch] queries
) -> AttentionPlan:
    """A prefill: every request has its own number of queries behind its cached prefix."""
    lengths = lengths.long()
    return AttentionPlan(
        table=table,
        rows=rows.long(),
        prefix=totals.long() - lengths,
        window=lengths,
        query_start=_starts(lengths),
    )


def _starts(lengths: torch.Tensor) -> torch.Tensor:  # [batch] int64 -> [batch + 1] int64
    """Where runs of these lengths begin when they stand end to end, and where the last one ends."""
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.long)
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts
