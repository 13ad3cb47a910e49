"""Speculation changes no token: greedy and seeded, alone and in mixed batches."""

from __future__ import annotations

import pytest

from .payloads import FILTERS, PROMPTS, accept_length, check, check_all, request, seeded
from .server import Reference, Server


def test_greedy_alone(speculative: Server, reference: Reference) -> None:
    answers = [check(speculative, reference, request(prompt, tokens=64)) for prompt in PROMPTS[:3]]
    # Without accepted drafts this module would compare plain decoding with itself.
    assert accept_length(answers) > 1.3


def test_greedy_together(speculative: Server, reference: Reference) -> None:
    payloads = [request(prompt, tokens=20 + 9 * i) for i, prompt in enumerate(PROMPTS)]
    check_all(speculative, reference, payloads)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_seeded_alone(speculative: Server, reference: Reference, filters: dict[str, float]) -> None:
    for seed, prompt in enumerate(PROMPTS[:2]):
        check(speculative, reference, seeded(prompt, seed, **filters))


def test_seeded_and_greedy_together(speculative: Server, reference: Reference) -> None:
    payloads = [
        seeded(prompt, seed=100 + i, tokens=24 + 8 * i, **filters)
        for i, (prompt, filters) in enumerate(zip(PROMPTS, FILTERS.values(), strict=True))
    ]
    payloads += [request(prompt, tokens=50) for prompt in PROMPTS[:4]]
    check_all(speculative, reference, payloads)


def test_seeds_matter(speculative: Server) -> None:
    texts = {answer["text"] for answer in speculative.generate_all([seeded(seed=s) for s in range(6)], 6)}
    assert len(texts) == 6


def test_a_request_without_a_seed_draws_by_its_id(speculative: Server, reference: Reference) -> None:
    unseeded = request(temperature=1.0)
    check(speculative, reference, unseeded | {"rid": "a request of this test"})
    texts = {answer["text"] for answer in speculative.generate_all([unseeded] * 4, 4)}
    assert len(texts) == 4
