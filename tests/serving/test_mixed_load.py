"""All kinds of requests at once on a pool too small for them, some dropped mid-stream."""

from __future__ import annotations

import pytest

from .mixed_load import PART, check_load, jobs
from .payloads import assert_same, check, endless, request
from .server import Reference, Server

RETRACTED = "KV cache pool is full. Retract requests."
MEMORY_GROWTH = 1.05


def retractions(server: Server) -> int:
    return server.log_text().count(RETRACTED)


def test_retraction(speculative: Server, reference: Reference) -> None:
    before = retractions(speculative)
    payloads = [endless(f"{i}: the object", tokens=640) for i in range(8)]
    answers = speculative.generate_all(payloads, 8)
    assert retractions(speculative) > before
    assert_same(answers, reference.together(payloads))


def test_mixed_load(speculative: Server, reference: Reference) -> None:
    work = jobs(60)
    assert any(job.aborts_after for job in work)
    check_load(speculative, reference, work)
    check(speculative, reference, request())


@pytest.mark.soak
def test_long_mixed_load(speculative: Server, reference: Reference) -> None:
    """Prints the memory of the whole server after every part of the load (`ARGS=-s` shows it)."""
    before = retractions(speculative)
    work = jobs(300, seed=1, crowd=12)
    aborted = sum(job.aborts_after is not None for job in work)
    assert aborted >= 25
    memory = []
    for start in range(0, 300, PART):
        check_load(speculative, reference, work[start : start + PART])
        memory.append(speculative.process.memory_bytes())
    megabytes = [round(each / 2**20) for each in memory]
    retracted = retractions(speculative) - before
    print(f"{aborted} aborted, {retracted} retractions, MB after 50, 100, ... requests: {megabytes}")
    assert max(memory[3:]) <= memory[2] * MEMORY_GROWTH
    assert retracted > 0
