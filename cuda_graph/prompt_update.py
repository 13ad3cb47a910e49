"""Learning from a prompt: its own next tokens are observed successors and cost no logits.

Runs at prefill, off the decode path, from torch operations on every device (sorts and gathers, no host read).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .successor_table import SuccessorTable, context_places, context_tags, known_tokens, order1_rows

SUCCESSOR_BITS = 26


def observe_prompt(
    table: SuccessorTable,
    table_index: Tensor,  # [n] int64, table of each position; positions with no table are skipped
    contexts: Tensor,  # [n] int64, what stands before each position, -1 when nothing is known
    tokens: Tensor,  # [n] int64, ids outside the vocabulary are skipped
    next_tokens: Tensor,  # [n] int64, the observed successor, -1 where it is not known yet
    prior: float = 0.5,
) -> None:
    """Put the observed successors at the front of their tokens' rows, in place.

    The result is as if the distinct successors of a row had been inserted one by one, the latest seen last:
    an insertion moves the token to rank 0, scales the row's probabilities by `1 - prior` and adds `prior`
    to the inserted one. A new context row starts from its token's order-1 row. Positions of one request
    must be in text order.

    Raises ValueError when `prior` is outside 0..1.
    """
    if not 0.0 < prior < 1.0:
        raise ValueError(f"prior {prior} must be between 0 and 1, ends excluded")
    seen = known_tokens(tokens, table.vocab_size) & known_tokens(next_tokens, table.vocab_size)
    seen = seen & (table_index >= 0) & (table_index < table.num_tables)
    rows = order1_rows(table, table_index, tokens).masked_fill(~seen, table.discard_row)
    _insert(table, rows, rows, next_tokens, prior)
    if not table.context_rows:
        return
    seen = seen & (contexts >= 0)
    tags = context_tags(contexts, tokens)
    places = context_places(table, table_index, tags).masked_fill(~seen, table.tags.numel() - 1)
    # Contexts that collide in one place: the latest owns it, and only its own successors go in.
    owner = _latest_of(places)
    mine = seen & (tags.take(owner) == tags)
    known_context = table.tags.take(places) == tags
    context_rows = places + table.first_context_row
    old_rows = torch.where(known_context, context_rows, rows)
    _insert(table, context_rows.masked_fill(~mine, table.discard_row), old_rows, next_tokens, prior)
    table.tags.index_copy_(0, places.masked_fill(~mine, table.tags.numel() - 1), tags)


class _Successors(NamedTuple):
    """The successors to insert, sorted by row; entry i matters where `leads` is set."""

    position: Tensor  # [n] int64, a position of that row in the input
    leads: Tensor  # [n] bool, first entry of its row
    tokens: Tensor  # [n, k] int64, the row's distinct successors, latest first, -1 padded


def _insert(
    table: SuccessorTable,
    rows: Tensor,  # [n] int64, row to write for each position, the discard row to skip it
    old_rows: Tensor,  # [n] int64, row whose entries are kept behind the inserted ones
    successors: Tensor,  # [n] int64
    prior: float,
) -> None:
    k = table.k
    new = _distinct_successors(rows, successors, k)
    row, old_row = rows.take(new.position), old_rows.take(new.position)
    old_tokens = table.tokens.index_select(0, old_row).long()  # [n, k]
    old_probs = table.probs.index_select(0, old_row).float()  # [n, k]
    same = (new.tokens.unsqueeze(2) == old_tokens.unsqueeze(1)) & (new.tokens >= 0).unsqueeze(
        2
    )  # [n, new, old]

    inserted = new.tokens >= 0
    age = torch.arange(k, device=rows.device)
    kept_share = (1.0 - prior) ** inserted.sum(1, keepdim=True)  # [n, 1]
    carried = (same * old_probs.unsqueeze(1)).sum(2)  # [n, new], what the old row gave the inserted tokens
    new_probs = prior * (1.0 - prior) ** age + kept_share * carried
    tokens = torch.cat([new.tokens, old_tokens.masked_fill(same.any(1), -1)], dim=1)  # [n, 2k]
    probs = torch.cat([new_probs, kept_share * old_probs], dim=1)
    front = (tokens < 0).to(torch.uint8).sort(dim=1, stable=True).indices[:, :k]  # entries first, in order
    tokens = tokens.gather(1, front)
    probs = probs.gather(1, front).masked_fill(tokens < 0, 0.0)

    target = row.masked_fill(~new.leads, table.discard_row)
    table.tokens.index_copy_(0, target, tokens.to(table.tokens.dtype))
    table.probs.index_copy_(0, target, probs.to(table.probs.dtype))


def _distinct_successors(
    rows: Tensor,  # [n] int64
    successors: Tensor,  # [n] int64
    k: int,
) -> _Successors:
    """Group positions by row and list each row's distinct successors by how recently they were seen."""
    n = rows.shape[0]
    latest_first = torch.arange(n - 1, -1, -1, device=rows.device)
    rows, successors = rows.take(latest_first), successors.take(latest_first)
    by_pair = ((rows << SUCCESSOR_BITS) + successors.clamp(min=0)).sort(stable=True)
    first_of_pair = _starts_run(by_pair.values)
    latest = torch.zeros_like(first_of_pair).scatter(0, by_pair.indices, first_of_pair)
    # Within a row: first the latest occurrence of each successor, by recency, then the repeats.
    by_row = (rows * 2 + (~latest).long()).sort(stable=True)
    row, successor, latest = (t.take(by_row.indices) for t in (rows, successors, latest))
    window = torch.arange(n, device=rows.device).unsqueeze(1) + torch.arange(k, device=rows.device)
    inside = window.clamp(max=n - 1)
    belongs = (window < n) & (row.take(inside) == row.unsqueeze(1)) & latest.take(inside)
    return _Successors(
        position=latest_first.take(by_row.indices),
        leads=_starts_run(row),
        tokens=successor.take(inside).masked_fill(~belongs, -1),
    )


def _starts_run(
    values: Tensor,  # [n] int64, sorted
) -> Tensor:  # [n] bool
    """Whether each value differs from the one before it."""
    changed = torch.ones_like(values, dtype=torch.bool)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _latest_of(
    groups: Tensor,  # [n] int64
) -> Tensor:  # [n] int64
    """For each position the last position of the same group."""
    n = groups.shape[0]
    order = groups.sort(stable=True)
    run = _starts_run(order.values).cumsum(0) - 1  # [n], number of each run
    last = torch.zeros(n, dtype=torch.long, device=groups.device)
    last = last.scatter_reduce(0, run, order.indices, "amax")  # stable: indices rise within a run
    return torch.zeros_like(last).scatter(0, order.indices, last.take(run))
