"""A draft, a table or a clock that has gone mad costs speed: every answer stays plain decoding's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .probe import ALGORITHMS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("faults")
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.probe", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SGLANG_PLATFORM": "sgl_graft_cpu"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    missing = [name for name in ("none", *ALGORITHMS) if not (folder / f"{name}.json").is_file()]
    assert not missing, f"{missing} wrote nothing:\n{(run.stdout + run.stderr)[-6000:]}"
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("none", *ALGORITHMS)}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_answers_are_right_during_every_fault_and_after_it(
    seen: dict[str, dict[str, Any]], algorithm: str
) -> None:
    found = seen[algorithm]
    assert found["before"] == {}
    assert len(found["faults"]) >= 5
    for name, outcome in found["faults"].items():
        assert outcome == {"during": {}, "after": {}}, name


def test_a_scheduler_subtracts_penalties_before_it_scales(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["none"]["order of penalties"] == ["BatchedFrequencyPenalizer", "BatchedRepetitionPenalizer"]
