"""Sixty prompts of the evaluation set on the embedded model, and the tiny families: `make soak`.

Prints one line per cell with what `docs/measurements.md` quotes (`ARGS=-s` shows them). `SGLGRAFT_EVAL` names
the folder of the evaluation files; `SGLGRAFT_SOAK_ROWS` and `SGLGRAFT_SOAK_TOKENS` make a run shorter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sgl_graft import models
from sgl_graft.bench.identity import TIE_GAP
from sgl_graft.bench.prompts import load_datasets, load_tokenizer

from .conftest import READY_TIMEOUT_S, ROOMY, CurrentServer
from .payloads import FILTERS, PROMPTS, accept_length, request, seeded
from .server import Answer, Payload, Server, Start
from .variants import EAGLE_TREE, PLAIN, SPECULATIVE, Variant

EVAL = Path(os.environ.get("SGLGRAFT_EVAL", Path(__file__).parents[3] / "shared" / "data" / "eval"))
ROWS = int(os.environ.get("SGLGRAFT_SOAK_ROWS", "10"))
TOKENS = int(os.environ.get("SGLGRAFT_SOAK_TOKENS", "128"))
TIES_ALLOWED = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T=0.7": {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "T=1": {"temperature": 1.0},
    "T=1, filtered": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(6 * 3600)]


@cache
def payloads() -> dict[str, list[Payload]]:
    """Requests by setting: the first rows of every evaluation file."""
    files = sorted(EVAL.glob("*.jsonl"))
    assert files, f"no evaluation files in {EVAL}: set SGLGRAFT_EVAL"
    prompts = [
        prompt
        for dataset in load_datasets(files, ROWS, load_tokenizer(models.get("smollm2-135m-instruct")))
        for prompt in dataset.prompts
    ]

    def payload(prompt: Any, setting: dict[str, Any]) -> Payload:
        sampling = {"max_new_tokens": TOKENS, "sampling_seed": prompt.seed, **setting}
        asked = {"return_logprob": True, "top_logprobs_num": 2} if setting["temperature"] == 0 else {}
        return {"input_ids": list(prompt.input_ids), "sampling_params": sampling, **asked}

    return {name: [payload(prompt, setting) for prompt in prompts] for name, setting in SETTINGS.items()}


@pytest.fixture(scope="module")
def expected(embedded_server: CurrentServer) -> dict[str, list[Answer]]:
    """Plain decoding's answers, greedy ones one request at a time."""
    server = embedded_server(PLAIN)
    return {
        name: server.generate_all(each, 1 if name == "greedy" else 8) for name, each in payloads().items()
    }


@pytest.mark.parametrize("variant", SPECULATIVE, ids=lambda variant: variant.name)
def test_each_setting(
    embedded_server: CurrentServer, expected: dict[str, list[Answer]], variant: Variant
) -> None:
    server = embedded_server(variant)
    failures = []
    for name, cell in payloads().items():
        for concurrency in (1, 8):
            answers = server.generate_all(cell, concurrency)
            failures += report(f"{variant.name}, {name}, concurrency {concurrency}", answers, expected[name])
    assert not failures


@pytest.mark.parametrize("variant", SPECULATIVE, ids=lambda variant: variant.name)
def test_all_settings_in_one_batch(
    embedded_server: CurrentServer, expected: dict[str, list[Answer]], variant: Variant
) -> None:
    server = embedded_server(variant)
    rows = range(len(payloads()["greedy"]))
    mixed = [cell[row] for row in rows for cell in payloads().values()]
    wanted = [answers[row] for row in rows for answers in expected.values()]
    answers = server.generate_all(mixed, 8)
    assert not report(f"{variant.name}, all settings mixed", answers, wanted)


def report(cell: str, answers: list[Answer], expected: list[Answer]) -> list[str]:
    """Print the cell's line; return what is not lossless about it."""
    gaps = [
        top_gap(wanted, answer)
        for answer, wanted in zip(answers, expected, strict=True)
        if answer["output_ids"] != wanted["output_ids"]
    ]
    length = accept_length(answers)
    print(f"{cell}: {len(answers) - len(gaps)} of {len(answers)} identical, accept length {length:.2f}")
    ties = [gap for gap in gaps if gap is not None and gap < TIE_GAP]
    if len(ties) == len(gaps) <= TIES_ALLOWED:
        return []
    return [f"{cell}: {len(gaps)} answers differ, top-2 gaps there {gaps}"]


def top_gap(expected: Answer, got: Answer) -> float | None:
    """Distance of plain decoding's two best tokens where the answers part; None when it was not asked for."""
    tops = expected["meta_info"].get("output_top_logprobs")
    pairs = zip(expected["output_ids"], got["output_ids"], strict=False)
    place = next((at for at, (right, other) in enumerate(pairs) if right != other), None)
    if not tops or place is None:
        return None
    best, second = (entry[0] for entry in tops[place][:2])
    return float(best - second)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_families(start_server: Start, tiny: dict[str, Path], family: str) -> None:
    cell = [request(prompt, tokens=128) for prompt in PROMPTS]
    cell += [seeded(prompt, 3, 128, **f) for prompt, f in zip(PROMPTS, FILTERS.values(), strict=True)]

    def answers(variant: Variant, use: Callable[[Server], Any]) -> Any:
        args = (*ROOMY, *variant.args(str(tiny[variant.draft])))
        server = start_server(f"{family}-{variant.name}", tiny[family], *args, OMP_NUM_THREADS="1")
        try:
            server.process.wait_ready(READY_TIMEOUT_S)
            return use(server)
        finally:
            server.stop()

    expected = answers(PLAIN, lambda server: server.generate_all(cell, 1))
    alone, together = answers(
        EAGLE_TREE, lambda server: [server.generate_all(cell, concurrency) for concurrency in (1, 8)]
    )
    assert accept_length(alone) > 1.3
    for got in (alone, together):
        assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
