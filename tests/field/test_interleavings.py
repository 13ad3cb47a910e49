"""Random interleavings on whole schedulers of every algorithm, judged by a model of what a client may see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .interleavings import STATES, Job, Model, Scenario
from .probe import SLOTS, VARIANTS

ROOT = Path(__file__).parents[2]
FIRST_SEED, NUM_SEEDS = 0, 3
SOAK_SEEDS = 60


def run_probe(folder: Path, first: int, number: int, timeout: float) -> dict[str, dict[str, Any]]:
    """What every variant's scheduler did; each runs in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.field.probe", str(folder), str(first), str(number), *VARIANTS],
        cwd=ROOT,
        # The platform is chosen when SGLang is imported.
        env=os.environ | {"OMP_NUM_THREADS": "1", "SGLANG_PLATFORM": "sgl_graft_cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    missing = [name for name in VARIANTS if not (folder / f"{name}.json").is_file()]
    assert not missing, f"{missing} wrote nothing:\n{(run.stdout + run.stderr)[-6000:]}"
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in VARIANTS}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_probe(tmp_path_factory.mktemp("field"), FIRST_SEED, NUM_SEEDS, 580)


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_answer_is_plain_decodings(seen: dict[str, dict[str, Any]], variant: str) -> None:
    """Tokens, ends, log-probabilities, batches, flushes; the engine searched for leaks at every step."""
    found = seen[variant]
    assert found["mistakes"] == []
    assert found["finished"] > 15


@pytest.mark.soak
def test_aborts_reached_every_state(seen: dict[str, dict[str, Any]]) -> None:
    reached = {state: sum(found["aborted_in"].get(state, 0) for found in seen.values()) for state in STATES}
    assert all(reached.values()), reached
    assert all(found["aborted"] for found in seen.values())


@pytest.mark.soak
def test_requests_were_retracted(seen: dict[str, dict[str, Any]]) -> None:
    assert sum(found["aborted_in"]["retractions"] for found in seen.values()) > 0


@pytest.mark.soak
def test_reasoning_tokens_are_plain_decodings(seen: dict[str, dict[str, Any]]) -> None:
    """The model compares them in every answer; here, that there were any."""
    jobs = [job for seed in range(NUM_SEEDS) for job in Scenario.draw(seed).jobs]
    assert sum("thinks" in job.kind for job in jobs) >= 3
    assert all("reasoning tokens" not in m for found in seen.values() for m in found["mistakes"])


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_positions_of_the_context(seen: dict[str, dict[str, Any]], variant: str) -> None:
    """An answer may end earlier than without speculation, by the slots kept free, and says the same."""
    for row in seen[variant]["edges"]:
        assert row["same"], row
        assert 0 <= row["plain"] - row["ours"] <= SLOTS + 1, row
        assert row["finish"] in ("length", "abort") if row["plain"] <= 1 else row["finish"] == "length", row


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cached_prefix_accepts_as_much(seen: dict[str, dict[str, Any]], variant: str) -> None:
    for row in seen[variant]["warm"]:
        assert row["cached"] > 20
        # BLOCKPILOT's sizes are drawn anew for every request here.
        most = 1.5 * row["cold"] + 2 if variant == "blockpilot" else row["cold"] + 1
        assert 0 < row["warm"] <= most, row


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_starved_request_ends_and_the_server_goes_on(seen: dict[str, dict[str, Any]], variant: str) -> None:
    starved = seen[variant]["starved"]
    assert starved["finish"]["type"] == "abort"
    length = min(len(starved["tokens"]), len(starved["after"]))
    assert starved["tokens"][:length] == starved["after"][:length] and len(starved["after"]) == 20


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_updates_reach_the_draft(seen: dict[str, dict[str, Any]], variant: str) -> None:
    assert seen[variant]["updated"], "an update would reach the target alone"


# ---- the load cap --------------------------------------------------------------------------------------


@pytest.mark.soak
def test_capped_servers_changed_tiers(seen: dict[str, dict[str, Any]]) -> None:
    cap = seen["capped"]["capped"]["cap"]
    assert cap["switches"] > 5 and cap["plain_rounds"] > 50 and cap["whole_rounds"] > 30
    assert 0 < cap["catch_ups"] <= cap["plain_rounds"]


@pytest.mark.soak
def test_plain_rounds_run_no_draft(seen: dict[str, dict[str, Any]]) -> None:
    capped = seen["capped"]["capped"]
    assert capped["drafts"] == capped["cap"]["whole_rounds"]
    assert capped["extends"] == capped["cap"]["whole_rounds"] + capped["cap"]["catch_ups"]


@pytest.mark.soak
def test_plain_rounds_count_no_proposals(seen: dict[str, dict[str, Any]]) -> None:
    capped = seen["capped"]["capped"]
    assert capped["counted"] == capped["drafted_requests"] > 0


@pytest.mark.soak
def test_the_draft_knows_what_was_decoded_without_it(seen: dict[str, dict[str, Any]]) -> None:
    cache = seen["capped"]["draft_cache"]
    assert cache["rows"] > 100 and cache["difference"] < 1e-4 < 0.01 < cache["control"], cache


# ---- the model itself ----------------------------------------------------------------------------------

ANSWER = {"tokens": [5, 6, 7], "finish": {"type": "length", "length": 3}, "logprobs": [], "reasoning": 0}


@pytest.mark.parametrize(
    ("chunks", "mistake"),
    [
        ([([5], None), ([6, 7], ANSWER["finish"])], None),
        ([([5], None), ([7], None)], "is not plain decoding's"),
        ([([5, 6], ANSWER["finish"])], "ended with"),
        ([([5, 6, 7], {"type": "stop"})], "ended with"),
        ([([5, 6, 7], ANSWER["finish"]), ([], ANSWER["finish"])], "over or unknown"),
        ([([5], {"type": "abort"})], "nobody asked"),
    ],
)
def test_the_model_notices(chunks: list[Any], mistake: str | None) -> None:
    job = Job("a", "greedy", b"x", 3, 0, 0)
    model = Model({job.key: ANSWER}, most_running=1)
    model.submit(job)
    model.ran(["a"])
    for tokens, finish in chunks:
        model.received("a", tokens, finish, {"logprobs": [], "reasoning": 0})
    assert (mistake is None and not model.mistakes) or mistake in model.mistakes[0]


def test_the_model_notices_batches_and_flushes() -> None:
    model = Model({}, most_running=1)
    model.ran(["a", "b"])
    model.ran(["a", "a"])
    model.flushed(False)
    assert len(model.mistakes) == 6


@pytest.mark.soak
def test_many_more_interleavings(tmp_path: Path) -> None:
    seen = run_probe(tmp_path, 1000, SOAK_SEEDS, 7000)
    assert not {name: found["mistakes"] for name, found in seen.items() if found["mistakes"]}
