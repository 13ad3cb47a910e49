"""Inside BLOCKPILOT's rounds: a whole scheduler, a tiny target, a draft that reads its whole block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .probe import B_MAX, CANDIDATES, PROMPTS, TOKENS, make_predictor

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe wrote; it runs in a process of its own, since SGLang's state is global."""
    output = tmp_path_factory.mktemp("probe") / "seen.json"
    run = subprocess.run(
        [sys.executable, "-m", "tests.blockpilot.probe", str(output)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert output.is_file(), run.stderr[-4000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def answers(seen: dict[str, Any], name: str) -> dict[str, list[int]]:
    return {rid.removeprefix(f"{name}-"): tokens for rid, tokens in seen[name].items()}


@pytest.mark.parametrize(
    "name", ["random", "fixed", "watched", "widths", "mlp", "ewma", "tail", "tail again"]
)
def test_no_token_depends_on_the_block_sizes(seen: dict[str, Any], name: str) -> None:
    """Greedy and seeded. `random` has a new size every round, `watched` garbage in every free row, too."""
    plain = answers(seen, "plain")
    assert len(plain) == 2 * len(PROMPTS) and all(len(tokens) == TOKENS for tokens in plain.values())
    assert answers(seen, name) == plain


def load_target(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.serving import markov

    return AutoModelForCausalLM.from_pretrained(markov.build_target(folder / "target"), dtype=torch.float32)


def test_the_predictor_reads_the_last_hidden_state_of_the_prompt(
    seen: dict[str, Any], tmp_path: Path
) -> None:
    """Once per request, in the step of its last chunk; prompts here are longer than a chunk."""
    import torch

    model, predictor = load_target(tmp_path), make_predictor()
    expected = []
    for prompt in PROMPTS:
        with torch.no_grad():
            hidden = model.model(torch.tensor([list(prompt)])).last_hidden_state[:, -1]
            expected.append(CANDIDATES[int(predictor(hidden).argmax())])
    assert max(map(len, PROMPTS)) > 64
    assert len(set(expected)) > 1, "the control: prompts get different sizes"
    chosen = seen["chosen"]
    assert [chosen[f"mlp-greedy-{i}"] for i in range(len(PROMPTS))] == expected
    assert [chosen[f"mlp-seeded-{i}"] for i in range(len(PROMPTS))] == expected


def test_tails_were_grafted_and_counted(seen: dict[str, Any]) -> None:
    tail = seen["tail_status"]
    assert 0 < tail["grafted"] < tail["blocks"]
    assert tail["grafted_slots"] >= tail["grafted"]
    assert len(tail["auc_by_offset"]) == B_MAX - 1
    draft, table = seen["counters"]["seen"]
    assert sum(map(sum, draft)) > 0 and sum(map(sum, table)) > 0
    for seen_cells, true_cells in zip(seen["counters"]["seen"], seen["counters"]["true"], strict=True):
        for all_of, right in zip(seen_cells, true_cells, strict=True):
            assert all(r <= n for r, n in zip(right, all_of, strict=True))


def test_greedy_answers_are_the_models(seen: dict[str, Any], tmp_path: Path) -> None:
    """Not only equal among themselves: transformers decodes the same tokens."""
    import torch

    model = load_target(tmp_path)
    for i, prompt in enumerate(PROMPTS[:3]):
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            for _ in range(TOKENS):
                ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
        assert answers(seen, "plain")[f"greedy-{i}"] == ids[0, len(prompt) :].tolist()


def test_blocks_were_drafted_at_every_size_in_mixed_batches(seen: dict[str, Any]) -> None:
    mixed = [entry for entry in seen["alone"] if entry["batch"] > 1]
    assert {entry["size"] for entry in mixed} == set(range(1, B_MAX + 1))
    assert {entry["width"] for entry in mixed} == {B_MAX}


def test_a_block_in_a_padded_batch_equals_the_block_alone(seen: dict[str, Any]) -> None:
    worst = max(entry["difference"] for entry in seen["alone"])
    assert worst < 1e-6, worst  # so far below the control's 5e-5


def test_a_shorter_block_is_another_draft(seen: dict[str, Any]) -> None:
    """The control: with the keys beyond its block in sight, a row drafts something else."""
    shorter = [entry["clipped"] for entry in seen["alone"] if entry["size"] < B_MAX]
    assert min(shorter) > 5e-5, min(shorter)
    whole = [entry["clipped"] for entry in seen["alone"] if entry["size"] == B_MAX]
    assert max(whole) < 1e-6


def test_the_draft_caches_exactly_what_was_committed(seen: dict[str, Any]) -> None:
    """After every round; rows of rejected tokens and of empty slots never stay."""
    assert len(seen["cache"]) > 50
    assert all(e["cached"] == e["finite"] == e["committed"] for e in seen["cache"])


def test_garbage_in_rows_that_are_not_committed_is_never_read(seen: dict[str, Any]) -> None:
    assert seen["not_finite"] == 0


def test_real_proposals_are_counted(seen: dict[str, Any]) -> None:
    status = seen["status"]
    rounds = {int(size): count for size, count in status["rounds_by_size"].items()}
    assert set(rounds) == set(range(1, B_MAX + 1))
    assert status["proposed"] == sum((size - 1) * count for size, count in rounds.items())
    assert 0 < status["accepted"] < status["proposed"]
    drafted = sum(count for size, count in rounds.items() if size > 1)
    assert status["accepted"] / drafted > 0.15, "otherwise equal answers would say little"
    assert 0 < status["speculated_share"] < 1
    assert status["rounds"] == sum(rounds.values())


def test_rounds_are_as_wide_as_their_largest_block(seen: dict[str, Any]) -> None:
    by_width = {int(width): count for width, count in seen["rounds_by_width"].items()}
    assert by_width[B_MAX] > 0 and by_width[4] > 0
