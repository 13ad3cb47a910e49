"""The successor table: for each token, the target's likeliest next tokens and their probabilities.

This is the paper's adjacency matrix (Graft, section 3.2, eq. 9) with two additions: the target's
probability is kept beside each successor, and besides one row per token (order 1) there may be rows for the
last two tokens (order 2), found through a hash and confirmed by an exact tag. One allocation can hold
several tables, one per request or group.

Rows are numbered over the whole allocation: the order-1 rows of all tables, then the order-2 rows of all
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
MAX_ORDER2_ROWS = 2**24


@dataclass(frozen=True)
class SuccessorTable:
    """Storage of one or more successor tables on one device. The tensors are updated in place."""

    tokens: Tensor  # [rows, k] int32, -1 where there is no successor
    probs: Tensor  # [rows, k] float16, probability of each successor under the target
    pairs: Tensor  # [num_tables * order2_rows + 1] int64, packed token pair of each order-2 row, -1 unused
    vocab_size: int
    num_tables: int
    order2_rows: int  # per table; 0 switches order 2 off

    @classmethod
    def create(
        cls,
        vocab_size: int,
        k: int = 8,
        num_tables: int = 1,
        order2_rows: int = 0,
        device: torch.device | str = "cpu",
    ) -> SuccessorTable:
        """Allocate empty tables. Raises ValueError for sizes out of range."""
        if min(vocab_size, k, num_tables) < 1:
            raise ValueError(f"vocab_size {vocab_size}, k {k} and num_tables {num_tables} must be at least 1")
        if order2_rows and not _is_power_of_two(order2_rows, MAX_ORDER2_ROWS):
            raise ValueError(f"order2_rows {order2_rows} must be 0 or a power of two up to {MAX_ORDER2_ROWS}")
        rows = num_tables * (vocab_size + order2_rows) + 2
        return cls(
            tokens=torch.full((rows, k), -1, dtype=torch.int32, device=device),
            probs=torch.zeros((rows, k), dtype=torch.float16, device=device),
            pairs=torch.full((num_tables * order2_rows + 1,), -1, dtype=torch.long, device=device),
            vocab_size=vocab_size,
            num_tables=num_tables,
            order2_rows=order2_rows,
        )

    @property
    def k(self) -> int:
        return self.tokens.shape[1]

    @property
    def first_order2_row(self) -> int:
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
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.tokens, self.probs, self.pairs))

    def clear(self) -> None:
        """Empty every table."""
        self.tokens.fill_(-1)
        self.probs.zero_()
        self.pairs.fill_(-1)

    def clear_table(self, index: int) -> None:
        """Empty one table, before another request may use it."""
        if not 0 <= index < self.num_tables:
            raise ValueError(f"table {index} does not exist: there are {self.num_tables}")
        order1 = slice(index * self.vocab_size, (index + 1) * self.vocab_size)
        slots = slice(index * self.order2_rows, (index + 1) * self.order2_rows)
        order2 = slice(self.first_order2_row + slots.start, self.first_order2_row + slots.stop)
        for rows in (order1, order2):
            self.tokens[rows] = -1
            self.probs[rows] = 0
        self.pairs[slots] = -1


def order1_rows(
    table: SuccessorTable,
    table_index: Tensor,  # int64, broadcastable to `tokens`
    tokens: Tensor,  # int64, within the vocabulary; others give rows of no meaning
) -> Tensor:  # int64, like `tokens`
    """Row of each token."""
    return table_index * table.vocab_size + tokens


def pack_pairs(previous: Tensor, tokens: Tensor) -> Tensor:
    """Two int64 token ids below 2**31 as one int64, the tag of an order-2 row."""
    return (previous << 32) + tokens


def order2_slots(
    table: SuccessorTable,
    table_index: Tensor,  # int64, broadcastable to `pairs`
    pairs: Tensor,  # int64 from `pack_pairs`
) -> Tensor:  # int64, like `pairs`
    """Index into `table.pairs`, and from `first_order2_row` on into the rows, where a pair lives."""
    hashed = (pairs * HASH_MULTIPLIER >> HASH_SHIFT) & (table.order2_rows - 1)
    return table_index * table.order2_rows + hashed


def known_tokens(
    tokens: Tensor,  # int64
    vocab_size: int,
) -> Tensor:  # bool, like `tokens`
    """Which ids are in the vocabulary; SGLang pads images with ids far beyond it."""
    return (tokens >= 0) & (tokens < vocab_size)


def _is_power_of_two(value: int, limit: int) -> bool:
    return 0 < value <= limit and value & (value - 1) == 0
