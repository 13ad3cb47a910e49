"""Two ranks over gloo commit what one process commits."""

from __future__ import annotations

from pathlib import Path

from .conftest import READY_TIMEOUT_S, TIGHT
from .payloads import FILTERS, PROMPTS, accept_length, check, check_all, request, seeded
from .server import Reference, Start
from .variants import EAGLE_TREE


def test_two_ranks_equal_one(start_server: Start, tiny: dict[str, Path], reference: Reference) -> None:
    args = (*TIGHT, *EAGLE_TREE.args(str(tiny["draft"])), "--tp", "2")
    server = start_server(
        "tiny-tp2", tiny["llama"], *args, OMP_NUM_THREADS="1", SGLANG_CPU_OMP_THREADS_BIND="0|1"
    )
    try:
        server.process.wait_ready(READY_TIMEOUT_S)
        greedy = [check(server, reference, request(prompt, tokens=64)) for prompt in PROMPTS[:2]]
        assert accept_length(greedy) >= 1.5
        together = [request(prompt, tokens=40) for prompt in PROMPTS]
        together += [seeded(prompt, 7, 40, **f) for prompt, f in zip(PROMPTS, FILTERS.values(), strict=True)]
        check_all(server, reference, together)
    finally:
        server.stop()
