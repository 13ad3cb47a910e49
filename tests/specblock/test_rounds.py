"""Inside SPECBLOCK's rounds: a whole scheduler, a tiny target, a draft that proposes its bigrams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .probe import LOADS

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "grafted": {"blocks": 2, "graft": True},
    "two blocks": {"blocks": 2, "blocks_by_group": {"short": 1}},
    "adapting": {
        "blocks": 2,
        "adaptation": {"enabled": True, "min_tokens": 0, "update_rows": 32, "every": 3, "always": True},
    },
    "four blocks": {"blocks": 4, "leaves": 3, "branching": "paper", "beam": 3, "reference_refresh": True},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the probe wrote, by configuration; it runs in a process of its own."""
    folder = tmp_path_factory.mktemp("probe")
    asked = {"none": "none"} | {name: json.dumps({"specblock": c}) for name, c in CONFIGS.items()}
    pairs = [word for name, config in asked.items() for word in (str(folder / f"{name}.json"), config)]
    run = subprocess.run(
        [sys.executable, "-m", "tests.specblock.probe", *pairs],
        cwd=ROOT,
        # The platform is chosen when SGLang is imported.
        env=os.environ | {"OMP_NUM_THREADS": "1", "SGLANG_PLATFORM": "sgl_graft_cpu"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    found = {}
    for name in asked:
        file = folder / f"{name}.json"
        assert file.is_file(), (run.stdout + run.stderr)[-4000:]
        found[name] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("load", LOADS)
def test_answers_are_those_of_plain_decoding(seen: dict[str, dict[str, Any]], config: str, load: str) -> None:
    """Greedy and seeded, alone and in batches, with cached prefixes, chunks, retractions and penalties."""
    plain, ours = seen["none"][load], seen[config][load]
    assert len(plain) == len(LOADS[load][0])
    for rid, answer in plain.items():
        assert ours[rid]["tokens"] == answer["tokens"], rid


@pytest.mark.parametrize("config", CONFIGS)
def test_the_loads_exercise_what_they_are_for(seen: dict[str, dict[str, Any]], config: str) -> None:
    loads = seen[config]
    for name in ("alone", "mixed finish", "sampled", "filtered"):
        tokens = sum(len(a["tokens"]) for a in loads[name].values())
        assert tokens > 1.2 * sum(a["verifies"] for a in loads[name].values()), f"{name}: too little accepted"
    assert sum(a["cached"] for a in loads["cached"].values()) > 300
    assert sum(a["retracted"] for load in LOADS for a in loads[load].values()) > 0
    assert len({tuple(a["tokens"]) for a in seen["none"]["sampled"].values()}) > 4


def test_weights_were_swapped_while_answers_stayed(seen: dict[str, dict[str, Any]]) -> None:
    """Good weights, and broken ones that had to go again, in the same rounds as everything above."""
    status = seen["adapting"]["adaptation"]
    assert status["version"] >= 4 and status["counts"]["head"] + status["counts"]["full"] >= 4
    assert status["counts"]["rolled_back"] >= 1
    assert sum(status["wanted_ranks"]) > 200 and status["rows"]["heads"] > 0 < status["rows"]["segments"]


@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "adapting"])
def test_incremental_equals_full_inside_the_server(seen: dict[str, dict[str, Any]], config: str) -> None:
    """After chunks, cached prefixes and accepted chains, block 1 is that of one forward over all pairs."""
    watch = seen[config]["watch"]
    assert watch["compared"] > 60 and watch["restored"] > 1000
    assert watch["largest"] < 1e-4


def test_entries_are_not_expanded_and_are_budgeted(seen: dict[str, dict[str, Any]]) -> None:
    """3 entries of 2 key-value heads (the draft has 10 query heads), which the engine's budget counts."""
    watch = seen["two blocks"]["watch"]
    assert watch["entries"][1:] == [3 * 2, 32]
    # Two layers of 3 x 2 heads of 32, in layers of the target's 2 heads of 16.
    assert watch["budget"] == 2 * 3 * 2 * 32 / (2 * 16)


def test_the_same_request_drafts_the_same_from_a_cached_prefix(seen: dict[str, dict[str, Any]]) -> None:
    """Rounds are as many with a restored draft cache as without: nothing was lost or misplaced."""
    loads = seen["two blocks"]
    pairs = zip(loads["mixed finish"].values(), loads["cached"].values(), strict=True)
    assert all(a["verifies"] == b["verifies"] for a, b in pairs)
