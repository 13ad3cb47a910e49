"""Serves the same jobs under every fault of :mod:`tests.faults.injections`, one scheduler per algorithm.

``python -m tests.faults.probe FOLDER``: plain decoding first, then a fork per algorithm, which writes
FOLDER/ALGORITHM.json: by fault, which answers are not plain decoding's, during the fault and after it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.field.interleavings import PREFIXES, TEXT, Job
from tests.field.probe import CONTEXT_LENGTH, SIZES, TIGHT, VARIANTS, build

KINDS = ("greedy", "seeded", "filtered", "grammar", "penalised", "long")
CAPPED = json.dumps({"graft": {"load_cap": {"above": 2, "hold": 1}}})
ALGORITHMS = {
    "graft": ("draft", (*VARIANTS["graft"][1], "--graft-config", CAPPED)),
    "blockpilot": VARIANTS["blockpilot"],
    "specblock": VARIANTS["specblock"],
}


def jobs(name: str) -> list[Job]:
    return [
        Job(
            f"{name}-{i}",
            kind,
            PREFIXES[i % 4] + TEXT[700 * i : 700 * i + 9],
            44 if kind == "grammar" else 30,
            i,
            0,
        )
        for i, kind in enumerate(KINDS)
    ]


def serve(engine: Any, name: str) -> dict[str, Any]:
    """Answers by kind."""
    asked = jobs(name)
    found = engine.answer(asked)
    engine.settle()
    return {job.kind: {part: found[job.rid][part] for part in ("tokens", "finish")} for job in asked}


def faults_of(engine: Any, algorithm: str) -> dict[str, Any]:
    from .injections import SPOILS, clock_that_jumps, spoiled_draft, spoiled_table, spoiled_waiting

    faults: dict[str, Any] = {
        f"draft: {name}": lambda spoil=spoil: spoiled_draft(engine, algorithm, spoil)
        for name, spoil in SPOILS.items()
    }
    faults["clock"] = lambda: clock_that_jumps(engine)
    if algorithm == "graft":
        faults["table"] = lambda: spoiled_table(engine)
        faults["waiting tokens"] = lambda: spoiled_waiting(engine)
    return faults


def main(folder: Path) -> None:
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert SIZES.is_file()
    target, drafts = build(folder)
    answers = folder / "none.json"
    for name in ("none", *ALGORITHMS):
        child = os.fork()
        if child == 0:
            try:
                with torch.inference_mode():
                    found = plain(target) if name == "none" else run(target, drafts, name, answers)
                (folder / f"{name}.json").write_text(json.dumps(found))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)


def plain(target: Path) -> dict[str, Any]:
    from tests.field.engine import Engine

    engine = Engine(target, "--max-total-tokens", "8192", *CONTEXT_LENGTH, think=False)
    return serve(engine, "plain") | {"order of penalties": order_of_penalties()}


def order_of_penalties() -> list[str]:
    """As a batch of this process would apply them, if upstream's set came in the order of an unlucky day."""
    from sglang.srt.sampling import penaltylib

    scaling, subtracted = penaltylib.BatchedRepetitionPenalizer, penaltylib.BatchedFrequencyPenalizer
    batch = type("Batch", (), {"device": "cpu", "reqs": []})()
    made = penaltylib.BatchedPenalizerOrchestrator(8, batch, [scaling, subtracted])
    return [penalty.__name__ for penalty in made.penalizers]


def run(target: Path, drafts: dict[str, Path], algorithm: str, answers: Path) -> dict[str, Any]:
    from tests.field.engine import Engine

    expected = json.loads(answers.read_text())
    draft, flags = ALGORITHMS[algorithm]
    argv = (*TIGHT, *CONTEXT_LENGTH, *flags, "--speculative-draft-model-path", str(drafts[draft]))
    engine = Engine(target, *argv, think=False)

    def wrong(name: str) -> dict[str, Any]:
        found = serve(engine, name)
        return {kind: (found[kind], expected[kind]) for kind in KINDS if found[kind] != expected[kind]}

    outcome: dict[str, Any] = {"before": wrong("before"), "faults": {}}
    for name, inject in faults_of(engine, algorithm).items():
        with inject():
            during = wrong(f"during {name}")
        outcome["faults"][name] = {"during": during, "after": wrong(f"after {name}")}
    return outcome


if __name__ == "__main__":
    main(Path(sys.argv[1]))
