from sgl_graft.bench.identity import choose_reference, compare_cell, explain
from sgl_graft.bench.plan import Cell
from sgl_graft.bench.records import CellRecord, MachineUse, RequestRecord


def record(
    variant: str, outputs: list[tuple[int, ...]], *, concurrency: int = 1, repeat: int = 0
) -> CellRecord:
    requests = tuple(
        RequestRecord(i, ids, ((1.0, len(ids)),), None, "length", 4, 0) for i, ids in enumerate(outputs)
    )
    use = MachineUse(None, 0.0, 0.0, 0.0, 0.0)
    return CellRecord(Cell(variant, "qa", 0.0, concurrency, repeat), "d", "now", 1.0, False, requests, use)


RIGHT = [(1, 2, 3), (4, 5, 6)]


def test_everything_is_held_against_the_lowest_concurrency_of_the_first_repeat() -> None:
    plain = record("none", RIGHT)
    batched = record("none", [(1, 2, 3), (4, 5, 7)], concurrency=8)
    later = record("none", RIGHT, repeat=1)
    reference = choose_reference([batched, later, plain], "none")
    assert reference == {("qa", 0.0): plain}
    assert compare_cell(plain, reference)[:2] == (None, 0)
    assert compare_cell(later, reference)[:2] == (2, 2)
    assert compare_cell(batched, reference)[:2] == (1, 2)
    assert compare_cell(plain, choose_reference([plain], None))[:2] == (None, 0)


def test_first_difference_and_early_ends() -> None:
    reference = choose_reference([record("none", [(1, 2, 3), (4, 5, 6), (7, 8)])], "none")
    wrong = record("E", [(1, 9, 9), (4, 5), (7, 8, 9)])
    identical, compared, differences = compare_cell(wrong, reference)
    assert (identical, compared) == (0, 3)
    assert [(d.index, d.position, d.expected, d.got) for d in differences] == [
        (0, 1, 2, 9),
        (1, 2, 6, None),
        (2, 2, None, 9),
    ]


def test_gaps_tell_ties_and_are_asked_for_once() -> None:
    reference = choose_reference([record("none", RIGHT)], "none")
    differences = [
        d
        for repeat in (0, 1)
        for d in compare_cell(record("E", [(1, 9, 3), (9, 5, 6)], repeat=repeat), reference)[2]
    ]
    asked: list[tuple[str, int, int]] = []

    def top_gap(dataset: str, index: int, position: int) -> float:
        asked.append((dataset, index, position))
        return 5e-5 if index == 0 else 0.3

    explained = explain(differences, top_gap)
    assert asked == [("qa", 0, 1), ("qa", 1, 0)]
    assert [d.is_tie for d in explained] == [True, False, True, False]
