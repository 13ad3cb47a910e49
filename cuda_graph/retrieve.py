"""Level-wise retrieval: walk the successor table from the root along a fixed template (Graft, eq. 10 and 15).

It needs the root token, the tokens before it and the table, but nothing from the drafter, so inside a
captured graph it may run beside the draft steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import host_op, use_triton
from .successor_table import (
    SuccessorTable,
    context_places,
    context_tags,
    known_tokens,
    next_contexts,
    order1_rows,
)
from .templates import Template


class Retrieved(NamedTuple):
    """What the table holds along the template; nodes in template order, parents before children."""

    tokens: Tensor  # [batch, nodes] int64, -1 where the table has nothing (then so have all descendants)
    probs: (
        Tensor  # [batch, nodes] float32, product of the stored probabilities along the path, 0 where nothing
    )


@dataclass(frozen=True)
class DeviceTemplate:
    """A template's constants on a device, made once before capture."""

    template: Template
    fathers: Tensor  # [nodes] int64, -1 for the root's children
    ranks: Tensor  # [nodes] int64
    level_starts: Tensor  # [levels + 1] int64, first node of each depth, then the number of nodes
    levels: tuple[
        tuple[Tensor, Tensor], ...
    ]  # per depth: fathers, numbered within the level above, and ranks

    @classmethod
    def create(cls, template: Template, device: torch.device | str = "cpu") -> DeviceTemplate:
        def as_tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        starts = list(accumulate(template.level_sizes, initial=0))
        levels = []
        for level, (start, stop) in enumerate(pairwise(starts)):
            above = starts[level - 1] if level else -1  # the root's children have father -1, column 0
            local = [father - above for father in template.fathers[start:stop]]
            levels.append((as_tensor(local), as_tensor(template.ranks[start:stop])))
        return cls(
            template=template,
            fathers=as_tensor(template.fathers),
            ranks=as_tensor(template.ranks),
            level_starts=as_tensor(starts),
            levels=tuple(levels),
        )

    @property
    def level_sizes(self) -> tuple[int, ...]:
        return self.template.level_sizes


def retrieve(
    table: SuccessorTable,
    template: DeviceTemplate,
    table_index: Tensor,  # [batch] int64, which table each request reads; an index of no table reads nothing
    root_tokens: Tensor,  # [batch] int64, last committed token
    contexts: Tensor,  # [batch] int64, what stands before it (`successor_table`), -1 when nothing is known
) -> Retrieved:
    """Look up every template node: successor number `rank` of its parent's token.

    The context row of the parent and the tokens before it is used when the table holds that very context,
    else the parent's order-1 row. Ids outside the vocabulary, in the inputs or in a damaged table, count as
    absent, and probabilities outside 0..1 are clipped.

    Raises ValueError when the template needs more ranks than a row has.
    """
    if template.template.width > table.k:
        width = template.template.width
        raise ValueError(
            f"the template uses {width} ranks, rows hold {table.k}: build it with k {table.k} or raise k"
        )
    if use_triton(root_tokens):
        from .retrieve_kernel import retrieve_triton

        return retrieve_triton(table, template, table_index, root_tokens, contexts)
    return host_op(retrieve_torch)(table, template, table_index, root_tokens, contexts)


def retrieve_torch(
    table: SuccessorTable,
    template: DeviceTemplate,
    table_index: Tensor,  # [batch] int64
    root_tokens: Tensor,  # [batch] int64
    contexts: Tensor,  # [batch] int64
) -> Retrieved:
    """Reference of `retrieve`."""
    has_table = (table_index >= 0) & (table_index < table.num_tables)
    index = table_index.clamp(0, table.num_tables - 1).unsqueeze(1)
    # A root of -1 has no successors, nor have its descendants.
    root = root_tokens.masked_fill(~(known_tokens(root_tokens, table.vocab_size) & has_table), -1)
    last, context = root.unsqueeze(1), contexts.unsqueeze(1)  # of the level above: the root alone
    tokens, entries = [last[:, :0]], [last[:, :0]]
    for fathers, ranks in template.levels:
        before, father = context.index_select(1, fathers), last.index_select(1, fathers)  # [batch, level]
        entry = successor_rows(table, index, before, father) * table.k + ranks
        found = table.tokens.take(entry).long()
        context, last = next_contexts(table, before, father), found.masked_fill(found >= table.vocab_size, -1)
        tokens.append(last)
        entries.append(entry)
    found_tokens = torch.cat(tokens, dim=1).clamp(min=-1)
    step_probs = table.probs.take(torch.cat(entries, dim=1)).float().nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)
    probs = _path_products(template, step_probs).masked_fill(found_tokens < 0, 0.0)
    return Retrieved(found_tokens, probs)


def _path_products(
    template: DeviceTemplate,
    step_probs: Tensor,  # [batch, nodes] float32
) -> Tensor:  # [batch, nodes] float32
    """Product of the step probabilities from the root to each node."""
    products = [torch.ones_like(step_probs[:, :1])]
    for (fathers, _), level in zip(template.levels, step_probs.split(template.level_sizes, 1), strict=True):
        products.append(products[-1].index_select(1, fathers) * level)
    return torch.cat(products, dim=1)[:, 1:]


def successor_rows(
    table: SuccessorTable,
    table_index: Tensor,  # [batch, 1] int64
    contexts: Tensor,  # [batch, nodes] int64, what stands before `last`
    last: Tensor,  # [batch, nodes] int64, in the vocabulary or negative
) -> Tensor:  # [batch, nodes] int64
    """The row that predicts what follows `last`: its context row if that is stored, else its order-1 row."""
    rows = order1_rows(table, table_index, last)
    if table.context_rows:
        tags = context_tags(contexts, last)
        places = context_places(table, table_index, tags)
        rows = torch.where(table.tags.take(places) == tags, places + table.first_context_row, rows)
    return rows.masked_fill(last < 0, table.empty_row)
