"""From commits and verifies to evidence a draft can learn from.

The labels are free: a verify says which token the target wanted behind the accepted ones. At temperature 0
that is its likeliest token, above it a sample of its distribution, of which the loss's gradient is an
unbiased estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

CONTEXT = 96  # rows before an answer (or an earlier part of it) that a segment repeats
SEGMENT = 128  # answer rows of a segment
LEAST = 12  # answer rows worth keeping
MOST_OPEN = 512  # requests followed at a time


class Segment(NamedTuple):
    """Consecutive rows of one request."""

    features: Tensor  # [rows, captured * hidden] bf16, on the host
    embeds: Tensor  # [rows, hidden] bf16, of each row's token
    tokens: Tensor  # [rows] the token after each row
    answer: int  # from this row on, the target wrote the token


class Heads(NamedTuple):
    """What block 1 proposed in several verifies, and what the target wanted."""

    hidden: Tensor  # [verifies, K, hidden] bf16 before the final norm
    wanted: Tensor  # [verifies, K] target token id, -1 where the verify did not get that far


@dataclass
class _Open:
    domain: str
    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    rows: int = 0
    answer: int = 0  # rows before the answer

    @property
    def answered(self) -> int:
        return self.rows - self.answer


class SegmentCollector:
    """Follows requests row by row and hands on segments of their answers.

    Args:
        emit: takes a domain, a segment and its number of answer rows.
    """

    def __init__(self, emit: Callable[[str, Segment, int], None]) -> None:
        self._emit = emit
        self._open: dict[Hashable, _Open] = {}

    def prompt(
        self, request: Hashable, domain: str, features: Tensor, embeds: Tensor, tokens: Tensor, whole: bool
    ) -> None:
        """A prefill chunk's rows; `whole`: it is the prompt's last, so its last token is the target's.

        A request that comes again (it was retracted) starts anew.
        """
        found = self._open.get(request)
        if found is not None and found.answered > 0:
            self.finish(request)
            found = None
        if found is None:
            if len(self._open) >= MOST_OPEN:
                return
            found = self._open[request] = _Open(domain)
        kept = slice(-CONTEXT - 1, None)
        self._append(found, features[kept], embeds[kept], tokens[kept])
        found.answer = found.rows - int(whole)

    def answer(self, request: Hashable, features: Tensor, embeds: Tensor, tokens: Tensor) -> None:
        """Newly committed rows of an answer; a request whose prompt was not seen is left out."""
        found = self._open.get(request)
        if found is None:
            return
        self._append(found, features, embeds, tokens)
        if found.answered >= SEGMENT:
            rest = self._close(found)
            self._open[request] = rest

    def finish(self, request: Hashable) -> None:
        """No more rows come."""
        found = self._open.pop(request, None)
        if found is not None:
            self._close(found)

    def clear(self) -> None:
        """Forget the requests in progress."""
        self._open.clear()

    def _append(self, to: _Open, features: Tensor, embeds: Tensor, tokens: Tensor) -> None:
        to.parts.append((features, embeds, tokens))
        to.rows += len(tokens)

    def _close(self, found: _Open) -> _Open:
        """Emit what is open; returns its end, as context of what follows."""
        columns = zip(*found.parts, strict=True)
        features, embeds, tokens = (torch.cat(column) for column in columns)
        first = max(0, found.answer - CONTEXT)
        segment = Segment(features[first:], embeds[first:], tokens[first:], found.answer - first)
        if found.answered >= LEAST:
            self._emit(found.domain, segment, found.answered)
        tail = slice(-CONTEXT, None)
        rest = _Open(found.domain)
        self._append(rest, features[tail].clone(), embeds[tail].clone(), tokens[tail].clone())
        rest.answer = rest.rows
        return rest


def wanted_tokens(committed: Tensor, lengths: Tensor, block: int) -> Tensor:
    """`[batch, K]` what the target wanted at each slot of block 1, -1 where the verify did not get that far.

    committed `[batch, slots]` the accepted tokens and the bonus at each row's front; lengths `[batch]`.
    """
    width = min(block, committed.shape[1])
    wanted = torch.full((len(committed), block), -1, dtype=torch.long, device=committed.device)
    known = torch.arange(width, device=committed.device) < lengths.unsqueeze(1)
    wanted[:, :width] = torch.where(known, committed[:, :width].long(), -1)
    return wanted


def ranks_of(proposed: Tensor, wanted: Tensor) -> Tensor:
    """`[batch, K]` where each wanted token stood in the draft's list: 0 the likeliest, `width` not among
    them, -1 unknown. proposed `[batch, K, width]`, wanted `[batch, K]`."""
    width = proposed.shape[-1]
    place = torch.arange(width, device=proposed.device)
    ranks = torch.where(proposed == wanted.unsqueeze(-1), place, width).amin(-1)
    return torch.where(wanted < 0, -1, ranks)
