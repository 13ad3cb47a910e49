"""The stock EAGLE and STANDALONE workers, whose drafts are other models, commit what plain decoding does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from . import markov
from .conftest import READY_TIMEOUT_S, TIGHT
from .payloads import FILTERS, PROMPTS, accept_length, check, check_all, request, seeded
from .server import Reference, Server, Start
from .variants import Variant

WORKERS = (
    # The worker that the `tree` variant runs, too.
    pytest.param(Variant("eagle", "EAGLE", (4, 2, 8)), marks=pytest.mark.soak, id="eagle"),
    pytest.param(Variant("standalone", "STANDALONE", (3, 2, 6)), id="standalone"),
)


@pytest.fixture(scope="module", params=WORKERS)
def server(
    request: pytest.FixtureRequest,
    start_server: Start,
    tiny: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param.name)
    eagle = request.param.algorithm == "EAGLE"
    draft = markov.build_eagle_draft(folder) if eagle else markov.build_target(folder, layers=1)
    args = (*TIGHT, *request.param.args(str(draft)))
    started = start_server(f"tiny-{request.param.name}", tiny["llama"], *args, OMP_NUM_THREADS="1")
    started.process.wait_ready(READY_TIMEOUT_S)
    yield started
    started.stop()


def test_greedy_alone(server: Server, reference: Reference) -> None:
    answers = [check(server, reference, request(prompt, tokens=64)) for prompt in PROMPTS[:3]]
    assert accept_length(answers) > 1.3


def test_seeded_and_greedy_together(server: Server, reference: Reference) -> None:
    payloads = [request(prompt, tokens=50) for prompt in PROMPTS]
    payloads += [
        seeded(prompt, seed, 40, **filters)
        for seed, (prompt, filters) in enumerate(zip(PROMPTS, FILTERS.values(), strict=True))
    ]
    check_all(server, reference, payloads)
