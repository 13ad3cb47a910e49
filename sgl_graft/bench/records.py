"""What was measured, and the journal that lets an interrupted run continue."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgl_graft.bench.plan import Cell


@dataclass(frozen=True)
class RequestRecord:
    index: int  # row in the prompt file
    output_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]  # (ms since the request was sent, new tokens) per streamed chunk
    num_verifies: int | None  # None: the server reported none, so it did not speculate
    finish: str  # why it ended: "length", "stop"
    prompt_tokens: int
    cached_tokens: int

    @property
    def ttft_ms(self) -> float:
        return self.arrivals[0][0]

    @property
    def latency_ms(self) -> float:
        return self.arrivals[-1][0]


@dataclass(frozen=True)
class MachineUse:
    """CPU time around one cell. None: the server is not ours to look at."""

    server_cpu_s: float | None
    idle_servers_cpu_s: float  # spent by our other servers, which should be asleep
    foreign_cores: float  # cores kept busy by processes that are not part of this run
    load_before: float
    load_after: float


@dataclass(frozen=True)
class CellRecord:
    cell: Cell
    digest: str  # of everything that decides the result: server, prompts, sampling, code
    started: str
    wall_s: float
    warm: bool
    requests: tuple[RequestRecord, ...]
    use: MachineUse

    @property
    def output_tokens(self) -> int:
        return sum(len(request.output_ids) for request in self.requests)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "cell": list(self.cell)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "CellRecord":
        data = json.loads(line)
        return cls(
            cell=Cell(*data["cell"]),
            digest=data["digest"],
            started=data["started"],
            wall_s=data["wall_s"],
            warm=data["warm"],
            requests=tuple(_request(item) for item in data["requests"]),
            use=MachineUse(**data["use"]),
        )


def _request(data: dict[str, Any]) -> RequestRecord:
    arrivals = tuple((float(ms), int(count)) for ms, count in data["arrivals"])
    return RequestRecord(**{**data, "output_ids": tuple(data["output_ids"]), "arrivals": arrivals})


def read_records(path: Path) -> list[CellRecord]:
    """Every cell of a journal that somebody named."""
    if not path.is_file():
        raise ValueError(f"no journal at {path}: it lies beside a bench's output, as NAME.json.journal.jsonl")
    return Journal(path).all()


class Journal:
    """One line per finished cell, flushed at once: a killed run loses only the cell under way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[tuple[Cell, str], CellRecord] = {}
        self._whole: str | None = None  # the intact lines, where the last one was cut off
        if path.is_file():
            self._read()

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith("\n"):
                    raise ValueError("cut off")
                record = CellRecord.from_json(line)
            except (ValueError, KeyError, TypeError):
                if number < len(lines):
                    raise ValueError(
                        f"{self.path}:{number} is damaged; delete the file to start over"
                    ) from None
                self._whole = text[: -len(line)]
                return
            self._records[record.cell, record.digest] = record

    def get(self, cell: Cell, digest: str) -> CellRecord | None:
        return self._records.get((cell, digest))

    def all(self) -> list[CellRecord]:
        return list(self._records.values())

    def num_stale(self, wanted: Iterable[tuple[Cell, str]]) -> int:
        """Cells that were measured before, but with other settings or other code."""
        known = {cell for cell, _digest in self._records}
        return sum(cell in known and (cell, digest) not in self._records for cell, digest in wanted)

    def add(self, record: CellRecord) -> None:
        self._records[record.cell, record.digest] = record
        if self._whole is not None:
            # Only now: whoever merely reads a journal may be looking at a line that is still being written.
            self.path.write_text(self._whole, encoding="utf-8")
            self._whole = None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
