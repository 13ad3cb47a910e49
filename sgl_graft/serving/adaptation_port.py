"""How routes and page reach online adaptation, whatever it adapts."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Adaptation(Protocol):
    """The attribute ``adaptation`` of a speculative worker that adapts its draft; other workers have none.

    Every rank calls the same methods in the same order between two rounds, so none needs to communicate.
    """

    def pause(self) -> None:
        """Stop learning; what was learned stays in use."""

    def resume(self) -> None:
        """Learn again."""

    def rollback(self, version: int | None) -> int:
        """Return to an earlier version, None for the one before; returns the version then in use.

        Raises:
            ValueError: there is no such version to return to, and which ones there are.
        """

    def status(self) -> dict[str, Any]:
        """Plain values only, and nothing of what users wrote. Called about once a second: reads no device."""


def adaptation_of(worker: Any) -> Adaptation | None:
    """A worker's adaptation, None where it has none."""
    found = getattr(worker, "adaptation", None)
    return found if isinstance(found, Adaptation) else None
