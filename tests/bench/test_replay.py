"""Replay rules on hand-made recordings, where the right number of rounds can be counted on paper."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from sgl_graft.cuda_graph.chain import GraftChain
from sgl_graft.cuda_graph.eagle_tree import DraftPool, stock_tree
from sgl_graft.cuda_graph.value_rule import ValueMaps

from sgl_graft.bench.ablation import BASE, run_ablation, settings
from sgl_graft.bench.ablation_report import (
    anchor_markdown,
    check_anchors,
    markdown,
    plot_ablation,
    warm_up_markdown,
)
from sgl_graft.bench.count_replay import count_recording
from sgl_graft.bench.recording import ROW_WIDTH, Answer, Recording, Shape
from sgl_graft.bench.replay import (
    Calibrated,
    Replay,
    Setting,
    _paths,
    accepted_path,
    loops,
    replay,
    stage_plan,
)

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
VALUE = Setting("value", "value", SHAPE.slots, context_rows=0)


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


def test_a_warm_line_says_what_its_table_costs(tmp_path: Path) -> None:
    one = answer(list(range(10)), [50], 0)
    given, met = recording(("a", one)), recording(("w", one))
    warm = replace(VALUE, name="value-warm-1", warm_up=1)
    for _ in range(2):  # replayed, then read back
        result = run_ablation(given, [VALUE, warm], Calibrated.none(), tmp_path / "ablation.json", met)
        cold_line, line = result["lines"]
        assert "warm_up" not in cold_line
        cost = line["warm_up"]
        # Tokens 0 to 8 were roots, and the draft always guessed the same two tokens.
        assert (cost["answers"], cost["tokens"], cost["rows"]) == (1, 9, 11)
        assert cost["row_bytes"] == 11 * 8 * (4 + 2)
        assert cost["file_bytes"] > (VOCAB + 2) * 8 * (4 + 2)
        assert cost["load_s"] > 0
    assert "| 4 | 1 |" in warm_up_markdown(result)
    assert warm_up_markdown({"lines": [cold_line]}) == ""


def test_order_two_rows_tell_contexts_apart() -> None:
    # After 1 comes 2 or 3, depending on what came before 1.
    tokens = [7, 1, 2, 8, 1, 3] * 6
    given = recording(("a", answer(tokens, [50], 0)))
    narrow = replace(VALUE, slots=2)  # one guess a round
    assert rounds(replace(narrow, context_rows=4096), given)[0] < rounds(narrow, given)[0]


class StagedBesidePruned(Replay):
    """Replays `staged`, and at every round also asks what its prune-only tree would have accepted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pruned = GraftChain.create(self.plan.prune_only(), self.chain.topk, self.chain.steps)
        self.accepted: list[tuple[int, int]] = []  # by the pruned tree, by the grafted one

    def _grow(self, pool: DraftPool, root: torch.Tensor, context: torch.Tensor) -> Any:
        retrieved = self.chain.retrieve(self.table, torch.zeros_like(root), root, context)
        self.alone = self.pruned.graft_staged(pool, retrieved, root, self._stage(pool))
        return super()._grow(pool, root, context)

    def _learn(self, answer: Answer, position: int, tokens: Any, parents: Any, *rest: Any) -> None:
        truth = answer.tokens.tolist()[position + 1 :]
        lengths, paths = [], []
        for tree in ((self.alone.tokens, self.alone.parents), (tokens, parents)):
            rows = [side[0].tolist() for side in tree]
            lengths.append(len(accepted_path(*rows, truth)))
            paths.append(set(_paths(*rows)) - {None})
        assert paths[0] <= paths[1]
        assert len(paths[0]) == 1 + self.plan.num_draft[int(self._stage(answer.pool(position)))]
        self.accepted.append((lengths[0], lengths[1]))
        super()._learn(answer, position, tokens, parents, *rest)


@settings_of_hypothesis(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=4, max_size=24),
    drafted=st.integers(0, 2),
    slots=st.integers(2, 7),
    thresholds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_staged_accepts_no_less_than_its_pruned_tree_round_by_round(
    tokens: list[int], drafted: int, slots: int, thresholds: tuple[float, float]
) -> None:
    calibrated = Calibrated(ValueMaps.identity(1), dict(enumerate(thresholds)))
    setting = Setting("staged", "staged", slots, context_rows=256)
    runner = StagedBesidePruned(setting, SHAPE, VOCAB, calibrated)
    runner.run("a", 0, answer(tokens, [4, 5], drafted))
    assert all(grafted >= pruned for pruned, grafted in runner.accepted)


def test_the_round_by_round_comparison_sees_rounds_that_grafting_wins() -> None:
    setting = Setting("staged", "staged", 6, context_rows=256)
    runner = StagedBesidePruned(setting, SHAPE, VOCAB, Calibrated.none())
    runner.run("a", 0, answer([*range(10), *range(10)], [50], 0))
    assert any(grafted > pruned for pruned, grafted in runner.accepted)


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
    assert len(again["lines"]) == 1 and len(again["replays"]) == 2  # the other one's stays, too

    served = {"runs": [{"variant": BASE, "dataset": "a", "temperature": 0.0, "accept_length": 1.92}]}
    served["runs"][0]["concurrency"] = 8
    assert f"| {SHAPE.slots} | {BASE} | 8 | 1.900 | 1.920 | -1.0% | yes |" in anchor_markdown(
        result, served, (SHAPE.slots,)
    )
    (anchor,) = check_anchors(result, served, SHAPE.slots)
    assert (anchor["files"], anchor["agrees"]) == (1, True)
    shape = ["--speculative-num-draft-tokens", str(SHAPE.slots + 1)]
    other_slots = served | {"settings": {"variants": {BASE: {"server_args": shape}}}}
    assert check_anchors(result, other_slots, SHAPE.slots) == []
    served["runs"][0]["accept_length"] = 2.2
    assert not check_anchors(result, served, SHAPE.slots)[0]["agrees"]

    assert "| 4 | value |" in markdown(result)
    plot_ablation(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_loops_are_told_from_answers() -> None:
    assert loops([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    assert not loops([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    assert not loops(range(200))


def test_a_recording_is_counted_for_calibration() -> None:
    """The draft is always right about one token and never about the second."""
    tokens = list(range(13))
    given = recording(("a", answer(tokens, [50], 1)))
    content = count_recording(given, SHAPE.slots)
    assert (content["vocab_size"], content["steps"], content["topk"]) == (VOCAB, SHAPE.steps, SHAPE.topk)
    assert content["rounds"] == rounds(VALUE, given)[0] == 6
    draft_seen, draft_true = (sum(map(sum, content[name][0][:1])) for name in ("seen", "true"))
    assert (draft_seen, draft_true) == (12, 6)  # two guesses a round at depth one
    assert sum(map(sum, content["true"][0][1:])) == 0
    stopped, went_on = ([sum(depth) for depth in side] for side in content["gates"])
    assert (stopped, went_on) == ([6, 6], [0, 0])  # nothing lay beyond depth 0, nor was depth 1 right
    staged = content["staged"]
    assert staged["checkpoints"] == list(stage_plan(replace(VALUE, rule="staged"), SHAPE.steps).checkpoints)
    assert {tuple(row) for row in staged["lengths"]} == {(2,) * (len(staged["checkpoints"]) + 1)}
    assert staged["confidence"][0] == pytest.approx([0.9, 0.8][: len(staged["checkpoints"])])
