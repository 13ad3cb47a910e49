"""What a round costs: seconds by batch size and block width, measured once per machine, target and draft.

The table turns accept lengths into time per token. It is what lets a policy prefer a shorter block when the
batch is large enough that verifying rules, and switch speculation off where it loses.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..files import write_whole

FILE_NAME = "blockpilot_costs.json"
FORMAT = 1


class CostTable(BaseModel):
    """Seconds per round.

    Attributes:
        format: version of this document.
        seconds: batch size -> block width -> seconds of one round of the whole batch. Width 1 is a round
            without speculation.
        machine: where it was measured, for people.
        device: kind of device it was measured on (torch's name); empty when not known.
        rounds: rounds it was measured on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    seconds: dict[int, dict[int, float]]
    machine: str = ""
    device: str = ""
    rounds: int = 0

    @model_validator(mode="after")
    def _usable(self) -> CostTable:
        if self.format != FORMAT:
            raise ValueError(f"cost table format {self.format}, this release reads {FORMAT}: measure again")
        if not self.seconds or not all(self.seconds.values()):
            raise ValueError("a cost table needs at least one batch size and one width")
        for batch, row in self.seconds.items():
            if batch < 1 or min(row) < 1 or min(row.values()) <= 0:
                raise ValueError(f"batch size {batch}: sizes must be at least 1 and seconds above 0")
        return self

    def bucket(self, batch: int) -> int:
        """The measured batch size that stands for ``batch``: the next larger one, else the largest."""
        sizes = sorted(self.seconds)
        return sizes[min(bisect_left(sizes, batch), len(sizes) - 1)]

    def cost(self, batch: int, width: int) -> float:
        """Seconds of a round, linear between measured widths and flat beyond them."""
        row = self.seconds[self.bucket(batch)]
        widths = sorted(row)
        if width <= widths[0]:
            return row[widths[0]]
        if width >= widths[-1]:
            return row[widths[-1]]
        right = bisect_left(widths, width)
        if widths[right] == width:
            return row[width]
        low, high = widths[right - 1], widths[right]
        share = (width - low) / (high - low)
        return row[low] + share * (row[high] - row[low])

    def row(self, batch: int, widths: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
        """Cost of each width, in seconds. [widths] float32"""
        return torch.tensor([self.cost(batch, w) for w in widths], dtype=torch.float32, device=device)


def read_costs(path: Path) -> CostTable:
    """Read a cost table.

    Raises:
        ValueError: the file is missing or damaged.
    """
    remedy = "measure one with `sgl-graft train blockpilot`, or leave blockpilot.costs out"
    try:
        return CostTable.model_validate_json(path.read_text())
    except (OSError, ValidationError, ValueError) as error:
        raise ValueError(f"cost table {path} cannot be used: {error}; {remedy}") from error


def write_costs(path: Path, table: CostTable) -> None:
    """Write the file whole or not at all."""
    write_whole(path, json.dumps(table.model_dump(), indent=1) + "\n")
