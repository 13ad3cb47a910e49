"""Thresholds of two made-up data sets, one whose draft is right and one whose draft is not."""

import dataclasses

import pytest
import torch

from sgl_graft.bench.recording import Answer, Recording
from sgl_graft.bench.threshold_spread import gates_of, markdown, threshold_spread

from .test_replay import SHAPE, VOCAB, answer


def mixed(tokens: list[int]) -> Answer:
    """A draft that knows whether it is right: at every third root it is not, and unsure of it."""
    right, wrong = answer(tokens, [50], 2), answer(tokens, [50], 0)
    fails = torch.arange(len(tokens)) % 3 == 2

    def pick(name: str) -> torch.Tensor:
        good, bad = getattr(right, name), getattr(wrong, name)
        return torch.where(fails.view(-1, *[1] * (good.dim() - 1)), bad, good)

    names = [field.name for field in dataclasses.fields(Answer) if field.name not in ("prompt", "tokens")]
    return dataclasses.replace(right, **{name: pick(name) for name in names})


def recording(rows: range) -> Recording:
    names = tuple((name, index) for name in ("a", "b") for index in rows)
    answers = tuple(mixed([(row * 7 + i * i) % 40 for i in range(20)]) for row in (*rows, *rows))
    return Recording(SHAPE, VOCAB, names, answers)


def test_a_draft_that_knows_when_it_is_right_is_told_apart() -> None:
    gates = gates_of([mixed(list(range(20)))], SHAPE.topk, SHAPE.steps)
    assert [gate.depth for gate in gates] == [0, 1]
    assert all(gate.auc == 1.0 for gate in gates)
    # Sure drafts have 0.9 and 0.8 for their best paths, unsure ones a hundredth of that.
    assert 0.01 <= gates[0].threshold < 0.9 and 0.01 <= gates[1].threshold < 0.8


def test_equal_files_lose_nothing_and_the_table_says_so() -> None:
    result = threshold_spread(recording(range(10, 14)), recording(range(2)), (11, 40), slots=6)
    assert set(result["spread"].values()) == {0.0}
    assert result["mean_loss"] == result["worst_loss"] == 0.0
    assert "| spread | 0.00 |" in markdown(result)


def test_rows_that_are_tested_on_cannot_be_fitted_on() -> None:
    both = recording(range(9, 12))
    with pytest.raises(ValueError, match="row 11 is tested on"):
        threshold_spread(both, both, (11, 40))
    with pytest.raises(ValueError, match="rows 21 to 40 of a were not recorded"):
        threshold_spread(both, both, (21, 40))
