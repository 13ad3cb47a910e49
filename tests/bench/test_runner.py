"""The whole bench against fakes: servers in this process by URL, or real subprocesses."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sgl_graft.bench.client import ServerError
from sgl_graft.bench.runner import Bench

Start = Callable[..., tuple[str, Any]]
Make = Callable[..., Bench]


def generated(calls: list[tuple[str, Any]]) -> list[Any]:
    """Measured requests: warm-up and explanations apart."""
    return [body for route, body in calls if route == "/generate" and body.get("stream")]


def test_two_servers_side_by_side(start_fake: Start, make_bench: Make) -> None:
    plain, plain_calls = start_fake()
    tree, tree_calls = start_fake(algorithm="EAGLE3")
    bench = make_bench("none,EAGLE3", urls={"none": plain, "EAGLE3": tree})
    result = bench.run()

    assert result["complete"]
    assert len(result["runs"]) == 2 * 2 * 2 * 2  # variants, data sets, concurrencies, repeats
    first = result["runs"][0]
    assert (first["variant"], first["compared"], first["identical"]) == ("none", 0, None)
    assert all(
        row["identical"] == row["compared"] == 4 for row in result["runs"] if row["variant"] == "EAGLE3"
    )
    # 11 tokens: one from the prefill, ten in four verifies of three, three, three and one.
    assert {row["accept_length"] for row in result["runs"]} == {None, 2.5}
    assert {row["output_tokens"] for row in result["runs"]} == {44}
    # Caches are cleared before each of the 8 cells of a server.
    for calls in (plain_calls, tree_calls):
        assert sum(route == "/flush_cache" for route, _ in calls) == 8
    saved = json.loads(bench.options.output.read_text())
    assert {"runs", "machine", "versions", "summary", "comparisons"} <= set(saved)
    assert saved["versions"]["sglang"] == "0.5.23"
    assert bench.options.output.with_suffix(".png").stat().st_size > 10_000


def test_a_wrong_server_is_caught_and_explained(start_fake: Start, make_bench: Make) -> None:
    plain, _ = start_fake()
    tree, _ = start_fake(algorithm="EAGLE3", wrong_at=5)
    bench = make_bench(
        "none,EAGLE3", urls={"none": plain, "EAGLE3": tree}, concurrencies=(1,), repeats=1, explain=True
    )
    result = bench.run()
    wrong = [row for row in result["runs"] if row["variant"] == "EAGLE3"]
    assert [(row["identical"], row["compared"]) for row in wrong] == [(0, 4), (0, 4)]
    assert len(result["differences"]) == 8
    for difference in result["differences"]:
        assert difference["position"] == 5
        assert difference["got"] == difference["expected"] + 1
        assert difference["top_gap"] == pytest.approx(0.25)
        assert difference["tie"] is False


def test_sampling_is_seeded_per_prompt_and_compared(start_fake: Start, make_bench: Make) -> None:
    plain, calls = start_fake()
    tree, _ = start_fake(algorithm="EAGLE3", incremental=True)
    bench = make_bench("none,EAGLE3", urls={"none": plain, "EAGLE3": tree}, temperatures=(0.7,), repeats=1)
    result = bench.run()
    seeds = {body["sampling_params"]["sampling_seed"] for body in generated(calls)}
    assert seeds == {1, 2, 3, 4, 5}  # what the prompts carry: data sets "one" and "two" overlap by three
    assert all(row["identical"] == row["compared"] for row in result["runs"] if row["compared"])


def test_an_interrupted_run_continues(start_fake: Start, make_bench: Make) -> None:
    plain, calls = start_fake()
    urls = {"none": plain}
    bench = make_bench("none", urls=urls)
    whole = bench.run()
    num_requests = len(generated(calls))
    assert num_requests == 8 * 4

    journal = bench.options.journal
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:5]) + lines[5][:100])
    again = make_bench("none", urls=urls).run()
    assert len(generated(calls)) == num_requests + 3 * 4
    key = ("variant", "dataset", "concurrency", "repeat", "output_tokens")
    assert [[row[k] for k in key] for row in again["runs"]] == [
        [row[k] for k in key] for row in whole["runs"]
    ]
    assert again["runs"][0] == whole["runs"][0]

    make_bench("none", urls=urls, warm=True, repeats=1).run()  # other settings: nothing may be reused
    assert len(generated(calls)) == num_requests + 3 * 4 + 4 * 4
    make_bench("none", urls=urls, fresh=True, repeats=1).run()
    assert len(generated(calls)) == num_requests + 3 * 4 + 8 * 4


def test_warm_clears_nothing_and_says_so(start_fake: Start, make_bench: Make) -> None:
    plain, calls = start_fake()
    result = make_bench("none", urls={"none": plain}, warm=True).run()
    assert not any(route == "/flush_cache" for route, _ in calls)
    assert result["settings"]["warm"] is True
    assert all(row["warm"] for row in result["runs"])


def test_a_failing_request_stops_the_run_and_keeps_what_is_done(start_fake: Start, make_bench: Make) -> None:
    plain, _ = start_fake()
    broken, _ = start_fake(algorithm="EAGLE3", fail=True)
    bench = make_bench("none,EAGLE3", urls={"none": plain, "EAGLE3": broken}, repeats=1)
    with pytest.raises(ServerError, match="the fake fails on purpose"):
        bench.run()
    partial = json.loads(bench.options.output.read_text())
    assert partial["complete"] is False
    assert {row["variant"] for row in partial["runs"]} == {"none"}


def test_a_url_of_the_wrong_kind_is_refused(start_fake: Start, make_bench: Make) -> None:
    plain, _ = start_fake()
    with pytest.raises(
        ValueError, match="the server runs no speculation, but the variant is declared as EAGLE3"
    ):
        make_bench("EAGLE3", urls={"EAGLE3": plain})


def fakes_with_child() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if "--fake-child" in (p.info["cmdline"] or [])]


def test_own_servers_alternate_are_accounted_and_are_gone(make_bench: Make, draft: Path) -> None:
    refine = {"drafts": [f"EAGLE3={draft}"], "server_args": ["none=--fake-child"]}
    bench = make_bench("none,EAGLE3", refine=refine, concurrencies=(2,), repeats=2)
    before = set(psutil.Process().children(recursive=True))
    assert not fakes_with_child()
    result = bench.run()
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not fakes_with_child()
    assert all(row["identical"] == row["compared"] for row in result["runs"] if row["compared"])
    # A cell this short may fall between two ticks of the kernel's clock; all of them together do not.
    assert sum(row["server_cpu_s_per_token"] for row in result["runs"]) > 0
    assert {row["accept_length"] for row in result["runs"]} == {None, 2.5}
    order = [json.loads(line)["cell"][0] for line in bench.options.journal.read_text().splitlines()]
    assert order == ["none", "EAGLE3"] * 2 + ["EAGLE3", "none"] * 2
    assert len(list(bench.options.logs.iterdir())) == 2  # each server started once for both repeats


def test_one_server_at_a_time(make_bench: Make, draft: Path) -> None:
    bench = make_bench(
        "none,EAGLE3",
        refine={"drafts": [f"EAGLE3={draft}"]},
        concurrencies=(2,),
        repeats=1,
        max_resident=1,
    )
    bench.run()
    order = [json.loads(line)["cell"][0] for line in bench.options.journal.read_text().splitlines()]
    assert order == ["none"] * 2 + ["EAGLE3"] * 2


def test_a_server_that_dies_shows_its_log(make_bench: Make) -> None:
    bench = make_bench("none", refine={"server_args": ["none=--fake-die"]})
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"(?s)exited with code 7.*the fake dies on purpose"):
        bench.run()
    assert time.monotonic() - start < bench.options.start_timeout_s


def test_a_draft_is_asked_for_before_anything_starts(make_bench: Make) -> None:
    with pytest.raises(ValueError, match=r"EAGLE3 needs a draft trained for .*--draft"):
        make_bench("none,EAGLE3")


def test_clearing_also_empties_what_a_plugin_learned(start_fake: Start, make_bench: Make) -> None:
    url, calls = start_fake(table=True)
    make_bench("none", urls={"none": url}, concurrencies=(1,), repeats=1).run()
    assert [route for route, _ in calls if route != "/generate"] == ["/flush_cache", "/graft/table/clear"] * 2


def test_load_is_recorded(start_fake: Start, make_bench: Make) -> None:
    url, _ = start_fake()
    result = make_bench("none", urls={"none": url}, concurrencies=(1,), repeats=1).run()
    for row in result["runs"]:
        assert row["server_cpu_s_per_token"] is None  # a server by URL is not ours to look at
        assert 0 <= row["foreign_cores"] <= (os.cpu_count() or 1)
        assert row["load"]["before"] >= 0
