"""The GPU check's own machinery, on a small round, in the interpreter: all ops, and whole rounds with
padding.
"""

from __future__ import annotations

import pytest
import torch
from sgl_graft.cuda_graph.check import check_shape, met_targets
from sgl_graft.cuda_graph.check_cases import Shape, op_cases, random_round
from sgl_graft.cuda_graph.check_times import Times, timed_calls
from sgl_graft.cuda_graph.dispatch import forced_backend

SMALL = Shape(batch=3, slots=6, topk=2, steps=3, max_depth=4, vocab=300, context_rows=64)


def test_a_small_round_agrees() -> None:
    case = random_round(SMALL, torch.device("cpu"), seed=3)
    found = check_shape(case)
    assert [comparison for comparison in found if not comparison.passed] == []
    names = [comparison.name for comparison in found]
    assert len(names) == len(set(names)) == len(op_cases(case)) + 4, (
        "each rule replays a full and a smaller batch"
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_everything_timed_runs(backend: str) -> None:
    case = random_round(SMALL, torch.device("cpu"))
    with forced_backend(backend):  # type: ignore[arg-type]
        for run in timed_calls(case).values():
            run()


def test_targets_are_read_from_batch_16_and_16_slots() -> None:
    micros = {"chain staged": 59.0, "chain value": 61.0, "table update": 13.0}
    verdicts = [t["verdict"] for t in met_targets([Times(16, 16, micros, 10.0)])]
    assert verdicts == ["met", "missed", "met"]
    assert met_targets([Times(4, 16, micros, 10.0)]) == []
