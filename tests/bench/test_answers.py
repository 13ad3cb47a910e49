"""Which known answers are recorded."""

import pytest

from sgl_graft.bench.answers import KnownAnswer, dialogue_answers, greedy_answers
from sgl_graft.bench.plan import Cell
from sgl_graft.bench.prompts import Prompt
from sgl_graft.bench.records import CellRecord, MachineUse, RequestRecord
from sgl_graft.draft_training.dialogues import Dialogue


def cell(variant: str, temperature: float, output: tuple[int, ...]) -> CellRecord:
    request = RequestRecord(4, output, ((1.0, len(output)),), None, "length", 2, 0)
    use = MachineUse(None, 0.0, 0.0, 0.0, 0.0)
    return CellRecord(Cell(variant, "qa", temperature, 1, 0), "digest", "now", 1.0, False, (request,), use)


def test_only_the_named_variants_greedy_answers_to_the_given_prompts() -> None:
    records = [cell("EAGLE3", 0, (1,)), cell("none", 0.7, (2,)), cell("none", 0, (3, 4))]
    asked = {"qa": (Prompt(4, (8, 9), 0), Prompt(5, (8, 8), 0))}
    assert greedy_answers(records, "none", asked) == [KnownAnswer("qa", 4, (8, 9), (3, 4))]
    with pytest.raises(ValueError, match="no greedy answers of GRAFT"):
        greedy_answers(records, "GRAFT", asked)


def dialogue(source: str, prompt_len: int, answer_len: int) -> Dialogue:
    ids = list(range(prompt_len + answer_len))
    return Dialogue(ids, [(prompt_len, prompt_len + answer_len)], source)


def test_dialogues_are_taken_from_every_source_in_turn_and_cut() -> None:
    given = [
        dialogue("math", 2, 40),
        dialogue("math", 3, 40),
        dialogue("math", 4, 5),  # too short
        dialogue("code", 5, 300),
    ]
    two = dialogue_answers(given, 2)
    assert [(answer.dataset, answer.index) for answer in two] == [("code", 3), ("math", 0)]
    assert two[0].prompt == tuple(range(5))
    assert two[0].tokens == tuple(range(5, 5 + 128))
    assert len(dialogue_answers(given, 99)) == 3
