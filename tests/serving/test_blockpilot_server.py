"""BLOCKPILOT over HTTP: what a request may choose, what it is refused, what is reported; two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import READY_TIMEOUT_S, TIGHT, CurrentServer
from .payloads import FILTERS, PROMPTS, check, check_all, request, seeded
from .server import Reference, Server, Start
from .variants import BLOCKPILOT


def choosing(text: str = PROMPTS[0], tokens: int = 40, **settings: Any) -> dict[str, Any]:
    return request(text, tokens, custom_params={"graft": settings})


class TestOneServer:
    variant = BLOCKPILOT  # its server is up when these tests are run

    @pytest.fixture
    def server(self, tiny_server: CurrentServer) -> Server:
        return tiny_server(BLOCKPILOT)

    def test_a_request_chooses_its_block_size(self, server: Server, reference: Reference) -> None:
        for size in (1, 3, 7):
            meta = check(server, reference, choosing(block_size=size))["meta_info"]
            assert meta["spec_num_proposed_drafts"] == (size - 1) * meta["spec_verify_ct"]

    def test_a_request_opts_out_among_others(self, server: Server, reference: Reference) -> None:
        payloads = [choosing(prompt, speculate=False) for prompt in PROMPTS[:2]]
        payloads += [request(prompt) for prompt in PROMPTS[2:]]
        answers = check_all(server, reference, payloads)
        for answer in answers[:2]:
            meta = answer["meta_info"]
            assert meta["spec_verify_ct"] == meta["completion_tokens"] - 1
            assert meta["spec_num_proposed_drafts"] == 0
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers[2:]) > 0

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"block_size": 8}, "at most 7 rows"),
            ({"block_size": 0}, "block_size"),
            ({"block_size": "large"}, "block_size"),
            ({"blocksize": 3}, "blocksize is unknown"),
        ],
    )
    def test_wrong_settings_are_refused(self, server: Server, settings: dict, message: str) -> None:
        answer = server.client.post("/generate", json=choosing(**settings))
        assert answer.status_code == 400 and message in answer.text

    def test_what_the_server_says_it_did(self, server: Server, reference: Reference) -> None:
        check_all(server, reference, [request(prompt, tokens=48) for prompt in PROMPTS])
        status = server.info()["internal_states"][0]["blockpilot"]
        by_size = {int(size): count for size, count in status["rounds_by_size"].items()}
        assert set(by_size) >= set(range(2, 8))
        assert status["proposed"] == sum((size - 1) * count for size, count in by_size.items())
        assert 0 < status["accepted"] < status["proposed"]
        assert 0 < status["tail"]["grafted"] <= status["tail"]["blocks"]


@pytest.mark.soak
class TestTwoRanks:
    @pytest.fixture(scope="class")
    def two_ranks(self, start_server: Start, tiny: dict[str, Path]) -> Iterator[Server]:
        server = start_server(
            "tiny-blockpilot-tp2",
            tiny["llama"],
            *(*TIGHT, *BLOCKPILOT.args(str(tiny["dflash"])), "--tp", "2"),
            OMP_NUM_THREADS="1",
            SGLANG_CPU_OMP_THREADS_BIND="0|1",
        )
        yield server
        server.stop()

    def test_two_ranks_equal_one(self, two_ranks: Server, reference: Reference) -> None:
        two_ranks.process.wait_ready(READY_TIMEOUT_S)
        together = [request(prompt, tokens=40) for prompt in PROMPTS]
        together += [seeded(prompt, 7, 40, **f) for prompt, f in zip(PROMPTS, FILTERS.values(), strict=True)]
        check_all(two_ranks, reference, together)
        status = two_ranks.info()["internal_states"][0]["blockpilot"]
        assert status["accepted"] > 0
