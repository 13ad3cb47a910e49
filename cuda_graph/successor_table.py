"""The successor table: for each token, the target's likeliest next tokens and their probabilities.

This is the paper's adjacency matrix (Graft, section 3.2, eq. 9) with two additions: the target's
probability is kept beside each successor, and besides one row per token (order 1) there may be context rows,
keyed by the last two or three tokens, found through a hash and confirmed by an exact tag. One allocation
can hold several tables, one per request or group.

What stands before a token is passed around as one int64, its context: the one or two tokens before it, 21
bits each, the nearest lowest. A token that is unknown there has all bits set; -1 says that nothing is known.

Rows are numbered over the whole allocation: the order-1 rows of all tables, then the context rows of all
tables, then one row that is always empty (unknown tokens read it) and one that takes discarded writes and
is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Fibonacci hashing: 2**64 divided by the golden ratio, as a signed 64-bit integer.
HASH_MULTIPLIER = -7046029254386353131
HASH_SHIFT = 36
TOKEN_FIELD = 21  # bits of a token in a context and in a tag: three fit into an int64
TOKEN_MASK = 2**TOKEN_FIELD - 1
MAX_CONTEXT_ROWS = 2**24


@dataclass(frozen=True)
class SuccessorTable:
    """Storage of one or more successor tables on one device. The tensors are updated in place."""

    tokens: Tensor  # [rows, k] int32, -1 where there is no successor
    probs: Tensor  # [rows, k] float16, probability of each successor under the target
    tags: Tensor  # [num_tables * context_rows + 1] int64, context and token of each context row, -1 unused
    vocab_size: int
    num_tables: int
    context_rows: int  # per table; 0 switches them off
    context_len: int  # tokens that key a context row: 2 or 3

    @classmethod
    def create(
        cls,
        vocab_size: int,
        k: int = 8,
        num_tables: int = 1,
        context_rows: int = 0,
        context_len: int = 3,
        device: torch.device | str = "cpu",
    ) -> SuccessorTable:
        """Allocate empty tables. Raises ValueError for sizes out of range."""
        if min(vocab_size, k, num_tables) < 1:
            raise ValueError(f"vocab_size {vocab_size}, k {k} and num_tables {num_tables} must be at least 1")
        if context_rows and not _is_power_of_two(context_rows, MAX_CONTEXT_ROWS):
            raise ValueError(
                f"context_rows {context_rows} must be 0 or a power of two up to {MAX_CONTEXT_ROWS}"
            )
        if context_len not in (2, 3):
            raise ValueError(f"context_len is {context_len}: key context rows by the last 2 or 3 tokens")
        if context_rows and vocab_size > TOKEN_MASK:
            raise ValueError(
                f"context rows tell at most {TOKEN_MASK} tokens apart, the vocabulary has {vocab_size}: "
                "set context_rows to 0"
            )
        rows = num_tables * (vocab_size + context_rows) + 2
        return cls(
            tokens=torch.full((rows, k), -1, dtype=torch.int32, device=device),
            probs=torch.zeros((rows, k), dtype=torch.float16, device=device),
            tags=torch.full((num_tables * context_rows + 1,), -1, dtype=torch.long, device=device),
            vocab_size=vocab_size,
            num_tables=num_tables,
            context_rows=context_rows,
            context_len=context_len,
        )

    @property
    def k(self) -> int:
        return self.tokens.shape[1]

    @property
    def context_mask(self) -> int:
        """The bits of a context that this table looks at."""
        return 2 ** (TOKEN_FIELD * (self.context_len - 1)) - 1

    @property
    def first_context_row(self) -> int:
        return self.num_tables * self.vocab_size

    @property
    def empty_row(self) -> int:
        """A row without successors, for reading."""
        return self.tokens.shape[0] - 2

    @property
    def discard_row(self) -> int:
        """A row nobody reads, for writes that lost."""
        return self.tokens.shape[0] - 1

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.tokens, self.probs, self.tags))

    def clear(self) -> None:
        """Empty every table."""
        self.tokens.fill_(-1)
        self.probs.zero_()
        self.tags.fill_(-1)

    def clear_table(self, index: int) -> None:
        """Empty one table, before another request may use it."""
        if not 0 <= index < self.num_tables:
            raise ValueError(f"table {index} does not exist: there are {self.num_tables}")
        order1 = slice(index * self.vocab_size, (index + 1) * self.vocab_size)
        slots = slice(index * self.context_rows, (index + 1) * self.context_rows)
        context = slice(self.first_context_row + slots.start, self.first_context_row + slots.stop)
        for rows in (order1, context):
            self.tokens[rows] = -1
            self.probs[rows] = 0
        self.tags[slots] = -1


def order1_rows(
    table: SuccessorTable,
    table_index: Tensor,  # int64, broadcastable to `tokens`
    tokens: Tensor,  # int64, within the vocabulary; others give rows of no meaning
) -> Tensor:  # int64, like `tokens`
    """Row of each token."""
    return table_index * table.vocab_size + tokens


def context_tags(
    contexts: Tensor,  # int64
    tokens: Tensor,  # int64, in the vocabulary or negative
) -> Tensor:  # int64
    """A context and the token after it as one int64, the tag of their context row; negative without one."""
    return (contexts << TOKEN_FIELD) + tokens


def next_contexts(
    table: SuccessorTable,
    contexts: Tensor,  # int64, what stands before `tokens`
    tokens: Tensor,  # int64, in the vocabulary or negative
) -> Tensor:  # int64
    """What stands before whatever follows `tokens`."""
    return ((contexts << TOKEN_FIELD) | (tokens & TOKEN_MASK)) & table.context_mask


def contexts_within(
    table: SuccessorTable,
    tokens: Tensor,  # [n] int64, consecutive; nothing is known before them
) -> Tensor:  # [n] int64
    """What stands before each token of a text."""
    named = tokens.masked_fill(~known_tokens(tokens, table.vocab_size), -1)
    nothing = named.new_full((1,), -1)
    nearest = torch.cat([nothing, named[:-1]])
    further = torch.cat([nothing, nearest[:-1]])
    return torch.cat([nothing, next_contexts(table, further, nearest)[1:]])


def context_places(
    table: SuccessorTable,
    table_index: Tensor,  # int64, broadcastable to `tags`
    tags: Tensor,  # int64 from `context_tags`
) -> Tensor:  # int64, like `tags`
    """Index into `table.tags`, and from `first_context_row` on into the rows, where a tag lives."""
    hashed = (tags * HASH_MULTIPLIER >> HASH_SHIFT) & (table.context_rows - 1)
    return table_index * table.context_rows + hashed


def known_tokens(
    tokens: Tensor,  # int64
    vocab_size: int,
) -> Tensor:  # bool, like `tokens`
    """Which ids are in the vocabulary; SGLang pads images with ids far beyond it."""
    return (tokens >= 0) & (tokens < vocab_size)


def _is_power_of_two(value: int, limit: int) -> bool:
    return 0 < value <= limit and value & (value - 1) == 0
