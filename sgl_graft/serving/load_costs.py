"""What rounds cost on a machine: measured while serving, kept in a file beside the draft."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..files import write_or_warn

FILE_NAME = "load_costs.json"
FORMAT = 1
MIN_ROUNDS = 8  # of one kind, before their median says anything
MAX_ROUNDS = 512  # kept of one kind


class LoadCosts(BaseModel):
    """Seconds per round.

    Attributes:
        format: version of this document.
        slots: of the whole tree.
        steps: draft steps that go with it.
        accept_len: tokens per request and round while it was measured.
        seconds: batch -> slots per request (1 is plain decoding) -> seconds of a round of the whole batch.
        machine: where it was measured, for people.
        device: kind of device it was measured on (torch's name).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    slots: int
    steps: int
    accept_len: float
    seconds: dict[int, dict[int, float]]
    machine: str = ""
    device: str

    @model_validator(mode="after")
    def _usable(self) -> LoadCosts:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}, this release reads {FORMAT}: measure again")
        if not 1.0 <= self.accept_len < float("inf"):
            raise ValueError(f"accept_len {self.accept_len} is no number of tokens")
        if not self.seconds:
            raise ValueError("no batch was measured")
        for batch, row in self.seconds.items():
            if batch < 1 or set(row) != {1, self.slots}:
                raise ValueError(f"batch {batch} needs the seconds of 1 and of {self.slots} slots")
            if not all(0.0 < value < float("inf") for value in row.values()):
                raise ValueError(f"batch {batch}: seconds must be above 0")
        return self

    def cost(self, batch: int, width: int) -> float:
        """Seconds of a round; a batch between two measured ones lies between their costs."""
        sizes = sorted(self.seconds)
        left = max((size for size in sizes if size <= batch), default=sizes[0])
        right = min((size for size in sizes if size >= batch), default=sizes[-1])
        low, high = self.seconds[left][width], self.seconds[right][width]
        share = 0.0 if left == right else (batch - left) / (right - left)
        return low + share * (high - low)


def read_load_costs(path: Path) -> LoadCosts:
    """Read a file of `sgl-graft calibrate-load`.

    Raises:
        ValueError: the file is missing or damaged, with the remedy.
    """
    remedy = "measure one with `sgl-graft calibrate-load`, or leave graft.load_cap.costs out"
    try:
        return LoadCosts.model_validate_json(path.read_text())
    except (OSError, ValidationError, ValueError) as error:
        raise ValueError(f"load costs {path} cannot be used: {error}; {remedy}") from error


def misfit(costs: LoadCosts, path: Path, slots: int, steps: int, kind: str) -> str | None:
    """Why costs are not a server's own, or None; ``kind`` is the type of its device."""
    if (costs.slots, costs.steps, costs.device) == (slots, steps, kind):
        return None
    return (
        f"load costs {path} are of {costs.slots} slots, {costs.steps} steps on {costs.device}; "
        f"this server has {slots} slots, {steps} steps on {kind}"
    )


class RoundTimes:
    """Collects how long rounds take, by batch and slots; one that follows something else is left out."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], list[float]] = {}
        self._last: tuple[int, int, float] | None = None

    def interrupted(self) -> None:
        """Something other than a round ran: the time up to the next one is not a round's."""
        self._last = None

    def round(self, batch: int, slots: int, now: float) -> None:
        """A round of this kind begins; ``now`` in seconds."""
        if self._last is not None and self._last[:2] == (batch, slots):
            kept = self._seconds.setdefault((batch, slots), [])
            if len(kept) < MAX_ROUNDS:
                kept.append(now - self._last[2])
        self._last = (batch, slots, now)

    def medians(self, slots: int) -> dict[int, dict[int, float]]:
        """Seconds by batch, of those batches whose plain and whole rounds were both seen often enough."""
        found: dict[int, dict[int, float]] = {}
        for batch in sorted({batch for batch, _ in self._seconds}):
            rows = {width: self._seconds.get((batch, width), []) for width in (1, slots)}
            if all(len(times) >= MIN_ROUNDS for times in rows.values()):
                found[batch] = {width: statistics.median(times) for width, times in rows.items()}
        return found

    def write(self, path: Path, slots: int, steps: int, accept_len: float, device: str, machine: str) -> None:
        """Write what was measured so far; nothing while no batch was seen often enough."""
        seconds = self.medians(slots)
        if not seconds:
            return
        costs = LoadCosts(
            slots=slots, steps=steps, accept_len=accept_len, seconds=seconds, machine=machine, device=device
        )
        write_or_warn(path, json.dumps(costs.model_dump(), indent=1) + "\n", "graft.load_cap.measure")
