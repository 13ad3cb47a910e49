"""How blocks are run: over newly committed rows, and behind the leaves of a tree.

This is plain torch, for any device. `cpu/block_rounds.py` has the same for a CPU with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .model import SpecBlockDraft
from .pool_attention import CommitRows, ContinueBlocks, DraftPool

ROWS_AT_ONCE = 256  # committed together: bounds what a long prompt takes beside the pools


@dataclass
class NewRows:
    """Rows of several requests that were committed, request by request.

    Attributes:
        slots: pool slots of each request's positions, the new rows' among them. [requests, positions]
        lengths: positions of each request, its new rows included.
        counts: new rows of each request, at least one.
    """

    slots: Tensor
    lengths: Sequence[int]
    counts: Sequence[int]


class Continuation(Protocol):
    """The later blocks of one round."""

    def next(
        self, source: Tensor | None, cuts: Tensor, condition: Tensor, embeds: Tensor, positions: Tensor
    ) -> Tensor:
        """Run one more block behind the same number of leaves of every request.

        source, cuts: as `ContinueBlocks.start` takes them; condition, embeds `[leaves, hidden]`; positions
        `[leaves]`. Returns hidden states before the final norm, `[leaves, K, hidden]`.
        """
        ...


class Blocks(Protocol):
    """A draft and the pools it writes to."""

    def commit(self, rows: NewRows, features: Tensor, embeds: Tensor) -> Tensor:
        """Block 1 over new rows: features `[rows, captured * hidden]`, embeds `[rows, hidden]` of the tokens
        after them. Returns each request's last row, `[requests, K, hidden]` before the final norm."""
        ...

    def continuing(self, slots: Tensor, lengths: Sequence[int], planned: int) -> Continuation:
        """For a round behind committed rows: slots `[requests, positions]`, and how many of them count;
        planned: most leaves of a request, of all later blocks together."""
        ...

    def propose(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `SpecBlockDraft.propose`."""
        ...


class TorchBlocks:
    """`Blocks` on any device."""

    def __init__(self, draft: SpecBlockDraft, pool: DraftPool) -> None:
        self.draft, self.pool = draft, pool
        self.propose = draft.propose

    def commit(self, rows: NewRows, features: Tensor, embeds: Tensor) -> Tensor:
        return in_parts(rows, lambda part, span: self._commit(part, features[span], embeds[span]))

    def _commit(self, part: Part, features: Tensor, embeds: Tensor) -> Tensor:
        device = features.device
        contexts = [
            part.rows.slots[i, :length].long()
            for i, length in zip(part.owners, part.rows.lengths, strict=True)
        ]
        counts = part.rows.counts
        written = torch.cat([c[-n:] for c, n in zip(contexts, counts, strict=True)])
        places = torch.cat(
            [torch.arange(len(c) - n, len(c), device=device) for c, n in zip(contexts, counts, strict=True)]
        )
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        asked = last[torch.tensor(part.ends, device=device)]
        attend = CommitRows(
            self.pool, written, contexts, places, counts, places[asked], [int(end) for end in part.ends]
        )
        return self.draft.run(self.draft.first_inputs(features, embeds), places, attend, asked)

    def continuing(self, slots: Tensor, lengths: Sequence[int], planned: int) -> TorchContinuation:
        contexts = [slots[i, :length].long() for i, length in enumerate(lengths)]
        return TorchContinuation(self.draft, self.pool, contexts)


class TorchContinuation:
    """`Continuation` on any device."""

    def __init__(self, draft: SpecBlockDraft, pool: DraftPool, contexts: Sequence[Tensor]) -> None:
        self.draft = draft
        self._attend = ContinueBlocks(pool, contexts, draft.block)

    def next(
        self, source: Tensor | None, cuts: Tensor, condition: Tensor, embeds: Tensor, positions: Tensor
    ) -> Tensor:
        self._attend.start(source, cuts)
        return self.draft.run(self.draft.next_inputs(condition, embeds), positions, self._attend)


@dataclass
class Part:
    """Some of the new rows.

    Attributes:
        rows: the part's requests only; `slots` still has those of all.
        owners: which request each is.
        ends: whether it holds the request's last new row.
    """

    rows: NewRows
    owners: Sequence[int]
    ends: Sequence[bool]


def in_parts(rows: NewRows, run: Callable[[Part, slice], Tensor], most: int = ROWS_AT_ONCE) -> Tensor:
    """Commit rows a part at a time. `run` takes a part and where its rows stand, and returns the last rows of
    the requests that end in it; together they are `[requests, ..]`, in order."""
    found = [run(part, span) for part, span in parts_of(rows, most)]
    found = [f for f in found if len(f)]
    return found[0] if len(found) == 1 else torch.cat(found)


def parts_of(rows: NewRows, most: int) -> Iterator[tuple[Part, slice]]:
    """Every row once and in order, at most `most` together."""
    first = 0
    pieces: list[tuple[int, int, int]] = []  # request, its length and its rows in this part
    held = 0
    for i, (length, count) in enumerate(zip(rows.lengths, rows.counts, strict=True)):
        done = 0
        while done < count:
            taken = min(count - done, most - held)
            done += taken
            held += taken
            pieces.append((i, length - count + done, taken))
            if held == most:
                yield _part(rows, pieces), slice(first, first + held)
                first, held, pieces = first + held, 0, []
    if pieces:
        yield _part(rows, pieces), slice(first, first + held)


def _part(rows: NewRows, pieces: Sequence[tuple[int, int, int]]) -> Part:
    owners, lengths, counts = ([piece[column] for piece in pieces] for column in range(3))
    ends = [length == rows.lengths[i] for i, length in zip(owners, lengths, strict=True)]
    return Part(NewRows(rows.slots, lengths, counts), owners, ends)
