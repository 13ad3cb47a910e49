"""Update of the successor table from a verify pass (Graft, eq. 12 and 14).

Every real node of every tree replaces the rows of its token: its target distribution is the newest
evidence, whether the node was accepted or not. When several nodes of one batch want the same row, accepted
nodes win over rejected ones, then the shallower, then the lower slot: the same on every rank, whatever the
order of writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import host_op, use_triton
from .successor_table import (
    TOKEN_FIELD,
    TOKEN_MASK,
    SuccessorTable,
    context_places,
    context_tags,
    known_tokens,
    order1_rows,
)
from .top_successors import TopSuccessors, top_successors


def update_from_logits(
    table: SuccessorTable,
    table_index: Tensor,  # [batch] int64; rows whose index is no table (padding) are skipped
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    depths: Tensor,  # [batch, slots] int64
    contexts: Tensor,  # [batch] int64, what stands before each root, -1 when nothing is known
    accepted: Tensor,  # [batch, slots] bool, from `accepted_slots`
    logits: Tensor,  # [batch * slots, columns] float, raw: before penalties and grammar masks
) -> TopSuccessors:
    """Write the target's top k after every real node into the table, in place, and return it."""
    best = top_successors(logits, table.k, table.vocab_size)
    write_successors(table, table_index, tokens, parents, depths, contexts, accepted, best)
    return best


def accepted_slots(
    accept_index: Tensor,  # [batch, max_path] int, flat verify rows, -1 padded: SGLang's layout
    slots: int,
) -> Tensor:  # [batch, slots] bool
    """Which slots of each tree were accepted, the root included."""
    rows = torch.arange(accept_index.shape[0] * slots, device=accept_index.device).view(-1, slots, 1)
    return (accept_index.unsqueeze(1) == rows).any(2)


def write_successors(
    table: SuccessorTable,
    table_index: Tensor,  # [batch] int64
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    depths: Tensor,  # [batch, slots] int64
    contexts: Tensor,  # [batch] int64
    accepted: Tensor,  # [batch, slots] bool
    best: TopSuccessors,  # of [batch * slots] rows
) -> None:
    """Write known successors: `update_from_logits` for callers that already have the top k."""
    args = (table, table_index, tokens, parents, depths, contexts, accepted, best)
    if use_triton(tokens):
        from .table_update_kernel import write_successors_triton

        return write_successors_triton(*args)
    return host_op(write_successors_torch)(*args)


def write_successors_torch(
    table: SuccessorTable,
    table_index: Tensor,  # [batch] int64
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    depths: Tensor,  # [batch, slots] int64
    contexts: Tensor,  # [batch] int64
    accepted: Tensor,  # [batch, slots] bool
    best: TopSuccessors,
) -> None:
    """Reference of `write_successors`."""
    slots = tokens.shape[1]
    slot = torch.arange(slots, device=tokens.device)
    index = table_index.unsqueeze(1)
    in_range = (index >= 0) & (index < table.num_tables)
    real = (
        ((slot == 0) | (parents >= 0)) & in_range & known_tokens(tokens, table.vocab_size)
    )  # [batch, slots]
    # Smaller wins; the flat position makes every priority unique.
    flat = torch.arange(tokens.numel(), device=tokens.device)
    priority = ((~accepted).long() << 48).add(depths << 32).flatten() + flat

    rows = order1_rows(table, index, tokens).flatten()
    wins = real.flatten() & wins_its_row(rows, priority, real.flatten())
    _replace_rows(table, rows.masked_fill(~wins, table.discard_row), best)
    if not table.context_rows:
        return
    before = node_contexts(table, tokens, parents, contexts)
    real = real & (before >= 0)
    tags = context_tags(before, tokens).flatten()
    places = context_places(table, index, tags.view_as(tokens)).flatten()
    wins = real.flatten() & wins_its_row(places, priority, real.flatten())
    _replace_rows(table, (places + table.first_context_row).masked_fill(~wins, table.discard_row), best)
    table.tags.index_copy_(0, places.masked_fill(~wins, table.tags.numel() - 1), tags)


def node_contexts(
    table: SuccessorTable,
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    contexts: Tensor,  # [batch] int64, what stands before each root
) -> Tensor:  # [batch, slots] int64
    """What stands before each node: a context reaches back two tokens, so two hops find it."""
    slots = tokens.shape[1]
    root = torch.arange(slots, device=tokens.device) == 0
    known = tokens.masked_fill(~known_tokens(tokens, table.vocab_size), -1)
    above = parents.clamp(0, slots - 1)
    before_root = contexts.unsqueeze(1)
    nearest = torch.where(root, before_root, known.gather(1, above)) & TOKEN_MASK
    further = torch.where(root, before_root >> TOKEN_FIELD, nearest.gather(1, above)) & TOKEN_MASK
    return torch.where(root, before_root, ((further << TOKEN_FIELD) | nearest) & table.context_mask)


def wins_its_row(
    rows: Tensor,  # [n] int64
    priority: Tensor,  # [n] int64, unique, smaller is better
    real: Tensor,  # [n] bool, who competes
) -> Tensor:  # [n] bool
    """Whether no competitor with the same row has a better priority."""
    beaten = (rows.unsqueeze(1) == rows) & (priority < priority.unsqueeze(1)) & real  # [n, rival]
    return ~beaten.any(1)


def _replace_rows(
    table: SuccessorTable,
    rows: Tensor,  # [n] int64, the discard row for writes that lost
    best: TopSuccessors,
) -> None:
    table.tokens.index_copy_(0, rows, best.ids)
    table.probs.index_copy_(0, rows, best.probs)
