"""Two ranks over gloo commit what one process commits, and a rank with other data is noticed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from . import faulty_rank
from .conftest import READY_TIMEOUT_S, TIGHT
from .graft_tools import metric, write_garbage_table
from .payloads import FILTERS, PROMPTS, accept_length, check, check_all, request, seeded
from .server import Reference, Server, Start
from .variants import EAGLE_TREE, Variant

NOTICED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def trigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As soon as this file exists, rank 1 goes wrong."""
    return tmp_path_factory.mktemp("trigger") / "now"


@pytest.fixture(scope="module")
def two_ranks(
    start_server: Start,
    tiny: dict[str, Path],
    trained_draft: Path,
    trigger: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A server of two ranks on the tiny target, with a draft that was trained for it."""
    environment = faulty_rank.environment(tmp_path_factory.mktemp("plugin"), trigger)
    server = start_server(
        "tiny-tp2",
        tiny["llama"],
        *(*TIGHT, *EAGLE_TREE.args(str(trained_draft)), "--tp", "2"),
        OMP_NUM_THREADS="1",
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
        **environment,
    )
    yield server
    server.stop()


def test_two_ranks_equal_one(two_ranks: Server, reference: Reference) -> None:
    two_ranks.process.wait_ready(READY_TIMEOUT_S)
    greedy = [check(two_ranks, reference, request(prompt, tokens=64)) for prompt in PROMPTS]
    print(f"two ranks, trained draft: accept length {accept_length(greedy):.2f}")
    assert accept_length(greedy) >= 1.5
    together = [request(prompt, tokens=40) for prompt in PROMPTS]
    together += [seeded(prompt, 7, 40, **f) for prompt, f in zip(PROMPTS, FILTERS.values(), strict=True)]
    check_all(two_ranks, reference, together)


def test_a_rank_with_other_data_is_noticed(two_ranks: Server, reference: Reference, trigger: Path) -> None:
    two_ranks.process.wait_ready(READY_TIMEOUT_S)
    check(two_ranks, reference, request())
    trigger.touch()
    with pytest.raises((httpx.HTTPError, AssertionError)):  # rather no answer than a wrong one
        two_ranks.generate(request(tokens=64))
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while two_ranks.poll() is None:
        assert time.monotonic() < deadline, "the server goes on serving"
        time.sleep(0.2)
    assert two_ranks.poll() != 0
    log = two_ranks.log_text()
    assert "tensor-parallel rank 1 disagrees with rank 0 about the tree's tokens: 1 of " in log
    assert "Start it again" in log


# ---- GRAFT: every rank keeps a successor table of its own --------------------------------------------------


@pytest.fixture(scope="module")
def graft_trigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As soon as this file exists, rank 1's table goes wrong."""
    return tmp_path_factory.mktemp("trigger") / "now"


@pytest.fixture(scope="module")
def two_graft_ranks(
    start_server: Start,
    tiny: dict[str, Path],
    trained_draft: Path,
    graft_trigger: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """Two ranks of GRAFT whose tables begin full of garbage, and are compared in every round."""
    folder = tmp_path_factory.mktemp("plugin")
    garbage = write_garbage_table(folder / "table", tiny["llama"])
    config = {"graft": {"check_ranks": 1, "table": {"path": str(garbage), "scope": "shared"}}}
    graft = Variant("graft-tp2", "GRAFT", EAGLE_TREE.shape, json.dumps(config))
    server = start_server(
        graft.name,
        tiny["llama"],
        *(*TIGHT, *graft.args(str(trained_draft)), "--tp", "2"),
        *("--enable-metrics", "--enable-metrics-for-all-schedulers"),
        OMP_NUM_THREADS="1",
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
        **faulty_rank.environment(folder / "fault", graft_trigger, "table"),
    )
    yield server
    server.stop()


def test_the_tables_and_trees_of_two_ranks_stay_equal(two_graft_ranks: Server, reference: Reference) -> None:
    two_graft_ranks.process.wait_ready(READY_TIMEOUT_S)
    greedy = [check(two_graft_ranks, reference, request(prompt, tokens=150)) for prompt in PROMPTS]
    assert accept_length(greedy) >= 1.5
    check_all(two_graft_ranks, reference, [request(prompt, tokens=40) for prompt in PROMPTS])
    (state,) = two_graft_ranks.info()["internal_states"]
    assert state["graft"]["rank_checks"] >= 200
    assert sum(state["graft"]["used_by_depth"]["table"]) >= 100


def test_metrics_of_every_rank(two_graft_ranks: Server) -> None:
    two_graft_ranks.process.wait_ready(READY_TIMEOUT_S)
    two_graft_ranks.generate(request(tokens=20))
    (state,) = two_graft_ranks.info()["internal_states"]
    rounds = state["graft"]["rounds"]
    for rank in ("0", "1"):
        assert metric(two_graft_ranks, "rounds_total", rounds, tp_rank=rank) == rounds


def test_a_rank_with_another_table_is_noticed(two_graft_ranks: Server, graft_trigger: Path) -> None:
    two_graft_ranks.process.wait_ready(READY_TIMEOUT_S)
    two_graft_ranks.generate(request())
    graft_trigger.touch()
    with pytest.raises((httpx.HTTPError, AssertionError)):
        two_graft_ranks.generate(request(tokens=64))
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while two_graft_ranks.poll() is None:
        assert time.monotonic() < deadline, "the server goes on serving"
        time.sleep(0.2)
    assert "table_tokens of rank 1 differs from rank 0's" in two_graft_ranks.log_text()


# ---- SPECBLOCK: every rank holds the whole draft, rank 0 learns --------------------------------------------


@pytest.fixture(scope="module")
def two_block_ranks(start_server: Start, tiny: dict[str, Path]) -> Iterator[Server]:
    """Two ranks of SPECBLOCK that learn as eagerly as they can."""
    eager = {"enabled": True, "min_tokens": 0, "update_rows": 32, "every": 3, "always": True}
    config = {"specblock": {"adaptation": eager | {"share": 1.0, "nice": 0, "learning_rate": 1e-3}}}
    blocks = Variant("specblock-tp2", "SPECBLOCK", (1, 1, 12), json.dumps(config), draft="specblock")
    server = start_server(
        blocks.name,
        tiny["llama"],
        *(*TIGHT, *blocks.args(str(tiny["specblock"])), "--tp", "2"),
        OMP_NUM_THREADS="1",
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
    )
    yield server
    server.stop()


@pytest.mark.soak
def test_two_ranks_that_learn_equal_one(two_block_ranks: Server, reference: Reference) -> None:
    server = two_block_ranks
    server.process.wait_ready(READY_TIMEOUT_S)
    deadline = time.monotonic() + 240
    learned: dict[str, int] = {}
    while sum(learned.get(arm, 0) for arm in ("head", "full")) < 3 and time.monotonic() < deadline:
        greedy = [check(server, reference, request(prompt, tokens=64)) for prompt in PROMPTS]
        assert accept_length(greedy) >= 1.2
        ranks = server.client.get("/graft/status").json()["ranks"]
        learned = ranks[0]["adaptation"]["counts"]
        assert len({rank["adaptation"]["version"] for rank in ranks}) == 1
    print(f"two ranks: {learned}, version {ranks[0]['adaptation']['version']} on {len(ranks)} ranks")
    assert sum(learned[arm] for arm in ("head", "full")) >= 3
    together = [request(prompt, tokens=40) for prompt in PROMPTS]
    together += [seeded(prompt, 7, 40, **f) for prompt, f in zip(PROMPTS, FILTERS.values(), strict=True)]
    check_all(server, reference, together)
    versions = check(server, reference, request())["meta_info"]["graft"][0]["draft_versions"]
    assert versions[0] <= versions[1]
    before = server.client.post("/graft/adaptation/rollback", json={"version": 0})
    assert before.status_code in (200, 400)  # 400 where nothing better was found
    check_all(server, reference, together)
