"""Is every output the one that the server without speculation gives?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sgl_graft.bench.plan import Cell
from sgl_graft.bench.records import CellRecord, RequestRecord

# Two logits this close may swap places between two batch shapes, by rounding alone.
TIE_GAP = 1e-4

Reference = Mapping[tuple[str, float], CellRecord]  # (data set, temperature) -> the run held as right


@dataclass(frozen=True)
class Difference:
    cell: Cell
    index: int  # row in the prompt file
    position: int  # first differing output token
    expected: int | None  # None: the reference ended here
    got: int | None  # None: the variant ended here
    top_gap: float | None = None  # log-probability gap of the reference's two best tokens there; T = 0 only

    @property
    def is_tie(self) -> bool | None:
        return None if self.top_gap is None else self.top_gap < TIE_GAP


def choose_reference(
    records: Iterable[CellRecord], variant: str | None
) -> dict[tuple[str, float], CellRecord]:
    """Per data set and temperature: the reference variant's first repeat at its lowest concurrency.

    One reference for all, so that its own later repeats and larger batches are held against it as well.
    """
    chosen: dict[tuple[str, float], CellRecord] = {}
    own = [record for record in records if record.cell.variant == variant]
    for record in sorted(own, key=lambda record: (record.cell.concurrency, record.cell.repeat)):
        chosen.setdefault((record.cell.dataset, record.cell.temperature), record)
    return chosen


def compare_cell(record: CellRecord, reference: Reference) -> tuple[int | None, int, list[Difference]]:
    """(identical, compared, differences); (None, 0, []) where there is nothing to compare with."""
    right = reference.get((record.cell.dataset, record.cell.temperature))
    if right is None or right.cell == record.cell:
        return None, 0, []
    expected = {request.index: request for request in right.requests}
    differences = []
    compared = 0
    for request in record.requests:
        if request.index not in expected:
            continue
        compared += 1
        if request.output_ids != expected[request.index].output_ids:
            differences.append(_first_difference(record.cell, expected[request.index], request))
    return compared - len(differences), compared, differences


def _first_difference(cell: Cell, expected: RequestRecord, got: RequestRecord) -> Difference:
    pairs = zip(expected.output_ids, got.output_ids, strict=False)
    shorter = min(len(expected.output_ids), len(got.output_ids))
    position = next((i for i, (right, other) in enumerate(pairs) if right != other), shorter)
    return Difference(
        cell=cell,
        index=got.index,
        position=position,
        expected=_at(expected.output_ids, position),
        got=_at(got.output_ids, position),
    )


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def explain(differences: Sequence[Difference], top_gap: Callable[[str, int, int], float]) -> list[Difference]:
    """Add the reference's top-2 gap to greedy differences; `top_gap(dataset, index, position)` asks."""
    known: dict[tuple[str, int, int], float] = {}
    explained = []
    for difference in differences:
        if difference.cell.temperature > 0:
            explained.append(difference)
            continue
        key = (difference.cell.dataset, difference.index, difference.position)
        if key not in known:
            known[key] = top_gap(*key)
        explained.append(replace(difference, top_gap=known[key]))
    return explained
