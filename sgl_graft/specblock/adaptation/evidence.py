"""What was seen while serving, kept in memory only and never more than so many rows of it."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

HELD_EVERY = 5  # of a domain's pieces, every fifth is kept for judging updates
HELD_SHARE = 0.25  # of the capacity, at most, is held


class EvidenceBuffer(Generic[T]):
    """Pieces of evidence by domain, newest last. When it is full, the oldest of all domains goes.

    Every `HELD_EVERY`-th piece of a domain is held back: updates are judged by those and never learn from
    them.

    Args:
        capacity: rows of all pieces together, at most.

    Attributes:
        rows: rows it holds.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows = 0
        self._held_rows = 0
        self._learnable: dict[str, deque[tuple[int, T, int]]] = {}  # domain -> (serial, piece, rows)
        self._held: dict[str, deque[tuple[int, T, int]]] = {}
        self._added: dict[str, int] = {}
        self._serial = 0

    def add(self, domain: str, piece: T, rows: int) -> None:
        """Keep a piece of `rows` rows; one that is larger than the whole buffer is dropped."""
        if rows > self.capacity:
            return
        count = self._added[domain] = self._added.get(domain, 0) + 1
        held = count % HELD_EVERY == 0
        self._serial += 1
        shelf = self._held if held else self._learnable
        shelf.setdefault(domain, deque()).append((self._serial, piece, rows))
        self.rows += rows
        self._held_rows += rows * held
        while self._held_rows > max(self.capacity * HELD_SHARE, rows):
            self._drop_oldest(self._held)
        while self.rows > self.capacity:
            self._drop_oldest(self._learnable, self._held)

    def learnable(self, domain: str, rows: int, others: float = 0.25) -> list[T]:
        """The newest pieces of `domain`, about `rows` rows, and a share `others` of that from the other
        domains, so that what they need is not unlearned."""
        rest = {name: pieces for name, pieces in self._learnable.items() if name != domain and pieces}
        own = int(rows * (1 - others)) if rest else rows
        found = _newest(self._learnable.get(domain, deque()), own)
        for pieces in rest.values():
            found += _newest(pieces, max(1, (rows - own) // len(rest)))
        return found

    def held(self, rows: int) -> list[T]:
        """The newest held pieces of all domains, about `rows` rows, by the domains' share of what is held."""
        found: list[T] = []
        for pieces in self._held.values():
            own = sum(size for _, _, size in pieces)
            found += _newest(pieces, int(rows * own / max(1, self._held_rows)))
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._learnable.clear()
        self._held.clear()
        self._added.clear()
        self.rows = self._held_rows = 0

    def _drop_oldest(self, *shelves: dict[str, deque[tuple[int, T, int]]]) -> None:
        oldest = min((p for shelf in shelves for p in shelf.values() if p), key=lambda p: p[0][0])
        _, _, rows = oldest.popleft()
        self.rows -= rows
        if any(oldest is pieces for pieces in self._held.values()):
            self._held_rows -= rows


def _newest(pieces: deque[tuple[int, T, int]], rows: int) -> list[T]:
    """The last pieces until they hold `rows` rows, oldest first."""
    found: list[T] = []
    for _, piece, size in reversed(pieces):
        if rows <= 0:
            break
        found.append(piece)
        rows -= size
    return found[::-1]
