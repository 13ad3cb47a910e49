"""What BLOCKPILOT keeps per request: its block size, who chose it, and what came of it.

Torch only; the worker connects it to the engine. Everything here changes speed, never output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .costs import CostTable
from .ewma import AcceptHistory
from .policy import BlockSizePolicy, Prefilled, Round
from .shape import BlockShape
from .speed import fastest_width


class BlockPilotState:
    """Block sizes of one server rank.

    Args:
        shape: the sizes fixed at start.
        policy: who chooses.
        num_rows: rows of the engine's request pool.
        history: accept history; read by the load-aware cap and by ``ewma``.
        costs: None leaves the width of a round to the largest block in it.
        verify_len: rows of a block that are verified; None: all.
    """

    def __init__(
        self,
        shape: BlockShape,
        policy: BlockSizePolicy,
        num_rows: int,
        history: AcceptHistory,
        costs: CostTable | None = None,
        verify_len: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        self.policy = policy
        self.history = history
        self.costs = costs
        self.verify_len = verify_len or shape.b_max
        # One entry per row of the request pool.
        self.size_buf = torch.full((num_rows,), shape.default, dtype=torch.int32, device=device)
        self.own_buf = torch.zeros(num_rows, dtype=torch.bool, device=device)  # the request's own choice
        self.widths = torch.tensor(shape.widths, dtype=torch.int64, device=device)
        self.seconds: dict[int, Tensor] = {}
        # Rounds by block size and drafted tokens accepted by block size: [b_max + 1] each.
        self.rounds = torch.zeros(shape.b_max + 1, dtype=torch.int64, device=device)
        self.accepted = torch.zeros(shape.b_max + 1, dtype=torch.int64, device=device)
        self.width_rounds = dict.fromkeys(shape.widths, 0)
        self.first_sizes = torch.zeros(shape.b_max + 1, dtype=torch.int64, device=device)

    # ---- a prefill -------------------------------------------------------------------------------------

    def begin(self, prefilled: Prefilled, wishes: Sequence[int | None]) -> Tensor:
        """Give every request whose prefill ended its first block size.

        Args:
            wishes: the size a request asked for itself; it is kept for good.

        Returns:
            the sizes. [n] int32
        """
        rows = prefilled.rows
        self.history.begin(rows)
        chosen = self.policy.first(prefilled).to(torch.int32)
        own = torch.tensor([wish is not None for wish in wishes], device=rows.device)
        wanted = torch.tensor([wish or 0 for wish in wishes], dtype=torch.int32, device=rows.device)
        sizes = torch.where(own, wanted, chosen).clamp(1, self.shape.b_max)
        self.size_buf[rows] = sizes
        self.own_buf[rows] = own
        self.first_sizes.scatter_add_(0, sizes.long(), torch.ones_like(sizes, dtype=torch.int64))
        return sizes

    def adopt(self, rows: Tensor) -> None:
        """Rows whose prefill happened elsewhere start at the default size."""
        self.history.begin(rows)
        self.size_buf[rows] = self.shape.default
        self.own_buf[rows] = False

    # ---- a round ---------------------------------------------------------------------------------------

    def sizes(self, rows: Tensor) -> Tensor:  # [n] -> [n] int32
        """Block size of each running request."""
        return self.size_buf[rows.long()]

    def width(self, rows: Tensor, sizes: Tensor) -> int:
        """Rows per request of the coming round: the load-aware cap with a cost table, else what fits all.

        Reads the device: only for servers whose rounds may differ in shape, which have no CUDA graphs.
        """
        if self.costs is not None:
            bucket = self.costs.bucket(rows.numel())
            if bucket not in self.seconds:
                self.seconds[bucket] = self.costs.row(bucket, self.shape.widths, rows.device)
            tokens = self.history.expected_tokens(rows.long())
            chosen = fastest_width(tokens, sizes, self.widths, self.seconds[bucket])
            # What a request asked for itself, and what the policy wants to learn from, is not cut short.
            kept = self.own_buf[rows.long()]
            if self.policy.tries is not None:
                kept = kept | self.policy.tries[rows.long()]
            chosen = torch.maximum(chosen, self._covering(torch.where(kept, sizes, 1)))
        else:
            chosen = self._covering(sizes)
        return int(chosen)

    def _covering(self, sizes: Tensor) -> Tensor:
        return self.widths[(self.widths < sizes.max()).sum()]

    def finish(self, done: Round) -> None:
        """Count a round and let the policy choose again, for requests that did not choose themselves."""
        rows = done.rows.long()
        done = Round(rows, done.block_lens, done.accepted.int(), done.batch, done.names)
        cell = done.block_lens.long()
        self.rounds.scatter_add_(0, cell, torch.ones_like(cell))
        self.accepted.scatter_add_(0, cell, done.accepted.long())
        self.history.observe(rows, done.block_lens, done.accepted)
        again = self.policy.again(done)
        if again is not None:
            again = again.to(torch.int32).clamp(1, self.shape.b_max)
            self.size_buf[rows] = torch.where(self.own_buf[rows], self.size_buf[rows], again)


def mask_beyond(
    candidates: Tensor,  # [batch, slots] the root and the drafted tokens
    block_lens: Tensor,  # [batch] rows that count, root included
) -> Tensor:  # [batch, slots]; -1 where nothing may be accepted
    """Empty the verify rows beyond each request's block: no token equals -1."""
    slot = torch.arange(candidates.shape[1], device=candidates.device)
    return candidates.masked_fill(slot >= block_lens.unsqueeze(1), -1)
