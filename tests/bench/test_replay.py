"""Replay rules on hand-made recordings, where the right number of rounds can be counted on paper."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sgl_graft.cuda_graph.eagle_tree import DraftPool, stock_tree

from sgl_graft.bench.ablation import BASE, check_anchors, markdown, plot_ablation, run_ablation, settings
from sgl_graft.bench.recording import ROW_WIDTH, Answer, Recording, Shape
from sgl_graft.bench.replay import Calibrated, Setting, loops, replay, stage_plan

SHAPE = Shape(steps=2, topk=2, slots=4)
VOCAB = 64
NOWHERE = 60  # a token that no answer contains


def answer(tokens: list[int], prompt: list[int], drafted: int) -> Answer:
    """A draft that is right about the next `drafted` tokens everywhere, and a target that is always sure."""
    count = len(tokens)
    padded = [*tokens, NOWHERE, NOWHERE]
    pool = torch.full((count, 6), NOWHERE)
    for i in range(count):
        pool[i, 0] = padded[i + 1] if drafted >= 1 else NOWHERE
        pool[i, 1] = NOWHERE + 1
        pool[i, 2] = padded[i + 2] if drafted >= 2 else NOWHERE
        pool[i, 3:] = torch.tensor([NOWHERE + 1, NOWHERE, NOWHERE + 1])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]]).expand(count, -1)
    sure_draft = [0.9, 0.05, 0.8, 0.05, 0.02, 0.01]
    scores = torch.tensor([sure_draft]).expand(count, -1) * (1.0 if drafted else 0.01)
    roots = torch.tensor(tokens)
    tree_tokens, tree_parents = stock_tree(DraftPool(pool, parents, scores), roots, SHAPE.slots)
    next_ids = torch.full((count, ROW_WIDTH), NOWHERE + 2, dtype=torch.int32)
    next_ids[:, 0] = torch.tensor(padded[1 : count + 1])
    sure = torch.zeros(count, ROW_WIDTH, dtype=torch.float16)
    sure[:, 0] = 0.95
    return Answer(
        prompt=torch.tensor(prompt),
        tokens=roots,
        next_ids=next_ids,
        next_probs=sure,
        pool_tokens=pool,
        pool_parents=parents,
        pool_scores=scores,
        tree_tokens=tree_tokens,
        tree_parents=tree_parents,
        tree_ids=torch.full((count, SHAPE.slots, ROW_WIDTH), NOWHERE + 2, dtype=torch.int32),
        tree_probs=torch.zeros(count, SHAPE.slots, ROW_WIDTH, dtype=torch.float16),
    )


def recording(*answers: tuple[str, Answer]) -> Recording:
    names = tuple((name, i) for i, (name, _) in enumerate(answers))
    return Recording(SHAPE, VOCAB, names, tuple(each for _, each in answers))


def rounds(setting: Setting, given: Recording) -> list[int]:
    return [row.num_rounds for row in replay(setting, given, Calibrated.none())]


EAGLE = Setting(BASE, "eagle", SHAPE.slots)
VALUE = Setting("value", "value", SHAPE.slots, order2_rows=0)


@pytest.mark.parametrize(("drafted", "expected"), [(0, 12), (1, 6), (2, 4)])
def test_a_round_commits_what_the_draft_got_right_and_one_more(drafted: int, expected: int) -> None:
    (row,) = replay(EAGLE, recording(("a", answer(list(range(13)), [50], drafted))), Calibrated.none())
    assert (row.num_tokens, row.num_rounds) == (12, expected)
    assert row.accept_length == 12 / expected


def test_the_last_round_counts_no_more_than_the_answer_has() -> None:
    (row,) = replay(EAGLE, recording(("a", answer(list(range(6)), [50], 2))), Calibrated.none())
    assert (row.num_tokens, row.num_rounds) == (5, 2)  # three, then two of a possible three


def test_the_table_learns_from_verifies_and_from_prompts() -> None:
    twice = [*range(10), *range(10)]
    useless = 0
    seen = recording(("a", answer(twice, [50], useless)))
    first = rounds(replace(VALUE, seed_prompts=False), seen)[0]
    assert rounds(EAGLE, seen) == [19]
    # The first ten tokens teach, one a round; the second time three slots follow each root.
    assert first <= 10 + 3
    prompted = recording(("a", answer(list(range(10)), list(range(10)), useless)))
    assert rounds(replace(VALUE, seed_prompts=False), prompted) == [9]
    assert rounds(VALUE, prompted) == [3]


def test_the_table_is_empty_at_each_file_and_kept_within() -> None:
    known, useless = list(range(10)), 0
    one = answer(known, [50], useless)
    same = rounds(VALUE, recording(("a", one), ("a", one)))
    apart = rounds(VALUE, recording(("a", one), ("b", one)))
    assert same[0] == apart[0] == apart[1] == 9
    assert same[1] == 3


def test_warm_up_comes_before_each_file() -> None:
    one = answer(list(range(10)), [50], 0)
    warm = replace(VALUE, warm_up=1)
    given = recording(("a", one), ("b", one))
    assert [row.num_rounds for row in replay(warm, given, Calibrated.none(), recording(("w", one)))] == [3, 3]
    with pytest.raises(ValueError, match="value warms up on 1 answers, the recording has 0"):
        replay(warm, given, Calibrated.none())


def test_order_two_rows_tell_contexts_apart() -> None:
    # After 1 comes 2 or 3, depending on what came before 1.
    tokens = [7, 1, 2, 8, 1, 3] * 6
    given = recording(("a", answer(tokens, [50], 0)))
    narrow = replace(VALUE, slots=2)  # one guess a round
    assert rounds(replace(narrow, order2_rows=4096), given)[0] < rounds(narrow, given)[0]


def test_every_setting_of_the_table_has_a_plan_at_both_sizes() -> None:
    for slots, steps in ((16, 5), (60, 8)):
        chosen = settings(slots)
        assert len({setting.name for setting in chosen}) == len(chosen)
        for setting in chosen:
            plan = stage_plan(setting, steps)
            kept = [a + b for a, b in zip(plan.num_draft, plan.num_retrieved, strict=True)]
            assert max(kept) <= slots - 1, setting
            assert "," not in setting.name and " " not in setting.name  # bench --variants takes it


def test_ablation_resumes_compares_and_prints(tmp_path: Path) -> None:
    given = recording(
        ("a", answer([*range(10), *range(10)], [50], 1)), ("b", answer(list(range(13)), [50], 1))
    )
    output = tmp_path / "ablation.json"
    done: list[str] = []
    result = run_ablation(
        given, [EAGLE, VALUE], Calibrated.none(), output, on_done=lambda setting: done.append(setting.name)
    )
    assert done == [BASE, "value"]
    base, value = result["lines"]
    assert base["over_base"] == 1.0
    assert value["over_base"] > 1.0
    assert base["by_file"] == {"a": 1.9, "b": 2.0}
    assert base["accept_length"] == 1.95

    old = json.loads(output.read_text())
    marked = json.dumps(next(iter(old["replays"])))
    old["replays"][json.loads(marked)]["answers"][0][3] = 19  # a replayed setting is read, not replayed again
    output.write_text(json.dumps(old))
    again = run_ablation(given, [EAGLE], Calibrated.none(), output)
    assert again["lines"][0]["by_file"]["a"] == 1.0

    served = {"runs": [{"variant": BASE, "dataset": "a", "temperature": 0.0, "accept_length": 1.92}]}
    (anchor,) = check_anchors(result, served, SHAPE.slots)
    assert (anchor["files"], anchor["agrees"]) == (1, True)
    served["runs"][0]["accept_length"] = 2.2
    assert not check_anchors(result, served, SHAPE.slots)[0]["agrees"]

    assert "| 4 | value |" in markdown(result)
    plot_ablation(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_loops_are_told_from_answers() -> None:
    assert loops([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    assert not loops([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    assert not loops(range(200))
